"""What the core may look at in one step: levels, never edges.

Owns the types that come in from launchers, store, collectors and people.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import msgspec

from .alert import Alert
from .bounds import Seconds, Whole
from .checked import CheckVerdict
from .concluded import Request
from .documents import Doc as Doc
from .documents import Documents
from .events import Event
from .readings import Readings
from .time import Value

TRAINER, SCRIPT, OPAQUE = "trainer", "script", "opaque"

Labels = tuple[tuple[str, str], ...]
EFA_GROUP = "efa_group"
LEVELS = (EFA_GROUP, "rack", "rail", "nvlink_domain")  # of the network, the widest first
MODEL = "model"  # label: what accelerators the node has


class Ended(Value, frozen=True):
    """How a rank ended.  The wait status counts only when the worker wrote no `outcome`."""

    code: Whole  # exit status; 128+n for death by signal n
    signal: Whole = 0
    outcome: str = ""  # "" | done | exception | exit | bad_checkpoint
    error: str = ""  # one line: type and message, at most 500 characters
    by_us: bool = False  # ended on an order of ours
    boot_s: Seconds = 0.0
    wall_s: Seconds = 0.0


class Parked(Value, frozen=True):
    """A survivor that has left its generation and waits for the next, with its state in memory."""

    step: Whole  # optimizer steps whose result it holds
    torn: bool = False  # a fault inside optimizer.step: the state must not be used
    reason: str = ""
    shard: Whole = 0  # which part of the run's state it holds, of how many: of 1 it is all of it
    shards: Whole = 1
    ready: bool = False  # can end the next step by itself, once another rank has


class GradientSum(Value, frozen=True):
    """How long one of a rank's steps took to sum its gradients, as torch's DDP measured it; of
    other ways to train, how long its collectives took in a step, on average over a few."""

    iteration: int  # by DDP's own count, from 1 on in each generation; else the step
    sum_s: float  # from the first bucket's all-reduce to the end of the last one's; else of all
    wait_s: float  # the part of it behind this rank's own backward pass; else of all waits
    compute_s: float  # forward and backward pass; else all of a step that is no such wait
    size_bytes: int = 0  # of all gradients; 0 unknown
    world: int = 0  # ranks that sum them; else all
    in_all: bool = False  # of all collectives that Python enters on CPU tensors


class RankView(Value, frozen=True):
    """One rank as its page, its process and its launcher show it now."""

    rank: int
    node: str
    pid: int
    generation: int
    state: str  # starting | running | parked | ended
    page: bool = True  # its page was read; else its step, phase and numbers are not known here
    step: int = 0  # optimizer steps done
    phase: str = "unknown"  # worker.page.PHASES; "exit" in the exit handlers of a good end
    still_s: float = 0.0  # since anything of the page's progress fields last moved
    beat_age_s: float = 0.0  # age of the ticker's last beat
    proc_state: str = "?"  # /proc/PID/stat: R S D T t Z, "?" unknown
    traced: bool = False
    stopped_s: float = 0.0  # how long state T without a tracer has lasted
    active: bool = False  # CPU or I/O of the rank or its children moved in the last second
    seq: tuple[tuple[int, int], ...] = ()  # (group id, collective sequence number)
    step_seq: tuple[tuple[int, int], ...] = ()  # (step, number at its end), newest last
    step_time_s: float = 0.0  # median of the latest steps, 0 unknown
    flight: tuple[tuple[int, str, str], ...] = ()  # last collectives: (sequence, name, sizes)
    where: str = ""  # source line of the main thread, from evidence
    phase_s: tuple[tuple[str, float], ...] = ()  # accumulated seconds per phase
    ended: Ended | None = None  # with state parked: by what it raised; its process lives on
    parked: Parked | None = None
    cgroup: str = ""  # that its memory is charged to, as the agent sees it; "" unknown
    start_boot_s: float = 0.0  # of its process; 0 unknown
    place: str = ""  # its part in the trainer's strategy: "stage 2 of 4, pipeline 1"
    gradients: GradientSum | None = None  # the newest that was measured
    reading: bool = False  # it or its children read megabytes each second while it stands still
    told_s: float = 0.0  # the receiver's: how long ago another node said all this; 0 of its own

    @property
    def known_step(self) -> int:
        """Its step, for a cause; -1 where its page was not read."""
        return self.step if self.page else -1

    @property
    def stood_s(self) -> float:
        """Since it last moved, unless it did so after this was said: `still_s` is known, this is
        what tells when its last move was."""
        return self.still_s + self.told_s

    @property
    def who(self) -> str:
        return rank_words(self.rank, self.pid, self.node, self.place)


def rank_words(rank: int, pid: int, node: str, place: str = "") -> str:
    """A rank as people read it."""
    return f"rank {rank} (pid {pid}{f', {place}' if place else ''}) on {node}"


class Commit(Value, frozen=True):
    """A durable checkpoint's marker, as listed on disk."""

    generation: Whole
    step: Whole
    path: str
    world: Whole = 0
    bad: str = ""  # why it was quarantined; "" = not known to be bad
    verified: bool = False  # every byte was read back from where it lies


