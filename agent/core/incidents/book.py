"""The open incidents of one home: their ids, their rows in a step, room for them, and their end.

Owns the table that survives a restart, and that every change of it is told in the step that made
it.  It judges nothing: what is an incident, worse or over is decided by the homes (run/incidents.py
and nodes/), and the words are incidents/values.py's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar

import msgspec

from ..model import SEVERITIES, Incident, Now
from . import values

NUMBERS_MAX = 64


class Step(Protocol):
    """What a book needs of the step that it is used in."""

    now: Now
    changed: dict[str, Incident]


class Entry(msgspec.Struct):
    """An open incident; a home adds what it judges by."""

    incident: Incident


Item = TypeVar("Item", bound=Entry)


class IncidentBook(msgspec.Struct, Generic[Item]):
    """Open incidents by the key that their home finds them under."""

    open: dict[str, Item] = {}
    numbers: dict[str, int] = {}  # incidents opened so far, by fault
    closed: Incident | None = None  # the last one: an answer about it may still be on its way

    def entries(self) -> list[Item]:
        return [self.open[key] for key in sorted(self.open)] if self.open else []

    def incidents(self) -> dict[str, Incident]:
        return {item.incident.id: item.incident for item in self.entries()}

    def number(self, fault: str) -> int:
        """The last part of the next id of this fault."""
        number = self.numbers.get(fault, 0) + 1
        others = [row for row in self.numbers.items() if row[0] != fault]
        self.numbers = {**dict(others[-NUMBERS_MAX:]), fault: number}  # the last use goes last
        return number

    def add(self, step: Step, key: str, item: Item) -> Item:
        self.open[key] = item
        step.changed[item.incident.id] = item.incident
        return item

    def change(self, step: Step, item: Item, incident: Incident) -> None:
        """The incident again, with more known of it or done about it."""
        item.incident = incident
        step.changed[incident.id] = incident

    def note(self, step: Step, item: Item, text: str) -> None:
        self.change(step, item, values.noted(item.incident, step.now, text))

    def room(self, step: Step, severity: str, keys: Iterable[str], most: int) -> bool:
        """Whether one more may be open; of `keys`, the first of the mildest makes room for what is
        worse than it."""
        if len(self.open) < most:
            return True
        mildest = min(keys, key=lambda key: SEVERITIES.index(self.open[key].incident.severity))
        if not worse(severity, self.open[mildest].incident.severity):
            return False
        self.close(step, mildest, "made room for something worse")
        return True

    def close(self, step: Step, key: str, text: str, state: str = values.CLOSED) -> None:
        self.end(step, key, values.ended(self.open[key].incident, step.now, state, text))

    def end(self, step: Step, key: str, incident: Incident) -> None:
        """The incident leaves, as it is from now on."""
        del self.open[key]
        step.changed[incident.id] = self.closed = incident


def worse(severity: str, than: str) -> bool:
    return SEVERITIES.index(severity) > SEVERITIES.index(than)


def plain(subject: str, most: int = 0) -> str:
    """A subject as a part of an id."""
    text = "".join(c if c.isalnum() else "-" for c in subject)
    return text[: most or None] or "host"
