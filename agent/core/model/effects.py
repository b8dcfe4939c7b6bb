"""Effects: what the core asks of the edge, and the decision that carries them.

Owns the types that go out to launchers, the store and the node's root unit.
"""

from __future__ import annotations

from .concluded import Answer, Incident, Request, Verdict
from .observed import Beat, Labels
from .plan import Plan, Resume
from .time import Value


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
      run_check    RunCheck        the agent: these checks; a launcher: paths, as the run's user
      run_check    NodeTests       the agents of these nodes, by the one of who leads their run
    """

    id: str
    kind: str
    subject: str
    reason: str
    deadline_s: float
    body: (StoreWrite | Start | Stop | Finish | TakeEvidence | Delete | NodeOrder | RemoveLock
           | RunCheck | NodeTests)
    outlives_node: bool = False  # refused while the journal is stalled
    fault: str = ""
    request: str = ""


class StoreWrite(Value, frozen=True, tag="put"):
    key: str  # "run/NAME" | "node/NAME" | "lease/NAME"
    expect_version: int  # 0 = must be absent
    body: bytes
    lease: str = ""  # compare(lease of this run is mine); "" = no lease (one node)
    over: str = ""  # of a lease: taken from this holder, if it is still his


class Start(Value, frozen=True, tag="start"):
    run: str
    generation: int
    ranks: tuple[int, ...]  # this node's
    keep: tuple[int, ...]  # of them, those whose processes the same places here have already
    world: int
    resume: Resume
    reason: str
    permit_s: float = 0.0  # 0 = no end
    history: tuple[tuple[int, int], ...] = ()
    labels: Labels | None = None  # of this node, by the plan; None = the plan has none at all


class Stop(Value, frozen=True, tag="stop"):
    run: str
    generation: int
    ranks: tuple[int, ...]  # () = all
    grace_s: float
    reason: str
    leave: bool = False  # the launcher ends as if its caller had asked: checkpoint, its own grace
    save: bool = False  # a trainer's ranks write a checkpoint first; with `park`
    park: bool = False  # a trainer's ranks park at the end of a step, with their state
    after: int = 0  # ... of this one, which all of them come to; 0 = wherever they are
    node: str = ""  # whose launcher carries it out; "" = this node's


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
    node: str = ""  # where the rank is; "" = this node


class Delete(Value, frozen=True, tag="delete"):
    run: str
    generation: int
    paths: tuple[str, ...]


class NodeOrder(Value, frozen=True, tag="node"):
    """`verb` is one of drain, reboot, replace, reset_gpu: the unit knows no other.  `incident` is
    why, and is written to evidence.store before.  `device` is the address on PCI of what is reset,
    as 0000:4e:00.0, and `cures` the incidents of it that are over then; for no other verb."""

    verb: str
    node: str
    incident: str
    reason: str
    device: str = ""
    cures: tuple[str, ...] = ()


class RemoveLock(Value, frozen=True, tag="unlock"):
    """A launcher takes this file away, when it still finds it to be a stale lock of its user."""

    run: str
    path: str


class RunCheck(Value, frozen=True, tag="check"):
    """Checks to be made anew where what is known of them is older than `max_age_s`.  With `run`
    its launcher writes to `paths` and reads back; detail is JSON: [[path, why not or ""], ...]."""

    node: str
    checks: tuple[str, ...]
    max_age_s: float = 0.0
    run: str = ""
    paths: tuple[str, ...] = ()
    incident: str = ""  # that it is made for


class NodeTests(Value, frozen=True, tag="tests"):
    """Tests between the nodes of a run, this one first; detail is JSON, Found of
    agent/core/checks/node_tests.py.  `groups`: also every operation of all of them together;
    `suspects`: for whose sake they are made between two generations."""

    run: str
    nodes: tuple[str, ...]
    groups: bool = False
    suspects: tuple[str, ...] = ()


class Decision(Value, frozen=True):
    """What one step returns: effects to perform and the view that people and metrics read."""

    effects: tuple[Effect, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    incidents: tuple[Incident, ...] = ()  # every open one, and those that changed in this step
    plans: tuple[Plan, ...] = ()
    reasons: tuple[tuple[str, str], ...] = ()  # (run, why there is or is no new plan)
    ledger: tuple[tuple[str, float], ...] = ()  # (category, seconds of this node)
    ledger_settled: tuple[tuple[str, float], ...] = ()  # ... without those that may yet change
    run_ledger: tuple[tuple[str, str, float], ...] = ()  # (run, category, seconds)
    detector_counts: tuple[tuple[str, str, int], ...] = ()  # (detector, "true" | "false", so far)
    next_step_s: float = 1.0  # step again no later than this
    answers: tuple[Answer, ...] = ()  # to the requests that were looked at and are settled
    asked: tuple[Request, ...] = ()  # what alerts became in this step
    paused: str = ""  # why an operator paused this node; "" = not paused
    fleet_paused: str = ""  # and the whole fleet
    beats: tuple[Beat, ...] = ()  # to be sent to the other nodes; none on a single one
