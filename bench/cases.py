"""The recovery cases: what runs, what is done to it, and what then counts.

Owns one run of one case, from start to its row.  Must not choose how often or in which order the
cases run (recovery.py does).  The fault always comes from outside, as soon as rank 1 is seen to
have finished step 17, that is at the start of its step 18; a stall alone is asked of the agent.
"""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from . import common
from .common import BENCH, POLL_S, Failed, Place
from .observe import PageWatch, Step, StepFile

FAULT_AFTER = 17  # rank 1 has finished this many steps: it is at the start of step 18
STEPS = 24
START_LIMIT_S = 120.0  # to the fault: a cold start, and the corpus the first time
EXIT_LIMIT_S = 60.0
INCIDENT_LIMIT_S = 1.5  # the agent closes an incident within a tick or two
RESULT = re.compile(r"result (\{.*\})")
DIGEST = re.compile(r"^.*\bdigest ([0-9a-f]{64})\s*$", re.MULTILINE)


class Case(NamedTuple):
    """One row of the table, many runs."""

    name: str
    grade: str  # trainer | script | torchrun
    fault: str  # sigkill | sigstop | stall | none
    share: float = 1.0  # of the runs asked for
    ranks: int = 2
    flags: tuple[str, ...] = ()
    wrapper: str = ""
    limit_s: float = 60.0  # fault -> first new step; torchrun may never come back
    settings: tuple[str, ...] = ()  # of the trainer


CASES = (
    Case("trainer_sigkill", "trainer", "sigkill", share=2.0),
    Case("trainer_sigstop", "trainer", "sigstop"),
    Case("trainer_stall", "trainer", "stall"),
    Case("script_sigkill", "script", "sigkill"),
    Case("script_sigstop", "script", "sigstop", flags=("--hang-limit", "2")),
    Case("torchrun_sigkill", "torchrun", "sigkill", limit_s=30.0),
    Case("torchrun_sigkill_prefix", "torchrun", "sigkill", wrapper="fresh_prefix.py",
         limit_s=30.0),
    Case("torchrun_sigstop", "torchrun", "sigstop", share=0.3, limit_s=20.0),
    Case("trainer_sigkill_cold", "trainer", "sigkill", share=0.5, flags=("--standby", "0")),
    Case("trainer_sigkill_3", "trainer", "sigkill", share=0.3, ranks=3),
    Case("trainer_sigkill_4", "trainer", "sigkill", share=0.3, ranks=4),
)
BY_NAME = {case.name: case for case in CASES}


class Run:
    """One started case, polled from outside."""

    def __init__(
        self, case: Case, where: Place, process: subprocess.Popen[bytes], name: str
    ) -> None:
        self.case, self.where, self.process, self.name = case, where, process, name
        self.watch = PageWatch(process.pid) if case.grade != "torchrun" else None
        self.file = StepFile(where.home / "steps") if case.grade != "trainer" else None

    @property
    def steps(self) -> list[Step]:
        """By the method that is the same for all rows of this grade."""
        source = self.file or self.watch
        assert source is not None
        return source.steps

    def until(self, met: Callable[[], bool], limit_s: float, what: str) -> None:
        """Polls until `met`.  Failed after the limit, or when the run ends first."""
        deadline = time.monotonic() + limit_s
        while True:
            ended = self.process.poll() is not None
            for source in (self.file, self.watch):
                if source is not None:
                    source.poll()
            if met():
                return
            if ended:
                raise Failed(f"ended with {self.process.returncode} before {what}")
            if time.monotonic() > deadline:
                raise Failed(f"not within {limit_s:g} s: {what}")
            time.sleep(POLL_S)

    def at_fault_point(self) -> Step | None:
        return next((s for s in self.steps if s.rank == 1 and s.step == FAULT_AFTER), None)


