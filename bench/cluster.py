"""Runs over nodes that are hurt for real: from the fault to the first new step on all ranks.

Owns five cases on network namespaces with an etcd of three members among them.  `rank_kill`,
`exception`: one rank of four.  `node_loss`: any node of four loses power, and a spare is ready.
`leader_and_etcd`: the same of the node that leads, where it has a member of etcd.  `shrink`: any
node of four goes, and no other is there.  Of each lost node a row says whether it led, whether it
had a member of etcd or etcd's own leader, whose successor an election finds, how many of the other
agents had named it by the first new step, and `known_s`, when each of them did.  Each world is
started once and hurt again and again; who was lost comes back before the next.  A rank's kill and
its exception take turns, for what else runs on the machine changes by the minute: each row has the
load, `ended_s`, when that rank's process had ended (`stays`: it had not, for who raises lives on),
and `raised_s`, when its page said that it raised: an exception is ordered by the agent's API and
raised where the step comes by, and only then is there a fault.

At a world's end the run is told to end, and one without a fault trains as many steps on one node:
the row `weights_...` says whether the weights are the same to the last bit, which they must be
where the world had four ranks all the time, and how far apart the furthest two are.

The lease is as it ships, etcd's timers as docs/cluster.md sets them; etcd's own are
`--etcd-timers 100 1000`.  Needs root, iproute2, nftables, etcd-server and etcd-client.

    python -m bench.cluster [--cases rank_kill exception node_loss leader_and_etcd shrink]
                            [--runs 10 | --quick] [--weight 16] [--seed 1] [--lease 10]
                            [--etcd-timers 20 200]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .common import BENCH, ROOT, Failed, Results, percentile, rounded
from .observe import LogWatch, PageWatch, Step, pages

sys.path.insert(0, str(ROOT / "tests"))

from nodes.harness import Nodes
from nodes.worlds import CLI, SMALL, World, output

from holdfast.agent.cli import main as holdfast
from holdfast.agent.cli.client import Agent, run_route
from holdfast.agent.config import settings
from holdfast.trainer.checkpoint import format as files
from holdfast.worker import exits

OF_A_RANK = ("rank_kill", "exception")
CASES = (*OF_A_RANK, "node_loss", "leader_and_etcd", "shrink")
RANKS, STEPS, MEMBERS = 4, 10_000_000, (0, 1, 2)
# Of one pair a batch learns nothing.  The rate stays the same, so that a run of fewer steps takes
# the same ones.
SETTINGS = ("micro_batches=12", "batch=2", "optimizer.final_fraction=1")
START_LIMIT_S, BACK_LIMIT_S, KNOWN_LIMIT_S = 300.0, 60.0, 30.0
END_LIMIT_S, CLEAN_LIMIT_S = 120.0, 1800.0
QUIET_STEPS, POLL_S = 8, 0.002  # steps of all ranks between two faults
PAUSE_S = 4.0  # and time: standbys are built


class Watched:
    """A world whose steps are read from its ranks' pages."""

    def __init__(self, world: World, nnodes: str, draw: random.Random) -> None:
        self.world, self.nnodes, self.draw = world, nnodes, draw
        self.pages: dict[int, PageWatch] = {}  # node ->
        self.victim, self.ended_ns = 0, 0  # the process that is hurt, and when it had ended
        self.raised_ns = 0  # and when its page said that it had raised
        self.logs: dict[int, LogWatch] = {}  # node -> its agent's, in which a lost one is named

    def launch(self, number: int) -> None:
        self.world.train([number], self.nnodes, STEPS, *SETTINGS)
        self.pages[number] = PageWatch(self.world.processes[number].pid)

    def poll(self) -> list[tuple[int, Step]]:
        if self.victim and not self.raised_ns and self.has_raised():
            self.raised_ns = time.monotonic_ns()
        if self.victim and is_over(self.victim):
            self.victim, self.ended_ns = 0, time.monotonic_ns()
        for log in self.logs.values():
            log.poll()
        return [(number, step) for number, watch in self.pages.items() for step in watch.poll()]

    def has_raised(self) -> bool:
        return any(view.pid == self.victim and view.outcome == "exception"
                   for watch in self.pages.values() for view in watch.views())

    def until(self, met: Callable[[list[tuple[int, Step]]], bool], limit_s: float) -> None:
        """Polls until the fresh steps meet it."""
        if not self.within(met, limit_s):
            raise Failed(f"not within its limit: {self.world.said()[-6000:]}")

    def within(self, met: Callable[[list[tuple[int, Step]]], bool], limit_s: float) -> bool:
        limit_s += time.monotonic()
        while not met(self.poll()):
            if time.monotonic() > limit_s:
                return False
            time.sleep(POLL_S)
        return True

    def quiet(self, nodes: int, spares: int = 0) -> dict[int, Step]:
        """Node -> its newest step, once so many train undisturbed and so many more stand by."""
        count: dict[tuple[int, int], int] = {}
        last: dict[int, Step] = {}
        since_s = time.monotonic()

        def met(fresh: list[tuple[int, Step]]) -> bool:
            for number, step in fresh:
                last[number] = step
                count[number, step.generation] = count.get((number, step.generation), 0) + 1
            newest = max((step.generation for step in last.values()), default=0)
            steady = [n for (n, g), c in count.items() if g == newest and c >= QUIET_STEPS]
            # A lease has passed since the plan as well.
            pause_s = max(PAUSE_S, self.world.lease_s + 1.0)
            if len(steady) != nodes or time.monotonic() - since_s < pause_s:
                return False
            return self.standing_by(newest) >= spares

        self.until(met, START_LIMIT_S)
        newest = max(step.generation for step in last.values())
        return {number: step for number, step in last.items() if step.generation == newest}

    def standing_by(self, generation: int) -> int:
        """Nodes that the leader counts among the spares, by their own agents' word."""
        ready = 0
        for number, watch in self.pages.items():
            views = watch.views()
            own = all(view.generation != generation for view in views)
            ready += bool(own and views and self.world.status(number).get("connected"))
        return ready

    def first_new(self, before: dict[int, Step], ranks: int, begun_ns: int) -> tuple[float, int]:
        """(seconds to the first step of a new generation on all its ranks, steps done anew)."""
        old = max(step.generation for step in before.values())
        peak = max(step.step for step in before.values())
        found: dict[int, Step] = {}

        def met(fresh: list[tuple[int, Step]]) -> bool:
            nonlocal peak
            for _, step in fresh:
                if step.generation == old:
                    peak = max(peak, step.step)
                elif step.generation > old:
                    found.setdefault(step.rank, step)
            return len(found) == ranks

        self.until(met, BACK_LIMIT_S)
        firsts = [self.first_of(step) for step in found.values()]
        redone = max(0, peak + 1 - min(number for number, _ in firsts))
        return (max(end_ns for _, end_ns in firsts) - begun_ns) / 1e9, redone

    def first_of(self, step: Step) -> tuple[int, int]:
        """(number, end) of the first step that this rank finished in the step's generation: a poll
        that came late has missed it, and the page's ring of times still tells."""
        number, end_ns = step.step, step.end_ns
        for watch in self.pages.values():
            for page in watch.known.values():
                view = pages.read_page(page.mapped)
                if view.pid != step.pid or view.generation != step.generation:
                    continue
                took = {of: took_ns(page.mapped, of) for of, _ in view.step_seq}
                while number - 1 in took:
                    end_ns, number = end_ns - took[number], number - 1
        return number, end_ns


