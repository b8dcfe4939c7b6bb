"""The table of actions: everything that Holdfast may do about a fault, or be asked to do.

Owns the names of actions and what is true of each: where it is granted, who performs it, whether
it outlives the node, what a person reads of it.  An action is one row; config, runbooks, ladders,
the API, the journal and `explain` read their lists from here.  Decides nothing and performs
nothing.  agent/actions/root_helper.py keeps its own closed list, because it runs as root and
imports nothing of ours; tests/test_house.py holds the two equal.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from .model.time import Value

RUN, DEVICE, NODE, PERSON = "run", "device", "node", "person"  # scopes
HERE, PLAN, NODE_DOCUMENT = "here", "plan", "node document"  # who grants; or PERSON
LAUNCHER, STORE, ROOT_HELPER = "launcher", "store", "root helper"
AGENT, NOBODY = "agent", "nobody"  # the agent's own memory; nobody yet

TAKE_EVIDENCE = "take_evidence"
STOP_OWN_RANKS = "stop_own_ranks"
RESTART_RANKS = "restart_ranks"
REPLACE_RANK = "replace_rank"
RESUME_OLDER = "resume_older"
DRAIN_NODE = "drain_node"
REBOOT_NODE = "reboot_node"
REPLACE_NODE = "replace_node"
RESET_GPU = "reset_gpu"
REMOVE_LOCK = "remove_lock"
RUN_CHECK = "run_check"
STOP_RUN = "stop_run"
ASK_PERSON = "ask_person"
PAUSE = "pause"
RESUME = "resume"
EXCLUDE_NODE = "exclude_node"
RELEASE_NODE = "release_node"
DRAIN = "drain"
CLOSE_INCIDENT = "close_incident"

OFF = "off in this version"


class Action(Value, frozen=True):
    """One row.  The fields with a default say what few actions have."""

    name: str
    scope: str  # run | device | node | person
    granted_by: str  # here | plan | node document | person
    performed_by: str  # launcher | store | root helper | agent | nobody
    does: str = OFF  # what `explain` says of it
    deadline_s: float = 0.0  # of its effect; 0 = its effect has one of its own, or it has none
    in_ladder: bool = True  # whether a runbook may name it; else only a person asks for it
    beside: bool = False  # it is done beside what the ladder is climbed to
    restarts: bool = False  # it answers a cause of a run with a new generation
    brings_back: bool = False  # training goes on after it, and no person need get up
    outlives_node: bool = False  # its intent must survive a loss of power
    off_by_default: bool = False  # until actions.allow names it
    needs_breaker: bool = False  # where the breaker cannot open, actions.alone must be set too
    ends_boot: bool = False
    by_leader: bool = False  # asked of a run, no other node's core than its leader's obeys
    marks_node: bool = False  # it changes a node's document, whichever agent is asked
    alert_label: str = ""  # run | node: what an alert must name to have it done; "" = none may
    verb: str = ""  # the root helper's word for it
    run_word: str = ""  # the API's word, of a run
    node_word: str = ""  # and of a node
    fleet_word: str = ""  # and of the fleet

    @property
    def is_rung(self) -> bool:
        """Whether a ladder may hold it: somebody performs it, or it is a person's."""
        return self.in_ladder and (self.performed_by != NOBODY or self.granted_by == PERSON)

    @property
    def text(self) -> str:
        """What `explain` says."""
        return self.does + ", where actions.allow names it" * self.off_by_default

    def withheld(
        self, allow: Collection[str], alone: bool = True, fatal: bool = True
    ) -> str:
        """What a person reads where a ladder asks for it beyond a run and it is not done.
        `alone`: the breaker can open, or actions.alone says that it need not be able to."""
        if self.granted_by == PERSON:
            return f"{self.name}: a person's part"
        if self.granted_by == NODE_DOCUMENT and not fatal:
            return f"{self.name}: only where it is fatal: runs go on, and start here"
        if self.granted_by == NODE_DOCUMENT:
            return f"{self.name}: no run starts on this node while the incident is open"
        if self.off_by_default and self.name not in allow:
            return f"{self.name}: not done, because actions.allow does not name it"
        if self.needs_breaker and not alone:
            return (f"{self.name}: not done, because this node sees no fleet, so that the breaker "
                    "cannot open: set actions.alone = true to have it done all the same")
        return ""