def command_of(case: Case, where: Place, name: str, shared: Path) -> list[str]:
    """`shared` holds what every trainer run may reuse: the corpus and the tokenizer."""
    if case.grade == "trainer":
        settings = [f"work_dir={shared}", f"checkpoint.dir={where.home / 'checkpoints'}",
                    f"steps={STEPS}", f"micro_batches={case.ranks}", *case.settings]
        return common.train_command(case.ranks, name, *settings, flags=case.flags)
    script = [str(BENCH / "workload_script.py"), "--dir", str(where.home), "--steps-file",
              str(where.home / "steps"), "--steps", str(STEPS)]
    if case.wrapper:
        script.insert(0, str(BENCH / case.wrapper))
    if case.grade == "torchrun":
        return common.torchrun_command(script, case.ranks)
    return common.run_command(script, case.ranks, name, *case.flags)


def measure(case: Case, shared: Path) -> dict[str, Any]:
    """One run; its row.  A run that fails is a row as well."""
    name = "bench"
    with common.place(case.name) as where:
        command = command_of(case, where, name, shared)
        row: dict[str, Any] = {
            "case": case.name, "ranks": case.ranks, "ok": False, "why": "",
            "command": common.neutral(command, where).replace(str(shared), "$SHARED"),
            "load_1m": round(os.getloadavg()[0], 2),
        }
        with common.running(command, where) as process:
            run = Run(case, where, process, name)
            try:
                follow(run, row)
                row["ok"] = True
            except Failed as error:
                row["why"] = str(error)
                row["log"] = common.log_tail(where)
            finally:
                if run.file is not None:
                    run.file.close()
    return row


def follow(run: Run, row: dict[str, Any]) -> None:
    """Start, fault, recovery, end; fills the row as it goes."""
    case = run.case
    began_ns = time.monotonic_ns()
    if case.fault != "none":
        run.until(lambda: run.at_fault_point() is not None, START_LIMIT_S, "the fault point")
        row["fault_point_s"] = (time.monotonic_ns() - began_ns) / 1e9
        describe_before(run, row)
        fault_ns = strike(run, row)
        recover(run, row, fault_ns)
        if case.grade != "torchrun":
            read_incidents(run, row, fault_ns)
    code = common.wait_exit(run.process, START_LIMIT_S if case.fault == "none" else EXIT_LIMIT_S)
    row["exit_code"] = code
    if code is None:
        raise Failed("training went on, but the run did not end")
    row["digest"] = digest_of(run)
    if code:
        raise Failed(f"ended with {code}")


def describe_before(run: Run, row: dict[str, Any]) -> None:
    """The step's time in this run, and whether a warm standby was there."""
    ends = [s.end_ns for s in run.steps if s.rank == 1]
    gaps = [b - a for a, b in zip(ends, ends[1:], strict=False)]
    row["step_s"] = round(statistics.median(gaps) / 1e9, 4)
    if run.watch is not None:
        row["standbys"] = [view.phase for view in run.watch.views() if view.rank < 0]


def strike(run: Run, row: dict[str, Any]) -> int:
    """Does to the victim what the case says; returns the time just before."""
    victim = run.at_fault_point()
    assert victim is not None
    if run.case.fault == "stall":
        body = {"fault": "stall", "rank": 1, "args": {}, "reason": "bench"}
        fault_ns = time.monotonic_ns()
        common.api(run.where, run.name, f"/api/v1/runs/{run.name}/inject", body)
        row["inject_answer_s"] = (time.monotonic_ns() - fault_ns) / 1e9
        return fault_ns
    number = signal.SIGKILL if run.case.fault == "sigkill" else signal.SIGSTOP
    fault_ns = time.monotonic_ns()
    os.kill(victim.pid, number)
    row["observed_late_s"] = (fault_ns - victim.end_ns) / 1e9
    return fault_ns


def epoch(step: Step) -> int:
    """What changes with every restart: the generation, or the process where none is known."""
    return step.generation or step.pid


