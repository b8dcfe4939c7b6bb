"""Starts real launchers with real agents and ranks, and asks them what they see."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from holdfast.agent.cli.client import Agent
from holdfast.agent.cli.text import Failure
from holdfast.agent.history.journal import Journal

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
LIMIT_S = 90.0
LOOK_S = 0.05  # each look is a question to an agent, on two processors that carry it and its ranks


def wait_for(holds: Callable[[], Any], limit_s: float = LIMIT_S, what: str = "") -> Any:
    """Polls a condition with a deadline; its truthy value, or a failure that says what."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        value = holds()
        if value:
            return value
        time.sleep(LOOK_S)
    raise AssertionError(f"not within {limit_s} s: {what or holds}")


def processes_with(mark: str) -> dict[int, str]:
    """Pid and command line of every process whose environment carries `mark`."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark.encode() in (entry / "environ").read_bytes():
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    found[int(entry.name)] = command
            except OSError:
                continue
    return {pid: command for pid, command in found.items() if command}


class Run:
    """One `holdfast run` or `holdfast train` and its output."""

    def __init__(self, home: Path, name: str, command: list[str], environ: dict[str, str]) -> None:
        self.home, self.name = home, name
        self.output_path = home / f"{name}.out"
        with open(self.output_path, "wb") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=environ, cwd=home,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self.output_path.read_text(errors="replace")

    def wait(self, limit_s: float = LIMIT_S) -> int:
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {limit_s} s:\n{self.output}") from None

    def wait_output(self, text: str, count: int = 1, limit_s: float = LIMIT_S) -> None:
        wait_for(
            lambda: self.output.count(text) >= count or self.process.poll() is not None,
            limit_s, f"{text!r} in the output:\n{self.output}",
        )
        assert self.output.count(text) >= count, self.output

    def api(self, route: str) -> Any:
        return Agent(self.home / "rt" / self.name / "api.sock").get(route)

    def try_api(self, route: str) -> Any:
        try:
            return self.api(route)
        except (OSError, Failure):
            return None

    def post(self, route: str, **body: Any) -> Any:
        return Agent(self.home / "rt" / self.name / "api.sock").post(route, body)

    def inject(self, fault: str, rank: int, **args: Any) -> Any:
        return self.post(
            f"/api/v1/runs/{self.name}/inject", fault=fault, rank=rank, args=args, reason="test"
        )

    def status(self) -> dict[str, Any]:
        """Of the run that goes on, as soon as its agent answers."""

        def told() -> list[dict[str, Any]]:
            answer = self.try_api("/api/v1/status")
            assert answer or self.process.poll() is None, self.output
            return list(answer["runs"]) if answer else []

        return dict(wait_for(told, LIMIT_S, f"a run in status\n{self.output}")[0])

    def ranks(self) -> dict[int, dict[str, Any]]:
        answer = self.try_api("/api/v1/status")
        runs = answer["runs"] if answer else []
        return {r["rank"]: r for r in runs[0]["ranks"]} if runs else {}

    def all_ranks(self) -> dict[int, dict[str, Any]]:
        """`ranks`, once its agent answers: it may be too busy for one question."""
        return dict(wait_for(self.ranks, what=f"ranks in status\n{self.output}"))

    def at_step(self, step: int, rank: int = 1, limit_s: float = LIMIT_S) -> int:
        """Waits until `rank` has done `step` steps; returns its pid."""

        def reached() -> int:
            seen = self.ranks().get(rank)
            if seen and seen["state"] == "running" and seen["step"] >= step:
                return int(seen["pid"])
            assert self.process.poll() is None, self.output
            return 0

        return int(wait_for(reached, limit_s, f"step {step} on rank {rank}\n{self.output}"))

    def incidents(self) -> list[dict[str, Any]]:
        """All of this run, from the agent, and out of its journal when that has ended."""
        answer = self.try_api("/api/v1/incidents?all=1")
        if answer is None and self.process.poll() is not None:
            journal = Journal(self.home / "st/runs" / self.name)
            journal.close()
            return [msgspec.to_builtins(incident) for incident in journal.seed.incidents]
        return list(answer) if answer else []

    def own_incidents(self) -> list[dict[str, Any]]:
        """Without those of the node, whose kernel's log, memory and disks are every test's."""
        return [one for one in self.incidents() if one["run"] == self.name]

    def result(self) -> dict[str, Any]:
        """What the trainer reported at its end."""
        line = next(ln for ln in self.output.splitlines() if "result {" in ln)
        return dict(json.loads(line[line.index("{") :]))

    def kill_all(self) -> None:
        """Until none is left: one that is killed may have started another just before."""
        mark = f"HOLDFAST_TEST_MARK={self.home}"

        def none_left() -> bool:
            left = processes_with(mark)
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return not left

        wait_for(none_left, 60, "the end of every process of the test")
        self.process.wait(60)


class Runs:
    """Starts runs in one test's own directories."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.started: list[Run] = []
        self.environ = {
            **os.environ,
            "PYTHONPATH": str(ROOT / ".types"),
            "HOLDFAST_STATE_DIR": str(home / "st"),
            "HOLDFAST_RUNTIME_DIR": str(home / "rt"),
            "HOLDFAST_TEST_MARK": str(home),
            "PYTHONUNBUFFERED": "1",
        }
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
            self.environ.pop(name, None)

    def start(self, command: str, *words: str, name: str = "t", **environ: str) -> Run:
        line = [sys.executable, "-m", "holdfast.agent.cli", command, "--run", name, *words]
        run = Run(self.home, name, line, {**self.environ, **environ})
        self.started.append(run)
        return run

    def script(self, script: str, *words: str, flags: tuple[str, ...] = (), **options: Any) -> Run:
        flags = flags or ("--nproc-per-node", "2")
        return self.start("run", *flags, str(SCRIPTS / script), *words, **options)

    def left(self) -> dict[int, str]:
        return processes_with(f"HOLDFAST_TEST_MARK={self.home}")
