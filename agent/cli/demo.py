"""`holdfast demo`: trains, loses ranks three ways, comes back, shows the bill and the proof.

Owns the story and what must hold at its end.  It uses what everybody has: `holdfast train`, the
agent's API, the printed result.  Nothing here knows how recovery works, and no number is fixed
beforehand: the digest to compare with comes from a second run without faults.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from holdfast.worker.exits import USAGE

from . import report
from .child import Child
from .client import Agent, run_route
from .text import BAD, GOOD, STRONG, Failure, Line, Span, field, line, seconds, show

RUN, REFERENCE = "demo", "clean"
START_LIMIT_S = 180.0  # the first start extracts the corpus and trains the tokenizer
STEP_LIMIT_S = 120.0
RECOVERY_LIMIT_S = 60.0
END_LIMIT_S = 300.0
ASK_EVERY_S = 0.1
DIRECTORY_MAX = 84  # a Unix socket's path has 107 characters, and ours add `/run/clean/agent.sock`
RESULT = "result "
MARK = "HOLDFAST_DEMO"  # in the environment of every process of ours: none may outlive the demo


# Small enough for two cores to take a step in about 0.1 s, and it learns something in a minute.
SETTINGS = (
    "batch=32", "data_options.tokens=32", "model_options.tokens=32", "model_options.layers=1",
    "model_options.width=128", "optimizer.learning_rate=2e-3", "checkpoint.every=10",
)


class Fault(NamedTuple):
    """One fault of the story: when, which fault on which rank, and the name that it must get."""

    at: float  # part of all steps
    inject: str
    rank: int
    said: str
    named: frozenset[str]


STORY = (
    Fault(0.2, "kill", 1, "SIGKILL to rank 1", frozenset({"rank_killed"})),
    Fault(0.45, "stop", 1, "SIGSTOP to rank 1", frozenset({"rank_stopped"})),
    Fault(0.7, "stall", 1, "rank 1 stalls inside a step", frozenset({"rank_hung"})),
)


class Outcome(NamedTuple):
    """What a run printed when it ended."""

    code: int
    digests: frozenset[str]  # of the final weights, as printed; more than one if ranks disagree
    evaluation: dict[str, float]
    took_s: float


class Check(NamedTuple):
    what: str
    good: bool
    said: str


def demo(options: argparse.Namespace) -> int:
    """0 only if every check held.  Leaves no process, file or socket behind, Ctrl-C included."""
    if options.ranks < 2:
        raise Failure("the demo needs at least 2 ranks: set --ranks 2", USAGE)
    _need_trainer()
    signal.signal(signal.SIGTERM, _interrupt)
    ranks, steps = options.ranks, options.steps
    with _directory(options.keep) as directory:
        stage = Stage(directory, ranks, steps)
        show([line(Span("Holdfast demo", STRONG), f": {ranks} ranks, {steps} steps, three faults")])
        faulty = stage.perform()
        show([(), line(Span("the same training without faults, to compare with", STRONG))])
        clean = stage.reference()
        show(stage.bill())
        checks = [*stage.checks, *compare(faulty, clean), nothing_left(stage.token)]
        show(verdict(faulty, clean, checks))
    return 0 if all(check.good for check in checks) else 1


def _need_trainer() -> None:
    from importlib.util import find_spec

    lacking = [name for name in ("torch", "tokenizers") if find_spec(name) is None]
    if lacking:
        raise Failure(f"no {', '.join(lacking)} in {sys.executable}: install holdfast[trainer]")


def _interrupt(_number: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt


@contextmanager
def _directory(keep: bool) -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="holdfast-"))
    if len(str(directory)) > DIRECTORY_MAX:
        directory.rmdir()
        directory = Path(tempfile.mkdtemp(prefix="holdfast-", dir="/tmp"))
    try:
        yield directory
    finally:
        if keep:
            show([line(f"kept: {directory}")])
        else:
            shutil.rmtree(directory, ignore_errors=True)


class Stage:
    """Both runs, one after the other, and the findings about them."""

    def __init__(self, directory: Path, ranks: int, steps: int) -> None:
        self.directory, self.ranks, self.steps = directory, ranks, steps
        self.token = f"{os.getpid()}-{time.monotonic_ns()}"
        self.agent = Agent(directory / "run" / RUN / "api.sock")
        self.checks: list[Check] = []
        self.incidents: list[dict[str, Any]] = []
        self.ledger: dict[str, Any] = {}
        self._asked_s = 0.0

    # ------------------------------------------------------------------ the two runs

    def perform(self) -> Outcome:
        """The run with faults; each must be seen, named and recovered from before the next."""
        began_s = time.monotonic()
        with self._child(RUN) as child:
            for fault in STORY:
                self._until(child, lambda one=fault: self._step() >= one.at * self.steps,
                            START_LIMIT_S if fault is STORY[0] else STEP_LIMIT_S,
                            f"step {round(fault.at * self.steps)} was not reached")
                self._cause(child, fault)
            while child.pump(0.05):
                self._keep_bill()
                if time.monotonic() - began_s > END_LIMIT_S:
                    raise Failure("the run did not end")
            return self._outcome(child, time.monotonic() - began_s)

    def reference(self) -> Outcome:
        began_s = time.monotonic()
        with self._child(REFERENCE) as child:
            child.wait(END_LIMIT_S)
            return self._outcome(child, time.monotonic() - began_s)

    def _child(self, run: str) -> Child:
        here = self.directory
        command = [
            sys.executable, "-P", "-m", "holdfast.agent.cli", "train", "--run", run,
            "--nproc-per-node", str(self.ranks), "--python", sys.executable, f"steps={self.steps}",
            f"work_dir={here / 'data'}", f"checkpoint.dir={here / run}", *SETTINGS]
        scratch = here / "tmp"  # libraries leave caches in TMPDIR
        scratch.mkdir(exist_ok=True)
        environ = {
            **os.environ, MARK: self.token, "TMPDIR": str(scratch),
            "HOLDFAST_STATE_DIR": str(here / "state"), "HOLDFAST_RUNTIME_DIR": str(here / "run")}
        return Child(command, environ, here / f"{run}.log")

    def _outcome(self, child: Child, took_s: float) -> Outcome:
        code = child.process.wait(timeout=10.0)
        results = [json.loads(text.partition(RESULT)[2]) for text in child.lines
                   if RESULT + "{" in text]
        if code or not results:
            raise Failure(f"the run ended with {code} and {len(results)} results; see above")
        return Outcome(code, frozenset(one["digest"] for one in results),
                       results[0]["evaluation"], took_s)

    # ------------------------------------------------------------------ one fault

    def _cause(self, child: Child, fault: Fault) -> None:
        """Injects it, and waits until an incident names the right rank and is closed."""
        before = {one["id"] for one in self._all_incidents()}
        body = {"fault": fault.inject, "rank": fault.rank, "args": {}, "reason": "demo"}
        self.agent.post(run_route(RUN, "inject"), body)
        show([line(Span("demo      ", STRONG), f"{fault.said}, at step {self._step()}")])

        def ours() -> dict[str, Any] | None:
            subject = f"run/{RUN}/rank/{fault.rank}"
            for one in self._all_incidents():
                new = one["id"] not in before and one["subject"] == subject
                if new and one["fault"] in fault.named and one.get("state") == "closed":
                    return one
            return None

        try:
            self._until(child, lambda: ours() is not None, RECOVERY_LIMIT_S, "no recovery")
        except TimeoutError as error:
            answer = self._ask("/api/v1/status")
            show(report.status([answer] if answer else []))
            show(report.incidents(self._all_incidents()))
            raise Failure(f"{fault.said}: {error}; the agent's view is above") from error
        found = ours() or {}
        said = f"{found['fault']}, {found['culprit']}, cost {report.cost(found)}"
        self.checks.append(Check(fault.said, bool(found.get("culprit")), said))

    # ------------------------------------------------------------------ asking

    def _until(self, child: Child, holds: Any, limit_s: float, otherwise: str) -> None:
        """Passes the child's output on until `holds()`; TimeoutError, or Failure when it ended."""
        deadline = time.monotonic() + limit_s
        while not holds():
            if not child.pump(ASK_EVERY_S):
                raise Failure(f"the run ended too early ({otherwise}); see above")
            if time.monotonic() > deadline:
                raise TimeoutError(otherwise)

    def _ask(self, route: str) -> Any:
        try:
            return self.agent.get(route)
        except OSError:
            return None  # not up yet, or gone with its run

    def _step(self) -> int:
        answer = self._ask("/api/v1/status") or {"runs": []}
        return max((run["step"] for run in answer["runs"]), default=0)

    def _all_incidents(self) -> list[dict[str, Any]]:
        return self._ask("/api/v1/incidents?all=1") or self.incidents

    def _keep_bill(self) -> None:
        """Keeps the agent's last answers: it ends with its run."""
        if time.monotonic() - self._asked_s < ASK_EVERY_S:
            return
        self._asked_s = time.monotonic()
        self.incidents = self._all_incidents()
        self.ledger = self._ask("/api/v1/ledger") or self.ledger

    def bill(self) -> list[Line]:
        """Incidents and ledger, and a check that the ledger sums to the wall time."""
        wall_s = float(self.ledger.get("wall_s", 0.0))
        total_s = sum(self.ledger.get("categories", {}).values())
        good = wall_s > 0 and abs(total_s - wall_s) <= 0.01 * wall_s + 1.0
        self.checks.append(
            Check("ledger", good, f"{total_s:.1f} s in categories, {wall_s:.1f} s of wall time"))
        lines: list[Line] = [(), line(Span("incidents", STRONG)), *report.incidents(self.incidents)]
        if self.ledger:
            lines += [(), line(Span("ledger", STRONG)), *report.ledger(self.ledger)]
        return lines


