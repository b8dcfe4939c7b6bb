"""The kernel's log on its way into the core: each line read once, understood once, counted once.

Owns the counting of events and the mark up to which they are counted; both go to the journal in
one transaction, so that a restart of the agent neither loses nor doubles one while the kernel still
has the lines.  Judges nothing: the core gets the events of the last minute, a few of each kind.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping

from holdfast.collectors.contract import LogLine
from holdfast.collectors.sources.journald import JournalLog
from holdfast.collectors.sources.kmsg import KernelLog

from ..core.model import Event
from ..core.parse.kernel_continuation import Folds
from ..core.parse.kernel_line import Catalogue, parse
from ..history.journal import Count, Labels, Mark
from .journalctl import JournalReader

MARK = "kernel_log_next"
Kind = tuple[str, str, str, int]
KINDS_MAX = 128  # of (source, code, subject, pid) that are kept for the core
OF_A_KIND_MAX = 4  # so that a flood of one line hides no other
KEPT_S = 60.0

Record = Callable[[tuple[Count, ...], Mark], None]
Counters = Mapping[tuple[str, Labels], float]


class KernelWatch:
    """Events of the last minute for the core, counts and the mark for the journal, from one log."""

    def __init__(self, path: str, boot_id: str, users: bool = False) -> None:
        self.log = KernelLog(path, users)
        self.journal: JournalReader | None = None  # where /dev/kmsg may not be read
        self._opened = False
        self.boot_id = boot_id
        self._catalogue: Catalogue | None = None
        self._folds = Folds()
        # of a kind, (when read, event)
        self._kinds: OrderedDict[Kind, deque[tuple[float, Event]]] = OrderedDict()

    def open(self, catalogue: Catalogue, counters: Counters) -> int:
        """Opens the log where the last agent left off: at its end on a node that never had one, at
        its begin after a reboot.  NoData where it may not be read."""
        self._catalogue = catalogue
        if isinstance(self.log, JournalLog):  # this part of the agent begins anew
            self.log, self.journal = KernelLog(self.log.path, self.log.users), None
        after: int | None = None
        for (name, labels), value in counters.items():
            if name == MARK and labels[0] != self.boot_id:
                after = -1
            elif name == MARK and len(labels) == 1:
                after = int(value) - 1  # else journald's numbers stand there, not the kernel's
        fd = self.log.open(after)
        self._opened = True
        return fd

    @property
    def source(self) -> str:
        """Where lines come from: kmsg | journald; "" from nowhere."""
        if self.journal is not None:
            return "journald" if self.journal.up else ""
        return "kmsg" if self._opened else ""

    def fall_back(self, counters: Counters, since_us: int) -> JournalLog:
        """The kernel's log by way of journald, from where the last agent left off.  Numbers go on
        from the mark: they stay below the kernel's own, in case it may be read again later."""
        cursor, number, whole = "", 0, False
        for (name, labels), value in counters.items():
            if name == MARK and labels[0] != self.boot_id:
                whole = True
            elif name == MARK:
                number, cursor = int(value), "".join(labels[1:])
        log = JournalLog(self.log.path, self.log.users, cursor, number, whole, since_us)
        self.log = log
        return log

    def read(self, boot_s: float, record: Record) -> bool:
        """Takes the lines that are there; True when the core should look at once."""
        return self._take(self.log.read(boot_s), boot_s, record)

    def feed(self, data: bytes, boot_s: float, record: Record) -> bool:
        """The same for a piece of journald's stream."""
        assert isinstance(self.log, JournalLog)
        return self._take(self.log.feed(data, boot_s), boot_s, record)

    def _take(self, lines: tuple[LogLine, ...], boot_s: float, record: Record) -> bool:
        catalogue = self._catalogue
        assert catalogue is not None
        counts: Counter[Labels] = Counter()
        urgent = False
        for line in lines:
            event = parse(catalogue, line.text, line.cursor, line.boot_s)
            if event is None:
                self._more(line)
                continue
            self._folds.begin(event, line.text)
            counts[event.labels] += 1
            if event.fault or event.code == "154":
                self._keep(boot_s, event)
                urgent = True
        if counts:
            record(
                tuple(Count("events", labels, float(n)) for labels, n in counts.items()),
                Mark(MARK, self._place(), float(self.log.next)))
        return urgent

    def _place(self) -> Labels:
        """Labels of the mark, among them journald's own cursor."""
        cursor = (self.log.cursor,) if isinstance(self.log, JournalLog) else ()
        return (self.boot_id, *cursor)

    def _keep(self, boot_s: float, event: Event) -> None:
        kind = _kind(event)
        self._kinds.setdefault(kind, deque(maxlen=OF_A_KIND_MAX)).append((boot_s, event))
        self._kinds.move_to_end(kind)
        if len(self._kinds) > KINDS_MAX:
            self._kinds.popitem(last=False)

    def _more(self, line: LogLine) -> None:
        """A continuation line: shown with its event, and not counted."""
        told = self._folds.more(line.text, line.boot_s)
        kept = self._kinds.get(_kind(told)) if told else None
        for at, (read_s, event) in enumerate(kept or ()):
            if told is not None and kept is not None and event.cursor == told.cursor:
                kept[at] = (read_s, told)

    def events(self, boot_s: float) -> tuple[Event, ...]:
        """Events of the last minute, oldest first."""
        for kind, kept in list(self._kinds.items()):
            if boot_s - kept[-1][0] > KEPT_S:
                del self._kinds[kind]
        found = [event for kept in self._kinds.values() for _, event in kept]
        return tuple(sorted(found, key=lambda event: event.cursor))

    def children(self) -> dict[str, int]:
        """Process id of journalctl while it runs."""
        return {"journald": self.journal.pid} if self.journal and self.journal.pid else {}

    def close(self) -> None:
        self._opened = False
        self.log.close()


def _kind(event: Event) -> Kind:
    """Each process that the kernel kills is told of, however many it kills at once."""
    return (event.source, event.code, event.subject, event.pid)
