"""Runs over nodes that are hurt for real: from the fault to the first new step on all ranks.

Owns five cases on network namespaces with an etcd of three members among them.  `rank_kill`,
`exception`: one rank of four.  `node_loss`: a node of four loses power, and a spare is ready.
`leader_and_etcd`: the same of the node that leads, and a member of the store with it.  `shrink`: a
node of four goes, and no other is there.  Of each lost node a row says how many of the other agents
knew by then, and whether etcd's own leader went with it, whose successor an election finds.  Each
world is started once and hurt again and again; who was lost comes back before the next.  A rank's
kill and its exception take turns, for what else runs on the machine changes by the minute: each row
has the load, `ended_s`, when that rank's process had ended, and `raised_s`, when its page said that
it raised: an exception is ordered by the agent's API and raised where the step comes by, and only
then is there a fault.  Needs root, iproute2, nftables, etcd-server and etcd-client.

    python -m bench.cluster [--cases rank_kill exception node_loss leader_and_etcd shrink]
                            [--runs 10] [--weight 16] [--seed 1] [--etcd-timers 50 500]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .common import BENCH, ROOT, Failed, Results, percentile, rounded
from .observe import PageWatch, Step, pages

sys.path.insert(0, str(ROOT / "tests"))

from nodes.harness import Nodes
from nodes.worlds import World

from holdfast.agent.cli.client import Agent, run_route

OF_A_RANK = ("rank_kill", "exception")
CASES = (*OF_A_RANK, "node_loss", "leader_and_etcd", "shrink")
RANKS, STEPS, MEMBERS = 4, 10_000_000, (0, 1, 2)
SETTINGS = ("micro_batches=12", "batch=1")
START_LIMIT_S, BACK_LIMIT_S = 300.0, 60.0
QUIET_STEPS, POLL_S = 8, 0.002  # steps of all ranks between two faults
PAUSE_S = 4.0  # and time: standbys are built, a lease has passed since the plan


class Watched:
    """A world whose steps are read from its ranks' pages."""

    def __init__(self, world: World, nnodes: str, draw: random.Random) -> None:
        self.world, self.nnodes, self.draw = world, nnodes, draw
        self.pages: dict[int, PageWatch] = {}  # node ->
        self.victim, self.ended_ns = 0, 0  # the process that is hurt, and when it had ended
        self.raised_ns = 0  # and when its page said that it had raised

    def launch(self, number: int) -> None:
        self.world.train([number], self.nnodes, STEPS, *SETTINGS)
        self.pages[number] = PageWatch(self.world.processes[number].pid)

    def poll(self) -> list[tuple[int, Step]]:
        if self.victim and not self.raised_ns and self.has_raised():
            self.raised_ns = time.monotonic_ns()
        if self.victim and is_over(self.victim):
            self.victim, self.ended_ns = 0, time.monotonic_ns()
        return [(number, step) for number, watch in self.pages.items() for step in watch.poll()]

    def has_raised(self) -> bool:
        return any(view.pid == self.victim and view.outcome == "exception"
                   for watch in self.pages.values() for view in watch.views())

    def until(self, met: Callable[[list[tuple[int, Step]]], bool], limit_s: float) -> None:
        """Polls until the fresh steps meet it."""
        limit_s += time.monotonic()
        while not met(self.poll()):
            if time.monotonic() > limit_s:
                raise Failed(f"not within its limit: {self.world.said()[-6000:]}")
            time.sleep(POLL_S)

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
            if len(steady) != nodes or time.monotonic() - since_s < PAUSE_S:
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
    run.until(lambda _: run.ended_ns > 0, BACK_LIMIT_S)
    raised_s = (run.raised_ns - begun_ns) / 1e9 if run.raised_ns else 0.0
    return {"recovery_s": seconds, "ended_s": (run.ended_ns - begun_ns) / 1e9,
            "raised_s": raised_s, "redone_steps": redone, "node": number,
            "kept": kept(run, before, number)}


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
    candidates = sorted(set(before) - {leader}) if case != "leader_and_etcd" else [leader]
    number = run.draw.choice(candidates)
    others = [one for one in run.pages if one != number]
    logs = {one: log_of(world, one) for one in others}
    ends = {one: path.stat().st_size for one, path in logs.items()}
    run.pages.pop(number)
    world.nodes.blackhole(number)  # a machine without power says no goodbye
    begun_ns = time.monotonic_ns()
    (world.nodes[number].cgroups.all / "cgroup.kill").write_text("1")
    del world.processes[number]
    seconds, redone = run.first_new(before, RANKS if spares else RANKS - 1, begun_ns)
    known = [says_lost(path, ends[one], number) for one, path in logs.items()]
    row = {"recovery_s": seconds, "redone_steps": redone, "node": number,
           "leader": number == leader, "etcd": number in MEMBERS,
           "etcd_leader": number == first_member,
           "kept": kept(run, before, number), "known": sum(map(bool, known))}
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


def says_lost(path: Path, begin: int, lost: int) -> bool:
    with open(path, "rb") as file:
        file.seek(begin)
        return f"n{lost} is lost".encode() in file.read()


# ------------------------------------------------------------------------------------ the worlds


@contextmanager
def started(
    nodes: int, nnodes: str, weight: int, seed: int, etcd_timers_ms: Sequence[int]
) -> Iterator[Watched]:
    with Nodes(nodes, weight=weight) as made:
        world = World(made, members=MEMBERS)
        world.heartbeat_ms, world.election_ms = etcd_timers_ms
        world.start_store()
        run = Watched(world, nnodes, random.Random(seed))
        for number in range(nodes):
            run.launch(number)
        yield run


def series(
    run: Watched, cases: Sequence[str], runs: int, results: Results
) -> list[dict[str, Any]]:
    """The cases in turns."""
    rows = []
    for number, case in itertools.product(range(runs), cases):
        hurt = hurt_rank if case in OF_A_RANK else hurt_node
        row = {"case": case, "number": number, "load_1m": os.getloadavg()[0], **hurt(run, case)}
        row = {key: rounded(value) if isinstance(value, float) else value
               for key, value in row.items()}
        results.add(row)
        rows.append(row)
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--weight", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--etcd-timers", type=int, nargs=2, default=(50, 500),
                        metavar=("HEARTBEAT_MS", "ELECTION_MS"))
    parser.add_argument("--out", type=Path, default=BENCH / "results")
    options = parser.parse_args()
    results = Results("cluster", options.out)
    worlds = ((RANKS + 1, "4", [c for c in CASES if c in options.cases and c != "shrink"]),
              (RANKS, "3:4", [c for c in options.cases if c == "shrink"]))
    for nodes, nnodes, cases in worlds:
        if not cases:
            continue
        with started(nodes, nnodes, options.weight, options.seed,
                     options.etcd_timers) as run:
            of_a_rank = [case for case in cases if case in OF_A_RANK]
            others = [[case] for case in cases if case not in OF_A_RANK]
            rows = [row for turns in (of_a_rank, *others)
                    for row in series(run, turns, options.runs, results)]
            for case in cases:
                took = [row["recovery_s"] for row in rows if row["case"] == case]
                print(f"{case}: p50 {percentile(took, 0.5):.2f} s, longest {max(took):.2f} s of "
                      f"{len(took)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
