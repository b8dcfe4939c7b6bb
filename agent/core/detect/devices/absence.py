"""Devices that were here and are not: how long a device must be missing to be lost.

Owns the count of readings in a row, and the PCI bus as collectors/pci.py lists it.  Pure.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from ...model import Rows
from ...parse.kernel_line import pci_of
from ...series.streak import Streak

BOUND = "pci_bound"
LOST_READINGS = 3
KNOWN_MAX = 1024  # devices


class Absence:
    """Readings in a row without a device."""

    def __init__(self, readings: int = LOST_READINGS) -> None:
        self._readings = readings
        self._read_s = -1.0
        self._streak = Streak(KNOWN_MAX)
        self._lost: set[str] = set()

    def take(self, read_s: float, present: Container[str], expected: Iterable[str]) -> set[str]:
        """Those of `known` that were in none of the last readings; the same reading counts once."""
        if read_s != self._read_s:
            self._read_s = read_s
            wanted = set(expected)
            self._streak.keep(wanted)
            self._lost = {device for device in wanted if self._streak.add(
                device, read_s, device not in present).readings >= self._readings}
        return self._lost


class Bus:
    """The PCI bus: who is on it with a driver, and who is not any more."""

    def __init__(self) -> None:
        self._absence = Absence()
        self.bound: frozenset[str] = frozenset()  # addresses
        self.lost: set[str] = set()

    def take(self, rows: Rows, known: Iterable[str]) -> None:
        """A listing; nothing changes without one."""
        if rows:
            self.bound = frozenset(one[1].removeprefix("pci=") for one in rows)
            self.lost = self._absence.take(rows[0][3], self.bound, known)


def address_of(text: str) -> str:
    """`00000000:4E:00.0` or `4e:00.0` as the bus lists it; "" for what is no function's."""
    device, dot, function = text.rpartition(".")
    whole = device if device.count(":") != 1 else f"0000:{device}"
    return f"{pci_of(whole)}.{function}" if dot else ""
