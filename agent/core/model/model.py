"""The nouns of Holdfast: what is observed, what is concluded, what is asked for, what is done.

Owns the types that cross the border between the deterministic core and the edge.  No I/O, no
clock but `Now`, no randomness.  Frozen, of tuples: a step over an equal observation is idempotent.

Units: `_s` seconds, `_bytes` bytes.  `boot_s` is CLOCK_BOOTTIME, `wall_s` is UTC, for people only.
"""

from __future__ import annotations

import msgspec

from .bounds import Seconds, Whole
from .events import Event
from .orders import Gate, NodeOrder, RemoveLock
from .readings import Readings

SEVERITIES = OK, UNKNOWN, WARN, DEGRADED, FATAL = "ok", "unknown", "warn", "degraded", "fatal"
TRAINER, SCRIPT, OPAQUE = "trainer", "script", "opaque"


class Value(msgspec.Struct, frozen=True, omit_defaults=True):
    """Base of every value of the core."""


class Now(Value, frozen=True):
    """The only time there is."""

    boot_s: float
    wall_s: float
    boot_id: str = ""


# ---------------------------------------------------------------- observed: levels, never edges


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


class RankView(Value, frozen=True):
    """One rank as its page, its process and its launcher show it now."""

    rank: int
    node: str
    pid: int
    generation: int
    state: str  # starting | running | parked | ended
    step: int = 0  # optimizer steps done
    phase: str = "unknown"  # worker.page.PHASES; "exit" in the exit handlers of a good end
    still_s: float = 0.0  # since anything of the page's progress fields last moved
    beat_age_s: float = 0.0  # age of the ticker's last beat
    proc_state: str = "?"  # /proc/PID/stat: R S D T t Z, "?" unknown
    traced: bool = False
    stopped_s: float = 0.0  # how long state T without a tracer has lasted
    active: bool = False  # CPU or I/O of the rank or its children moved in the last second
    in_optimizer: bool = False  # step_begin != step_end
    seq: tuple[tuple[int, int], ...] = ()  # (group id, collective sequence number)
    step_seq: tuple[tuple[int, int], ...] = ()  # (step, number at its end), newest last
    step_time_s: float = 0.0  # median of the latest steps, 0 unknown
    flight: tuple[tuple[int, str, str], ...] = ()  # last collectives: (sequence, name, sizes)
    where: str = ""  # source line of the main thread, from evidence
    phase_s: tuple[tuple[str, float], ...] = ()  # accumulated seconds per phase
    ended: Ended | None = None
    parked: Parked | None = None
    cgroup: str = ""  # that its memory is charged to, as the agent sees it; "" unknown
    start_boot_s: float = 0.0  # of its process; 0 unknown


class Commit(Value, frozen=True):
    """A durable checkpoint's marker, as listed on disk; its bytes are proven when read."""

    generation: Whole
    step: Whole
    path: str
    world: Whole = 0
    bad: str = ""  # why it was quarantined; "" = not known to be bad


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
    nnodes: int = 1  # how many nodes the run asks for; ranks a node = nproc
    hang_limit_s: float = 0.0  # a user's own limit; 0 = none
    ranks: tuple[RankView, ...] = ()
    commits: tuple[Commit, ...] = ()
    snapshot: SnapshotView | None = None
    checkpoint_dir: str = ""  # where the commits are
    keep: int = 0  # valid checkpoints the job wants kept; 0 = the configuration's number
    shutdown: str = ""  # "" | preempted | interrupted | drained: the launcher was asked to end
    connected: bool = True
    startup_s: float = 0.0  # first start -> first finished step, 0 unknown
    logs: bool = False  # its launcher has a child that reads the ranks' logs
    compiling: str = ""  # a compiler child or compile-cache lock: what, else ""
    registered_boot_s: float = 0.0
    uid: int = -1  # the launcher's user, as the kernel says; -1 unknown


class Doc(Value, frozen=True):
    """A document of the store with its version (0 = absent)."""

    key: str
    version: int
    body: bytes = b""


class Lease(Value, frozen=True):
    """Who may lead a run.  `until_boot_s` is this node's clock, counted from before the renewal was
    sent (so it ends here before it ends in the store); 0 for another node's lease."""

    run: str
    holder: str
    until_boot_s: float = 0.0


class StoreView(Value, frozen=True):
    """What the store said last, and whether it answers."""

    up: bool
    docs: tuple[Doc, ...] = ()
    leases: tuple[Lease, ...] = ()


