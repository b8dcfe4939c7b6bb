"""Which rank holds the run up: suspicion at once, acting by proof or by cost.

Owns the naming of the culprit among ranks that stand still, and the two proofs that need no
waiting (a stopped process, collectives that cannot match).  Input is levels and the run's history;
output is Findings.  It orders nothing and remembers nothing.
"""

from __future__ import annotations

import heapq

import msgspec

from ...actions import RESTART_RANKS
from ...model import FATAL, OPAQUE, TRAINER, WARN, RankView, Settings, Value
from ...run import members, policy
from ...series.wait_history import History
from .. import detector
from . import limits
from .collective import proofs
from .ended import Cause, failed_ranks, step_words

DETECTOR = "hang"
STALE_BEAT_S = 1.5  # the ticker beats at 10 Hz: fifteen beats missing
EARLY_STOP_S = 0.2  # a T state this old is worth evidence before it is proof
BEAT_STEP_S = 0.05  # a beat is on average this old when the process stops
SAME_STILL_S = 0.1  # ranks that stopped moving closer together than this are not told apart
NAMED_MAX = 4  # nodes that a reason names
FAR_S = 2.0  # ... and what another node said of its ranks is older than what this one sees
NOT_LIVE = ("T", "t", "Z", "X", "x")


class Finding(Value, frozen=True):
    """One suspicion; `act` says that proof, a limit or cost allows acting on it."""

    cause: Cause
    act: bool
    proof: bool = False
    limit: bool = False  # that was the user's own limit, which overrides both ways


class HangView(Value, frozen=True):
    """What the detector looks at."""

    run: str
    ranks: tuple[RankView, ...]  # the running generation's, on every node heard of
    costs: limits.Costs
    boot_s: float
    resumed_step: int = 0
    bases: dict[int, int] | None = None  # see collective.learn_bases; {}: count from 0
    silent: tuple[str, ...] = ()  # nodes of its ranks that nothing is heard of


class Look(Value, frozen=True):
    """The result of one look."""

    findings: tuple[Finding, ...] = ()
    evidence: tuple[int, ...] = ()  # ranks whose evidence is wanted before there is a verdict
    wake_s: float = 3600.0  # when the next limit would be crossed


class Hang(detector.RunDetector):
    """Ranks that stand still.  While a bad end is looked into nobody is suspected of that."""

    name = DETECTOR

    def look(self, view: detector.RanksView) -> detector.Look:
        ranks, state, plan = view.ranks, view.state, view.plan
        if not ranks or view.frozen or failed_ranks(ranks):
            return detector.Look()
        found = look(HangView(
            run=state.run, ranks=ranks, costs=self._costs(view), boot_s=view.now.boot_s,
            resumed_step=plan.resume.step, bases=state.progress.bases,
            silent=members.silent(
                view.run, plan, view.observed.beats, view.now, view.settings),
        ), state.history, view.settings)
        first = found.findings[0] if found.findings else None
        acting = [finding for finding in found.findings if finding.act]
        evidence: tuple[int, ...] = ()
        if policy.wants_evidence(view.runbooks, first.cause.fault if first else "rank_stopped"):
            evidence = (*found.evidence, *(finding.cause.rank for finding in acting))
        said = detector.Look(evidence=evidence, wake_s=found.wake_s)
        observe = "hang" not in view.settings.act
        if acting and not (observe or state.held.rests or plan.paused):
            by_cost = not (acting[0].proof or acting[0].limit)
            return said._replace(cause=acting[0].cause, by_cost=by_cost)
        if first is None:
            return said._replace(moves=True)
        would = f"{RESTART_RANKS}: the rank would have ended" if first.act and observe else ""
        return said._replace(suspicion=first.cause, would_have=would)

    def _costs(self, view: detector.RanksView) -> limits.Costs:
        now, run = view.state.progress, view.run
        held = [view.plan.resume.step]
        held += [commit.step for commit in run.commits if not commit.bad]
        held += [run.snapshot.step] if run.snapshot else []
        alone = run.grade != TRAINER or len(view.ranks) < 2
        compiles = members.compiling(run, view.observed.beats, view.now, view.settings)
        return limits.Costs(
            grade=run.grade, startup_s=run.startup_s, hang_limit_s=run.hang_limit_s,
            steps_to_redo=max(0, now.peak_step - max(held)) if alone else 0,
            compiling=compiles[0] if compiles else "",
            # The highest step may be another script's, under whose name this one runs.
            started=now.peak_step > 0 if run.grade == TRAINER else now.trained,
            backoff=now.backoff if now.peak_step <= now.backoff_step + 1 else 1.0,
        )


def look(view: HangView, history: History, settings: Settings) -> Look:
    """All that is to be said about stillness now; proofs come first and silence suspicions."""
    live = tuple(r for r in view.ranks if r.state in ("starting", "running"))
    stopped = _stopped(live, settings)
    if any(f.act for f in stopped.findings):
        return stopped
    if view.costs.grade != OPAQUE:
        proven = proofs(view.ranks, view.resumed_step, view.boot_s, view.bases)
        if proven is not None:
            return Look((Finding(proven, act=True, proof=True),), (), 0.2)
    still = _still(view, live, history, settings)
    evidence = tuple(sorted({*stopped.evidence, *still.evidence}))
    return Look(still.findings, evidence, min(stopped.wake_s, still.wake_s))


