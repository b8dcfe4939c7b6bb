"""The kernel's log as journald keeps it, for where /dev/kmsg may not be read.

Owns the command line of journalctl and the meaning of its stream of JSON objects.  Starts nothing:
agent/telemetry/journalctl.py owns the process, and hands its output over in pieces by `feed`.  A
stream may break off anywhere and hold anything: text that is no entry is counted, and the next
entry begins anew.
"""

from __future__ import annotations

import json
from typing import Any

from ..contract import LogLine, legible
from .kmsg import TEXT_MAX, USER, KernelLog, said_s

ENTRY_MAX_BYTES = 1 << 20  # an entry of the kernel has about 1 KB; a longer one is skipped
CURSOR_MAX = 512  # characters; systemd's have about 130
KERNEL = 0  # the facility of the kernel's own lines


class JournalLog(KernelLog):
    """As KernelLog, with lines that are fed.  The kernel's own sequence numbers are not in the
    journal: entries are numbered here, on from `number`, and what journald missed stays unknown.

    cursor  journald's own word for the place behind which to go on; "" before the first entry
    heard   whether the stream held an entry so far
    """

    def __init__(
        self, path: str, users: bool = False, cursor: str = "", number: int = 0,
        whole: bool = False, since_us: int = 0,
    ) -> None:
        """whole: without a cursor, take this boot's entries from their begin, else only those
        from `since_us` (CLOCK_MONOTONIC) on."""
        super().__init__(path, users)
        self.cursor = cursor
        self.heard = False
        self._next = number
        self._whole = whole
        self._since_us = 0 if whole or cursor else since_us
        self._piece, self._skipping = b"", False

    def command(self, tool: str) -> tuple[str, ...]:
        """How journalctl is called to go on from here."""
        place: tuple[str, ...]
        if self.cursor:
            place = ("--no-tail", f"--after-cursor={self.cursor}")
        else:  # the one line before the end proves that there is a journal to be read
            place = ("--no-tail",) if self._whole else ("--lines=1",)
        return (tool, "--dmesg", "--output=json", "--output-fields=MESSAGE,SYSLOG_FACILITY",
                "--no-pager", "--quiet", "--follow", *place)

    def restarted(self) -> None:
        """A new process begins to speak: the unfinished entry of the last one is void."""
        self.broken += bool(self._piece)
        self._piece, self._skipping = b"", False

    def forget_cursor(self, since_us: int) -> None:
        """The journal does not know the place any more: entries are taken from now on."""
        self.cursor, self._whole, self._since_us = "", False, since_us

    def feed(self, data: bytes, boot_s: float) -> tuple[LogLine, ...]:
        """Takes the next piece of the stream; the lines that it completes."""
        *entries, self._piece = (self._piece + data).split(b"\n")
        taken: list[LogLine] = []
        for entry in entries:
            if self._skipping:
                self._skipping = False  # the end of an entry that was too long
                continue
            line = self._line(entry, boot_s) if entry else None
            if line is not None:
                taken.append(line)
        if len(self._piece) > ENTRY_MAX_BYTES:
            self.broken += not self._skipping
            self._piece, self._skipping = b"", True
        return tuple(taken)

    def _line(self, entry: bytes, boot_s: float) -> LogLine | None:
        fields = _object(entry)
        cursor, text = fields.get("__CURSOR"), _text(fields.get("MESSAGE"))
        if not isinstance(cursor, str) or not _is_cursor(cursor) or text is None:
            self.broken += 1
            return None
        self.cursor, self.heard = cursor, True
        number, self._next = self._next, self._next + 1
        stamp = fields.get("__MONOTONIC_TIMESTAMP")
        if _number(stamp, self._since_us) < self._since_us:
            return None  # the entry is older than this agent
        facility = _number(fields.get("SYSLOG_FACILITY"), KERNEL)
        if facility != KERNEL and not (self.users and facility == USER):
            self.foreign += 1
            return None
        # One record may have several lines; /dev/kmsg gives them so.
        text = text.rstrip("\n").replace("\n", r"\x0a")
        at_s = said_s(stamp if isinstance(stamp, str) else "", self._slept_s, boot_s)
        return LogLine("journald", number, at_s, text[:TEXT_MAX])


def _object(entry: bytes) -> dict[str, Any]:
    """A JSON object; {} for anything else, also for one that is nested beyond reason."""
    try:
        found = json.loads(entry)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _is_cursor(text: str) -> bool:
    """It goes into a command line again: one printable word, no option."""
    return 0 < len(text) <= CURSOR_MAX and text.isascii() and text.isprintable() and " " not in text


def _text(value: Any) -> str | None:
    """A field's text: a string, a list of bytes where it was no UTF-8, or the first of several;
    None for a field that journalctl leaves out because of its length."""
    if isinstance(value, list) and value and isinstance(value[0], str):
        value = value[0]
    if isinstance(value, list):
        try:
            return bytes(value).decode("utf-8", "replace")
        except (TypeError, ValueError):
            return None
    return legible(value) if isinstance(value, str) else None


def _number(value: Any, otherwise: int) -> int:
    is_number = isinstance(value, str) and value.isascii() and value.isdecimal()
    return int(value) if is_number and len(value) < 19 else otherwise
