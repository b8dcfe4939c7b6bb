"""Whether all goes on: useful steps behind the storm, or an end that was deserved.

Owns the judgement at the end of a storm, by what truly happened.  A run that was not hit by what
deserves an end must finish steps that nobody had finished before; one that ended must have been
asked to, have ended well, have failed the same way in the same place, or have spent what it had.
"""

from __future__ import annotations

from holdfast.worker import exits

from ..core.model import Plan, node_subject, run_subject
from ..core.run.plan import NOTHING_LEFT
from . import account
from .cluster import Cluster
from .disk import void_by
from .job import Job
from .launcher import Launcher
from .loop import InvariantBroken
from .monitor import excluded
from .storms import Storm

LIVE_STEPS = 3  # new steps after the storm that count as going on
ANSWERED_S = 3.0
LOOK_EVERY_S = 4.0
UNTIDIED = 4  # checkpoints that may stay beyond those kept
ECHO = "the run's document says it is over"  # of whoever only heard of the end


def settle(cluster: Cluster, storm: Storm) -> None:
    """After the storm every run must go on, or be over by right, within `calm_s`."""
    end_s = cluster.loop.now_s
    marks = {name: job.best for name, job in cluster.jobs.items()}
    while cluster.loop.now_s < end_s + storm.calm_s:
        cluster.loop.run_until(cluster.loop.now_s + LOOK_EVERY_S)
        if all(_settled(cluster, job, marks[name]) for name, job in cluster.jobs.items()) \
                and not _draining(cluster, end_s):
            break
    for name, job in cluster.jobs.items():
        if not _settled(cluster, job, marks[name]):
            raise InvariantBroken("all_goes_on", f"{name} stands still {storm.calm_s:.0f} s after "
                                  f"the storm: {_why(cluster, job)}")
        how = standing(cluster, job)
        if how.startswith("finished"):
            wrong = undeserved(cluster, job, int(how.split()[1]))
            if wrong:
                raise InvariantBroken("ends_deserved", f"{name} {how}: {wrong}")
        elif any(each.shutdown for each in everyone(cluster, job) if each.alive):
            raise InvariantBroken("asked_to_end", f"{name} was asked to end, and is {how}")
        if (left := _untidied(cluster, job)) and not how.startswith("waiting"):
            raise InvariantBroken("folder_tidied", f"{name} is {how}, and beyond those kept are "
                                  f"{left}")
        gang = job.newest()
        if how == "progress" and gang is not None and job.is_wrong((gang.generation, gang.step)):
            raise InvariantBroken("wrong_found", f"{name} trains on behind a collective that was "
                                  f"left out: {job.wrong}")
    late = sorted(one for edge in cluster.edges.values() if edge.machine.up
                  for one, asked_s in edge.asked_s.items() if asked_s < end_s)
    if late and cluster.loop.now_s > end_s + ANSWERED_S:
        raise InvariantBroken("requests_settled", f"nobody answers {late}")


def _untidied(cluster: Cluster, job: Job) -> list[str]:
    """Good checkpoints that should be gone: behind those kept, and behind the last few that may not
    have been read back before the end or the last change of who leads.  An order whose launcher is
    gone holds the next one up until its deadline, and none is given before a recovery is over.
    What nobody alive has heard of stays: its rank 0's node is gone, and those who remembered it
    began anew."""
    subject = run_subject(job.name, "checkpoints")
    minds = [edge.node for edge in cluster.edges.values() if edge.node is not None]
    recovers = any(job.name in mind.cases and mind.cases[job.name].state.recovery is not None
                   for mind in minds)
    if recovers or any(mind.kept.in_flight.busy(subject) for mind in minds):
        return []
    truth = cluster.monitor.runs.get(job.name)
    told = truth.resumes.get(job.folder, []) if truth is not None else []
    heard = _heard_of(cluster, job)
    good = [one.path for one in job.disk.listing() if one.path in heard
            and one.verified and not one.bad and void_by(one, told) is None]
    return good[: -(cluster.settings.keep_checkpoints + UNTIDIED)]


