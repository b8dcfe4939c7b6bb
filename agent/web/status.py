"""The documents that people and programs read: status, incidents, ledger.

Owns turning the last snapshot into plain JSON values.  Pure but for reading the agent's state;
no waiting, no I/O.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import statistics
import time
from typing import Any

import msgspec

from ..checks import table
from ..core.detect.ranks import known_causes
from ..core.detect.ranks.hang import DETECTOR as HANG
from ..core.detect.ranks.live_logs import FAULT as LOG_ROOT
from ..core.model import (
    FLEET,
    Commit,
    Incident,
    RankView,
    RunView,
    Verdict,
    node_subject,
    run_subject,
)
from ..core.run import members
from ..core.run.plan import is_leader
from ..core.run.stage import Stage
from ..core.run.state import NOTHING, Suspension
from ..core.series import gradient_pace
from ..daemon.state import AgentState
from ..history.job_log import Attempts, attempt_at, money
from ..launchers import log_child
from ..system import procfs
from ..system.version import VERSION
from ..telemetry.devices import CARDS, COLLECTORS, cards, devices
from . import books, fleet, node_places

OPEN = ("open", "acted")
LIMIT = re.compile(r", would act at [0-9.]+ s")
FAULTY = ("degraded", "fatal")
INCIDENTS_SHOWN = 200
DOING = {
    "startup": "starting up",
    "compile": "compiling",
    "checkpoint": "writing a checkpoint",
    "eval": "evaluating",
    "exit": "ending: its exit handlers run",
}
# What an evidence child saw -> the words for it; with the rank before it where none is blamed.
SEEN_OF_RANK = {"where": "at", "waits for": "waits for"}
GO_ON = "fg in its terminal, or resume the job; nothing where that is meant"
STOPS = ("crash_loop", "budget_spent")
NEEDS_A_PERSON = (*STOPS, "journal_stalled", "agent_config_bad")


def status(state: AgentState) -> dict[str, Any]:
    """GET /api/v1/status."""
    snapshot = state.snapshot
    decision = snapshot.decision
    incidents = [incident for incident in state.incident_log.incidents.values()
                 if incident.state in OPEN]
    attempts = state.jobs.attempts()
    return {
        "node": state.name,
        "version": VERSION,
        "now_wall_s": time.time(),
        "store_up": snapshot.observed.store.up,
        "store_problem": snapshot.observed.store.problem,
        "store_answer_s": round(state.store_traffic.slowest_s(), 3) if state.store_traffic else 0.0,
        "journal_stalled": snapshot.observed.journal_stalled,
        "disk_problem": state.disk_problem,
        "paused": node_paused(state),
        "paused_until_wall_s": paused_until(state, node_subject(state.name)),
        "paused_reason": decision.paused,
        "fleet_paused": bool(decision.fleet_paused),
        "fleet_paused_until_wall_s": paused_until(state, FLEET),
        "fleet_paused_reason": decision.fleet_paused,
        "breaker_open": breaker_open(state),
        "nodes": node_places.rows(state),
        "refused_nodes": dict(state.refused_nodes()),
        "elsewhere": fleet.elsewhere(state),
        "config_reload_ok": state.reload_ok,
        "agent": {
            "pid": os.getpid(),
            "rss_bytes": procfs.rss_bytes(),
            "uptime_s": round(time.monotonic() - state.started_s, 3),
            "steps": state.steps,
            "step_s": round(state.step_s, 6),
            "troubles": state.errors.latest,
        },
        "collectors": collectors(state),
        "devices": _devices(state),
        "runs": [_run(state, view, decision.verdicts) for view in snapshot.observed.runs],
        "incidents": [reviewed(state, incident, attempts) for incident in reversed(incidents)],
        "faults": [msgspec.to_builtins(verdict) for verdict in decision.verdicts],
    }


def incidents(state: AgentState, everything: bool) -> list[dict[str, Any]]:
    """GET /api/v1/incidents: newest first; without `all` the open ones and the latest closed."""
    newest_first: list[Incident] = list(reversed(state.incident_log.incidents.values()))
    newest_first.sort(key=lambda incident: incident.opened_wall_s, reverse=True)
    if not everything:
        newest_first = [incident for place, incident in enumerate(newest_first)
                        if place < INCIDENTS_SHOWN or incident.state in OPEN]
    attempts = state.jobs.attempts()
    return [reviewed(state, incident, attempts) for incident in newest_first]


def reviewed(state: AgentState, incident: Incident, attempts: Attempts) -> dict[str, Any]:
    """An incident with what people said of it, and in which attempt of its run here it opened."""
    told: dict[str, Any] = msgspec.to_builtins(incident)
    attempt = attempt_at(incident.run, incident.opened_wall_s, attempts)
    if attempt is not None:
        told["attempt"] = attempt
    review = state.incident_log.reviews.get(incident.id)
    if review is not None:
        told["review"] = {name: value for name, value in review._asdict().items()
                          if name not in ("id", "counts")}
    return told


def checks(state: AgentState) -> dict[str, Any]:
    """GET /api/v1/checks: each check's verdict of this boot, made last."""
    rows = [msgspec.to_builtins(one) for one in state.checks]
    return {"node": state.name, "checks": sorted(rows, key=lambda one: str(one["check"]))}


