"""Which ranks compute on a device, from the processes that its driver listed last.

Owns that table.  What breaks a GPU often silences its driver first, and the kernel says only then
what broke: so a device stays as it was listed until its driver lists something else.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import msgspec

from ..detect.devices import accelerator
from ..model import Event, Observed, RankView, Rows, labels_of
from ..parse.kernel_line import pci_of

INFO = f"{accelerator.PREFIX}info"
PLACES_MAX = 256  # devices that are remembered
PIDS_MAX = 64  # of the processes on one
WORDS = {"gpu": "GPU", "neuron": "Neuron device"}  # kind of a subject -> as people say it
Lodger = tuple[str, RankView]  # run, rank


class Place(msgspec.Struct):
    """One device, and the processes that its driver listed on it last."""

    vendor: str
    device: str  # its number
    address: str  # on PCI, as pci_of; "" unknown
    pids: list[int] = []


class Places:
    """The table.  `known` is kept up in place, and survives a restart of the agent."""

    def __init__(self, known: dict[str, Place]) -> None:
        self.known = known
        self._read: tuple[Rows, Rows] = ((), ())

    def look(self, observed: Observed) -> bool:
        """Takes what drivers list now; whether there was something new to take."""
        read = observed.samples.of(INFO), observed.samples.of(accelerator.PROCESS)
        if read[0] is self._read[0] and read[1] is self._read[1]:
            return False
        self._read = read
        well = accelerator.answering(observed.samples.under(accelerator.PREFIX))
        pids: dict[tuple[str, str], list[int]] = defaultdict(list)
        for _, subject, _, _ in read[1]:
            labels = labels_of(subject)
            pid = labels.get("pid", "")
            if pid.isdecimal() and len(pid) < 12:
                pids[labels.get("vendor", ""), labels.get("device", "")].append(int(pid))
        for _, subject, _, _ in read[0]:
            labels = labels_of(subject)
            vendor, device = labels.get("vendor", ""), labels.get("device", "")
            address = pci_of(labels.get("pci", ""))
            key = f"{vendor}/{address or device}"
            before = self.known.pop(key, None)
            # A GPU that is lost lists no process any more, though one hangs in it; one that is
            # well and lists none is idle.
            kept = before.pids if before and (vendor, device) not in well else []
            listed = pids.get((vendor, device)) or kept
            self.known[key] = Place(vendor, device, address, listed[:PIDS_MAX])
        while len(self.known) > PLACES_MAX:
            del self.known[next(iter(self.known))]
        return True

    def of(self, subject: str) -> Place | None:
        """The device that a kernel line's subject names: by address, or by its driver's number."""
        kind, _, name = subject.partition("/")
        for place in self.known.values():
            if kind == "gpu" and place.address == name:
                return place
            if kind == "neuron" and place.vendor == kind and place.device == name:
                return place
        return None

    def named(self, subject: str) -> str:
        """The subject in words: `GPU 3 (0000:4e:00)`, `disk sda`; "" for the node itself."""
        place = self.of(subject)
        if place is None:
            return plain_name(subject)
        at = f" ({place.address})" if place.address else ""
        return f"{WORDS[subject.partition('/')[0]]} {place.device}{at}"

    def ranks(self, event: Event, observed: Observed) -> tuple[Lodger, ...]:
        """The ranks that computed there when the kernel said it, and still live."""
        place = self.of(event.subject)
        pids = set(place.pids) if place else set()
        return tuple(one for one in _there(event, observed)
                     if one[1].pid in pids and one[1].state != "ended")


def plain_name(subject: str) -> str:
    """The same where no driver was heard."""
    kind, _, name = subject.partition("/")
    return f"{WORDS.get(kind, kind)} {name}".strip()


def rank_of(event: Event, observed: Observed) -> Lodger | None:
    """Whose process the line names; a rank that has just ended counts as well."""
    return next((one for one in _there(event, observed) if one[1].pid == event.pid), None)


def _there(event: Event, observed: Observed) -> Iterator[Lodger]:
    """The ranks that may be meant.  A line may be days old, read after a stop of the agent: a
    process that began behind it is another's, on a device that was reset since."""
    for view in observed.runs:
        for rank in view.ranks:
            if rank.pid and not 0.0 < event.boot_s < rank.start_boot_s:
                yield view.run, rank
