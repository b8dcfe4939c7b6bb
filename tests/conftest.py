"""What every test needs of its own process."""

from __future__ import annotations

import signal

# A shell without job control starts what it puts into the background with SIGINT ignored, and a
# child inherits that: tests that press Ctrl-C would wait for ever where CI is started so.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