class SnapshotView(Value, frozen=True):
    """The newest step for which every shard of an in-memory snapshot is whole."""

    generation: Whole
    step: Whole
    shards: Whole


class RunView(Value, frozen=True):
    """One run on this node: what its launcher says, as levels."""

    run: str
    node: str
    grade: str  # trainer | script | opaque
    nproc: int
    generation: int = 0  # highest that this launcher has started; 0 = none
    state: str = "idle"  # idle | running | done
    max_restarts: int = 0
    nnodes_min: int = 1  # with how many nodes it may go on
    nnodes_max: int = 1  # how many it asks for; ranks a node = nproc
    unit: int = 1  # so many nodes live and move together: a world is a multiple of it
    mixed: bool = False  # nodes with different models of accelerators may be one world
    gang_limit_s: float = 0.0  # how long it waits for its nodes; 0 = as the configuration says
    node_rank: int = -1  # this node's place in the first world, where the caller gave one
    hang_limit_s: float = 0.0  # a user's own limit; 0 = none
    ranks: tuple[RankView, ...] = ()
    commits: tuple[Commit, ...] = ()
    snapshot: SnapshotView | None = None
    checkpoint_dir: str = ""  # where the commits are
    keep: int = 0  # valid checkpoints the job wants kept; 0 = the configuration's number
    shutdown: str = ""  # "" | preempted | interrupted | drained: the launcher was asked to end
    connected: bool = True
    gone: bool = False  # its launcher and its ranks are dead: it is only kept to be seen
    startup_s: float = 0.0  # first start -> first finished step, 0 unknown
    logs: bool = False  # its launcher has a child that reads the ranks' logs
    suspended: bool = False  # its launcher stands still: stopped, or its cgroup is frozen
    compiling: str = ""  # a compiler child or compile-cache lock: what, else ""
    registered_boot_s: float = 0.0
    uid: int = -1  # the launcher's user, as the kernel says; -1 unknown
    visible: tuple[tuple[str, str], ...] = ()  # (vendor, CUDA_VISIBLE_DEVICES or its like)
    devices: tuple[str, ...] = ()  # the GPUs that its ranks take, by their addresses on PCI
    ignored_checks: tuple[str, ...] = ()  # --ignore-check: they stop no start of this run
    ignore_reason: str = ""
    wants_checks: str = ""  # --check: "passive" | "full"; "" = as the configuration says


class Lease(Value, frozen=True):
    """Who may lead a run.  `until_boot_s` is this node's clock, counted from before the renewal was
    sent (so it ends here before it ends in the store); 0 for another node's lease."""

    run: str
    holder: str
    until_boot_s: float = 0.0


class StoreView(msgspec.Struct, frozen=True):
    """What the store said last, and whether it answers.  A store that changes seldom hands out the
    same Documents again; any other sequence of documents is made one here."""

    up: bool
    docs: Documents = Documents()
    leases: tuple[Lease, ...] = ()
    problem: str = ""  # why it is not up, with what to do about it
    cluster: str = ""  # id of the cluster that it is of; "" where it has none, or is not known now

    def __post_init__(self) -> None:
        docs = cast("Iterable[Doc]", self.docs)
        if not isinstance(docs, Documents):
            msgspec.structs.force_setattr(self, "docs", Documents(docs))