def is_over(pid: int) -> bool:
    """Ended, whether or not its launcher has seen it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("Z", "X")
    except OSError:
        return True


def took_ns(mapped: Any, step: int) -> int:
    """From the end of the step before to this one's, in one generation."""
    at = pages.F_STEP_NS + step % pages.RING
    return int(struct.unpack_from("=Q", mapped, 8 * at)[0])


# ------------------------------------------------------------------------------------ one fault


def hurt_rank(run: Watched, case: str) -> dict[str, Any]:
    before = run.quiet(RANKS)
    number = run.draw.choice(sorted(before))
    step = before[number]
    run.victim, run.ended_ns, run.raised_ns = step.pid, 0, 0
    begun_ns = time.monotonic_ns()
    if case == "rank_kill":
        os.kill(step.pid, signal.SIGKILL)
    else:
        socket = run.world.nodes[number].home / "run" / run.world.name / "api.sock"
        Agent(socket).post(run_route(run.world.name, "inject"), {
            "fault": "exception", "rank": step.rank, "args": {}, "reason": "bench", "by": "bench"})
    seconds, redone = run.first_new(before, RANKS, begun_ns)
    if case == "rank_kill":
        run.until(lambda _: run.ended_ns > 0, BACK_LIMIT_S)
    stays = bool(run.victim)  # its process was not seen to end
    run.victim = 0
    return {"recovery_s": seconds, "stays": stays,
            "ended_s": (run.ended_ns - begun_ns) / 1e9 if run.ended_ns else 0.0,
            "raised_s": (run.raised_ns - begun_ns) / 1e9 if run.raised_ns else 0.0,
            "redone_steps": redone, "node": number, "kept": kept(run, before, number)}


