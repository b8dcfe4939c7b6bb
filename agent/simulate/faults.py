"""What a storm does to a cluster: one small function a fault.

Owns the faults.  A fault is drawn before the storm begins (when, what, two numbers in [0, 1) that
choose its target and its length), so that the same seed makes the same storm whatever the system
under test does meanwhile.  What a fault breaks, the end of the storm heals, except what only the
system under test may put right (a hung or stopped rank, a spoilt checkpoint).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from ..core.actions import DRAIN, PAUSE, RELEASE_NODE, RESTART_RANKS, RESUME
from ..core.model import TRAINER, Ended, Request, node_subject, run_subject
from . import links, weak_nodes
from .cluster import Cluster
from .edge import Edge, decode_plan
from .job import RUN, Job, Rank
from .launcher import Launcher

Fault = Callable[[Cluster, float, float], None]
# Of the shipped runbooks: the first takes its node out of service, the second ends in a person.
FATAL_FAULTS = ("host_disk_error", "gpu_fell_off_bus")
COMMON_FAULT = "cpu_machine_check"


def pick_rank(cluster: Cluster, u: float) -> Rank | None:
    """A running rank, chosen by `u`."""
    ranks = [rank for _, rank in cluster.ranks() if rank.state == RUN]
    return ranks[int(u * len(ranks))] if ranks else None


def pick_edge(cluster: Cluster, u: float) -> Edge:
    """A node, chosen by `u`."""
    edges = list(cluster.edges.values())
    return edges[int(u * len(edges))]


def _say(cluster: Cluster, who: str, text: str, *values: object) -> None:
    cluster.loop.note("STORM", f"{who}: {text}", *values)


def _wake(cluster: Cluster, rank: Rank) -> None:
    cluster.edges[rank.machine.name].wake()


def _harm(cluster: Cluster, rank: Rank) -> None:
    for job, each in cluster.ranks():
        if each is rank:
            job.harm(rank.generation, rank.pid)


def _disturb(cluster: Cluster, for_s: float = 0.0) -> None:
    """Nodes, network or launchers are not as they should be: what is done meanwhile has a cause."""
    cluster.monitor.disturbed_s = max(cluster.monitor.disturbed_s, cluster.loop.now_s + for_s)


def _end(cluster: Cluster, rank: Rank, how: Ended) -> None:
    cluster.struck += 1
    for job, each in cluster.ranks():
        if each is rank:
            job.end(rank, how)


def rank_killed(cluster: Cluster, u: float, v: float) -> None:
    """SIGKILL from outside.  A large process takes its time to go: peers may fail before it."""
    rank = pick_rank(cluster, u)
    if rank is None:
        return
    _say(cluster, rank.machine.name, "SIGKILL rank %d", rank.rank)
    if v < 0.7 or not cluster.single or rank.gang is None or not rank.moves():
        _end(cluster, rank, Ended(137, 9))
        return
    cluster.struck += 1
    rank.hung = True
    for job, each in cluster.ranks():
        if each is rank:
            job.harm(rank.generation, rank.pid)
            job.break_gang(rank.gang, None, "Connection closed by peer")
            rank.machine.after(0.5, partial(job.end, rank, Ended(137, 9)))


def rank_exited(cluster: Cluster, u: float, v: float) -> None:
    """An exception that comes once (v chooses its text, and whether its process lives on)."""
    rank = pick_rank(cluster, u)
    if rank is not None and rank.moves():  # a rank that stands still raises nothing
        _say(cluster, rank.machine.name, "rank %d raises", rank.rank)
        error = f"OSError: shard {int(v * 99)}"
        if v < 0.5:
            _end(cluster, rank, Ended(1, outcome="exception", error=error))
            return
        cluster.struck += 1
        for job, each in cluster.ranks():
            if each is rank:
                job.raises(rank, error)


def rank_hung(cluster: Cluster, u: float, v: float) -> None:
    """The main thread stops moving; one in three holds the GIL, some come back by themselves."""
    rank = pick_rank(cluster, u)
    if rank is None:
        return
    rank.hung, rank.holds_gil = True, v < 0.33
    _harm(cluster, rank)
    _say(cluster, rank.machine.name, "rank %d hangs%s", rank.rank, ", GIL" if v < 0.33 else "")
    if v > 0.8:
        cluster.loop.after(4.0, lambda: _resume_rank(cluster, rank))


def _resume_rank(cluster: Cluster, rank: Rank) -> None:
    rank.hung = rank.holds_gil = False
    rank.stopped_at_s = -1.0
    _say(cluster, rank.machine.name, "rank %d goes on", rank.rank)


def rank_stopped(cluster: Cluster, u: float, v: float) -> None:
    """SIGSTOP; some get SIGCONT later."""
    rank = pick_rank(cluster, u)
    if rank is None:
        return
    rank.stopped_at_s = cluster.loop.now_s
    _harm(cluster, rank)
    _say(cluster, rank.machine.name, "SIGSTOP rank %d", rank.rank)
    if v > 0.5:
        cluster.loop.after(6.0 * v, lambda: _resume_rank(cluster, rank))


def suspended(cluster: Cluster, u: float, v: float) -> None:
    """A whole run is stopped from outside and goes on later: a scheduler, a freezer, Ctrl-Z."""
    job = _job(cluster, u)
    ranks = [rank for which, rank in cluster.ranks() if which is job]
    if not cluster.single or len(ranks) < 2 or any(rank.stopped_at_s >= 0 for rank in ranks):
        return
    launchers = cluster.launchers(job.name) if v < 0.5 else []
    for rank in ranks:
        rank.stopped_at_s = cluster.loop.now_s
    for launcher in launchers:
        launcher.suspended = True
    _say(cluster, job.name, "is suspended%s", " with its launcher" if launchers else "")
    cluster.loop.after(2.0 + 20.0 * v, partial(_let_go, cluster, ranks, launchers))


def _let_go(cluster: Cluster, ranks: list[Rank], launchers: list[Launcher]) -> None:
    for rank in ranks:
        rank.stopped_at_s = -1.0
    for launcher in launchers:
        launcher.suspended = False
    _say(cluster, "outside", "lets the run go on")


def mount_hung(cluster: Cluster, u: float, v: float) -> None:
    """The server of a mount stops: a rank that reads from it waits in the kernel until it is back,
    and no restart would help."""
    rank = pick_rank(cluster, u)
    # Of several nodes the leader knows its own mounts alone.
    if rank is None or not rank.moves() or not cluster.single:
        return
    edge = cluster.edges[rank.machine.name]
    if edge.mount_dead_s is not None:
        return  # the same server is not there already
    # The agent's own probe was there before the rank was.
    rank.waits_for, edge.mount_dead_s = "/data/shard-7", cluster.loop.now_s - 30.0
    _say(cluster, rank.machine.name, "the server of /data stops under rank %d", rank.rank)

    def back() -> None:
        rank.waits_for, edge.mount_dead_s = "", None
        _say(cluster, rank.machine.name, "the server of /data is back")

    cluster.loop.after(8.0 + 40.0 * v, back)


def collective_left_out(cluster: Cluster, u: float, _v: float) -> None:
    """A rank leaves a collective out: what is computed from this step on is wrong on every rank,
    and what is written of it reads back well."""
    rank = pick_rank(cluster, u)
    if rank is None or rank.gang is None or len(rank.gang.ranks) < 2 or not rank.moves():
        return
    for job, each in cluster.ranks():
        if each is rank and job.grade == TRAINER and rank.generation not in job.wrong:
            rank.skipped_at = job.wrong[rank.generation] = rank.step + 1
            job.harm(rank.generation, rank.pid)
            _say(cluster, job.name, "rank %d leaves one out in step %d", rank.rank, rank.step + 1)


def folder_moved(cluster: Cluster, u: float, v: float) -> None:
    """The caller ends the launcher and starts the run again with another checkpoint folder, or
    with the one before."""
    job = _job(cluster, u)
    launchers = cluster.launchers(job.name)
    if not cluster.single or not launchers or not launchers[0].ranks:
        return
    edge = cluster.edges[launchers[0].machine.name]
    _disturb(cluster, 10.0)
    launchers[0].alive = False
    launchers[0].drop_ranks()
    job.move(f"/ckpt/{job.name}" + "-b" * (not job.folder.endswith("-b")))
    _say(cluster, job.name, "is started again with %s", job.folder)
    edge.machine.after(1.0 + 3.0 * v, partial(_relaunch, cluster, job, edge))


def _job(cluster: Cluster, u: float) -> Job:
    return list(cluster.jobs.values())[int(u * len(cluster.jobs))]


def generation_killed(cluster: Cluster, u: float, _v: float) -> None:
    """Every rank of a run at once: the kernel's out-of-memory killer, or a user's kill."""
    job = _job(cluster, u)
    for launcher in cluster.launchers(job.name):
        for rank in launcher.ranks.values():
            job.end(rank, Ended(137, 9))
    _say(cluster, job.name, "SIGKILL to every rank")


def user_bug(cluster: Cluster, u: float, v: float) -> None:
    """From now on every generation of one run dies at the same step."""
    job = _job(cluster, u)
    if job.bug_step < 0:
        job.bug_step = job.best + 1 + int(v * 6)
        _say(cluster, job.name, "a bug waits at step %d", job.bug_step)


def commit_spoilt(cluster: Cluster, u: float, _v: float) -> None:
    """A flipped byte in the newest checkpoint, which nobody has read yet."""
    job = _job(cluster, u)
    paths = [each.path for each in job.disk.listing() if not each.bad]
    if paths:
        job.disk.rot(paths[-1])
        _say(cluster, job.name, "rots %s", paths[-1])


def slow_commits(cluster: Cluster, u: float, v: float) -> None:
    """Markers come late: processes of an old generation write them beside a new one."""
    for job in cluster.jobs.values():
        job.slow_commit_s = 3.0 + 6.0 * u
        cluster.loop.after(8.0 + 8.0 * v, partial(setattr, job, "slow_commit_s", 0.0))


def agent_killed(cluster: Cluster, u: float, _v: float) -> None:
    """kill -9 of the agent; systemd or the launcher brings it back."""
    if not cluster.single:  # its peers may miss it for longer than a lease
        _disturb(cluster, 5.0)
    pick_edge(cluster, u).kill("SIGKILL")


def kill_mid_effect(cluster: Cluster, u: float, v: float) -> None:
    """For a while agents die between intent, effect and outcome."""
    cluster.weather.kill_mid_effect = 0.2 + 0.5 * u
    if not cluster.single:
        _disturb(cluster, 15.0)
    cluster.loop.after(3.0 + 6.0 * v, lambda: setattr(cluster.weather, "kill_mid_effect", 0.0))
    _say(cluster, "agents", "die in mid effect with chance %.2f", cluster.weather.kill_mid_effect)


def launcher_killed(cluster: Cluster, u: float, v: float) -> None:
    """A launcher dies and takes its ranks along; its caller starts it again."""
    edge = pick_edge(cluster, u)
    for name, launcher in edge.launchers.items():
        if launcher.alive and launcher.ranks:
            _say(cluster, edge.machine.name, "launcher of %s dies", name)
            _disturb(cluster, 10.0)
            launcher.alive = False
            launcher.drop_ranks()
            edge.machine.after(2.0 + 6.0 * v, partial(_relaunch, cluster, launcher.job, edge))
            return


def _relaunch(cluster: Cluster, job: Job, edge: Edge) -> None:
    cluster.launch(job, edge)


def node_crashed(cluster: Cluster, u: float, v: float) -> None:
    """Power loss and reboot; one in four loses its journal with its disk."""
    edge = pick_edge(cluster, u)
    machine = edge.machine
    if not machine.up:
        return
    _say(cluster, machine.name, "loses power")
    _disturb(cluster, 15.0)
    cluster.network.changes += 1
    edge.kill("power")
    dead = [each for each in edge.launchers.values() if each.alive]
    for launcher in dead:
        launcher.alive = False
    machine.crash()
    for launcher in dead:
        launcher.drop_ranks()
    if v > 0.75:
        edge.lose_disk()
    jobs = [each.job for each in edge.launchers.values() if each.exit_code is None]
    cluster.loop.after(3.0 + 10.0 * v, lambda: _reboot(cluster, edge, jobs))


def _reboot(cluster: Cluster, edge: Edge, jobs: list[Job]) -> None:
    if edge.machine.gone:
        return
    _say(cluster, edge.machine.name, "boots")
    cluster.network.changes += 1
    edge.machine.boot()
    edge.start()
    for job in jobs:
        edge.machine.after(1.0, partial(_relaunch, cluster, job, edge))


def leader_and_another(cluster: Cluster, u: float, v: float) -> None:
    """Two nodes lose power within a second, and who leads a run is one of them."""
    leader = cluster.store.holder(_job(cluster, u).name)
    names = list(cluster.machines)
    if len(names) < 3 or leader not in names:
        return
    other = (names.index(leader) + 1 + int(v * (len(names) - 1))) % len(names)
    node_crashed(cluster, (names.index(leader) + 0.5) / len(names), 0.7 * v)
    cluster.loop.after(u, partial(node_crashed, cluster, (other + 0.5) / len(names), 0.7 * u))


def joins(cluster: Cluster, u: float, v: float) -> None:
    """The launchers of a run on most nodes die, and their callers start them within one second."""
    job, names = _job(cluster, u), list(cluster.machines)
    if cluster.single:
        return
    _disturb(cluster, 15.0)
    for name in names[int(v * 2):]:
        edge = cluster.edges[name]
        launcher = edge.launchers.get(job.name)
        if launcher is not None and launcher.alive and launcher.exit_code is None:
            launcher.alive = False
            launcher.drop_ranks()
            edge.machine.after(2.0 + cluster.rng.random(), partial(_relaunch, cluster, job, edge))
    _say(cluster, job.name, "is started again on %s", names[int(v * 2):])


def node_gone(cluster: Cluster, u: float, _v: float) -> None:
    """A machine that never comes back, where a spare is left."""
    edge = pick_edge(cluster, u)
    lost = [each for each in cluster.machines.values() if each.fatal or each.gone]
    if len(lost) >= cluster.shape.spares or not edge.machine.up:
        return
    edge.machine.gone = True
    node_crashed(cluster, u, 0.0)


def frozen_at_put(cluster: Cluster, u: float, v: float) -> None:
    """The next plan arrives late, by a slow network or with its writer frozen meanwhile."""
    cluster.weather.freeze_at_put_s = 1.0 + 16.0 * v * v
    _disturb(cluster, 150.0)  # whenever that plan comes


def node_frozen(cluster: Cluster, u: float, v: float) -> None:
    """Everything on a machine stops, and later goes on as if nothing had been; a paused guest's
    boot clock stops as well."""
    edge = pick_edge(cluster, u)
    if edge.machine.frozen or not edge.machine.up:
        return
    _say(cluster, edge.machine.name, "freezes%s", " with its clock" if v < 0.4 else "")
    _disturb(cluster, 13.0)
    cluster.network.changes += 1
    edge.machine.freeze(v < 0.4 and not cluster.scripts_over_nodes())
    cluster.loop.after(1.0 + 12.0 * v, lambda: _thaw(cluster, edge))


def _thaw(cluster: Cluster, edge: Edge) -> None:
    if edge.machine.frozen:
        _say(cluster, edge.machine.name, "thaws")
        edge.thaw()


def node_fatal(cluster: Cluster, u: float, v: float) -> None:
    """Hardware breaks for good: its ranks die now, and would again."""
    edge = pick_edge(cluster, u)
    sick = [each for each in cluster.machines.values() if each.fatal or each.gone]
    if len(sick) >= cluster.shape.spares:
        return
    _break_node(cluster, edge, FATAL_FAULTS[int(v * len(FATAL_FAULTS))], v)


def common_cause(cluster: Cluster, u: float, v: float) -> None:
    """The same fatal fault on most nodes at once: a driver, a switch, a bad rule."""
    if len(cluster.machines) < 5 or u < 0.3:
        return
    edges, idle = list(cluster.edges.values()), cluster.shape.idle
    for edge in (edges[0], *edges[-idle:]) if idle else edges[:3 + int(v * 2)]:
        _break_node(cluster, edge, COMMON_FAULT, v)
    cluster.loop.after(6.0 + 8.0 * v, lambda: _repair(cluster, COMMON_FAULT))


def _break_node(cluster: Cluster, edge: Edge, fault: str, v: float) -> None:
    _disturb(cluster, 20.0)
    edge.machine.break_down(fault)
    _say(cluster, edge.machine.name, "fatal fault %s", fault)
    edge.wake()
    if v < 0.7:
        for _, rank in cluster.ranks():
            if rank.machine is edge.machine:
                edge.machine.after(0.5, partial(_end, cluster, rank, Ended(134, 6)))


def _repair(cluster: Cluster, fault: str) -> None:
    for edge in cluster.edges.values():
        if edge.machine.fatal == fault:
            edge.machine.fatal = ""
            edge.close_incidents("repaired")
            _say(cluster, edge.machine.name, "%s is over", fault)


def store_restored(cluster: Cluster, u: float, v: float) -> None:
    """The store lost its disk and is away for a while; a person restores a backup of before, or has
    none and seeds it.  One time in three that is in the moment in which a run's next generation is
    written, and who wrote it may go with it: nobody else has read it."""
    if cluster.single or not cluster.store.available:
        return
    store, name, names = cluster.store, _job(cluster, v).name, list(cluster.machines)
    behind_s, for_s = math.inf if u < 0.3 else 30.0 * (u - 0.3), 1.0 + 5.0 * v
    before = store.docs.get(run_subject(name))

    def lose() -> None:
        _disturb(cluster, for_s + 5.0)
        _say(cluster, "store", "lost its disk, and what it was told for %.1f s", behind_s)
        store.lose(behind_s)
        cluster.loop.after(for_s, store.come_back)

    def written() -> None:
        doc = store.docs.get(run_subject(name))
        if doc is None or not store.available or before is None or decode_plan(
                doc.body).generation <= decode_plan(before.body).generation:
            return
        forget()
        leader = store.holder(name)
        lose()
        if u > 0.6 and leader:
            node_crashed(cluster, (names.index(leader) + 0.5) / len(names), 0.7 * v)
            cluster.monitor.runs[name].forget(decode_plan(doc.body).generation)

    def forget() -> None:
        if written in store.watchers:
            store.watchers.remove(written)

    if v < 0.67 or before is None:
        return lose()
    store.watchers.insert(0, written)
    cluster.loop.after(15.0, forget)


def replaced_unseen(cluster: Cluster, u: float, v: float) -> None:
    """The nodes of a run are cut off from all others, and from the store as well in the moment in
    which the next generation is written.  The leader may go, so that another misses them late."""
    job, names = _job(cluster, u), list(cluster.machines)
    cut = cluster.computing(job)
    rest, leader = set(names) - cut, cluster.store.holder(job.name)
    if not cut or not rest:
        return
    for_s = 12.0 + 12.0 * v
    cluster.cut({pair for a in cut for b in rest for pair in ((a, b), (b, a))}, for_s)
    cluster.cut_at_write(job, cut, for_s, 1)
    if v > 0.5 and leader in rest:
        node_crashed(cluster, (names.index(leader) + 0.5) / len(names), 0.7 * v)


def unfit_unseen(cluster: Cluster, u: float, v: float) -> None:
    """A node of a run breaks while it hears nobody, and is cut off from all in the moment in which
    something of the run is written, or its next generation."""
    job, sick = _job(cluster, u), [one for one in cluster.machines.values() if one.fatal]
    found = sorted(cluster.computing(job) - {cluster.store.holder(job.name)})
    if not found or len(sick) >= cluster.shape.spares:
        return
    name, for_s = found[int(v * len(found))], 12.0 + 12.0 * v
    cluster.cut({(other, name) for other in cluster.machines if other != name}, for_s)
    _break_node(cluster, cluster.edges[name], FATAL_FAULTS[0], 1.0)
    cluster.cut_at_write(job, {name}, for_s, int(u * 100) % 2)


def weather(name: str, value: float) -> Fault:
    """A spell of bad weather: `Weather.name` at up to `value` for some seconds."""

    def spell(cluster: Cluster, u: float, v: float) -> None:
        _disturb(cluster, 14.0)
        setattr(cluster.weather, name, value * u)
        _say(cluster, "weather", "%s %.2f", name, value * u)
        cluster.loop.after(4.0 + 10.0 * v, lambda: setattr(cluster.weather, name, 0.0))

    return spell


def wall_jump(cluster: Cluster, u: float, v: float) -> None:
    """Somebody sets the clock."""
    pick_edge(cluster, u).machine.wall_ahead_s += (v - 0.5) * 7200


def journal_stall(cluster: Cluster, u: float, v: float) -> None:
    """The journal's disk does not answer."""
    edge = pick_edge(cluster, u)
    edge.journal_stalled = True
    _say(cluster, edge.machine.name, "journal stalls")
    cluster.loop.after(2.0 + 8.0 * v, lambda: setattr(edge, "journal_stalled", False))