# -------------------------------------------------------------------------------------- checks


def compare(faulty: Outcome, clean: Outcome) -> list[Check]:
    """Quality was measured, and both runs ended with the same weights."""
    quality = faulty.evaluation
    measured = 0.0 < quality.get("mrr_at_10", 0.0) <= quality.get("recall_at_10", 0.0) <= 1.0
    same = faulty.digests == clean.digests and len(clean.digests) == 1
    digests = " ".join(sorted(faulty.digests | clean.digests))
    return [
        Check("quality", measured, ", ".join(f"{key} {value}" for key, value in quality.items())),
        Check("proof", same, f"final weights {'bit-identical' if same else 'differ'}: {digests}")]


def nothing_left(token: str) -> Check:
    """No process that carries our mark lives on."""
    left = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if f"{MARK}={token}".encode() in (entry / "environ").read_bytes():
                left.append(entry.name)
        except OSError:
            continue  # gone, or another user's
    return Check("nothing left", not left, f"pids {', '.join(left)}" if left else "no process")


def verdict(faulty: Outcome, clean: Outcome, checks: list[Check]) -> list[Line]:
    """The last lines: what held, and what all of it cost."""
    lines: list[Line] = [(), line(Span("what had to hold", STRONG))]
    for check in checks:
        mark = Span("held  ", GOOD) if check.good else Span("FAILED", BAD)
        lines += [line("  ", mark, f"  {check.what}"), *field("", check.said, indent=10)]
    lines += [
        (), line(f"with three faults {seconds(faulty.took_s)}, without {seconds(clean.took_s)}")]
    return lines
