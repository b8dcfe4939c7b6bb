"""Drafts of the effects on a run and on the store: bodies, subjects, deadlines.

Owns what an order says.  The table of effects in flight gives it an id and decides whether it may
go; when it is wanted is decided where it is drafted.
"""

from __future__ import annotations

from ..actions import ACTIONS, RESTART_RANKS, RUN_CHECK, STOP_RUN, TAKE_EVIDENCE
from ..model import (
    Delete,
    Effect,
    Finish,
    NodeTests,
    Plan,
    RankView,
    RunCheck,
    RunView,
    Start,
    Stop,
    StoreWrite,
    TakeEvidence,
    node_subject,
    rank_subject,
    run_subject,
)
from ..model.subject import LEASE, NODE, STORE, Subject, subject_of

PUT_S = 5.0
START_S = ACTIONS[RESTART_RANKS].deadline_s
FINISH_S = ACTIONS[STOP_RUN].deadline_s
EVIDENCE_S = ACTIONS[TAKE_EVIDENCE].deadline_s
DELETE_S = 60.0
LOGS_S = 32.0  # the launcher gives its child less; only a run's end waits for it, and shorter
STOP_MARGIN_S = 5.0
PATHS_S = 20.0  # the launcher gives its child less


def start(view: RunView, body: Start) -> Effect:
    return _draft("start", view.run, body.reason, START_S, body)


def stop(
    view: RunView, ranks: tuple[int, ...], grace_s: float, reason: str, fault: str,
    leave: bool = False, park: bool = False, save: bool = False, after: int = 0,
) -> Effect:
    body = Stop(
        run=view.run, generation=view.generation, ranks=ranks, grace_s=grace_s, reason=reason,
        leave=leave, park=park, save=save, after=after)
    return _draft("stop", view.run, reason, grace_s + STOP_MARGIN_S, body, fault)


def stop_elsewhere(
    run: str, ranks: tuple[RankView, ...], grace_s: float, reason: str, fault: str,
    park: bool = False,
) -> Effect:
    """Ranks of one other node and one generation, which that node's launcher ends; `park`: all of a
    trainer's there leave at once, with their state."""
    node = ranks[0].node
    body = Stop(run=run, generation=ranks[0].generation, ranks=tuple(r.rank for r in ranks),
                grace_s=grace_s, reason=reason, node=node, park=park)
    return Effect("", "stop", run_subject(run, f"{NODE}/{node}"), reason, grace_s + STOP_MARGIN_S,
                  body, fault=fault)


def finish(view: RunView, code: int, reason: str, fault: str = "") -> Effect:
    body = Finish(run=view.run, code=code, reason=reason)
    return _draft("finish", view.run, reason, FINISH_S, body, fault)


def document_subject(run: str) -> str:
    """Of a write of the run's document."""
    return str(Subject(STORE, run_subject(run)))


def put(
    key: str, version: int, body: bytes, reason: str, lease: str = "", over: str = "",
) -> Effect:
    write = StoreWrite(key=key, expect_version=version, body=body, lease=lease, over=over)
    subject = key if subject_of(key).kind == LEASE else str(Subject(STORE, key))
    return Effect("", "put", subject, reason, PUT_S, write)


def evidence(view: RunView, rank: RankView, reason: str) -> Effect:
    body = TakeEvidence(
        run=view.run, generation=rank.generation, rank=rank.rank, pid=rank.pid, reason=reason,
        node=rank.node if rank.node != view.node else "")
    return Effect(
        id="", kind="evidence", subject=rank_subject(view.run, rank.rank), reason=reason,
        deadline_s=EVIDENCE_S, body=body)


def logs_subject(run: str) -> str:
    return run_subject(run, "logs")


def logs(view: RunView, generation: int, incident: str, node: str = "") -> Effect:
    """Read the end of the logs of every rank of a node; rank -1 stands for all.  `request` names
    whose answer it is."""
    reason = "what the ranks wrote before it"
    body = TakeEvidence(view.run, generation, rank=-1, pid=0, reason=reason, node=node)
    return Effect(
        id="", kind="logs", subject=logs_subject(view.run), reason=reason, deadline_s=LOGS_S,
        body=body, request=incident)


def checks_subject(run: str) -> str:
    return run_subject(run, "checks")


def check_paths(view: RunView, paths: tuple[str, ...]) -> Effect:
    """Its launcher's part: the run's user may write there, the agent's perhaps not."""
    return Effect(
        id="", kind=RUN_CHECK, subject=checks_subject(view.run), deadline_s=PATHS_S,
        reason=f"before run {view.run} starts",
        body=RunCheck(view.node, ("paths",), run=view.run, paths=paths))


def check_node(
    node: str, checks: tuple[str, ...], max_age_s: float, reason: str, deadline_s: float,
    fault: str = "",
) -> Effect:
    return Effect(
        id="", kind=RUN_CHECK, subject=node_subject(node, "checks"), reason=reason,
        deadline_s=deadline_s, fault=fault, body=RunCheck(node, checks, max_age_s))


def peers_subject(run: str) -> str:
    return run_subject(run, "peers")


def test_nodes(
    view: RunView, nodes: tuple[str, ...], groups: bool, deadline_s: float, reason: str,
    suspects: tuple[str, ...] = (),
) -> Effect:
    """This node is the first of them."""
    return Effect(
        id="", kind=RUN_CHECK, subject=peers_subject(view.run), deadline_s=deadline_s,
        reason=reason, body=NodeTests(view.run, nodes, groups, suspects))


def delete(plan: Plan, view: RunView, paths: tuple[str, ...]) -> Effect:
    body = Delete(run=view.run, generation=plan.generation, paths=paths)
    return Effect(
        id="", kind="delete", subject=run_subject(view.run, "checkpoints"),
        reason=f"{len(paths)} checkpoints beyond those kept", deadline_s=DELETE_S, body=body,
        outlives_node=True)


def _draft(
    kind: str, run: str, reason: str, deadline_s: float, body: Start | Stop | Finish,
    fault: str = "",
) -> Effect:
    return Effect(
        id="", kind=kind, subject=run_subject(run), reason=reason, deadline_s=deadline_s,
        body=body, fault=fault)