def preempted(cluster: Cluster, u: float, v: float) -> None:
    """The scheduler asks a launcher to end."""
    if v < 0.6:
        return
    edge = pick_edge(cluster, u)
    for launcher in edge.launchers.values():
        launcher.shutdown = "preempted"
    _say(cluster, edge.machine.name, "preempted")
    edge.wake()


def operator(cluster: Cluster, u: float, v: float) -> None:
    """An operator asks for a restart of one run, on whichever node is at hand."""
    edge = pick_edge(cluster, v)
    run = list(cluster.jobs)[int(u * len(cluster.jobs))]
    request = Request(id=f"operator-{cluster.loop.now_s:.3f}", action=RESTART_RANKS,
                      subject=run_subject(run), reason="by hand", run=run,
                      by="storm")
    _say(cluster, edge.machine.name, "operator restarts %s", run)
    edge.ask(request)


def paused(cluster: Cluster, u: float, v: float) -> None:
    """An operator pauses a run of a single node for a while: nothing is answered meanwhile."""
    job, edge = _job(cluster, u), pick_edge(cluster, u)
    if not cluster.single or job.name in cluster.monitor.paused_s:
        return
    cluster.monitor.paused_s[job.name] = cluster.loop.now_s
    _say(cluster, job.name, "is paused by an operator")

    def ask(action: str) -> None:
        name = f"{action}-{job.name}-{cluster.loop.now_s:.3f}"
        edge.ask(Request(id=name, action=action, subject=run_subject(job.name),
                         reason="by hand", run=job.name, by="storm"))

    def resume() -> None:
        cluster.monitor.paused_s.pop(job.name)
        ask(RESUME)

    ask(PAUSE)
    cluster.loop.after(3.0 + 15.0 * v, resume)