def checks_named(state: AgentState, names: object) -> tuple[str, ...]:
    """Checks that a round may be asked for; without names those of the gate.  Raises ValueError."""
    if not isinstance(names, list) or not all(isinstance(one, str) for one in names):
        raise ValueError("args.checks is a list of names")
    if not names:
        names = list(state.config.checks.core_settings().names)
        return tuple(one for one in names if one not in table.NOT_A_ROUND)
    chosen = tuple(one.name for one in table.chosen(tuple(names)))
    if wrong := [one for one in chosen if one in table.NOT_A_ROUND]:
        raise ValueError(f"{wrong[0]} is no check that an agent makes: "
                         f"give others of {', '.join(table.BY_NAME)}")
    return chosen


def ledger(state: AgentState) -> dict[str, Any]:
    """GET /api/v1/ledger: settled seconds by category, of the node and of each run, with how many
    attempts under its name those of a run are of."""
    decision, cost = state.snapshot.decision, state.config.cost
    total_s = sum(seconds for _, seconds in decision.ledger)
    runs: dict[str, dict[str, float]] = {}
    for run, category, seconds in decision.run_ledger:
        runs.setdefault(run, {})[category] = round(seconds, 6)
    return {
        "categories": {name: round(seconds, 6) for name, seconds in decision.ledger},
        "wall_s": round(total_s, 6),
        "cost": money(cost.node_hour, cost.currency, dict(decision.ledger)),
        "since_wall_s": state.snapshot.now.wall_s - total_s,
        "runs": runs,
        "attempts": {run: max(number for _, number in known)
                     for run, known in state.jobs.attempts().items() if run in runs},
    }


def collectors(state: AgentState) -> list[dict[str, Any]]:
    """Each collector: whether its last reading went well, and how old it is."""
    if state.runner is None:
        return []
    now_s = time.monotonic()
    return [
        {
            "name": health.name,
            "up": health.up,
            "absent": health.absent,
            "age_s": round(now_s - health.read_s, 3) if health.read_s else None,
            "error": health.error,
        }
        for health in state.runner.health()
    ]


def _devices(state: AgentState) -> list[dict[str, Any]]:
    """Each accelerator: health, why, and the ranks that compute there; then the network cards."""
    if state.runner is None:
        return []
    boot_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    snapshot, interval_s = state.snapshot, state.config.agent.slow_s
    found, verdicts = [], snapshot.decision.verdicts
    for health in state.runner.health():
        last = state.runner.last(health.name)
        if health.name in COLLECTORS:
            found += devices(health, last, snapshot.observed.runs, verdicts, state.name, boot_s,
                             interval_s)
        elif health.name == CARDS and not health.absent:
            found += cards(health, last, verdicts, state.name, boot_s, interval_s)
    return found


