"""How long a rank's collectives take, kind by kind, where torch's process group is entered.

Owns the tap: the methods of the process group's class that start a collective, and `wait` of what
they return, each with a clock beside it.  All that Python enters passes there, under whatever name
it was imported and whoever wrapped torch.distributed: FSDP, pipelines, DeepSpeed, a script's own
calls.  What C++ enters does not: DDP's sums (gradients.py has those) and functional collectives.
torch's functions keep their identity, which they are compared by.

A call on CPU tensors lasts until the wait for it ends, and counts then: never waited for, never
counted.  A call on a device's tensors returns when it is launched and so does the wait, so there
calls and bytes are counted, and no time.  The tap is open in two of each EVERY_STEPS: the same
steps on every rank, so that ranks can be compared, and little to pay in the others; for a program
without an optimizer it goes by the clock.  Fails open: a torch without one of these names is left
alone.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Set, Tuple

from .. import page as pages

EVERY_STEPS = 20
OPENS_AT, CLOSES_AT = 10, 12  # of them: checkpoints and evaluations stand behind round numbers
EVERY_BEATS, MEASURED_BEATS = 100, 20  # of a program without steps: two of ten seconds
MARK = "_holdfast_tapped"
PENDING_MAX = 256  # calls that nobody has waited for yet


class Method(NamedTuple):
    """How a method is read.  What counts as the bytes of a call is as nccl-tests has it."""

    kind: str
    at: int  # the argument whose bytes are counted; -1 none
    by_size: bool = False  # each rank's part: times the group's size


METHODS = {
    "allreduce": Method("all_reduce", 0),
    "allreduce_coalesced": Method("all_reduce", 0),
    "allgather": Method("all_gather", 1, True),
    "allgather_coalesced": Method("all_gather", 1, True),
    "_allgather_base": Method("all_gather", 0),
    "allgather_into_tensor_coalesced": Method("all_gather", 0),
    "reduce_scatter": Method("reduce_scatter", 0, True),
    "_reduce_scatter_base": Method("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced": Method("reduce_scatter", 1),
    "alltoall": Method("all_to_all", 1),
    "alltoall_base": Method("all_to_all", 1),
    "broadcast": Method("broadcast", 0),
    "reduce": Method("reduce", 0),
    "gather": Method("gather", 1, True),
    "scatter": Method("scatter", 0, True),
    "send": Method("send", 0),
    "recv": Method("recv", 0),
    "recv_anysource": Method("recv", 0),
    "barrier": Method("barrier", -1),
    # from torch 2.13 on
    "all_gather_single": Method("all_gather", 0),
    "all_gather_single_coalesced": Method("all_gather", 0),
    "reduce_scatter_single": Method("reduce_scatter", 1),
    "reduce_scatter_single_coalesced": Method("reduce_scatter", 1),
    "all_to_all_single": Method("all_to_all", 1),
}
BETWEEN_TWO = ("send", "recv")
CALLS, BYTES, NS = 0, 1, 2  # of a row

Row = List[int]


def nbytes(what: Any) -> int:
    """Of a tensor, or of all in a list of them or of lists of them."""
    return sum(map(nbytes, what)) if isinstance(what, (list, tuple)) else int(what.nbytes)


def first_of(what: Any) -> Any:
    while isinstance(what, (list, tuple)):
        what = what[0]
    return what


class Tap:
    """One rank's.  Rows are added to by whichever thread waits, under the GIL: of two threads that
    add at once one may be lost, which is one call of thousands."""

    def __init__(self, fields: memoryview) -> None:
        self.fields = fields
        self.rows: Dict[int, Row] = {}  # by pages.collective_key, of this window
        self.pending: Dict[int, Tuple[Row, int, int]] = {}  # by id: row, when entered, bytes
        self.waited = [0]  # nanoseconds that this rank stood in waits in this window
        self.is_open = [False]
        self.world = 0
        self.classes: Set[type] = set()  # whose methods were looked at
        self.refused = False
        self.beats = 0
        self.is_warm = False  # a window's begin was reached: what came before is no measure
        self.began: Optional[Tuple[int, int]] = None  # step and nanoseconds
        self.lock = threading.Lock()

    # -------------------------------------------------------------- ticker's thread

    def each_beat(self) -> None:
        """Looks for the default group: a dictionary look-up until torch.distributed is there."""
        module = sys.modules.get("torch.distributed.distributed_c10d")
        group = getattr(getattr(module, "_world", None), "default_pg", None)
        if group is None:
            return
        try:
            self.follow(group, module)
        except Exception as error:  # border: whatever it is, the rank's beats go on
            first, self.refused = not self.refused, True
            if first:
                _say("holdfast: this torch's collectives are not timed: %s" % error)
        self.beats += 1
        if self.fields[pages.F_STEP] == 0:
            at = self.beats % EVERY_BEATS
            if at == 0:
                self.open(0)
            elif at == MEASURED_BEATS:
                self.close(0)

    def follow(self, group: Any, module: Any) -> None:
        self.world = int(group.size())
        if type(group) not in self.classes:
            self._tap_wait(module.Work)
            self._tap_group(type(group))

    def _tap_group(self, kind: type) -> None:
        self.classes.add(kind)
        for name, method in METHODS.items():
            owner = next((one for one in kind.__mro__ if name in vars(one)), None)
            if owner is not None:
                _replace(owner, name, self._entering(getattr(owner, name), method))

    def _tap_wait(self, kind: type) -> None:
        self.classes.add(kind)
        owner = next((one for one in kind.__mro__ if "wait" in vars(one)), None)
        if owner is not None:  # else a stand-in, which hands on what it is asked
            _replace(owner, "wait", self._waiting(getattr(owner, "wait")))

    # -------------------------------------------------------------- whoever calls

    def _entering(self, original: Callable[..., Any], method: Method) -> Callable[..., Any]:
        kind, at, by_size = method
        clock_ns, pending, classes, is_open = (
            time.monotonic_ns, self.pending, self.classes, self.is_open)
        rows: Dict[Tuple[int, bool], Row] = {}

        def call(group: Any, *given: Any, **named: Any) -> Any:
            if not is_open[0]:
                return original(group, *given, **named)
            began_ns = clock_ns()
            work = original(group, *given, **named)
            try:
                size = int(group.size())
                if at < 0:
                    many, on_cpu = 0, True
                else:
                    what = given[at]
                    if type(what) is list and len(what) == 1:
                        what = what[0]
                    if type(what) is list:
                        many, on_cpu = nbytes(what), first_of(what).is_cpu
                    else:
                        many, on_cpu = int(what.nbytes), what.is_cpu
                    if by_size:
                        many *= size
                if size < 1 or many < 0:  # the page holds no such number
                    return work
                row = rows.get((size, on_cpu))
                if row is None:
                    row = rows[size, on_cpu] = self._row(kind, size, on_cpu)
                if work is None or not on_cpu:
                    row[CALLS] += 1
                    row[BYTES] += many
                    if on_cpu:
                        row[NS] += clock_ns() - began_ns
                    return work
                if type(work) not in classes:
                    self._tap_wait(type(work))
                if len(pending) >= PENDING_MAX:
                    pending.clear()
                pending[id(work)] = row, began_ns, many
            except Exception:  # border: a tensor of somebody's own kind may raise whatever it likes
                pass  # its call is not counted, and its collective has begun
            return work

        return call

    def _waiting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        clock_ns, pending, waited = time.monotonic_ns, self.pending, self.waited

        def wait(work: Any, *given: Any, **named: Any) -> Any:
            found = pending.pop(id(work), None) if pending else None
            if found is None:
                return original(work, *given, **named)
            began_ns = clock_ns()
            answer = original(work, *given, **named)
            ended_ns = clock_ns()
            row, entered_ns, many = found
            row[CALLS] += 1
            row[BYTES] += many
            row[NS] += ended_ns - entered_ns
            waited[0] += ended_ns - began_ns
            return answer

        return wait

    def _row(self, kind: str, size: int, on_cpu: bool) -> Row:
        """The same for all methods of a kind."""
        ranks = 2 if kind in BETWEEN_TWO else size
        return self.rows.setdefault(pages.collective_key(kind, ranks, not on_cpu), [0, 0, 0])

    # -------------------------------------------------------------- between two steps

    def forget(self) -> None:
        """Another generation begins: ranks may have moved."""
        with self.lock:
            self._stop()
            self.is_warm = False
            self.fields[pages.F_COLLECTIVES] = 0

    def open(self, step: int) -> None:
        """A window begins behind `step`; 0: of a program without.  The first one is left out."""
        with self.lock:
            self._stop()
            if self.is_warm:
                for row in list(self.rows.values()):
                    row[:] = 0, 0, 0
                self.waited[0] = 0
                self.began = step, time.monotonic_ns()
                self.is_open[0] = True
            self.is_warm = True

    def close(self, step: int) -> Optional[pages.Gradients]:
        """Writes what the window held to the page.

        Returns what this rank waited in a step of it on average, in the terms of DDP's own
        measurement; None where steps or times are unknown.
        """
        with self.lock:
            began, now_ns, waited_ns = self.began, time.monotonic_ns(), self.waited[0]
            self._stop()
            if began is None:
                return None
            window = {key: list(row) for key, row in list(self.rows.items()) if row[CALLS]}
            self._write(window, step or self.beats)
        steps, took_ns = step - began[0], now_ns - began[1]
        timed_ns = sum(row[NS] for row in window.values())
        unseen = any(pages.collective_of(key, row).on_device for key, row in window.items())
        if not began[0] or steps < 1 or unseen or not timed_ns or not 0 < waited_ns < took_ns:
            return None
        return pages.Gradients(
            step, max(timed_ns, waited_ns) // steps, waited_ns // steps,
            (took_ns - waited_ns) // steps, 0, self.world, 1)

    def _stop(self) -> None:
        self.is_open[0], self.began = False, None
        self.pending.clear()

    def _write(self, window: Dict[int, Row], number: int) -> None:
        """The busiest kinds of a window, which is 0 while they are written."""
        fields, first = self.fields, pages.F_COLLECTIVES
        fields[first] = 0
        most = sorted(window.items(), key=lambda item: (-item[1][NS], -item[1][BYTES]))
        at = first + 1
        for key, row in most[: pages.KINDS_SHOWN]:
            for number_of, value in enumerate((key, *row)):
                fields[at + number_of] = min(value, pages.COUNT_MAX)
            at += pages.KIND_FIELDS
        for left in range(at, first + 1 + pages.KINDS_SHOWN * pages.KIND_FIELDS):
            fields[left] = 0
        fields[first] = number


def _replace(owner: type, name: str, tapped: Callable[..., Any]) -> None:
    """Puts the tapped method into its class.

    The name of its code is the method's own: pybind11 looks at the calling frame's name and first
    argument to tell a method that is overridden in Python from one that calls what it overrides,
    and would otherwise call the two in turn for ever where a subclass is entered from C++.
    """
    original = getattr(owner, name)
    if getattr(original, MARK, False):
        return
    code: Any = tapped.__code__
    tapped.__code__ = code.replace(co_name=name)
    tapped.__name__, tapped.__doc__ = name, original.__doc__
    tapped.__qualname__ = getattr(original, "__qualname__", name)
    for mark in (MARK, "_torchdynamo_disable"):  # there is nothing in it to compile
        setattr(tapped, mark, True)
    setattr(owner, name, tapped)


def _say(text: str) -> None:
    try:
        print(text, file=sys.stderr, flush=True)
    except (OSError, ValueError, AttributeError):
        pass  # closed, replaced or full: nothing is left to tell it to