def _stopped(live: tuple[RankView, ...], settings: Settings) -> Look:
    """State T without a tracer is proof once it lasted; a debugger's stop never is."""
    findings: list[Finding] = []
    early: list[int] = []
    wake_s = 3600.0
    for rank in live:
        if rank.proc_state != "T" or rank.traced:
            continue
        lasted_s = max(rank.stopped_s, rank.beat_age_s - BEAT_STEP_S)
        if lasted_s < settings.stopped_s:
            wake_s = min(wake_s, max(0.01, settings.stopped_s - lasted_s + 0.005))
            early += [rank.rank] if lasted_s > EARLY_STOP_S else []
            continue
        reason = f"{rank.who} is stopped (state T, no tracer) for {lasted_s:.1f} s"
        findings.append(_finding(rank, "rank_stopped", reason, True, proof=True))
    return Look(tuple(findings), tuple(early), wake_s)


def _still(
    view: HangView, live: tuple[RankView, ...], history: History, settings: Settings
) -> Look:
    """Suspicion by stillness and by a stale ticker; act when the limit by cost is over."""
    # A stopped rank has its own verdict under way; a traced one is in a person's hands.
    if not live or any(r.proc_state in ("T", "t") for r in live):
        return Look()
    culprits, how = name_culprits(live, history, view.bases, view.costs.grade)
    held = _gil_holders(live)
    if held:
        culprits, how = held, "its ticker stands still while the process lives"
    elif view.silent:
        culprits = live  # whom they wait for may be among those that are not heard of
    waits = {r.rank: max(r.still_s, r.beat_age_s) if held else r.still_s for r in culprits}
    # Of thousands of ranks most are alike in all that a limit depends on.
    limits_s = {limits.alike(r): _suspect_s(r, held, view.costs, history, settings)
                for r in {limits.alike(r): r for r in culprits}.values()}
    left_s = max(limits_s[limits.alike(r)] - waits[r.rank] for r in culprits)
    if left_s > 0:
        return Look(wake_s=max(0.01, left_s + 0.005))
    limit_s = max(limits.act_s(r, view.costs, history, settings) for r in culprits)
    waited_s = min(waits.values())
    act = waited_s >= limit_s
    wake_s = 3600.0 if act else max(0.01, limit_s - waited_s + 0.005)
    if view.silent and not held:
        return _unheard(view, live, waited_s, act, wake_s)
    fault = "rank_gil_held" if held else "rank_hung"
    tail = f"waited {waited_s:.1f} s, would act at {min(limit_s, 1e6):.1f} s"
    finding = (
        _finding(culprits[0], fault, f"{culprits[0].who} holds the run up: {how}; {tail}", act)
        if len(culprits) == 1 else _unnamed(culprits, fault, tail, act))
    if view.costs.hang_limit_s > 0:
        own = all(limits.user_limit_applies(rank, view.costs) for rank in culprits)
        finding = msgspec.structs.replace(finding, limit=own)
    return Look((finding,), tuple(r.rank for r in culprits), wake_s)


def name_culprits(
    live: tuple[RankView, ...], history: History, bases: dict[int, int] | None, grade: str
) -> tuple[tuple[RankView, ...], str]:
    """(ranks that may hold the others up, what tells them apart).  Several: nobody is named."""
    if len(live) == 1:
        return live, "it is the only rank"
    left = _a_step_behind(live) if grade == TRAINER else live
    if len(left) == 1:
        return left, "it is a step behind its peers"
    left = _behind(left, bases)
    if len(left) == 1:
        return left, "it is behind its peers' sequence number"
    left = _not_waiting(left)
    if len(left) == 1:
        return left, f"it is in {left[0].phase} while the others wait"
    if len({r.page for r in left}) > 1:
        return left, "of some of these ranks nothing could be read"
    longest = heapq.nsmallest(2, left, key=lambda r: (-r.stood_s, r.rank))
    margin_s = max(SAME_STILL_S, 0.25 * history.step_s)
    if len({rank.node for rank in left}) > 1:
        margin_s += FAR_S
    if longest[0].stood_s - longest[1].stood_s > margin_s:
        return (longest[0],), "it has stood still the longest"
    return left, "nothing tells these ranks apart"


def _a_step_behind(live: tuple[RankView, ...]) -> tuple[RankView, ...]:
    """Ranks that have finished the fewest steps.  In the trainer nobody enters the optimizer before
    all gradients are there, and nobody waits in it: whoever is behind keeps the others waiting.
    Whose page was not read is at no step, and may be the one."""
    least = min((rank.step for rank in live if rank.page), default=0)
    return tuple(rank for rank in live if not rank.page or rank.step == least)


