"""What every test needs of its own process."""

from __future__ import annotations

import signal

from hypothesis import settings

# A property is right or wrong however long an example takes: by itself hypothesis fails one that
# takes 200 ms, which a busy machine makes of any.
settings.register_profile("house", deadline=None)
settings.load_profile("house")

# A shell without job control starts what it puts into the background with SIGINT ignored, and a
# child inherits that: tests that press Ctrl-C would wait for ever where CI is started so.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