def recover(run: Run, row: dict[str, Any], fault_ns: int) -> None:
    """Waits for every rank's first step that no rank had ever finished."""
    before = {epoch(s) for s in run.steps}
    row["fault_ns"] = fault_ns

    def firsts(steps: Sequence[Step]) -> dict[int, int]:
        top = max(s.step for s in steps if epoch(s) in before)
        found: dict[int, int] = {}
        for s in steps:
            if epoch(s) not in before and s.step > top:
                found.setdefault(s.rank, s.end_ns)
        return found

    try:
        run.until(lambda: len(firsts(run.steps)) == run.case.ranks, run.case.limit_s,
                  "the first new step on every rank")
    finally:
        top = max(s.step for s in run.steps if epoch(s) in before)
        again = sorted({s.step for s in run.steps if epoch(s) not in before and s.step <= top})
        row["top_step"], row["redone_steps"] = top, len(again)
        row["steps"] = [[*s.row()[:4], s.end_ns - fault_ns] for s in run.steps]
    found = firsts(run.steps)
    row["first_new_s"] = {str(r): round((ns - fault_ns) / 1e9, 4) for r, ns in found.items()}
    row["recovery_s"] = round((max(found.values()) - fault_ns) / 1e9, 4)
    if run.file is not None and run.watch is not None:
        row["recovery_by_page_s"] = by_page(run, top, fault_ns)


def by_page(run: Run, top: int, fault_ns: int) -> float | None:
    """A script's step as its page counts it: a new process begins at 1 again."""
    assert run.watch is not None
    started = {s.pid for s in run.watch.steps if s.end_ns < fault_ns}
    after = [s for s in run.watch.steps if s.pid not in started]
    redone = top - top // 5 * 5  # its checkpoint is written every 5 steps
    ends = [s.end_ns for s in after if s.step == redone + 1]
    return round((max(ends) - fault_ns) / 1e9, 4) if len(ends) >= run.case.ranks else None


def read_incidents(run: Run, row: dict[str, Any], fault_ns: int) -> None:
    """What the agent says of it: when it was seen, whom it blamed.  Its silence is noted."""
    deadline = time.monotonic() + INCIDENT_LIMIT_S
    found: list[dict[str, Any]] = []
    while time.monotonic() < deadline:
        try:
            found = common.incidents(run.where, run.name)
        except Failed as error:
            row["api"] = str(error)
            return
        if found and all(item["state"] in ("closed", "taken_back") for item in found):
            break
        time.sleep(0.02)  # the agent's tick, not a condition of the measurement
    row["incidents"] = [
        {key: item.get(key) for key in
         ("fault", "subject", "culprit", "reason", "state", "timeline", "lost_steps", "lost_s")}
        for item in found[:5]
    ]
    fault_wall_s = fault_ns / 1e9 + common.wall_minus_monotonic_s()
    # A verdict may fall without a suspicion before it: then it is the first word, too.
    for words, key in ((("suspected", "seen"), "suspected_s"), (("seen",), "verdict_s")):
        times = [at for item in found for at, text in item["timeline"] if text.startswith(words)]
        if times:
            row[key] = round(min(times) - fault_wall_s, 4)
    if "suspected_s" in row:
        # A stall begins somewhere in the step after the last finished one, which is what counts.
        last = max(s.end_ns for s in run.steps if s.rank == 1 and s.step == row["top_step"])
        row["still_at_suspicion_s"] = round(row["suspected_s"] - (last - fault_ns) / 1e9, 4)
    if "verdict_s" in row:
        row["after_verdict_s"] = round(row["recovery_s"] - row["verdict_s"], 4)
        row["right_rank"] = any("rank 1" in (item.get("culprit") or "") for item in found)


def digest_of(run: Run) -> str:
    """Of the final weights: the trainer's result line, or the script's own line."""
    text = common.log_text(run.where)
    if run.case.grade == "trainer":
        results = {json.loads(found)["digest"] for found in RESULT.findall(text)}
        return results.pop() if len(results) == 1 else ""
    found = DIGEST.findall(text)
    return found[-1] if found else ""
