"""The kernel's log on its way into the core: each line read once, understood once, counted once.

Owns the counting of events and the mark up to which they are counted; both go to the journal in
one transaction, so that a restart of the agent neither loses nor doubles one while the kernel still
has the lines.  Judges nothing: the core gets the events of the last minute, a few of each kind.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping

from holdfast.collectors.kmsg import KernelLog

from .core.detect.kernel import Catalogue, parse
from .core.event import Event
from .journal import Count, Labels, Mark

MARK = "kernel_log_next"
KINDS_MAX = 128  # of (source, code, subject) that are kept for the core
OF_A_KIND_MAX = 4  # so that a flood of one line hides no other
KEPT_S = 60.0

Record = Callable[[tuple[Count, ...], Mark], None]
Counters = Mapping[tuple[str, Labels], float]


class KernelWatch:
    """See the module."""

    def __init__(self, path: str, boot_id: str, users: bool = False) -> None:
        self.log = KernelLog(path, users)
        self.boot_id = boot_id
        self._catalogue: Catalogue | None = None
        self._kinds: OrderedDict[tuple[str, str, str], deque[Event]] = OrderedDict()

    def open(self, catalogue: Catalogue, counters: Counters) -> int:
        """Opens the log where the last agent left off: at its end on a node that never had one, at
        its begin after a reboot.  NoData where it may not be read."""
        self._catalogue = catalogue
        after: int | None = None
        for (name, labels), value in counters.items():
            if name == MARK:
                after = int(value) - 1 if labels == (self.boot_id,) else -1
        return self.log.open(after)

    def read(self, boot_s: float, record: Record) -> bool:
        """Takes what is there; True when the core should look at once."""
        catalogue = self._catalogue
        assert catalogue is not None
        counts: Counter[Labels] = Counter()
        urgent = False
        for line in self.log.read(boot_s):
            event = parse(catalogue, line.text, line.cursor, boot_s)
            if event is None:
                continue
            counts[event.labels] += 1
            if event.fault or event.code == "154":
                self._keep(event)
                urgent = True
        if counts:
            record(
                tuple(Count("events", labels, float(n)) for labels, n in counts.items()),
                Mark(MARK, (self.boot_id,), float(self.log.next)),
            )
        return urgent

    def _keep(self, event: Event) -> None:
        kind = (event.source, event.code, event.subject)
        self._kinds.setdefault(kind, deque(maxlen=OF_A_KIND_MAX)).append(event)
        self._kinds.move_to_end(kind)
        if len(self._kinds) > KINDS_MAX:
            self._kinds.popitem(last=False)

    def events(self, boot_s: float) -> tuple[Event, ...]:
        """What was read in the last minute, oldest first."""
        for kind, kept in list(self._kinds.items()):
            if boot_s - kept[-1].boot_s > KEPT_S:
                del self._kinds[kind]
        found = [event for kept in self._kinds.values() for event in kept]
        return tuple(sorted(found, key=lambda event: event.cursor))

    def close(self) -> None:
        self.log.close()