def _behind(live: tuple[RankView, ...], bases: dict[int, int] | None) -> tuple[RankView, ...]:
    """Ranks with the lowest number in the first group where numbers differ; all, if none does.

    Ranks whose numbers were never seen to advance alike are not compared (collective.py).
    """
    if bases is None:
        return live
    for group in sorted({g for r in live for g, _ in r.seq}):
        numbers = {
            r.rank: dict(r.seq)[group] - (bases.get(r.rank, 0) if group == 0 else 0)
            for r in live if group in dict(r.seq)}
        if len(numbers) < 2 or len(set(numbers.values())) == 1:
            continue
        low = min(numbers.values())
        return tuple(r for r in live if not r.page or numbers.get(r.rank) == low)
    return live


def _not_waiting(ranks: tuple[RankView, ...]) -> tuple[RankView, ...]:
    """Ranks in a known phase of their own while others wait in a collective; all, if none."""
    waiting = [r for r in ranks if r.phase == "collective"]
    own = tuple(r for r in ranks if r.phase not in ("collective", "unknown"))
    return own if waiting and own else ranks


def _gil_holders(live: tuple[RankView, ...]) -> tuple[RankView, ...]:
    """Ranks whose ticker is stale though the process lives.

    When every one of several ranks is stale the machine was frozen, not the interpreters; and an
    import may hold the lock for long (dlopen), and an exit stops threads: both have own limits.
    """
    stale = tuple(
        r for r in live
        if r.beat_age_s > STALE_BEAT_S and r.proc_state not in NOT_LIVE
        and r.state == "running" and r.phase not in ("startup", "compile", "exit"))
    return () if len(stale) == len(live) > 1 else stale


def _suspect_s(
    rank: RankView, held: tuple[RankView, ...], costs: limits.Costs, history: History,
    settings: Settings,
) -> float:
    if costs.grade == OPAQUE:
        return limits.act_s(rank, costs, history, settings)
    return STALE_BEAT_S if held else limits.suspect_s(rank, costs, history, settings)


def _unheard(
    view: HangView, live: tuple[RankView, ...], waited_s: float, over: bool, wake_s: float
) -> Look:
    """The ranks that are heard of stand still, and others are on nodes that are silent.  Those are
    lost soon or heard of again; until then a limit of the user's alone ends what may be waiting."""
    limit = view.costs.hang_limit_s > 0 and all(
        limits.user_limit_applies(rank, view.costs) for rank in live)
    found = _unnamed(live, "rank_hung", f"waited {waited_s:.1f} s", over and limit, (
        f"and nothing is heard of {', '.join(view.silent[:NAMED_MAX])}, where the others are"))
    found = msgspec.structs.replace(found, limit=limit)
    return Look((found,), tuple(rank.rank for rank in live), wake_s)


def _unnamed(
    ranks: tuple[RankView, ...], fault: str, tail: str, act: bool,
    why: str = "and nothing tells them apart",
) -> Finding:
    who = f"ranks {', '.join(str(r.rank) for r in ranks)} stand" if len(ranks) > 1 \
        else f"{ranks[0].who} stands"
    # One row a rank, so that there is room for where each of a node's ranks is found to stand.
    rows = [(f"rank {r.rank}", "; ".join(f"{what} {value}" for what, value in _rows(r)))
            for r in ranks]
    rows += [(f"rank {r.rank} where", r.where) for r in ranks if r.where]
    cause = Cause(
        fault=fault, generation=ranks[0].generation, detector=DETECTOR, evidence=tuple(rows),
        reason=f"culprit unknown: {who} still {why}; {tail}",
        step=max(r.known_step for r in ranks), confidence=0.5, severity=FATAL if act else WARN,
        among=tuple(sorted({r.node for r in ranks})) if fault == "rank_hung" else ())
    return Finding(cause, act)


def _finding(rank: RankView, fault: str, reason: str, act: bool, proof: bool = False) -> Finding:
    cause = Cause(
        fault=fault, generation=rank.generation, reason=reason, rank=rank.rank, node=rank.node,
        pid=rank.pid, place=rank.place, step=rank.known_step, error=rank.where, detector=DETECTOR,
        confidence=1.0 if proof else 0.8, severity=FATAL if act else WARN,
        evidence=(*_rows(rank), *((("where", rank.where),) if rank.where else ())))
    return Finding(cause, act, proof)


def _doing(rank: RankView) -> str:
    return "reads" if rank.reading else "active" if rank.active else "no activity"


def _rows(rank: RankView) -> tuple[tuple[str, str], ...]:
    rows = [
        ("phase", rank.phase), ("step", step_words(rank)),
        ("process", f"state {rank.proc_state}, {_doing(rank)}"),
        ("still", f"{rank.still_s:.2f} s, last beat {rank.beat_age_s:.2f} s ago")]
    if rank.seq:
        rows.append(("sequence", ", ".join(f"group {g}: {n}" for g, n in rank.seq)))
    return tuple(rows)