class EffectOutcome(Value, frozen=True):
    """What became of an effect; kept as a level until the core stops asking."""

    id: str
    ok: bool
    error: str = ""
    detail: str = ""  # JSON where the kind says so (evidence: {"where": ..., "stacks": ...})


class Condition(Value, frozen=True):
    """What is so on a node and may be what its ranks wait for (detect/ranks/known_causes.py)."""

    node: str
    fault: str
    reason: str  # one sentence for a person
    mount: str = ""  # of a file system ...
    within: tuple[str, ...] = ()  # ... the mounts inside it, whose files are not its own
    fstype: str = ""
    card: str = ""  # of a network card: its kind
    path: str = ""  # of a compiler's lock


class Beat(Value, frozen=True):
    """What another node says of itself and of one run, through the store or directly.  With run ""
    it speaks of the node alone: each agent sends one such, whether it has runs or not."""

    node: str
    run: str
    generation: int
    boot_s: float  # receiver's clock at arrival; 0 where it is sent
    ranks: tuple[RankView, ...] = ()
    fatal: str = ""  # name of a fatal fault on that node
    lost: bool = False  # the receiver's: two nodes hear nothing of it, nor does its kernel answer
    sent_boot_s: float = 0.0  # sender's clock: what its ranks' times are measured from; 0 = ours
    labels: Labels = ()  # of the node
    grade: str = ""  # from here on what its launcher says, as in RunView
    nproc: int = 0
    nnodes_min: int = 0
    nnodes_max: int = 0
    uid: int = -1
    commits: tuple[Commit, ...] = ()
    snapshot: SnapshotView | None = None
    checkpoint_dir: str = ""
    shutdown: str = ""
    held: str = ""  # why that node's own gate gives this run no rank there now; "" = it passed
    node_rank: int = -1
    suspended: bool = False  # a release that does not say it is taken to go on
    compiling: str = ""  # a release that does not say it is taken to compile nothing ...
    conditions: tuple[Condition, ...] = ()  # ... and to be well: then its ranks' limits are usual
    top: int = 0  # highest generation of the run's name that its agent knows of; 0 = not said


class Gate(Value, frozen=True):
    """What was found at the node's edge, so that nothing is ended for an order that cannot leave,
    nor under the hands of somebody whom this agent does not serve."""

    closed: str = ""  # why no order could leave now
    seen: tuple[tuple[int, str], ...] = ()  # (pid, device) as drivers said last; these still live
    ours: tuple[int, ...] = ()  # of those: they descend from our runs' launchers, or are its ranks
    gone: tuple[int, ...] = ()  # as drivers say still; these live no more
    others: tuple[str, ...] = ()  # sockets of other agents here, which serve runs of their own


class Observed(Value, frozen=True):
    """Everything the core may look at in one step."""

    runs: tuple[RunView, ...] = ()
    coming: bool = False  # a launcher imports: its run is seen in a moment
    samples: Readings = Readings()
    events: tuple[Event, ...] = ()  # the kernel's, of the last minute
    beats: tuple[Beat, ...] = ()
    store: StoreView = StoreView(up=False)
    outcomes: tuple[EffectOutcome, ...] = ()
    requests: tuple[Request, ...] = ()
    orphans: tuple[Request, ...] = ()  # that an earlier life of this agent took, and did not answer
    journal_stalled: bool = False
    gate: Gate = Gate()
    alerts: tuple[Alert, ...] = ()  # from outside, firing, and not settled yet
    firing: tuple[str, ...] = ()  # ids of all that fire, settled or not
    checks: tuple[CheckVerdict, ...] = ()  # what was checked last on this node, in this boot
    passes: tuple[tuple[str, tuple[float, ...]], ...] = ()  # what they measured here when well
    labels: Labels = ()  # of this node: LEVELS of the network, and MODEL
