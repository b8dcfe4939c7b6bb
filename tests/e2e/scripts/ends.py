"""Ends in every orderly way a Python program may: thread, executor, atexit, unflushed output."""

import atexit
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

if sys.argv[1] == "recorded":
    from torch.distributed.elastic.multiprocessing.errors import record

    @record
    def main():
        raise LookupError("said through record")

    main()

from holdfast.worker import elastic

rank = os.environ["RANK"]
atexit.register(print, "atexit ran on", rank)
ThreadPoolExecutor().submit(lambda: (time.sleep(0.3), print("executor ran on", rank)))
threading.Thread(target=lambda: (time.sleep(0.5), print("thread ran on", rank))).start()
with elastic.during("eval"):
    while len(sys.argv) > 2 and not os.path.exists(sys.argv[2]):
        time.sleep(0.05)
sys.stdout.write("no newline at the end, port %s" % os.environ["MASTER_PORT"])
