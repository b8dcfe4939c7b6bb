"""What a run's case remembers between steps, and what one step works with.

Owns the records of a run and the Context of one step.  RunState survives a restart of the agent
(msgspec JSON, bounded).  Each record is frozen, replaced as a whole, and written by the one module
that RECORDS names (held by tests/test_house.py).  None of it is authority: members, ranks, resume
point and budgets are the plan's.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ..checks.node_tests import Found
from ..detect.ranks.ended import Cause
from ..detect.ranks.growth import Growth
from ..detect.ranks.known_causes import Wait
from ..detect.ranks.live_logs import LogLook
from ..effects.in_flight import EffectResult, InFlight
from ..incidents.book import Entry, IncidentBook
from ..model import (
    Answer,
    CheckVerdict,
    Commit,
    Condition,
    Effect,
    Incident,
    Now,
    Observed,
    Plan,
    Runbook,
    RunView,
    Settings,
    Value,
    Verdict,
)
from ..series.wait_history import History
from . import members
from .layout import Member
from .policy import Beyond, Grant, nothing_beyond

NOTHING = "nothing to plan"  # the reason of a step that had none
RECORDS = {  # field of RunState -> the module that writes it
    "launcher": "plan_document", "document": "plan_document", "progress": "progress",
    "suspects": "causes", "recovery": "recovery", "budgets": "recovery", "ending": "ending",
    "incidents": "incidents", "held": "operator", "logs": "log_questions", "upkeep": "case",
    "gate": "start_gate", "peers": "peer_gate", "between": "between", "heard": "heard",
}


class LauncherSeen(Value, frozen=True):
    """The launcher of this run, as it showed itself so far."""

    registered_boot_s: float = -1.0
    generation: int = 0  # that it showed last
    top: int = 0  # highest that any launcher here ever showed


class DocumentSeen(Value, frozen=True):
    """The run's document, as this node knows it."""

    plan: Plan | None = None  # newest that this node wrote or read
    version: int = 0
    cluster: str = ""  # whose store that was; "" on one node, or of an older release's memory
    wrote: int = 0  # generation of the last plan this node tried to write
    meant: int = 0  # generation that is meant for the launcher that is here now
    refused_version: int = -1  # a write against this version failed: read again first
    refused_boot_s: float = 0.0
    bad_paths: tuple[str, ...] = ()  # checkpoints that its ranks refused


class Progress(Value, frozen=True):
    """How far training came, and what of it the last cause broke off."""

    peak_step: int = 0  # highest step ever seen finished, under whatever launcher of this name
    trained: bool = False  # this launcher's ranks finished a step of their own
    last_step_boot_s: float = 0.0  # when a step was finished last, redone or new; 0 = never
    earlier_step_boot_s: float = 0.0  # ... before this generation, under this launcher; 0 = never
    seen_step: int = 0  # highest of this generation, by its own counter
    began_boot_s: float = 0.0  # when this generation was first seen
    base_step: int = 0  # peak when the last cause was found
    earned_steps: int = 0  # new steps of the generation that the last cause ended
    moved: bool = False  # that generation finished a step that counts as progress
    lasted: bool = False  # it was a script's or a command's, and did too much to be a loop
    quick: int = 0  # generations in a row that broke within moments
    trained_s: float = 0.0  # of all generations that broke, each to its last finished step
    broken_boot_s: float = 0.0  # when the last cause was found
    backoff_step: int = -1
    backoff: float = 1.0
    bases: dict[int, int] | None = None  # see detect/ranks/collective.py
    bases_generation: int = 0
    oom_pids: tuple[int, ...] = ()


class Suspension(Value, frozen=True):
    """The run is stopped from outside."""

    since_boot_s: float
    why: str


class Suspects(Value, frozen=True):
    """What is being looked into before anything is a cause."""

    lonely_boot_s: float = 0.0  # since only consequences were seen
    suspension: Suspension | None = None  # as of the last step
    suspended_boot_s: float = -1e9  # when that was so last
    explained_boot_s: float = -1e9  # when a known cause last explained its stillness
    waits: dict[str, Wait] = {}  # same key -> what it waits in
    where: dict[str, str] = {}  # "generation/rank/step" -> source line, "" until it is known
    growth: Growth = Growth()  # that waits for one more node


class Recovery(Value, frozen=True):
    """From a cause to the first step that nobody had finished before."""

    cause: Cause
    incident: str = ""
    grant: Grant | None = None
    stop_ranks: tuple[int, ...] = ()  # whom the last order to stop named
    stop_boot_s: float = 0.0  # when ranks were first ordered to stop for the cause
    left: bool = False  # ranks here were told to leave what broke on another node
    planned: bool = False  # the next generation is in force: its new step is waited for
    told: tuple[tuple[str, float], ...] = ()  # other node -> when its ranks were ordered to stop