def drained(cluster: Cluster, u: float, v: float) -> None:
    """An operator has a node drained, asking whichever agent is at hand, and releases it later."""
    if cluster.single:
        return
    node, edge = pick_edge(cluster, u).machine.name, pick_edge(cluster, v)
    _disturb(cluster, 40.0)

    def ask(action: str) -> None:
        name = f"{action}-{node}-{cluster.loop.now_s:.3f}"
        edge.ask(Request(id=name, action=action, subject=node_subject(node), reason="by hand",
                         by="storm"))

    _say(cluster, node, "is to be drained")
    ask(DRAIN)
    cluster.loop.after(6.0 + 12.0 * v, lambda: ask(RELEASE_NODE))


def heal(cluster: Cluster) -> None:
    """The end of the storm: the world is whole again, whatever is broken in the runs."""
    _say(cluster, "end", "of the storm")
    cluster.weather.clear()
    cluster.network.heal()
    cluster.store.available = True
    cluster.store.restore()
    cluster.store.come_back()
    for job in cluster.jobs.values():
        job.slow_commit_s = 0.0
    for edge in cluster.edges.values():
        edge.journal_stalled = False
        _thaw(cluster, edge)
    _repair(cluster, COMMON_FAULT)
    weak_nodes.change_cards(cluster)
    for job in cluster.jobs.values():
        # All ranks stopped is a run suspended from outside: who did that lets it go on.
        living = [rank for which, rank in cluster.ranks() if which is job]
        if all(rank.stopped_at_s >= 0 for rank in living):
            for rank in living:
                _resume_rank(cluster, rank)


