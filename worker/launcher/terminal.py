"""What a person sees of a run: the ranks' lines, Holdfast's lines, and a bar.

Owns standard output and error of the launcher.  The ranks' lines go where the ranks wrote them;
Holdfast's own go to standard error, so that a redirect holds what it would under torchrun.  Reads
the ranks' files in bounded bites and only whole lines, so that two ranks never mix inside one;
holds back nothing for longer than a beat.  A reader who has gone away, a full disk or a terminal
that was closed never ends a job: what cannot be written is dropped here, and is in the files.  One
that stands still (Ctrl-S, a pager) never holds the launcher up: the rest waits in the ranks' files.
"""

from __future__ import annotations

import codecs
import os
import select
import shutil
import stat
import sys
import time
from typing import Dict, List, Optional, TextIO, Tuple

from ..redact import redacted
from .log_limit import HOLE, after_hole
from .spec import Shown

BITE_BYTES = 1 << 18  # of one file a beat: 2.6 MB/s a rank; the file itself is always whole
LINE_BYTES = 1 << 16  # a longer line is passed on in pieces
PLAIN_EVERY_S = 10.0
CHUNK_BYTES = 4096  # a pipe that has room at all has this much
OWN_BYTES = 1 << 16  # of Holdfast's own lines, kept for a stream that stands still
END_WAIT_S = 10.0  # at the end of a run, for such a stream to take anything
COLOURS = {"info": "36", "good": "32", "warn": "33", "error": "31"}


class Output:
    """One standard stream of this process: it takes a text or a rank's own bytes, and never waits
    for whoever reads them."""

    def __init__(self, stream: TextIO) -> None:
        self.encoding = codecs.lookup(stream.encoding or "utf-8").name
        self.tty = stream.isatty()
        self.fd = never_waiting(stream.fileno())
        self.room = select.poll()
        self.room.register(self.fd, select.POLLOUT)
        self.rest = bytearray()  # what there was no room for
        self.dropped = 0  # texts, since there was no room for them either
        self.given_up = False

    def write(self, said: "str | bytes") -> None:
        if isinstance(said, bytes) and self.encoding != "utf-8":
            said = said.decode("utf-8", "backslashreplace")
        data = said if isinstance(said, bytes) else said.encode(self.encoding, "backslashreplace")
        if self.given_up or len(self.rest) > OWN_BYTES:
            self.dropped += 1
            return
        self.rest += data
        self.flush()

    def flush(self) -> bool:
        """Writes what there is room for now; whether that was all."""
        while self.rest:
            if not self.room.poll(0):
                return False
            try:
                del self.rest[:os.write(self.fd, bytes(self.rest[:CHUNK_BYTES]))]
            except BlockingIOError:
                return False
            except OSError:
                self.rest.clear()  # EPIPE, EIO, ENOSPC: nobody reads it there, and the run goes on
        return True

    def finish(self) -> None:
        """At the end of a run: waits while anything is taken."""
        while not self.given_up and not self.flush():
            if not self.room.poll(END_WAIT_S * 1000.0):
                self.given_up = True
                self.rest.clear()


