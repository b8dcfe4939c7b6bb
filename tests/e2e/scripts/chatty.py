"""Prints far more than is sampled: the line that counts, and then a megabyte a second, for ever."""

import sys
import time

WARN = (
    "node-2:5776:5902 [0] transport/net_ib.cc:1296 NCCL WARN NET/IB : Got completion from peer "
    "10.2.0.5<33092> with error 12, opcode 0, len 0, vendor err 129 (Recv)"
)
FILLER = "".join("step %d loss 2.3 %s\n" % (number, "." * 80) for number in range(1000))
while True:
    sys.stdout.write(FILLER + WARN + "\n")
    sys.stdout.flush()
    time.sleep(0.1)