FAULTS: dict[str, Fault] = {
    "rank_killed": rank_killed, "rank_exited": rank_exited, "rank_hung": rank_hung,
    "rank_stopped": rank_stopped, "user_bug": user_bug, "commit_spoilt": commit_spoilt,
    "slow_commits": slow_commits, "agent_killed": agent_killed,
    "kill_mid_effect": kill_mid_effect, "launcher_killed": launcher_killed,
    "node_crashed": node_crashed, "node_gone": node_gone, "frozen_at_put": frozen_at_put,
    "suspended": suspended, "mount_hung": mount_hung, "folder_moved": folder_moved,
    "collective_left_out": collective_left_out, "generation_killed": generation_killed,
    "node_frozen": node_frozen, "node_fatal": node_fatal, "node_weak": weak_nodes.node_weak,
    "common_cause": common_cause, "store_replaced": links.store_replaced,
    "store_restored": store_restored, "store_down": links.store_down,
    "cut_from_store": links.cut_from_store,
    "isolate": links.isolate, "peers_cut": links.peers_cut, "flapping": links.flapping,
    "replaced_unseen": replaced_unseen, "unfit_unseen": unfit_unseen,
    "leader_and_another": leader_and_another,
    "joins": joins, "lost_beats": weather("lost_beats", 0.9), "lost_ack": weather("lost_ack", 0.6),
    "lost_request": weather("lost_request", 0.4), "slow": weather("slow_s", 1.5),
    "stale_reads": weather("stale_s", 4.0), "twice": weather("twice", 1.0),
    "wall_jump": wall_jump, "journal_stall": journal_stall, "preempted": preempted,
    "operator": operator, "paused": paused, "drained": drained,
}
