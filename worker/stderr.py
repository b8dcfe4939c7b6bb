"""One line on standard error, from whoever has no terminal of the launcher's to say it on.

Owns that saying it never fails: what nobody takes (a closed pipe, a full disk) is dropped, as
launcher/terminal.py drops it, and changes nothing else.
"""

from __future__ import annotations

import os
import sys


def say(text: str) -> None:
    """Writes past Python's own buffer: what that held back would fail again at the next line, and
    at the interpreter's end, which then has the exit code 120."""
    stream = sys.stderr
    try:
        data = (text + "\n").encode(stream.encoding or "utf-8", "backslashreplace")
        while data:
            data = data[os.write(stream.fileno(), data):]
    except (OSError, ValueError, AttributeError):
        pass  # full, closed, or this process was started without one
