"""Continuation lines of the kernel's log: the switches' driver prints one error as several lines.

Owns which event such a line belongs to.  Counts nothing and waits for nothing: the event is told at
once, and once more with what came behind it.  The lines of several switches may come mixed, and
those of one error may be missing, for the driver's own log of errors can be full.  Pure, bounded.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from ..model import Event
from .kernel_line import GOES_ON, LINE_MAX, SXID

OPEN_MAX = 32  # errors that may still go on
MORE_MAX = 8  # lines of one error; a halted processor tells of as many places as it remembers
TEXT_MAX = 200
GOES_ON_S = 5.0  # the driver prints them in one go; what comes later is of an error not seen

Key = tuple[str, str, str]  # switch, address, number, as they were printed


class Folds:
    """The latest error of each switch and number."""

    def __init__(self) -> None:
        self._open: OrderedDict[Key, Event] = OrderedDict()

    def begin(self, event: Event, text: str) -> None:
        """An event was understood in `text`: lines may follow."""
        if event.source != "sxid" or (found := _key(text)) is None:
            return
        self._open[found[0]] = event
        self._open.move_to_end(found[0])
        if len(self._open) > OPEN_MAX:
            self._open.popitem(last=False)

    def more(self, text: str, boot_s: float) -> Event | None:
        """The event that this line goes on with, and now holds it; None for any other line."""
        if "SXid (" not in text or (found := _key(text)) is None:
            return None
        key, said = found
        event = self._open.get(key)
        if event is None or not said.startswith(GOES_ON) or len(event.more) >= MORE_MAX:
            return None
        if not 0.0 <= boot_s - event.boot_s <= GOES_ON_S:
            return None
        self._open[key] = msgspec.structs.replace(event, more=(*event.more, said[:TEXT_MAX]))
        return self._open[key]


def _key(text: str) -> tuple[Key, str] | None:
    match = SXID.match(text[:LINE_MAX])
    return ((match["switch"], match["pci"], match["sxid"]), match["text"]) if match else None