def never_waiting(fd: int) -> int:
    """The same terminal or pipe by an open file description of its own, whose writes do not wait:
    the shell, and whatever else writes there, shares the other one."""
    mode = os.fstat(fd).st_mode
    if stat.S_ISCHR(mode) or stat.S_ISFIFO(mode):
        try:
            return os.open("/proc/self/fd/%d" % fd,
                           os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError:
            pass  # another user's, after su: only the poll before each write keeps from waiting
    return fd


class Terminal:
    """Standard output and error of one launcher."""

    def __init__(self, tee: bool, shown: Optional[Shown] = None) -> None:
        self.tee = tee
        self.shown = shown or Shown()
        self.local_ranks: Dict[int, int] = {}  # of ranks that are numbered otherwise on this node
        self.out, self.err = Output(sys.stdout), Output(sys.stderr)
        self.tty = self.err.tty and os.environ.get("TERM", "") != "dumb"
        self.colour = self.tty and not os.environ.get("NO_COLOR")
        self.offsets: Dict[Tuple[str, str], int] = {}
        self.bar = ""
        self.plain_s = 0.0

    def say(self, text: str, level: str = "info") -> None:
        """One line of Holdfast's own."""
        mark = "holdfast"
        if self.colour:
            mark = "\x1b[%sm%s\x1b[0m" % (COLOURS.get(level, "36"), mark)
        # The text may hold a rank's own words: nothing in them may move a person's cursor.
        plain = "".join(c if c.isprintable() else " " for c in redacted(text))
        self.clear()
        self.err.write("%s  %s\n" % (mark, " ".join(plain.split())))
        self.draw()

    def tell_dropped(self) -> None:
        """Says what a stream that stood still has missed, now that it moves."""
        count, self.err.dropped = self.err.dropped, 0
        if count:
            self.say("%d line%s of Holdfast's not shown here while this terminal stood still: "
                     "`holdfast incidents` has what happened" % (count, "s"[count == 1:]), "warn")

    def clear(self) -> None:
        if self.bar:
            self.err.write("\r\x1b[K")

    def draw(self) -> None:
        if self.bar:
            self.err.write(self.bar)

    def progress(self, step: int, total: int, loss: float, rate: float) -> None:
        """The bar on a terminal; one line now and then elsewhere."""
        if self.err.rest:
            return
        if not self.tty:
            now = time.monotonic()
            if now - self.plain_s >= PLAIN_EVERY_S:
                self.plain_s = now
                self.say("step %d%s  loss %.4f  %.0f/s" % (
                    step, "/%d" % total if total else "", loss, rate))
            return
        width = shutil.get_terminal_size((80, 24)).columns
        step = min(step, total) if total else step
        text = " step %d%s  loss %.4f  %.0f/s" % (step, "/%d" % total if total else "", loss, rate)
        room = max(10, min(40, width - len(text) - 4))
        done = int(room * 8 * step / total) if total else 0
        blocks = "\u2588" * (done // 8) + (" \u258f\u258e\u258d\u258c\u258b\u258a\u2589"[done % 8]
                                            if done % 8 else "")
        bar = "\u2595%s\u258f%s" % (blocks.ljust(room), text)
        if self.err.encoding != "utf-8":
            bar = "[%s]%s" % (("#" * (done // 8)).ljust(room), text)
        if bar != self.bar:
            self.clear()
            self.bar = bar[: width - 1]
            self.draw()

    def end_bar(self) -> None:
        if self.bar:
            self.err.write("\n")
        self.bar = ""

    def follow(self, folders: List[str], last: bool = False) -> bool:
        """Passes on what the ranks wrote since the last call; True when there is more.  Nothing is
        read for a stream that stands still: it stays in the files."""
        more = False
        if self.err.flush():
            self.tell_dropped()
        for folder in folders:
            for name, stream in (("stdout.log", self.out), ("stderr.log", self.err)):
                key = (folder, name)
                if not stream.flush():
                    more = True
                    continue
                data, rest, self.offsets[key] = read_lines(
                    os.path.join(folder, name), self.offsets.get(key, 0), whole=not last)
                more = more or rest
                if not data or not self.shows(folder, name):
                    continue
                self.clear()
                stream.write(self.dress(folder, data))
                self.draw()
        return more

    def finish(self, folders: List[str]) -> None:
        """Everything that is left in the files, for streams that take it."""
        while self.follow(folders, last=True):
            self.out.finish()
            self.err.finish()

    def shows(self, folder: str, name: str) -> bool:
        rank = os.path.basename(folder).rpartition("-")[2]
        bit = 1 if name == "stdout.log" else 2
        if not rank.isdecimal():
            return True
        return self.shown.shows(self.local_ranks.get(int(rank), int(rank)), bit)

    def skip_existing(self, folder: str) -> None:
        """Lines of earlier runs in an appended file are not shown again.

        To be called before the first process of this run can write there, or its first lines count
        as an earlier run's.  A folder is looked at once: from then on `follow` alone moves its
        offsets, so no line is shown twice, whoever writes there next.
        """
        for name in ("stdout.log", "stderr.log"):
            key = (folder, name)
            if key not in self.offsets:
                try:
                    self.offsets[key] = os.path.getsize(os.path.join(folder, name))
                except OSError:
                    self.offsets[key] = 0

    def dress(self, folder: str, data: bytes) -> bytes:
        data = HOLE.sub(b"", data)
        if not self.tee:
            return data
        mark = ("[%s]: " % os.path.basename(folder).replace("-", "")).encode()
        return b"".join(mark + line for line in data.splitlines(keepends=True))


def read_lines(path: str, offset: int, whole: bool) -> Tuple[bytes, bool, int]:
    """Up to a bite of new bytes, cut behind the last newline; whether more is waiting; where the
    next bite begins, which a hole puts further on."""
    try:
        with open(path, "rb", buffering=0) as file:
            offset = max(offset, after_hole(file.fileno(), offset))
            file.seek(offset)
            data = file.read(BITE_BYTES) or b""
    except OSError:
        return b"", False, offset
    more = len(data) == BITE_BYTES
    if whole and not data.endswith(b"\n"):
        end = data.rfind(b"\n") + 1
        if end or len(data) < LINE_BYTES:
            data = data[:end]
    return data, more, offset + len(data)
