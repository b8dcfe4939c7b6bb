"""What a program under the launcher can say and ask: phases, steps, survival.

Owns the rank's side of the page's [M] fields and of the control channel.  A trainer that can
survive the loss of a peer calls `ready`, `park`, `step_begin`, `step_end`; a script may call
`phase` or `during`, which is all it needs to be seen exactly.  Outside a launcher every call is
harmless: `active()` says which.  Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from . import page as pages
from .rank import collectives, faults, gradients, outcome
from .rank import snapshot as snapshots
from .rank.snapshot import SnapshotShard
from .wire import Channel, Packet, close_all, cut

COMMITS_SENT = 100  # a packet has 60 kB
SNAPSHOT_WAIT_S = 2.0  # for the launcher to hand out a memfd


class Broken(RuntimeError):
    """The generation is over: leave the step and call `park`."""


class Assignment(NamedTuple):
    """A place in a generation."""

    run: str
    generation: int
    rank: int
    local_rank: int
    world: int
    store_host: str
    store_port: int
    resume_kind: str  # fresh | survivor | snapshot | disk | own
    resume_step: int
    resume_generation: int
    resume_path: str
    history: Tuple[Tuple[int, int], ...]
    node: str
    # Of the node in the network, by the plan: (rack, r7).  None = the plan has none of any node, or
    # the agent is of the release before.
    labels: Optional[Tuple[Tuple[str, str], ...]] = None


class Parting(NamedTuple):
    """Behind which step of a generation its ranks park though nothing is broken."""

    generation: int
    after: int
    save: bool  # a checkpoint is written there first


class Worker:
    """One rank's runtime.  Main thread writes the page; the ticker thread delivers packets."""

    def __init__(self, fields: memoryview, channel: Channel) -> None:
        self.fields = fields
        self.channel = channel
        self.lock = threading.Condition()
        self.assignment: Optional[Assignment] = None
        self.place_environ: Dict[str, str] = {}  # torchrun's variables that the place changes
        self.generation = 0
        self.ticker: Any = None
        self.cut: Optional[Callable[[], None]] = None
        self.watched: Any = None
        self.injected: Dict[str, Any] = {}
        self.snapshot_fds: List[int] = []
        self.snapshot_answer: Optional[List[int]] = None
        self.snapshot_file: Optional[snapshots.SnapshotFile] = None
        self.snapshot_bytes = 0
        self.snapshot_off = False
        self.step_began_ns = 0
        self.joining = False  # between an assignment and its first phase of work
        self.phase_number = pages.UNKNOWN
        self.parting = Parting(0, 0, False)
        self.assigned_ns = 0  # Unix time when this generation began here
        self.assigned_hooks: List[Callable[[Assignment], None]] = []
        self.gradients = gradients.Watch(fields)
        self.collectives = collectives.Tap(fields)

    # -------------------------------------------------------------- ticker's thread

    def each_beat(self) -> None:
        """Cuts again while a broken generation is not left: its group may be younger than the
        order to leave, and a collective entered after the first cut would block anew.

        Asked under the lock: between the question and the cut the main thread may have got its
        next place and begun to form a group there, whose connections would be cut instead."""
        with self.lock:
            if self.fields[pages.F_BROKEN] >= self.generation > 0 and self.cut is not None:
                self.cut()

    def on_packet(self, packet: Packet, fds: List[int]) -> None:
        """Takes one packet from the launcher; runs on the ticker's thread."""
        kind = packet["t"]
        if kind == "assign":
            self.on_assign(packet, fds)
        elif kind == "leave":
            self.on_leave(int(packet["generation"]))
        elif kind == "park":
            self.parting = Parting(
                int(packet["generation"]), max(1, int(packet["after"])), bool(packet["save"]))
        elif kind == "snapshot":
            with self.lock:
                self.snapshot_answer = fds
                self.lock.notify_all()
        elif kind == "inject":
            self.injected[str(packet["fault"])] = packet.get("args", {})
        elif kind == "flight":
            self.send_flight()
        else:
            close_all(fds)

    def send_flight(self) -> None:
        """The last collectives, with the generation that they are of."""
        self.send({"t": "flight", "generation": int(self.fields[pages.F_GENERATION]),
                   "entries": faults.flight_record(self.assigned_ns)})

    def on_assign(self, packet: Packet, fds: List[int]) -> None:
        resume = packet["resume"]
        place = {name: packet[name] for name in (
            "run", "generation", "rank", "local_rank", "world", "store_host", "store_port", "node")}
        labels = packet.get("labels")
        assignment = Assignment(
            **place, resume_kind=resume["kind"], resume_step=resume.get("step", 0),
            resume_generation=resume.get("generation", 0), resume_path=resume.get("path", ""),
            history=tuple((g, s) for g, s in packet.get("history", ())),
            labels=None if labels is None else tuple((name, text) for name, text in labels))
        with self.lock:
            self.snapshot_fds = fds
            self.place_environ = dict(packet.get("environ") or {})
            self.assignment = assignment
            self.lock.notify_all()

    def on_leave(self, generation: int) -> None:
        """The generation is over: unblocks a main thread that sits in one of its collectives."""
        self.fields[pages.F_BROKEN] = max(self.fields[pages.F_BROKEN], generation)
        with self.lock:
            if self.cut is not None and self.generation <= generation:
                self.cut()

    # -------------------------------------------------------------- main thread

    def send(self, packet: Packet) -> None:
        self.channel.send(packet)

    def wait_assignment(self) -> Assignment:
        with self.lock:
            while self.assignment is None or self.assignment.generation <= self.generation:
                self.lock.wait(1.0)
            assignment = self.assignment
            self.generation = assignment.generation
        fields = self.fields
        self.assigned_ns = time.time_ns()
        fields[pages.F_RANK] = assignment.rank
        fields[pages.F_GENERATION] = assignment.generation
        fields[pages.F_STEP_BEGIN] = fields[pages.F_STEP_END]
        self.step_began_ns = 0
        self.joining = True
        for at in range(pages.RING):
            fields[pages.F_RING + 2 * at] = 0  # another generation's numbers mean nothing now
        fields[pages.F_GRADIENTS] = 0
        self.collectives.forget()
        os.environ.update(
            RANK=str(assignment.rank), LOCAL_RANK=str(assignment.local_rank),
            WORLD_SIZE=str(assignment.world), MASTER_ADDR=assignment.store_host,
            MASTER_PORT=str(assignment.store_port))
        os.environ.update(self.place_environ)
        for hook in self.assigned_hooks:
            hook(assignment)
        return assignment

    def switch_phase(self, number: int) -> None:
        """Closes the current phase's account and opens the next; one clock read."""
        fields, now = self.fields, time.monotonic_ns()
        began = fields[pages.F_PHASE_BEGIN]
        if began:
            fields[pages.F_PHASE_NS + self.phase_number] += now - began
        self.phase_number = number
        fields[pages.F_PHASE] = number
        fields[pages.F_PHASE_BEGIN] = now
        fields[pages.F_PROGRESS] = now

    def finish_step(self, step: int) -> None:
        fields, now = self.fields, time.monotonic_ns()
        at = step % pages.RING
        if self.step_began_ns:
            fields[pages.F_STEP_NS + at] = now - self.step_began_ns
        self.step_began_ns = now
        fields[pages.F_RING + 2 * at + 1] = max(0, self.ticker.default_sequence())
        fields[pages.F_RING + 2 * at] = step
        fields[pages.F_STEP] = step
        fields[pages.F_STEP_END] = fields[pages.F_STEP_BEGIN]
        fields[pages.F_PROGRESS] = now
        place = step % collectives.EVERY_STEPS
        if place == 0:
            self.gradients.copy()
        elif place == collectives.OPENS_AT:
            self.collectives.open(step)
        elif place == collectives.CLOSES_AT:
            self.gradients.write_waited(self.collectives.close(step))