class Budgets(Value, frozen=True):
    """The age of what is spent; how much was is the plan's."""

    since: dict[str, float] = {}  # budget key -> boot_s of the window's begin


class Ending(Value, frozen=True):
    """The way to the end of the run."""

    code: int = -1  # -1: not decided
    reason: str = ""
    fault: str = ""
    shutdown_boot_s: float = 0.0  # since the caller or an operator wants the end
    stop_boot_s: float = 0.0  # when ranks were ordered to stop for that
    left: bool = False  # the launcher was ordered to leave, and said yes
    alone: bool = False  # it ends for this node's launcher alone: no document says so


class Stopped(Value, frozen=True):
    """That a run was stopped for good, and when: said for longer than the run is here."""

    verdict: Verdict
    boot_s: float


class OpenIncident(Entry):
    """An incident with what its cost will be measured from."""

    base_step: int = 0  # highest step finished before
    last_step_boot_s: float = 0.0  # when a step was finished last: its own cost begins there
    seen_boot_s: float = 0.0  # when the verdict fell
    suspicion: bool = False  # a warning that may still be taken back
    trained_s: float = 0.0  # before it: more than this a script cannot have to redo
    is_note: bool = False  # stands until the run is over, and waits for nothing
    detector: str = ""  # whose note it is; "" = the gate's
    planned_boot_s: float = 0.0  # when the first plan behind it was made; 0 = not yet


class Incidents(msgspec.Struct, frozen=True):
    """The open incidents of the run."""

    book: IncidentBook[OpenIncident] = msgspec.field(default_factory=IncidentBook)  # by id
    suspicion: str = ""  # id of the open suspicion
    stopped: Stopped | None = None  # by a crash loop, or with its budget spent


class Held(Value, frozen=True):
    """What an operator, or this node in his place, asked of the run."""

    paused: bool = False
    until_wall_s: float = 0.0  # when the pause ends by itself; 0 = by a person
    ends_wall_s: float = 0.0  # the same of the document's pause, by this node's clock
    counted_wall_s: float = 0.0  # the end in the document that this was counted from
    resumed: bool = False  # an operator's resume that the document does not show yet
    drain: str = ""  # reason of a drain
    fleet: bool = False  # the whole fleet is paused: no mark of this run's

    @property
    def rests(self) -> bool:
        """Whether nothing is done about a fault."""
        return self.paused or self.fleet


class GateSeen(Value, frozen=True):
    """What became of the checks before the first start of one launcher."""

    launcher_boot_s: float = -1.0  # its registration
    since_boot_s: float = 0.0  # when checks were first asked for
    asked_boot_s: float = 0.0  # when the node's were asked for last; 0 = not yet
    asked_paths_boot_s: float = 0.0
    paths: CheckVerdict | None = None
    silent_boot_s: float = 0.0  # since when a node of the run has not said what it is made of
    owing: tuple[str, ...] = ()  # nodes with other drivers that have not refused the run
    owing_boot_s: float = 0.0  # since when the last of them is known
    held_boot_s: float = 0.0  # since when something refuses the start
    incident: str = ""  # of that
    rechecked_boot_s: float = 0.0  # when what was checked again before a restart had broken
    passed: bool = False  # nothing was against it once, beside a run that went on elsewhere
    ignored: bool = False  # that it started all the same is written down
    held: str = ""  # what is against ranks of the run here, as other nodes read it
    left_out: tuple[str, ...] = ()  # other nodes of which it is written down that they are held
    common: str = ""  # for what no node is refused, once it is written down


class PeersSeen(Value, frozen=True):
    """What became of the tests between the nodes of this run, where this node led it."""

    launcher_boot_s: float = -1.0  # the registration of whom they were asked for
    ended_boot_s: float = 0.0  # when the last of them ended, with a result or without
    found: Found | None = None  # what it was
    said: str = ""  # the incident that tells it
    named: tuple[tuple[str, str], ...] = ()  # (node that is left out, the incident of that)
    ignored: bool = False  # that they were left out is written down
    left: tuple[str, ...] = ()  # who would get no ranks now


class Loss(Value, frozen=True):
    """What a node under suspicion has cost this run since it was tested last."""

    node: str
    times: int = 0
    lost_s: float = 0.0


