"""A module whose import never ends, as one over a dead mount would not."""

import os
import time

with open(os.environ["IMPORTING"], "w"):
    pass
time.sleep(3600)
