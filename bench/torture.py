"""A trainer over four nodes that loses a rank every six steps: what is committed, and at what cost.

Owns one case.  Behind the first step that all ranks of a generation have finished, a random rank is
killed after a number of steps drawn with a mean of six, somewhere within the step.  An attempted
step is one that was begun: those that were finished, those done again, and the one that each kill
cut short, so that 6 / 7 is the most that can commit.  The run goes on to its end without more kills
once there were enough, and must have the weights of a run that lost nobody.  Needs root, iproute2,
nftables and etcd-server.

    python -m bench.torture [--failures 500] [--weight 16] [--seed 1] [--quick]
"""

from __future__ import annotations

import argparse
import math
import os
import random
import re
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from .cluster import MEMBERS, POLL_S, RANKS, START_LIMIT_S, Watched
from .common import BENCH, ROOT, Failed, Results, rounded
from .observe import PageWatch, Step

sys.path.insert(0, str(ROOT / "tests"))

from nodes.harness import Nodes
from nodes.worlds import CLI, SMALL, World, output

MTBF_STEPS = 6.0  # on average; half a step of it is the one that a kill falls into
STEPS_EACH = 8.0  # of the run, for each kill: between two a few are finished behind the drawn one
BUDGET = re.compile(r"budget( *)= {.*}")  # of a runbook, which is 10 restarts a day of one rank
SPLIT = f"micro_batches={RANKS}"
CALM_STEPS = 40  # before the first kill: what a step takes
BACK_LIMIT_S, END_LIMIT_S = 60.0, 900.0
SLOW_S, SLOW_CHARS = 5.0, 6000  # a return that is to be understood: what was said until then


class Storm:
    """What the pages say of one run, and the kills."""

    def __init__(self, run: Watched, draw: random.Random) -> None:
        self.run, self.draw = run, draw
        self.firsts: dict[int, dict[int, int]] = {}  # generation -> rank -> its first step
        self.came_ns: dict[int, int] = {}  # generation -> when the last rank's first step ended
        self.last: dict[int, Step] = {}  # rank -> its newest step
        self.took_s: list[float] = []  # a kill to the next generation's first step of all ranks
        self.attempted = self.steps = 0  # of the generations that a kill has ended

    def poll(self) -> None:
        for _, step in self.run.poll():
            number = step.step
            if step.rank not in self.firsts.setdefault(step.generation, {}):
                number, end_ns = self.run.first_of(step)
                self.firsts[step.generation][step.rank] = number
                self.came_ns[step.generation] = max(
                    end_ns, self.came_ns.get(step.generation, end_ns))
            self.last[step.rank] = step

    def finished(self, generation: int) -> int:
        """The step that all ranks of this generation have finished; -1 while one has none."""
        steps = [one.step for one in self.last.values() if one.generation == generation]
        return min(steps) if len(steps) == RANKS else -1

    def until(self, generation: int, step: int, limit_s: float) -> None:
        limit_s += time.monotonic()
        while self.finished(generation) < step:
            if time.monotonic() > limit_s:
                raise Failed(f"generation {generation}: {self.run.world.said()[-6000:]}")
            if any(process.poll() for process in self.run.world.processes.values()):
                raise Failed(f"the run has ended: {self.run.world.said()[-6000:]}")
            time.sleep(POLL_S)
            self.poll()

    def kill(self, generation: int, step_s: float) -> None:
        """One, and the wait for who comes after it."""
        first = min(self.firsts[generation].values())
        more = math.ceil(math.log(1.0 - self.draw.random())
                         / math.log(1.0 - 1.0 / (MTBF_STEPS - 0.5)))
        self.until(generation, first + more - 1, BACK_LIMIT_S)
        within_s = time.monotonic() + self.draw.random() * step_s
        while time.monotonic() < within_s:
            time.sleep(POLL_S)
            self.poll()
        victim = self.last[self.draw.randrange(RANKS)]
        killed_ns = time.monotonic_ns()
        os.kill(victim.pid, signal.SIGKILL)
        self.until(generation + 1, 0, BACK_LIMIT_S)
        # By the pages' own times: this process gets few of the processors beside the nodes.
        self.took_s.append((self.came_ns[generation + 1] - killed_ns) / 1e9)
        if self.took_s[-1] > SLOW_S:
            print(f"generation {generation}: back after {self.took_s[-1]:.1f} s\n"
                  f"{self.run.world.said()[-SLOW_CHARS:]}", flush=True)
        last = max(max(self.firsts[generation + 1].values()) - 1, first)
        self.steps = last
        self.attempted += max(last, self.finished(generation)) - first + 2  # one was cut short