def node_paused(state: AgentState) -> bool:
    """Whether an operator paused this node, which holds for runs that come later as well."""
    return bool(state.snapshot.decision.paused)


def fleet_paused(state: AgentState) -> bool:
    """Whether an operator paused the whole fleet."""
    return bool(state.snapshot.decision.fleet_paused)


def breaker_open(state: AgentState) -> bool:
    """Whether a common cause was seen, so that nothing is done to nodes."""
    return any(verdict.detector == "breaker" for verdict in state.snapshot.decision.verdicts)


def run_paused(state: AgentState, run: str) -> bool:
    """Whether an operator paused this run."""
    return any(plan.run == run and plan.paused for plan in state.snapshot.decision.plans)


def paused_until(state: AgentState, subject: str) -> float | None:
    """When a pause ends by itself."""
    return state.snapshot.paused_until.get(subject)


def restarts(state: AgentState, run: str) -> int:
    """Starts of this run after its first."""
    return round(sum(
        value for (name, labels), value in state.counters.items()
        if name == "restarts" and labels[0] == run
    ))


def checkpoint(state: AgentState, view: RunView) -> dict[str, Any] | None:
    """The newest checkpoint whose every byte was read back; `unread_step` is that of a newer one
    that is durable and not read yet, -1 when there is none."""
    good = sorted((commit for commit in _commits(state, view) if not commit.bad),
                  key=lambda commit: (commit.generation, commit.step))
    proven = [commit for commit in good if commit.verified]
    if not proven:
        return None
    newest, age_s = proven[-1], state.checkpoints.age_s(view.run, proven[-1])
    return {"step": newest.step, "age_s": round(age_s, 3), "path": newest.path,
            "unread_step": -1 if good[-1].verified else good[-1].step}


def checkpoint_age_s(state: AgentState, view: RunView) -> float | None:
    """Seconds since the newest verified checkpoint; since the run's first step where none of those
    that it wrote was verified, None where it wrote none."""
    newest = checkpoint(state, view)
    if newest is not None:
        return float(newest["age_s"])
    return _training_s(state, view) if _written_ages_s(state, view) else None


def checkpoint_interval_s(state: AgentState, view: RunView) -> float | None:
    """Median time between the verified checkpoints that are kept; of fewer than two, between all
    that this run wrote, verified or not; None for fewer than two of these."""
    verified_s = sorted(state.checkpoints.age_s(view.run, commit)
                        for commit in _commits(state, view)
                        if commit.verified and not commit.bad)
    ages_s = verified_s if len(verified_s) > 1 else _written_ages_s(state, view)
    gaps_s = [later - sooner for sooner, later in itertools.pairwise(ages_s)]
    return statistics.median(gaps_s) if gaps_s else None


def _written_ages_s(state: AgentState, view: RunView) -> list[float]:
    """Ages of the checkpoints that this run wrote itself, newest first.  Those that it found in
    its directory may be days old, and of another interval."""
    ages_s = sorted(
        state.checkpoints.age_s(view.run, commit) for commit in _commits(state, view))
    return [age_s for age_s in ages_s if age_s < _training_s(state, view)]


def _commits(state: AgentState, view: RunView) -> tuple[Commit, ...]:
    """What rank 0's node tells of them, while it is heard of; else what this node's launcher knows:
    where rank 0 has moved on, it hears neither of later ones nor that its own were deleted."""
    snapshot = state.snapshot
    plan = next((one for one in snapshot.decision.plans if one.run == view.run), None)
    beat = members.of_rank_0(view, plan, snapshot.observed.beats) if plan is not None else None
    if plan is None or beat is None or not beat.commits or not (
            beat.checkpoint_dir == plan.checkpoint_dir
            and members.is_fresh(beat, snapshot.now, state.config.core_settings())):
        return view.commits
    return beat.commits