_worker: Optional[Worker] = None


def attach(worker: Worker) -> None:
    global _worker
    _worker = worker


def active() -> bool:
    """True in a rank that a Holdfast launcher started."""
    return _worker is not None


def _get() -> Worker:
    if _worker is None:
        raise RuntimeError("holdfast: not under a launcher; ask elastic.active() first")
    return _worker


def ready(
    checkpoint_dir: str = "", keep: int = 3, commits: Sequence[Dict[str, Any]] = ()
) -> Assignment:
    """Blocks until this process has a place in a generation.  A warm standby waits here.

    `commits`: what `checkpoint_dir` holds, newest first, each with generation, step, path, world
    and bad ("" or why); the plan chooses from them where the first generation resumes.
    """
    worker = _get()
    worker.send({"t": "ready", "checkpoint_dir": checkpoint_dir, "keep": keep,
                 "commits": list(commits)[:COMMITS_SENT]})
    return worker.wait_assignment()


def raised(error: BaseException) -> str:
    """Says what this rank's own code raised, as at the end of its process: traceback, outcome, last
    collectives.  Returns the line for `park`, by which the process lives on all the same."""
    worker = _get()
    outcome.show(error, ends=False)
    outcome.flush()
    worker.send_flight()
    outcome.write_page(worker.fields, *outcome.of_exception(error))
    return "%s: %s" % (type(error).__name__, error)


