"""The detectors of a run and of a node: the one table of them, and the border around a node's.

Owns the table, and what a step asks of a detector of a node: it gets the readings that it declares
and its own memory, is asked again when one of those readings is newer, and costs its news alone
when a bug of ours shows in it.  What a verdict means and what follows from it is not known here.
Pure.
"""

from __future__ import annotations

import msgspec

from ..model import (
    DEGRADED,
    UNKNOWN,
    Observed,
    Readings,
    Rows,
    RunView,
    Selection,
    Verdict,
    node_subject,
    run_subject,
)
from .cloud.ec2 import Ec2
from .detector import Detector, NodeView, RunDetector
from .devices.accelerator import Accelerators
from .devices.compile_cache import CompileCache
from .devices.fabric import Fabric
from .host.checks import Checks
from .host.clock import Clock
from .host.hardware import Hardware
from .host.host import Host
from .host.reach import Reach
from .host.storage import Storage
from .network.network import Networks
from .ranks.broken import Alerted, Ended, Growing, Members, Requested, UnderRanks
from .ranks.hang import Hang
from .ranks.slow_collectives import SlowCollectives

DETECTORS: tuple[type[Detector] | type[RunDetector], ...] = (
    # Of a run: the first cause holds.
    Members, Growing, Requested, Ended, UnderRanks, Alerted, Hang, SlowCollectives,
    Accelerators, CompileCache, Ec2, Host, Storage, Reach, Hardware, Clock, Fabric, Networks,
    Checks,
)
NAMES_MAX = 4096  # names of readings whose readers are remembered
Memories = dict[str, object]  # detector -> what it keeps


def of_run() -> list[RunDetector]:
    """The detectors of one run, in the order in which they are asked."""
    return [kind() for kind in DETECTORS if kind.view == "run"]


def of_node() -> list[type[Detector]]:
    return [kind for kind in DETECTORS if kind.view == "node"]


def named(name: str) -> type[Detector] | None:
    """The detector of that name; None for what is no detector of a node."""
    return next((kind for kind in of_node() if kind.name == name), None)


class Seat:
    """One detector at work: the readings that it was shown last, and what it concluded from them.

    Its last verdicts stand while a bug of ours keeps it from new ones.
    """

    def __init__(self, kind: type[Detector], node: str, memories: Memories) -> None:
        self.kind = kind
        self.detector = kind(node)
        self._memories = memories
        self._selection = Selection()
        self._rows: Rows = ()
        self.looked: Rows | None = None  # None: it must look, whatever is new
        self.verdicts: list[Verdict] = []

    def show(self, parts: list[Rows]) -> None:
        """The readings of each name that it reads, as read last."""
        self._rows = self._selection.joined(parts)

    def look(self, observed: Observed) -> None:
        if self.looked is self._rows and not self.kind.beside:
            return
        self.looked = None  # a look that fails is made again
        memory = self._memories.get(self.kind.name)
        self.verdicts = self.detector.look(NodeView(self._rows, observed, memory))
        self.looked = self._rows


class NodeWatch:
    """The detectors of one node.

    memories: what they keep, as a restart of the agent read it; kept up in place.  A memory that
    is not of its detector's type raises msgspec.ValidationError.
    """

    def __init__(self, node: str, memories: Memories) -> None:
        self._node = node
        self._memories = memories
        self._kinds = of_node()
        for kind in self._kinds:
            if kind.memory is not None and kind.name in memories:
                memories[kind.name] = msgspec.convert(memories[kind.name], kind.memory)
        kept = {kind.name for kind in self._kinds if kind.memory is not None}
        for name in memories.keys() - kept:
            del memories[name]  # a detector that is no more, or keeps nothing any more
        self._fill()
        self.seats = {kind.name: Seat(kind, node, memories) for kind in self._kinds}
        self._samples = Readings()
        self._readers: dict[str, tuple[int, ...]] = {}  # name of a reading -> seats that read it

    def other_boot(self) -> None:
        """Forgets what was so in the boot before."""
        for kind in self._kinds:
            if kind.of_boot:
                self._memories.pop(kind.name, None)
        self._fill()
        for seat in self.seats.values():
            seat.looked = None

    def look(self, observed: Observed) -> list[Verdict]:
        """What the detectors say now, in the order of the table."""
        if observed.samples is not self._samples:
            self._samples = observed.samples
            self._show(observed.samples)
        found: list[Verdict] = []
        for seat in self.seats.values():
            try:
                seat.look(observed)
            except Exception as error:  # border of a detector: the runs are judged in any case
                found.append(detector_failed(self._node, seat.kind.name, error))
            found += seat.verdicts
        return found

    def _fill(self) -> None:
        for kind in self._kinds:
            if kind.memory is not None:
                self._memories.setdefault(kind.name, kind.memory())

    def _show(self, samples: Readings) -> None:
        """Deals the readings out in one walk over their names: a large node has some hundreds."""
        parts: list[list[Rows]] = [[] for _ in self.seats]
        for name, rows in samples.named():
            readers = self._readers.get(name)
            if readers is None:
                if len(self._readers) >= NAMES_MAX:
                    self._readers.clear()
                readers = self._readers[name] = tuple(
                    place for place, seat in enumerate(self.seats.values())
                    if name.startswith(seat.kind.reads))
            for place in readers:
                parts[place].append(rows)
        for seat, shown in zip(self.seats.values(), parts, strict=True):
            seat.show(shown)


def run_not_judged(view: RunView, error: Exception) -> Verdict:
    """A bug of ours that one run's levels brought out."""
    what, where = _raised(error)
    return Verdict(
        fault="run_not_judged", subject=run_subject(view.run), severity=DEGRADED, confidence=1.0,
        reason=f"a defect in holdfast: this run alone is neither judged nor brought back ({what})",
        evidence=(("exception", what), ("raised in", where)),
        detector="core", run=view.run, generation=view.generation,
    )


def detector_failed(node: str, name: str, error: Exception) -> Verdict:
    """A bug of ours that readings brought out."""
    what, where = _raised(error)
    return Verdict(
        fault="collector_failed", subject=node_subject(node, f"detector/{name}"), severity=UNKNOWN,
        confidence=1.0, evidence=(("exception", what), ("raised in", where)), detector="core",
        reason=f"a defect in holdfast: what is read for {name} is not judged anew ({what})")


def _raised(error: Exception) -> tuple[str, str]:
    """An exception in words, and the line that raised it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code.co_qualname if trace is not None else "?"
    line = trace.tb_lineno if trace is not None else 0
    return f"{type(error).__name__}: {str(error)[:200]}", f"{code}, line {line}"