class EffectOutcome(Value, frozen=True):
    """What became of an effect; kept as a level until the core stops asking."""

    id: str
    ok: bool
    error: str = ""
    detail: str = ""  # JSON where the kind says so (evidence: {"where": ..., "stacks": ...})


class Beat(Value, frozen=True):
    """What another member of a run says of itself, through the store or directly."""

    node: str
    run: str
    generation: int
    boot_s: float  # receiver's clock at arrival
    ranks: tuple[RankView, ...] = ()
    fatal: str = ""  # name of a fatal fault on that node


class Observed(Value, frozen=True):
    """Everything the core may look at in one step."""

    runs: tuple[RunView, ...] = ()
    samples: Readings = Readings()
    lines: tuple[tuple[str, int, float, str], ...] = ()  # collectors.sample.LogLine
    events: tuple[Event, ...] = ()  # the kernel's, of the last minute
    beats: tuple[Beat, ...] = ()
    store: StoreView = StoreView(up=False)
    outcomes: tuple[EffectOutcome, ...] = ()
    requests: tuple[Request, ...] = ()
    journal_stalled: bool = False
    gate: Gate = Gate()


# ---------------------------------------------------------------- concluded


class Verdict(Value, frozen=True, omit_defaults=False):
    """A detector's conclusion about one subject, with what it rests on."""

    fault: str  # name of a runbook
    subject: str  # "run/NAME/rank/1", "node/NAME", "store", ...
    severity: str
    confidence: float  # 1.0 = proof
    reason: str  # one sentence for a person
    evidence: tuple[tuple[str, str], ...] = ()  # (what, value)
    act: bool = False  # True: proof or cost allows acting; False: shown only
    detector: str = ""
    run: str = ""
    generation: int = 0
    explains: tuple[str, ...] = ()  # faults of the same node that are only its consequence


class Incident(Value, frozen=True, omit_defaults=False):
    """A fault over its lifetime: opened by a verdict, acted on, closed."""

    id: str
    fault: str
    subject: str
    severity: str
    run: str
    generation: int
    opened_wall_s: float
    opened_boot_s: float
    reason: str
    culprit: str  # "rank 1 (pid 4711) on node-a"
    evidence: tuple[tuple[str, str], ...] = ()
    timeline: tuple[tuple[float, str], ...] = ()  # (wall_s, what happened)
    state: str = "open"  # open | acted | closed | taken_back
    actions: tuple[str, ...] = ()  # effect ids
    closed_wall_s: float = 0.0
    lost_steps: int = 0  # -1: unknown, the job keeps its own checkpoints
    lost_s: float = 0.0  # from the last finished step before to the first new one after
    would_have: str = ""  # what acting would have done, for observe-only detectors


class Request(Value, frozen=True):
    """A rung of a ladder, or an operator's or alert's wish; granted by plan or node document."""

    id: str
    kind: str  # restart_ranks | stop_own_ranks | take_evidence | run_check | exclude_node | ...
    subject: str
    reason: str
    origin: str = "policy"  # policy | operator | alert
    run: str = ""
    fault: str = ""
    by: str = ""  # who, for people


class Resume(Value, frozen=True):
    """Where a generation starts from."""

    kind: str  # fresh | survivor | snapshot | disk | own (a script's own checkpoint)
    step: int = 0
    generation: int = 0  # of the state, for snapshot and disk
    path: str = ""


class Plan(Value, frozen=True):
    """The run's document: the one authority over members, ranks and the resume point."""

    run: str
    generation: int
    members: tuple[str, ...]
    ranks: tuple[tuple[int, str], ...]  # (rank, node)
    resume: Resume
    reason: str
    keep: tuple[int, ...] = ()  # ranks whose process lives on
    spares: tuple[str, ...] = ()
    granted: tuple[str, ...] = ()  # request ids
    spent: tuple[tuple[str, int], ...] = ()  # (budget key, count): inherited by a new leader
    history: tuple[tuple[int, int], ...] = ()  # (generation, step it resumed from), oldest first
    checkpoint_dir: str = ""  # whose commits the history judges
    other_histories: tuple[tuple[str, tuple[tuple[int, int], ...]], ...] = ()  # of other folders
    finished: int = -1  # exit code once the run is over, -1 = goes on
    paused: bool = False
    quarantined: tuple[str, ...] = ()  # checkpoint paths that must not be used