def kept(run: Watched, before: dict[int, Step], lost: int) -> int:
    """Nodes whose rank has the process that it had."""
    run.poll()
    now = {number: {view.pid for view in watch.views() if view.rank >= 0}
           for number, watch in run.pages.items()}
    return sum(number != lost and step.pid in now.get(number, ())
               for number, step in before.items())


def hurt_node(run: Watched, case: str) -> dict[str, Any]:
    world, spares = run.world, int(case != "shrink")
    before = run.quiet(RANKS, spares)
    leader, first_member = world.leader(), leads_store(world)
    # A spare may lead as well, and nothing is lost with it.
    wanted = [leader] if case == "leader_and_etcd" and leader in before else sorted(before)
    number = run.draw.choice(wanted)
    others = [one for one in run.pages if one != number]
    run.logs = {one: LogWatch(log_of(world, one), f"n{number} is lost") for one in others}
    run.pages.pop(number)
    world.nodes.blackhole(number)  # a machine without power says no goodbye
    begun_ns = time.monotonic_ns()
    (world.nodes[number].cgroups.all / "cgroup.kill").write_text("1")
    del world.processes[number]
    seconds, redone = run.first_new(before, RANKS if spares else RANKS - 1, begun_ns)
    row = {"recovery_s": seconds, "redone_steps": redone, "node": number,
           "leader": number == leader, "etcd": number in MEMBERS,
           "etcd_leader": number == first_member, "kept": kept(run, before, number),
           "known": sum(log.at_ns > 0 for log in run.logs.values()), "observers": len(others)}
    run.within(lambda _: all(log.at_ns for log in run.logs.values()), KNOWN_LIMIT_S)
    row["known_s"] = {f"n{one}": rounded((log.at_ns - begun_ns) / 1e9)
                      for one, log in run.logs.items() if log.at_ns}
    for log in run.logs.values():
        log.close()
    run.logs = {}
    world.nodes[number].kill()  # its last process is waited for
    world.nodes.blackhole(number, on=False)
    if number in MEMBERS:
        world.start_member(number)
    run.launch(number)
    return row


def leads_store(world: World) -> int:
    """The node whose member of etcd leads the others; -1 where none says so."""
    for number in MEMBERS:
        said = world.nodes[number].run(
            ["etcdctl", "--endpoints", f"{world.nodes[number].address}:2379", "endpoint", "status",
             "-w", "json"], {"ETCDCTL_API": "3"})
        for one in json.loads(said.stdout or "[]"):
            if one["Status"]["leader"] == one["Status"]["header"]["member_id"]:
                return number
    return -1


def log_of(world: World, number: int) -> Path:
    return next((world.nodes[number].home / "state").rglob("agent.log"))


# ------------------------------------------------------------------------------------ the worlds


@contextmanager
def started(
    nodes: int, nnodes: str, seed: int, weight: int, lease_s: float, etcd_timers_ms: Sequence[int]
) -> Iterator[Watched]:
    with Nodes(nodes, weight=weight) as made:
        world = World(made, members=MEMBERS, lease_s=lease_s)
        world.heartbeat_ms, world.election_ms = etcd_timers_ms
        world.start_store()
        run = Watched(world, nnodes, random.Random(seed))
        for number in range(nodes):
            run.launch(number)
        yield run


def series(
    run: Watched, cases: Sequence[str], runs: int, keep: Callable[[dict[str, Any]], None]
) -> None:
    """The cases in turns."""
    for number, case in itertools.product(range(runs), cases):
        hurt = hurt_rank if case in OF_A_RANK else hurt_node
        keep({"case": case, "number": number, "load_1m": os.getloadavg()[0], **hurt(run, case)})


def final_weights(run: Watched, name: str) -> dict[str, Any]:
    """Ends the run as a scheduler does, and compares it with one that nothing was done to."""
    world = run.world
    spares = len(run.pages) - RANKS
    run.quiet(RANKS, spares)
    for process in world.processes.values():
        process.send_signal(signal.SIGTERM)
    codes = [process.wait(END_LIMIT_S) for process in world.processes.values()]
    if set(codes) != {exits.RETRY}:
        raise Failed(f"ended with {codes}: {world.said()[-6000:]}")
    said = "".join(output(node) for node in world.nodes)
    step, state = newest(world, world.name)
    begun_s = time.monotonic()
    clean = world.nodes[0].run(
        [*CLI, "train", "--run", "clean", "--nproc-per-node", str(RANKS), "--standby", "0",
         f"work_dir={world.shared}/work", f"checkpoint.dir={world.shared}/clean", *SMALL, *SETTINGS,
         f"steps={step}", f"checkpoint.every={step}", "snapshot.enabled=false"],
        {"PYTHONPATH": str(ROOT / ".types"), "OMP_NUM_THREADS": "1"}, timeout_s=CLEAN_LIMIT_S)
    if clean.returncode:
        raise Failed(f"the run without a fault: {clean.stderr[-3000:]}")
    return {"case": f"weights_{name}", "load_1m": os.getloadavg()[0], "steps": step,
            "generations": max(map(int, re.findall(r"planned generation (\d+)", said)), default=1),
            "identical": (step, state) == newest(world, "clean"), "weights_apart": apart(world),
            "clean_s": time.monotonic() - begun_s}


