"""Counts the errors of each part of the agent, and logs each one once.

Owns the counters and the lines on standard error.  A fault in one part is never the end of
another, so parts report here instead of raising further.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections import OrderedDict

from holdfast.collectors.contract import legible
from holdfast.worker.redact import redacted

SAID_MAX = 500
SAY_AGAIN_S = 3600.0
LINES_MAX = 20  # of one part in that time: what it is sent may differ each time


class ErrorCounters:
    """Counts by part; the same text of the same part is written once an hour at most."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.latest: dict[str, str] = {}
        self._said: OrderedDict[tuple[str, str], float] = OrderedDict()
        self._lines: dict[str, tuple[float, int]] = {}  # part -> since when, how many

    def __call__(self, part: str, error: BaseException | str) -> None:
        """Counts one failure of `part`; an exception is written with where it came from."""
        text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        text = redacted(text)
        self.counts[part] = self.counts.get(part, 0) + 1
        self.latest[part] = legible(text[:500])  # a page takes nothing else
        now_s = time.monotonic()
        key = (part, text[:200])
        if now_s - self._said.get(key, -SAY_AGAIN_S) < SAY_AGAIN_S:
            return
        self._said[key] = now_s
        self._said.move_to_end(key)
        while len(self._said) > SAID_MAX:
            self._said.popitem(last=False)
        since_s, lines = self._lines.get(part, (now_s, 0))
        if now_s - since_s >= SAY_AGAIN_S:
            since_s, lines = now_s, 0
        self._lines[part] = since_s, lines + 1
        if lines >= LINES_MAX:
            if lines == LINES_MAX:
                say(f"{part}: more of it is counted and not written, for an hour")
            return
        if isinstance(error, BaseException) and not isinstance(error, OSError):
            text = redacted("".join(traceback.format_exception(error)).rstrip())
        say(f"{part}: {text}")


def say(text: str) -> None:
    """One line of the agent's own log, which may be a terminal: names and paths in it are other
    people's."""
    plain = "".join(c if c.isprintable() or c == "\n" else "?" for c in legible(text))
    try:
        print(f"holdfast agent: {plain}", file=sys.stderr, flush=True)
    except OSError:
        pass  # nobody reads the log any more; the counters still tell