ACTIONS: dict[str, Action] = {one.name: one for one in (
    Action(TAKE_EVIDENCE, RUN, HERE, LAUNCHER,
           "reads the rank's stack and state, without stopping it", 5.0, beside=True),
    Action(STOP_OWN_RANKS, RUN, HERE, NOBODY),
    Action(RESTART_RANKS, RUN, PLAN, LAUNCHER,
           "ends the faulty ranks and starts a new generation of the run", 30.0,
           restarts=True, brings_back=True, by_leader=True, alert_label=RUN, run_word="restart"),
    Action(REPLACE_RANK, RUN, PLAN, NOBODY),
    Action(RESUME_OLDER, RUN, PLAN, LAUNCHER,
           "sets the state aside and resumes from the next older verified one", 30.0,
           restarts=True, brings_back=True, alert_label=RUN),
    Action(DRAIN_NODE, NODE, HERE, ROOT_HELPER,
           "ends this node's runs with 75, and for a kernel fault runs your program by the node's "
           "root unit", 30.0, outlives_node=True, off_by_default=True, alert_label=NODE,
           verb="drain"),
    Action(REBOOT_NODE, NODE, HERE, ROOT_HELPER, "by the node's root unit", 30.0,
           outlives_node=True, off_by_default=True, needs_breaker=True, ends_boot=True,
           verb="reboot"),
    Action(REPLACE_NODE, NODE, HERE, ROOT_HELPER, "your program, by the node's root unit", 30.0,
           brings_back=True, outlives_node=True, off_by_default=True, needs_breaker=True,
           ends_boot=True, verb="replace"),
    # A reset takes longer than what only starts something.
    Action(RESET_GPU, DEVICE, HERE, ROOT_HELPER,
           "`nvidia-smi --gpu-reset` or your program, by the node's root unit", 80.0,
           outlives_node=True, off_by_default=True, verb=RESET_GPU),
    # A cache often lies on a network mount.
    Action(REMOVE_LOCK, RUN, HERE, LAUNCHER, "the run's launcher removes the file", 15.0,
           beside=True, off_by_default=True),
    Action(RUN_CHECK, NODE, HERE, AGENT,
           "makes checks of this node, those that take its devices when no run goes on",
           alert_label=NODE, node_word="check"),
    Action(STOP_RUN, RUN, PLAN, LAUNCHER,
           "ends the run with the exit code that says whose fault it was", 30.0),
    Action(ASK_PERSON, PERSON, PERSON, NOBODY),
    Action(PAUSE, RUN, PERSON, AGENT, in_ladder=False, by_leader=True, run_word=PAUSE,
           node_word=PAUSE, fleet_word=PAUSE),
    Action(RESUME, RUN, PERSON, AGENT, in_ladder=False, by_leader=True, run_word=RESUME,
           node_word=RESUME, fleet_word=RESUME),
    Action(EXCLUDE_NODE, NODE, NODE_DOCUMENT, STORE, deadline_s=5.0, outlives_node=True,
           marks_node=True, alert_label=NODE, node_word="exclude"),
    Action(RELEASE_NODE, NODE, PERSON, STORE, deadline_s=5.0, in_ladder=False,
           marks_node=True, node_word="release"),
    Action(DRAIN, RUN, PERSON, LAUNCHER, in_ladder=False, marks_node=True, run_word=DRAIN,
           node_word=DRAIN),
    Action(CLOSE_INCIDENT, PERSON, PERSON, AGENT, in_ladder=False),
)}


def _names(has: Callable[[Action], object]) -> tuple[str, ...]:
    return tuple(name for name, row in ACTIONS.items() if has(row))


def _asked(word: Callable[[Action], str]) -> dict[str, str]:
    return {word(row): name for name, row in ACTIONS.items() if word(row)}


def rungs() -> tuple[str, ...]:
    """What a runbook's ladder may name."""
    return _names(lambda row: row.is_rung)


def restarting() -> tuple[str, ...]:
    """What answers a cause of a run with a new generation."""
    return _names(lambda row: row.restarts)


def bringing_back() -> tuple[str, ...]:
    """Where a ladder has one of these, training comes back by itself."""
    return _names(lambda row: row.brings_back)


def beyond_run() -> tuple[str, ...]:
    """Rungs that concern more than a run."""
    return _names(lambda row: row.is_rung and row.scope != RUN)


def beside() -> tuple[str, ...]:
    """Rungs that are done beside the one that is climbed to."""
    return _names(lambda row: row.beside)


def by_alert(label: str) -> tuple[str, ...]:
    """What an alert may have done with what this label names, but for a look at ranks."""
    return _names(lambda row: row.alert_label == label)


def is_persons(name: str) -> bool:
    """Asked of every open incident's ladder in every step: a look at one row."""
    row = ACTIONS.get(name)
    return row is not None and row.in_ladder and row.granted_by == PERSON


def is_root_verb(name: str) -> bool:
    row = ACTIONS.get(name)
    return row is not None and row.performed_by == ROOT_HELPER


def is_by_leader(name: str) -> bool:
    return name in ACTIONS and ACTIONS[name].by_leader


def marks_node(name: str) -> bool:
    return name in ACTIONS and ACTIONS[name].marks_node


def outlives_node(name: str) -> bool:
    return name in ACTIONS and ACTIONS[name].outlives_node


def allowable() -> tuple[str, ...]:
    """What actions.allow may name."""
    return _names(lambda row: row.off_by_default)


def needing_alone(allow: Collection[str], alone: bool) -> tuple[str, ...]:
    """What is allowed, and is not done all the same on a node that sees no fleet."""
    return () if alone else _names(lambda row: row.needs_breaker and row.name in allow)


def root_verbs() -> dict[str, str]:
    """Action -> the root helper's word for it."""
    return {name: row.verb for name, row in ACTIONS.items() if row.performed_by == ROOT_HELPER}


def of_run() -> dict[str, str]:
    """The API's word for what may be asked of a run -> action."""
    return _asked(lambda row: row.run_word)


def of_node() -> dict[str, str]:
    return _asked(lambda row: row.node_word)


def of_fleet() -> dict[str, str]:
    return _asked(lambda row: row.fleet_word)