def park(
    step: int, torn: bool, reason: str, meanwhile: Optional[Callable[[], None]] = None,
    shard: int = 0, shards: int = 1, ready: bool = False, error: str = "",
) -> Assignment:
    """Leaves the generation with `step` optimizer steps in memory; blocks until the next one.

    `shard` of `shards`: which part of the run's state that is.  `ready`: this rank can end the step
    that it is in by itself, once another one has ended it.  `error`: what it `raised` itself, ""
    where the generation ended for another's reason.
    """
    worker = _get()
    worker.send({"t": "parked", "generation": worker.generation, "step": step, "torn": torn,
                 "reason": cut(reason, 300), "shard": shard, "shards": shards, "ready": ready,
                 **({"error": cut(error)} if error else {})})
    if meanwhile is not None:
        meanwhile()
    return worker.wait_assignment()


def broken() -> bool:
    """True once the launcher has told this rank to leave its generation."""
    worker = _get()
    return bool(worker.fields[pages.F_BROKEN] >= worker.generation > 0)


def phase(name: str) -> None:
    """Says what this rank does from now on.  Raises Broken when the generation is over."""
    if _worker is None:
        return
    worker = _worker
    worker.switch_phase(pages.PHASES.index(name))
    if worker.joining and name != "startup":
        worker.joining = False
        worker.ticker.rebase()
    if worker.injected and name == "forward_backward":
        faults.inject(worker.injected)
    if worker.fields[pages.F_BROKEN] >= worker.generation > 0:
        # Without its number: equal failures of two generations are told by their words.
        raise Broken("generation is over")


@contextlib.contextmanager
def during(name: str) -> Iterator[None]:
    """`with during("eval"):` for scripts: the phase inside, `unknown` again behind it."""
    if _worker is None:
        yield
        return
    _worker.switch_phase(pages.PHASES.index(name))
    try:
        yield
    finally:
        _worker.switch_phase(pages.UNKNOWN)


def step_begin() -> None:
    """Just before optimizer.step.  Raises Broken, and then nothing is torn."""
    if _worker is None:
        return
    phase("optimizer")
    _worker.fields[pages.F_STEP_BEGIN] += 1


def step_end(step: int, loss: float) -> None:
    """`step` optimizer steps are done and whole."""
    if _worker is None:
        return
    _worker.fields[pages.F_LOSS] = pages.bits(loss)
    _worker.finish_step(step)