def newest(world: World, name: str) -> tuple[int, tuple[str, ...]]:
    """The step of a run's newest checkpoint, and the digests of its files: weights, optimizer and
    all that is saved."""
    found, wrong = files.newest_valid(world.shared / name)
    if found is None:
        raise Failed(f"{name} left no checkpoint that proves: {wrong}")
    shards = files.read_manifest(Path(found.path))["shards"]
    return found.step, tuple(one["digest"] for one in shards)


def apart(world: World) -> float:
    """The furthest that one weight is from the other run's."""
    import torch
    states = []
    for name in (world.name, "clean"):
        last, file = max((world.shared / name).glob("step-*")), world.shared / f"{name}.pt"
        if holdfast(["checkpoint", "export", str(last), str(file)]):
            raise Failed(f"{last} was not written as weights")
        states.append(torch.load(file))
    return max(float((tensor - states[1][name]).abs().max()) for name, tensor in states[0].items())


def summary(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A line for each case."""
    for case in dict.fromkeys(row["case"] for row in rows):
        mine = [row for row in rows if row["case"] == case]
        if case.startswith("weights_"):
            (row,) = mine
            yield f"{case}: " + (row["why"] or (
                f"{row['steps']} steps, identical" if row["identical"] else
                f"{row['steps']} steps, weights at most {row['weights_apart']:.1e} apart"))
            continue
        words = [f"{case}: {spread([row['recovery_s'] for row in mine])} of {len(mine)}"]
        known = [seconds for row in mine for seconds in row.get("known_s", {}).values()]
        if known:
            words.append(f"named by each other agent after {spread(known)} of {len(known)}")
        yield "; ".join(words)


def spread(found: Sequence[float]) -> str:
    return f"p50 {percentile(found, 0.5):.2f} s, longest {max(found):.2f} s"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.cluster")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="one run of each case")
    parser.add_argument("--weight", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lease", type=float, default=settings.Detect().lease_s,
                        metavar="SECONDS")
    parser.add_argument("--etcd-timers", type=int, nargs=2, default=(20, 200),
                        metavar=("HEARTBEAT_MS", "ELECTION_MS"))
    parser.add_argument("--out", type=Path, default=BENCH / "results")
    options = parser.parse_args(arguments)
    results, rows = Results("cluster", options.out), list[dict[str, Any]]()
    timers = {"lease_s": options.lease, "etcd_ms": list(options.etcd_timers),
              "etcd_pre_vote": True}

    def keep(row: dict[str, Any]) -> None:
        row = {"ok": True, "why": "", **{
            key: rounded(value) if isinstance(value, float) and key != "weights_apart" else value
            for key, value in row.items()}}
        results.add({**row, **timers})
        rows.append(row)
        print("  ".join(f"{key} {value}" for key, value in row.items()
                        if key not in ("ok", "why")), flush=True)

    runs = 1 if options.quick else options.runs
    worlds = (("same_size", RANKS + 1, "4", [c for c in CASES if c != "shrink"]),
              ("shrink", RANKS, "3:4", ["shrink"]))
    for name, nodes, nnodes, cases in worlds:
        cases = [case for case in cases if case in options.cases]
        if not cases:
            continue
        with started(nodes, nnodes, options.seed, options.weight, options.lease,
                     options.etcd_timers) as run:
            of_a_rank = [case for case in cases if case in OF_A_RANK]
            try:
                for turns in (of_a_rank, *([case] for case in cases if case not in OF_A_RANK)):
                    series(run, turns, runs, keep)
                keep(final_weights(run, name))
            except Failed as error:  # the other world is measured all the same
                keep({"case": f"weights_{name}", "ok": False, "why": str(error)[-2000:],
                      "identical": False})
    print("\n".join(summary(rows)), f"rows: {results.path}", sep="\n")
    return int(any(not row.get("ok", True) or (row["case"] == "weights_same_size"
                                               and not row["identical"]) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