def _heard_of(cluster: Cluster, job: Job) -> set[str]:
    """Checkpoints that rank 0's launcher knows, or that an agent remembers."""
    plan = newest_plan(cluster, job)
    led = dict(plan.ranks).get(0) if plan is not None else None
    found = {path for each in everyone(cluster, job) if each.machine.name == led
             for path in each.known or ()}
    for edge in cluster.edges.values():
        case = edge.node.cases.get(job.name) if edge.node is not None else None
        if case is not None:
            found |= {one.path for one in case.state.heard.by_folder.get(job.folder, ())}
    return found


def _draining(cluster: Cluster, end_s: float) -> bool:
    """A drain is answered when nothing is left on its node, or after so long."""
    most_s = cluster.settings.drain_limit_s + ANSWERED_S
    return cluster.loop.now_s < end_s + most_s and any(
        one.startswith("drain-") for edge in cluster.edges.values() for one in edge.asked_s)


def _settled(cluster: Cluster, job: Job, mark: int) -> bool:
    how = standing(cluster, job)
    if how.startswith(("finished", "waiting")):
        return True
    return how == "progress" and job.best >= mark + LIVE_STEPS and _as_large(cluster, job) \
        and not _unnamed(cluster, job)


def standing(cluster: Cluster, job: Job) -> str:
    """ "finished N", "waiting for nodes" (rightly), "progress" or "still"."""
    plan = newest_plan(cluster, job)
    if plan is not None and plan.finished >= 0:
        return f"finished {plan.finished}" if plan.reason and not _still_there(cluster, job) \
            else "still"
    alive = cluster.launchers(job.name)
    gone = [each for each in everyone(cluster, job) if each.exit_code is not None]
    few = len(alive) < cluster.shape.need  # a rest cannot train: the run was ended
    if few and gone and all(each.exit_reason for each in gone):
        return f"finished {max(each.exit_code or 0 for each in gone)}"
    if _short_of_nodes(cluster, job, alive):
        return "waiting for nodes"
    gang = job.newest()
    late_s = cluster.loop.now_s - job.last_progress_s
    newest = plan.generation if plan is not None else 0
    current = gang is not None and gang.generation == newest and not gang.broken
    return "progress" if current and late_s < 3 * job.step_s + 1 else "still"


def newest_plan(cluster: Cluster, job: Job) -> Plan | None:
    truth = cluster.monitor.runs.get(job.name)
    return truth.plans[max(truth.plans)] if truth is not None and truth.plans else None


def undeserved(cluster: Cluster, job: Job, code: int) -> str:
    """Why this run should not have ended so; "" where it should."""
    if code == exits.DONE:
        return "" if job.best >= job.target else f"at step {job.best} of {job.target}"
    if code == exits.RETRY:
        asked = any(each.shutdown for each in everyone(cluster, job))
        return "" if asked else "nobody asked it to end, and its nodes are fit"
    plan, truth = newest_plan(cluster, job), cluster.monitor.runs.get(job.name)
    if plan is None or truth is None:
        return "it never began"
    ends, hurt = job.ends.get(plan.generation, set()), plan.generation in job.hurt
    if not hurt and cluster.loop.now_s > cluster.monitor.disturbed_s + 200.0:
        return f"nothing happened to gen {plan.generation}"
    if code == exits.FAILED and not ends & {"raised", "echo"}:
        return "its script's own code, and it raised nothing"
    lost = any(edge.was_late for edge in cluster.edges.values())  # to the others its node was gone
    if code == exits.BUDGET_SPENT and ends == {"raised"} and not lost:
        return "a code of ours, and its script raised"
    # A node that was late with an end of its own says that, and another's holds.
    why = " ".join(each.exit_reason for each in everyone(cluster, job)
                   if each.exit_reason not in ("", ECHO)
                   and not (cluster.edges[each.machine.name].was_late and not cluster.single))
    looped = truth.fruitless >= cluster.settings.crash_loop_count - 1 \
        and job.best <= truth.best_at_plan
    spent = _spent(cluster, job, plan)
    if "the same failure" in why and not looped:
        return f"no crash loop: {truth.fruitless} generations without a step: {why}"
    if NOTHING_LEFT in why:
        return _still_left(job, plan, truth.resumes.get(plan.checkpoint_dir, []))
    if "used up" in why and not spent:
        return f"it had restarts left, of {plan.spent}: {why}"
    return "" if looped or spent else f"neither a loop nor spent, with {plan.spent}: {why}"