class Effect(Value, frozen=True):
    """Something to be done at the edge.  Idempotent under its id; pending until its outcome or
    its deadline; one in flight per subject, only `stop` overtakes.

    kind / body:
      put       StoreWrite         compare-and-set of a document
      start     Start              launcher: start this generation
      stop      Stop               launcher: end these ranks
      finish    Finish             launcher: leave with this code
      evidence, logs: TakeEvidence, a child for one rank or a whole generation; detail is JSON
      delete    Delete             checkpoint directories that keep-N lets go
      drain_node, reboot_node, replace_node, reset_gpu: NodeOrder, a verb for the root unit
      remove_lock  RemoveLock      launcher: a lock in a compile cache that nobody holds
    """

    id: str
    kind: str
    subject: str
    reason: str
    deadline_s: float
    body: StoreWrite | Start | Stop | Finish | TakeEvidence | Delete | NodeOrder | RemoveLock
    outlives_node: bool = False  # refused while the journal is stalled
    fault: str = ""
    request: str = ""


class StoreWrite(Value, frozen=True, tag="put"):
    key: str  # "run/NAME" | "node/NAME" | "lease/NAME"
    expect_version: int  # 0 = must be absent
    body: bytes
    lease: str = ""  # compare(lease of this run is mine); "" = no lease (one node)


class Start(Value, frozen=True, tag="start"):
    run: str
    generation: int
    ranks: tuple[int, ...]  # this node's
    keep: tuple[int, ...]
    world: int
    resume: Resume
    reason: str
    permit_s: float = 0.0  # 0 = no end
    history: tuple[tuple[int, int], ...] = ()


class Stop(Value, frozen=True, tag="stop"):
    run: str
    generation: int
    ranks: tuple[int, ...]  # () = all
    grace_s: float
    reason: str
    leave: bool = False  # the launcher ends as if its caller had asked: checkpoint, its own grace


class Finish(Value, frozen=True, tag="finish"):
    run: str
    code: int
    reason: str


class TakeEvidence(Value, frozen=True, tag="evidence"):
    run: str
    generation: int
    rank: int
    pid: int
    reason: str


class Delete(Value, frozen=True, tag="delete"):
    run: str
    generation: int
    paths: tuple[str, ...]


class Decision(Value, frozen=True):
    """What one step returns: effects to perform and the view that people and metrics read."""

    effects: tuple[Effect, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    incidents: tuple[Incident, ...] = ()  # every open one, and those that changed in this step
    plans: tuple[Plan, ...] = ()
    reasons: tuple[tuple[str, str], ...] = ()  # (run, why there is or is no new plan)
    ledger: tuple[tuple[str, float], ...] = ()  # (category, settled seconds of this node)
    ledger_held_s: float = 0.0  # of the detection seconds: not settled, may turn out training
    run_ledger: tuple[tuple[str, str, float], ...] = ()  # (run, category, seconds)
    detector_counts: tuple[tuple[str, str, int], ...] = ()  # (detector, "true" | "false", so far)
    next_step_s: float = 1.0  # step again no later than this
    paused: str = ""  # why an operator paused this node; "" = not paused


class Runbook(Value, frozen=True):
    """The machine part of runbooks/<fault>.md: the policy for one fault."""

    fault: str
    severity: str
    scope: str  # gpu | neuron | nic | rank | node | run | store
    ladder: tuple[str, ...] = ()  # restart_ranks resume_older exclude_node stop_run ...
    budget_count: int = 3  # per rung and subject, then climb
    budget_window_h: float = 24.0
    clears: str = "check"  # reboot | quiet_10m | check | operator
    alert: str = ""
    path: str = ""  # the file that spoke


class Settings(Value, frozen=True):
    """What of the configuration the core needs."""

    suspect_floor_s: float = 2.0
    suspect_steps: float = 3.0
    odds: float = 3.0
    odds_active: float = 9.0
    script_floor_s: float = 60.0
    phase_factor: float = 10.0
    compile_limit_s: float = 7200.0
    quiet_limit_s: float = 1800.0  # evaluation and checkpoint, until their p99 is known
    stopped_s: float = 1.0  # state T without a tracer must last this long
    park_wait_s: float = 1.0  # survivors have this long to park before they are replaced
    stop_grace_s: float = 5.0
    crash_loop_count: int = 3  # same signature at the same step
    breaker_nodes: int = 3
    breaker_fraction: float = 0.05
    keep_checkpoints: int = 3
    lease_s: float = 10.0
    act: tuple[str, ...] = ("ended", "hang", "kernel")
    allow: tuple[str, ...] = ()  # reboot_node, replace_node, ...: off until turned on
    single_node: bool = True
