"""A command of ours as a child, its output passed on to the terminal and read line by line.

Owns the child from start to end: it gets a pseudo-terminal when we have one (so that its progress
bar works), it dies with us, and leaving the `with` block leaves no process of it behind.
"""

from __future__ import annotations

import ctypes
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

LINES_MAX = 2000
BITE_BYTES = 65536
LINE_BYTES_MAX = 1 << 20
GRACE_S = 8.0  # after the first interrupt; the launcher ends its ranks within this
SECOND_GRACE_S = 3.0
PR_SET_PDEATHSIG = 1
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Child:
    """One child process.  `lines` holds the last whole lines, without colours and bars."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], log: Path) -> None:
        self.lines: deque[str] = deque(maxlen=LINES_MAX)
        self._rest = b""
        self._log = log.open("wb")
        self._terminal = sys.stdout.isatty()
        if self._terminal:
            self._reader, writer = os.openpty()
            _same_size(writer)
        else:
            self._reader, writer = os.pipe()
        try:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=writer, stderr=subprocess.STDOUT,
                env=dict(environ), start_new_session=True, preexec_fn=die_with_parent)
        except BaseException:
            os.close(self._reader)
            self._log.close()
            raise
        finally:
            os.close(writer)

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()
        os.close(self._reader)
        self._log.close()

    def pump(self, limit_s: float) -> bool:
        """Passes on what comes within limit_s; False once the child has ended and all is read."""
        ready, _, _ = select.select([self._reader], [], [], limit_s)
        if not ready:
            return True
        try:
            data = os.read(self._reader, BITE_BYTES)
        except OSError:  # a pseudo-terminal says EIO at its end
            data = b""
        if not data:
            return False
        self._log.write(data)
        sys.stdout.buffer.write(data)
        sys.stdout.flush()
        *whole, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest[-LINE_BYTES_MAX:]
        for one in whole:
            text = ESCAPES.sub("", one.decode(errors="replace")).rstrip("\r")
            self.lines.append(text.rpartition("\r")[2])
        return True

    def wait(self, limit_s: float) -> int:
        """Pumps to the end; the exit code.  Raises TimeoutError."""
        deadline = time.monotonic() + limit_s
        while self.pump(0.1):
            if time.monotonic() > deadline:
                raise TimeoutError(f"still running after {limit_s:.0f} s")
        return self.process.wait(timeout=max(1.0, deadline - time.monotonic()))

    def end(self) -> None:
        """Interrupt, a second interrupt, kill: each bounded.  Safe to call twice; a person's own
        second interrupt comes here too, and skips to the kill."""
        try:
            for grace_s in (GRACE_S, SECOND_GRACE_S):
                if self.process.poll() is not None:
                    return
                self.process.send_signal(signal.SIGINT)
                deadline = time.monotonic() + grace_s
                while self.process.poll() is None and time.monotonic() < deadline:
                    if not self.pump(0.05):
                        self.process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except (KeyboardInterrupt, subprocess.TimeoutExpired):
            pass  # on to the kill
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(timeout=10.0)


def die_with_parent() -> None:
    """In the child: SIGTERM when the parent is gone, kill -9 included."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _same_size(terminal: int) -> None:
    import fcntl
    import termios

    try:
        size = fcntl.ioctl(sys.stdout.fileno(), termios.TIOCGWINSZ, b"\0" * 8)
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, size)
    except OSError:
        return  # it stays at the system's default