def _still_left(job: Job, plan: Plan, resumes: list[tuple[int, int]]) -> str:
    """What a run could have gone on from that ended as all its checkpoints were put aside."""
    stands = [one.path for one in job.disk.commits.values() if not one.bad and one.path not in (
        *plan.quarantined, *job.refused) and void_by(one, resumes) is None]
    return f"{stands} was left to resume from" if stands else ""


def _spent(cluster: Cluster, job: Job, plan: Plan) -> bool:
    """Is a budget truly used up?  What the plans say was held against the acts all along; what its
    last generation earned comes off."""
    truth = cluster.monitor.runs[job.name]
    earned = truth.end_heard and account.must_give_back(job, plan.generation)
    back = account.bought(plan) if earned else ()
    runbooks = next(iter(cluster.edges.values())).runbooks
    for key, count in plan.spent:
        book = runbooks.get(key.partition("/")[0])
        most = book.budget_count if book is not None else cluster.restarts(job.name)
        if not key.startswith("signature/") and count - (key in back) >= most:
            return True
    return False


def _short_of_nodes(cluster: Cluster, job: Job, alive: list[Launcher]) -> bool:
    """Truly fewer fit nodes than the run needs, and somebody says so."""
    fit = [each for each in alive if _is_fit(cluster, each)]
    said = any(run == job.name and ("waiting for nodes" in why or "no spare" in why)
               for edge in cluster.edges.values() for run, why in edge.decision.reasons)
    return len(fit) < cluster.shape.need and said


def _is_fit(cluster: Cluster, launcher: Launcher) -> bool:
    machine = launcher.machine
    doc = cluster.store.docs.get(node_subject(machine.name))
    return machine.up and not machine.fatal and not (doc and excluded(doc.body))


def _as_large(cluster: Cluster, job: Job) -> bool:
    """Whether the run uses as many of the fit nodes as it asked for."""
    plan, edges = newest_plan(cluster, job), cluster.edges
    fit = [each for each in cluster.launchers(job.name) if _is_fit(cluster, each)
           and edges[each.machine.name].node is not None]
    most = min(len(fit), cluster.shape.members)
    return plan is None or len({node for _, node in plan.ranks}) >= most


def _unnamed(cluster: Cluster, job: Job) -> list[str]:
    """Nodes of the run, fit by their own word too, that its plan does not name: the next loss could
    not use them at once."""
    plan = newest_plan(cluster, job)
    named = {*plan.members, *plan.spares} if plan is not None else set()
    found = []
    for each in cluster.launchers(job.name) if not cluster.single else ():
        edge = cluster.edges[each.machine.name]
        sick = any(beat.fatal or beat.held for beat in edge.decision.beats)
        if edge.node is not None and _is_fit(cluster, each) and not sick \
                and each.machine.name not in named:
            found.append(each.machine.name)
    return found


def _still_there(cluster: Cluster, job: Job) -> bool:
    return any(rank.state != "ended" for launcher in cluster.launchers(job.name)
               for rank in launcher.ranks.values())


def everyone(cluster: Cluster, job: Job) -> list[Launcher]:
    """Every launcher that this run ever had."""
    now = [edge.launchers[job.name] for edge in cluster.edges.values()
           if job.name in edge.launchers]
    return now + [each for each in cluster.left if each.job is job]


def _why(cluster: Cluster, job: Job) -> str:
    said = []
    for name, edge in cluster.edges.items():
        for run, reason in edge.decision.reasons:
            if run == job.name:
                said.append(f"{name} says: {reason}")
    states = [f"{rank.rank}@{launcher.machine.name}:{rank.state}"
              for launcher in cluster.launchers(job.name) for rank in launcher.ranks.values()]
    if unnamed := _unnamed(cluster, job):
        said.append(f"not in the plan: {', '.join(unnamed)}")
    return f"best step {job.best}; ranks {' '.join(states) or 'none'}; {'; '.join(said)}"
