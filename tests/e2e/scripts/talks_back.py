"""Says its file and a word that ASCII cannot, on both streams; then waits for what it is told."""

import os
import sys
import time

print("file", __file__, flush=True)
print("caf\u00e9 \u2713", flush=True)
print("on stderr caf\u00e9", file=sys.stderr, flush=True)
word = (sys.argv[1:] or [""])[0]
if word == "slow":
    for number in range(int(sys.argv[2])):
        print("line", number, flush=True)
        time.sleep(0.1)
while word == "deaf":  # it takes an interrupt, and stays
    try:
        time.sleep(600)
    except KeyboardInterrupt:
        print("told", flush=True)
print("rank", os.environ["RANK"], "leaves", flush=True)