def _training_s(state: AgentState, view: RunView) -> float:
    """Seconds since the run's first step; since its launcher began before there is one."""
    session = state.launchers.session(view.run)
    began_s = session.hello.started_boot_s if session is not None else view.registered_boot_s
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began_s - view.startup_s)


def leads(state: AgentState, run: str) -> bool:
    """Whether this agent makes the run's plans; on one node nobody else could."""
    leases = state.snapshot.observed.store.leases
    alone = state.config.core_settings().single_node
    return alone or is_leader(run, state.name, leases, state.snapshot.now)


def _run(state: AgentState, view: RunView, verdicts: tuple[Verdict, ...]) -> dict[str, Any]:
    paused = run_paused(state, view.run) or fleet_paused(state)
    verdicts = of_now(view, verdicts)
    prefix = run_subject(view.run, "rank/")
    by_rank = {
        verdict.subject[len(prefix) :]: verdict
        for verdict in sorted(verdicts, key=lambda verdict: verdict.act)
        if verdict.subject.startswith(prefix)
    }
    session = state.launchers.session(view.run)
    running = [rank for rank in view.ranks if rank.state == "running"]
    faulty = any(verdict.severity in FAULTY and verdict.run == view.run for verdict in verdicts)
    steps = [rank.step for rank in running]
    times = sorted(rank.step_time_s for rank in running if rank.step_time_s > 0)
    phase = _common_phase(running)
    is_training = bool(
        view.state == "running" and view.connected and len(running) == view.nproc
        and not faulty and phase not in ("startup", "compile", "exit")
    )
    stage = state.snapshot.stages.get(view.run, Stage.UNKNOWN)
    reason = dict(state.snapshot.decision.reasons).get(view.run, "")
    rows, rates = fleet.nodes(state, view), books.rates(state, view)
    if rows:
        whole = fleet.trains(rows, fleet.plan_of(state, view.run)) and not faulty
        is_training = whole and (is_training or not running)
    suspension = state.snapshot.suspended.get(view.run) if stage == Stage.SUSPENDED else None
    doing = _doing(view, running, phase, faulty)
    if stage == Stage.WAITING:
        doing = waiting(view, reason, state.snapshot.now.boot_s)
    elif suspension is not None and _trains_on(view, running):
        doing += f"; {suspension.why}, and no fault is answered"
    elif suspension is not None:
        is_training, doing = False, suspended(suspension, state.snapshot.now.boot_s)
    return {
        "run": view.run,
        "grade": view.grade,
        "generation": view.generation,
        "state": view.state if view.connected else "launcher lost",
        "connected": view.connected,
        "paused": paused,
        "paused_until_wall_s": paused_until(state, _paused_by(state, view)),
        "training": is_training,
        "suspicion": _suspicion(state, view, verdicts),
        "stage": str(stage),
        "doing": doing,
        "need": (GO_ON if suspension is not None else _need(state, view, paused)
                 or books.lateness(rates) or "nothing"),
        "reason": reason,
        "step": min(steps) if steps else _last_step(view),
        "loss": books.loss(session, running),
        "step_time_s": round(times[len(times) // 2], 6) if times else 0.0,
        "collectives": _collectives(state, view),
        "checkpoint": checkpoint(state, view),
        "books": rates._asdict(),
        "snapshot_step": view.snapshot.step if view.snapshot is not None else None,
        "restarts": restarts(state, view.run),
        "root": next((v.reason for v in verdicts if (v.fault, v.run) == (LOG_ROOT, view.run)), ""),
        "logs": log_child.status(session),
        "nproc": view.nproc,
        "log_dir": session.hello.log_dir if session is not None else "",
        "checkpoint_dir": view.checkpoint_dir,
        "launcher_pid": session.pid if session is not None else 0,
        "user": session.hello.user if session is not None else "",
        "ranks": [_rank(rank, by_rank.get(str(rank.rank))) for rank in view.ranks],
        "nodes": rows,
    }


def of_now(view: RunView, verdicts: tuple[Verdict, ...]) -> tuple[Verdict, ...]:
    """Without that a run of this name was stopped before: that is said for a while, and says
    nothing about the one that is here now."""
    return tuple(verdict for verdict in verdicts if verdict.fault not in STOPS
                 or verdict.run != view.run or verdict.generation == view.generation)


def _collectives(state: AgentState, view: RunView) -> dict[str, float]:
    """What the rank that comes last waits for its gradients: lately, and in the first steps once
    they are known."""
    pace = state.snapshot.paces.get(view.run)
    if pace is None or pace.newest is None:
        return {}
    found = {"wait_s": pace.newest.wait_s}
    if pace.has_first:
        found["first_wait_s"] = gradient_pace.wait_s(pace.first)
    return {name: round(seconds, 6) for name, seconds in found.items()}


def _rank(rank: RankView, verdict: Verdict | None) -> dict[str, Any]:
    health, why = "ok", ""
    if verdict is not None:
        health = "fault" if verdict.act and verdict.severity in FAULTY else "suspect"
        why = verdict.reason
    if rank.ended is not None:
        health = "ok" if rank.ended.code == 0 or rank.ended.by_us else "fault"
        if health == "fault":
            why = why or rank.ended.error or f"exit status {rank.ended.code}"
    return {
        "rank": rank.rank,
        "pid": rank.pid,
        "state": rank.state,
        "generation": rank.generation,
        "step": rank.step,
        "phase": rank.phase,
        "phase_age_s": round(rank.still_s, 3),
        "beat_age_s": round(rank.beat_age_s, 3),
        "step_time_s": round(rank.step_time_s, 6),
        "proc_state": rank.proc_state,
        "active": rank.active,
        "where": rank.where,
        "phase_s": {name: round(seconds, 3) for name, seconds in rank.phase_s if seconds > 0},
        "place": rank.place,
        "health": health,
        "why": why,
    }


def _common_phase(running: list[RankView]) -> str:
    phases = [rank.phase for rank in running]
    return max(sorted(set(phases)), key=phases.count) if phases else ""


def waiting(view: RunView, reason: str, now_s: float) -> str:
    """The same of a node whose ranks have ended while others have the run: since when, and why."""
    ended_s = max((rank.ended.boot_s for rank in view.ranks if rank.ended is not None), default=0.0)
    since = f" for {max(0.0, now_s - ended_s):.0f} s" if ended_s > 0.0 else ""
    why = reason if reason not in ("", NOTHING) else "other nodes have its ranks"
    return f"waiting for the cluster{since}: {why}"


def suspended(found: Suspension, now_s: float) -> str:
    """The same of a run that is stopped from outside: since when, by whom perhaps, and why that
    is believed."""
    return (f"suspended for {max(0.0, now_s - found.since_boot_s):.0f} s (scheduler, Ctrl-Z, "
            f"freezer): {found.why}")


def _trains_on(view: RunView, running: list[RankView]) -> bool:
    """Whether the launcher here is all that is stopped."""
    return view.suspended and not all(map(known_causes.stands_still, running))


def _doing(view: RunView, running: list[RankView], phase: str, faulty: bool) -> str:
    """One line for a person who was just woken."""
    if not view.connected:
        return "nothing: its launcher is gone"
    if view.state == "done":
        return "done"
    if view.shutdown:
        return f"ending: {view.shutdown}"
    if view.state == "preparing":
        return "preparing: imports and fork server"
    if view.state == "idle" or not view.ranks:
        return "waiting to start"
    broken = [rank for rank in view.ranks if rank.state in ("parked", "ended")]
    if faulty or broken:
        left = max((rank.step for rank in running), default=0)
        return f"recovering at step {left or _last_step(view)}"
    if view.compiling:
        still_s = max((rank.still_s for rank in running), default=0.0)
        others = "; the other ranks wait for it" * (len(running) > 1)
        return f"compiling for {still_s:.0f} s: {view.compiling}{others}"
    step = min((rank.step for rank in running), default=0)
    if phase in DOING:
        return f"{DOING[phase]} at step {step}" if step else DOING[phase]
    if phase == "unknown" and view.grade != "trainer" and not step:
        return "running"
    at = f"training step {step + 1}"
    if view.grade != "trainer":  # a script counts anew at each start, wherever it resumed
        at = f"training, step {step + 1} since its last start"
    return at + f" ({phase})" * (phase != "unknown")


def _suspicion(state: AgentState, view: RunView, verdicts: tuple[Verdict, ...]) -> str:
    """Who may hold the run up, where, for how long, and what happens when; "" for nobody."""
    doubt = next((verdict for verdict in verdicts if verdict.run == view.run
                  and verdict.detector == HANG and not verdict.act), None)
    if doubt is None:
        return ""
    said = [doubt.reason]
    for incident in reversed(state.incident_log.incidents.values()):
        same = (incident.fault, incident.subject) == (doubt.fault, doubt.subject)
        if incident.state not in OPEN or not same:
            continue
        said += _seen_of_ranks(incident)
        if incident.would_have.startswith("waits"):  # a known cause: the limit does not count
            said[0] = LIMIT.sub("", doubt.reason)
        if incident.would_have:
            said.append(incident.would_have)
        break
    return "; ".join(said)


def _seen_of_ranks(incident: Incident) -> list[str]:
    """Where its ranks stand and what they wait for: those together that stand in the same place."""
    ranks: dict[str, list[int]] = {}
    for what, value in incident.evidence:
        for kind, words in SEEN_OF_RANK.items():
            if what.endswith(kind):
                named = ranks.setdefault(f"{words} {value}", [])
                named += map(int, re.findall("^rank ([0-9]+) ", what))
    return [f"{'ranks' if len(who) > 1 else 'rank'} {', '.join(map(str, sorted(who)))} {text}"
            if who else text for text, who in ranks.items()]


def _need(state: AgentState, view: RunView, paused: bool) -> str:
    """What a person has to do, so that it trains and goes on to train; "" for nothing."""
    if paused:
        until = paused_until(state, _paused_by(state, view))
        when = f" until {time.strftime('%H:%M', time.localtime(until))}" if until else ""
        if not run_paused(state, view.run):
            return f"the fleet is paused{when}: holdfast resume --fleet --reason ..."
        return f"it is paused{when}: holdfast resume --run {shlex.quote(view.run)} --reason ..."
    for incident in reversed(state.incident_log.incidents.values()):
        if incident.state in OPEN and incident.fault in NEEDS_A_PERSON:
            if incident.run in ("", view.run):
                return f"see holdfast incidents {incident.id}: {incident.reason}"
    if state.disk_problem:
        return (f"make room: {state.disk_problem}; training and restarts go on from memory, and "
                "nothing that outlives the node is done")
    if not state.snapshot.observed.store.up:
        why = state.snapshot.observed.store.problem or "the store does not answer"
        return f"{why}: training goes on, no plan is made"
    return ""


def _paused_by(state: AgentState, view: RunView) -> str:
    """The subject of the pause that is shown of a run: its own before the fleet's."""
    return run_subject(view.run) if run_paused(state, view.run) else FLEET


def _last_step(view: RunView) -> int:
    steps = [rank.step for rank in view.ranks]
    steps += [rank.parked.step for rank in view.ranks if rank.parked is not None]
    return max(steps, default=0)