def weights(text: str) -> str:
    found = re.search(r'"digest": "([0-9a-f]+)"', text)
    if found is None:
        raise Failed(f"no digest: {text[-2000:]}")
    return found[1]


def torture(failures: int, weight: int, seed: int) -> dict[str, Any]:
    steps = int(failures * STEPS_EACH) + 2 * CALM_STEPS
    with Nodes(RANKS, weight=weight) as nodes:
        world = World(nodes, members=MEMBERS)
        world.max_restarts = 1_000_000
        runbook = BUDGET.sub("budget = { count = 1000, window_h = 24 }",
                             (ROOT / "runbooks/rank_killed.md").read_text())
        (nodes.home / "runbooks").mkdir()
        (nodes.home / "runbooks/rank_killed.md").write_text(runbook)
        world.settings = f'[runbooks]\ndirectory = "{nodes.home}/runbooks"\n'
        world.start_store()
        run = Watched(world, str(RANKS), random.Random(seed))
        for number in range(RANKS):
            world.train([number], RANKS, steps, SPLIT)
            run.pages[number] = PageWatch(world.processes[number].pid)
        storm = Storm(run, random.Random(seed))
        storm.until(1, 5, START_LIMIT_S)
        calm_s = time.monotonic()
        storm.until(1, 5 + CALM_STEPS, START_LIMIT_S)
        step_s = (time.monotonic() - calm_s) / CALM_STEPS
        begun_s, begun, generation = time.monotonic(), storm.finished(1), 1
        while len(storm.took_s) < failures and storm.finished(generation) < steps - 20:
            storm.kill(generation, step_s)
            generation += 1
            if generation % 50 == 0:
                print(f"{len(storm.took_s)} kills, step {storm.steps}", flush=True)
        lasted_s = time.monotonic() - begun_s
        done, attempted = storm.steps - begun, storm.attempted - begun
        codes = [process.wait(END_LIMIT_S) for process in world.processes.values()]
        said = "".join(output(node) for node in nodes)
        clean = nodes[0].run(
            [*CLI, "train", "--run", "clean", "--nproc-per-node", str(RANKS),
             f"work_dir={world.shared}/work", f"checkpoint.dir={world.shared}/clean",
             f"steps={steps}", *SMALL, SPLIT],
            {"PYTHONPATH": str(ROOT / ".types"), "OMP_NUM_THREADS": "1"}, timeout_s=END_LIMIT_S)
        equal = codes == [0] * RANKS and weights(said) == weights(clean.stdout + clean.stderr)
    kills = len(storm.took_s)
    return {"kills": kills, "steps": done, "attempted": attempted,
            "committed_share": done / attempted, "calm_step_s": step_s,
            "lost_s_each": (lasted_s - done * step_s) / kills, "lasted_s": lasted_s,
            "back_s": [round(one, 3) for one in storm.took_s],
            "redone_steps": sum(map(int, re.findall(r"(\d+) steps? lost", said))),
            "equal": equal, "codes": codes, "ok": equal, "why": ""}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.torture", description=__doc__.partition("\n")[0])
    parser.add_argument("--failures", type=int, default=500)
    parser.add_argument("--weight", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="20 failures")
    parser.add_argument("--out", type=Path, default=BENCH / "results")
    options = parser.parse_args(arguments)
    results = Results("torture", options.out)
    row = torture(20 if options.quick else options.failures, options.weight, options.seed)
    row = {key: rounded(value) if isinstance(value, float) else value
           for key, value in row.items()}
    results.add({"case": "torture", **row})
    back = sorted(row.pop("back_s"))
    print("  ".join(f"{key} {value}" for key, value in row.items()))
    print(f"back after {statistics.median(back):.2f} s p50, {back[-1]:.2f} s at most")
    print(f"rows: {results.path}")
    return int(not row["ok"])


if __name__ == "__main__":
    sys.exit(main())