class BetweenSeen(Value, frozen=True):
    """The tests of nodes under suspicion between two generations, where this node led the run."""

    losses: tuple[Loss, ...] = ()
    broken_boot_s: float = -1.0  # of the cause that was weighed last
    suspects: tuple[str, ...] = ()  # who is tested for it; () = nobody
    asked_boot_s: float = 0.0  # when the tests were asked for
    effect: str = ""  # by which effect; "" = they have ended
    held_s: float = 0.0  # how long this recovery waited for them
    judged: tuple[str, ...] = ()  # hurt nodes that were excluded since, or could not be
    excluding: tuple[str, ...] = ()  # those of them of whom it is still to be written
    took_s: float = 0.0  # what the last ones with a result took; 0 = none yet
    cut_s: float = 0.0  # the limit at which the last ones were cut off; 0 = they were not


class Upkeep(Value, frozen=True):
    """What was tidied up behind a generation that runs, and how long it does without its store."""

    deleted: tuple[str, ...] = ()  # asked for
    not_deleted: tuple[str, ...] = ()  # of these, what was refused: again with the next
    storeless_boot_s: float = -1.0  # since when it has none that can come back, and makes no step


class Heard(Value, frozen=True):
    """Checkpoints that rank 0's node told of, the newest, by folder.  There is one folder: a run
    that goes to another forgets the first."""

    registered_boot_s: float = -1.0  # of the launcher here: one that begins anew lists the folder
    by_folder: dict[str, tuple[Commit, ...]] = {}


class RunState(msgspec.Struct):
    """One run, as this node remembers it.  History alone grows in place, by run/progress.py."""

    run: str
    history: History = msgspec.field(default_factory=History)
    launcher: LauncherSeen = LauncherSeen()
    document: DocumentSeen = DocumentSeen()
    progress: Progress = Progress()
    suspects: Suspects = Suspects()
    recovery: Recovery | None = None
    budgets: Budgets = Budgets()
    ending: Ending | None = None
    incidents: Incidents = msgspec.field(default_factory=Incidents)
    held: Held = Held()
    logs: LogLook = LogLook()
    upkeep: Upkeep = Upkeep()
    gate: GateSeen = GateSeen()
    peers: PeersSeen = PeersSeen()
    between: BetweenSeen = BetweenSeen()
    heard: Heard = Heard()

    @property
    def cause(self) -> Cause | None:
        """What no plan has answered yet."""
        recovery = self.recovery
        return recovery.cause if recovery is not None and not recovery.planned else None

    @property
    def grant(self) -> Grant | None:
        return self.recovery.grant if self.recovery is not None else None

    @property
    def finish_code(self) -> int:
        """-1 until the run's end is decided."""
        return self.ending.code if self.ending is not None else -1


class Context(msgspec.Struct):
    """One step of one run: inputs, and the lists its outputs go to."""

    now: Now
    view: RunView
    observed: Observed
    settings: Settings
    runbooks: Mapping[str, Runbook]
    in_flight: InFlight
    settled: list[EffectResult]
    since_boot_s: float
    frozen: bool  # this agent itself stood still a moment ago: still pages prove nothing
    counts: dict[str, int]
    effects: list[Effect]
    verdicts: list[Verdict]
    changed: dict[str, Incident]
    leader: bool = True
    reason: str = NOTHING
    wake_s: float = 1.0
    causes: list[tuple[int, Cause]] = []  # (pid, cause) of what the kernel said of processes
    conditions: tuple[Condition, ...] = ()  # what is so and may be what its ranks wait for
    beyond: Beyond = nothing_beyond  # what may be done beyond this run
    opened: tuple[Incident, ...] = ()  # of this node, of whatever run
    climbed: list[tuple[Cause, str, str]] = []  # what this run asks for there, and why
    answers: list[Answer] = []  # to the alerts about this run
    listed: tuple[Plan | None, tuple[Member, ...]] | None = None  # the plan asked about last

    def nodes(self, plan: Plan | None) -> tuple[Member, ...]:
        """Every node of the run and of this plan, as this step sees it."""
        if self.listed is None or self.listed[0] is not plan:
            self.listed = plan, members.members(
                self.view, plan, self.observed.beats, self.observed.store, self.now, self.settings,
                self.since_boot_s)
        return self.listed[1]

    def wake(self, seconds: float) -> None:
        """Step again no later than this."""
        self.wake_s = min(self.wake_s, max(0.01, seconds))

    def emit(self, generation: int, draft: Effect) -> Effect | None:
        """Hand an effect out, unless its subject is busy or the journal stalled."""
        if draft.outlives_node and self.observed.journal_stalled:
            return None
        effect = self.in_flight.add(generation, draft, self.now.boot_s)
        if effect is not None:
            self.effects.append(effect)
        return effect