def progress(step: int, loss: float, rate: float, total_steps: int) -> None:
    """Feeds the launcher's bar: tokens (or samples) a second, and the steps the run wants."""
    if _worker is None:
        return
    fields = _worker.fields
    fields[pages.F_RATE], fields[pages.F_TOTAL] = pages.bits(rate), total_steps
    fields[pages.F_LOSS] = pages.bits(loss)


def register_group(
    group: Any, cut_sockets: Optional[Callable[[], None]], alike: Sequence[Any] = (),
) -> None:
    """The generation's process group and how to unblock it; (None, None) before it goes.

    `alike`: this rank's other groups in which every rank enters equally many collectives.
    """
    worker = _get()
    with worker.lock:
        worker.cut = cut_sockets
        worker.ticker.forget_groups()
        if group is not None:
            for one in (group, *alike):
                worker.ticker.watch_group(one)
            if worker.fields[pages.F_BROKEN] >= worker.generation and cut_sockets is not None:
                cut_sockets()  # the order to leave came while the group was being made


def placed(words: str) -> None:
    """This rank's part in the strategy, for people: "stage 2 of 4, pipeline 1"."""
    _get().send({"t": "place", "text": cut(words)})


def report(fault: str, text: str) -> None:
    """One line for the terminal and the agent; `fault` is a runbook's name or ""."""
    _get().send({"t": "report", "fault": fault, "text": cut(text)})


def committed(generation: int, step: int, path: str, world: int) -> None:
    """A checkpoint's marker is durable."""
    _get().send({"t": "committed", "generation": generation, "step": step, "path": path,
                 "world": world})


def verified(path: str) -> None:
    """Every byte of a committed checkpoint was read back and is as it was written."""
    _get().send({"t": "verified", "path": path})


def bad_checkpoint(path: str, why: str) -> None:
    """A checkpoint did not verify and was put aside."""
    _get().send({"t": "bad_checkpoint", "path": path, "why": cut(why, 500)})


def stop_after() -> int:
    """0, or the step at whose end to write a checkpoint and leave with code 0."""
    return int(_get().fields[pages.F_STOP_AFTER])


def park_after() -> Tuple[int, bool]:
    """(the step at whose end to park, whether to write a checkpoint there first); 0 = none."""
    worker = _get()
    wanted = worker.parting
    return (wanted.after, wanted.save) if wanted.generation == worker.generation else (0, False)


def skip_collective() -> bool:
    """True once after `holdfast inject skip-collective`: leave this step's all-reduce out."""
    return _worker is not None and _worker.injected.pop("skip-collective", None) is not None


def snapshot_buffer(nbytes: int) -> Optional[memoryview]:
    """Room for this rank's shard, in the half that does not hold its newest whole snapshot.

    None when the launcher has no memory to give; asked for once per generation and size.
    """
    worker = _get()
    if worker.snapshot_off and worker.snapshot_bytes == nbytes:
        return None
    if worker.snapshot_file is None or worker.snapshot_bytes != nbytes:
        worker.snapshot_bytes = nbytes
        with worker.lock:
            worker.snapshot_answer = None
            worker.send({"t": "snapshot", "nbytes": nbytes})
            worker.lock.wait_for(lambda: worker.snapshot_answer is not None, SNAPSHOT_WAIT_S)
            fds: List[int] = worker.snapshot_answer or []
        worker.snapshot_off = not fds
        worker.snapshot_file = snapshots.SnapshotFile(fds[0]) if fds else None
        close_all(fds)
    return worker.snapshot_file.begin(nbytes) if worker.snapshot_file else None


def snapshot_commit(step: int, digest: str) -> None:
    """The half handed out last holds the state after `step` steps, whole."""
    worker = _get()
    assignment = worker.assignment
    if worker.snapshot_file is None or assignment is None:
        return
    worker.snapshot_file.commit(
        assignment.generation, assignment.rank, assignment.world, step,
        worker.snapshot_bytes, digest,
    )


def snapshot_shards() -> List[SnapshotShard]:
    """Every whole shard the launcher held when it made this assignment."""
    worker = _get()
    return snapshots.shards_of(worker.snapshot_fds)
