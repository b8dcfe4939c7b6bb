"""A line of the kernel's becomes an incident and a count of the running agent.

Writes to /dev/kmsg: root, and a kernel that takes lines from programs.  What a program writes the
kernel marks as such (facility 1); the agent believes it only with collectors.kmsg_users.
"""

from __future__ import annotations

import json
import os
import resource
import select
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from running import Run, Runs
from waiting import wait_for

from holdfast.agent.cli.client import Agent as Door

SWITCH = Path("/proc/sys/kernel/printk_devkmsg")
XID = "<3>NVRM: Xid (PCI:0000:4e:00): %d, pid='<unknown>', name=<unknown>, GPU has fallen off."
ACTED = 'holdfast_actions_total{action="stop",fault="gpu_memory_error",outcome="ok"} 1'
CRASH_S = 5.0  # until the kernel has printed it
LABELS = ("xid", "79", "hardware", "reboot_node")
SERIES = 'holdfast_events_total{action="reboot_node",class="hardware",code="79",source="xid"}'


@pytest.fixture
def kernel() -> Iterator[Callable[[str], None]]:
    """Writes a line to the kernel's log; skips where that cannot be."""
    try:
        log = open("/dev/kmsg", "wb", buffering=0)
    except OSError as error:
        pytest.skip(f"/dev/kmsg cannot be written here: {error}")
    with log:
        try:
            before = SWITCH.read_text().strip()
            SWITCH.write_text("on\n")
        except OSError as error:
            pytest.skip(f"/dev/kmsg takes lines only now and then here: {error}")
        try:
            yield lambda line: log.write(line.encode() + b"\n") and None
        finally:
            SWITCH.write_text(before + "\n")


class Agent:
    """The agent as a process."""

    def __init__(self, folder: Path, users: bool, more: str = "") -> None:
        self.state, runtime = folder / "state", folder / "run"
        config = folder / "agent.toml"
        config.write_text(f"[collectors]\nkmsg_users = {str(users).lower()}\n{more}")
        (runtime / "address").unlink(missing_ok=True)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "holdfast.agent", "--config", str(config), "--state",
             str(self.state), "--runtime", str(runtime), "--listen", "127.0.0.1:0"],
        )
        try:
            wait_for(lambda: (runtime / "address").exists() or self.process.poll() is not None)
            assert self.process.poll() is None, "the agent ended by itself"
        except BaseException:
            self.kill()
            raise
        self.address = (runtime / "address").read_text().strip()

    def get(self, path: str) -> str:
        url = self.address if "://" in self.address else f"http://{self.address}"
        with urllib.request.urlopen(url.rstrip("/") + path, timeout=30) as answer:
            return answer.read().decode()

    def count(self) -> float:
        lines = [one for one in self.get("/metrics").splitlines() if one.startswith(SERIES)]
        return float(lines[0].rpartition(" ")[2]) if lines else -1.0

    def incidents(self) -> list[dict]:
        answer = json.loads(self.get("/api/v1/incidents"))
        listed = answer["incidents"] if isinstance(answer, dict) else answer
        return [one for one in listed if one["fault"] == "gpu_fell_off_bus"]

    def journalled(self) -> float:
        with sqlite3.connect(f"file:{self.state}/journal.db?mode=ro", uri=True) as database:
            row = database.execute(
                "SELECT value FROM counters WHERE name = 'events' AND labels = ?",
                (json.dumps(LABELS, separators=(",", ":")),),
            ).fetchone()
        return row[0] if row else 0.0

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)


CHECKED = """+++
severity = "fatal"
scope    = "gpu"
ladder   = ["run_check"]
budget   = { count = 1, window_h = 24 }
clears   = "check"
checks   = ["devices", "clock"]
alert    = "HoldfastGpuFellOffBus"
+++
"""


def test_a_check_that_a_runbook_asks_for_clears_its_incident(tmp_path, kernel) -> None:
    books = tmp_path / "runbooks"
    books.mkdir()
    (books / "gpu_fell_off_bus.md").write_text(CHECKED)
    agent = Agent(tmp_path, True, f'[runbooks]\ndirectory = "{books}"\n[checks]\ngate = []\n')
    try:
        wait_for(lambda: agent.count() == 0.0)
        kernel(XID % 79)
        wait_for(lambda: [one for one in agent.incidents() if one["state"] == "closed"])
        (incident,) = agent.incidents()
        told = [text for _, text in incident["timeline"]]
        assert "run_check: devices, clock" in told and told[-1].startswith("checked, and well")
        made = {one["check"] for one in json.loads(agent.get("/api/v1/checks"))["checks"]}
        assert made == {"devices", "clock"}

        door = Door(tmp_path / "run" / "api.sock")
        node = door.get("/api/v1/status")["node"]
        asked = door.post(f"/api/v1/nodes/{node}/check",
                          {"reason": "a look", "args": {"checks": ["memory"]}})
        wait_for(lambda: door.get(f"/api/v1/requests/{asked['id']}")["state"] != "waiting")
        answer = door.get(f"/api/v1/requests/{asked['id']}")
        assert answer["state"] == "done" and answer["text"].startswith("memory ")
        assert 'holdfast_check_status{check="memory"} 0' in agent.get("/metrics")
    finally:
        agent.kill()


def test_equal_xids_are_one_incident_and_each_is_counted_across_a_kill(tmp_path, kernel) -> None:
    agent = Agent(tmp_path, users=True)
    try:
        wait_for(lambda: agent.count() == 0.0)  # a series from the start, so that increase() works
        kernel(XID % 79)
        wait_for(lambda: agent.count() == 1.0)
        (incident,) = wait_for(agent.incidents)  # counted when read, an incident a step later
        assert incident["subject"].endswith("/gpu/0000:4e:00") and incident["severity"] == "fatal"
        assert "reboot_node" in incident["would_have"]
        kernel(XID % 79)  # a gauge of the last value would not move
        wait_for(lambda: agent.count() == 2.0 and agent.journalled() == 2.0)
        agent.kill()
        kernel(XID % 79)  # nobody listens
        agent = Agent(tmp_path, users=True)
        wait_for(lambda: agent.count() == 3.0)
        assert len(agent.incidents()) == 1
        kernel(XID % 79)
        wait_for(lambda: agent.count() == 4.0)
    finally:
        agent.kill()


def metrics(run: Run) -> str:
    address = (run.home / "rt" / run.name / "address").read_text().strip()
    url = address if "://" in address else f"http://{address}"
    with urllib.request.urlopen(url.rstrip("/") + "/metrics", timeout=30) as answer:
        return answer.read().decode()


def generation_of(run: Run) -> int:
    answer = run.try_api("/api/v1/status")
    return answer["runs"][0]["generation"] if answer and answer["runs"] else 0


def test_a_line_about_a_rank_restarts_it(tmp_path, kernel, runs: Runs) -> None:
    """From the kernel's log to the action, in a real run: line, incident, new generation."""
    config = tmp_path / "agent.toml"
    config.write_text("[collectors]\nkmsg_users = true\n")
    run = runs.start("run", "--nproc-per-node", "2", "--max-restarts", "2", "--no-python",
                     "sleep", "600", HOLDFAST_CONFIG=str(config))
    try:
        def running() -> dict[int, dict]:
            found = run.ranks()
            return found if {one["state"] for one in found.values()} == {"running"} else {}

        before = wait_for(running, 60.0)
        wait_for(lambda: 'holdfast_kernel_log_up{source="kmsg"} 1' in metrics(run))
        kernel("<3>NVRM: Xid (PCI:0000:4e:00): 95, pid=%d, name=python3, Uncontained ECC error."
               % before[1]["pid"])
        wait_for(lambda: generation_of(run) == 2, 60.0)
        wait_for(lambda: (now := running()) and now[1]["pid"] != before[1]["pid"], 60.0)
        of_run, of_node = sorted(
            wait_for(lambda: len(found := [
                one for one in run.incidents() if one["fault"] == "gpu_memory_error"]) == 2
                and found), key=lambda one: one["run"], reverse=True)
        assert of_run["subject"] == "run/t/rank/1" and of_run["actions"]
        assert "XID 95 on GPU 0000:4e:00" in of_run["reason"]
        assert of_node["culprit"].endswith("; rank 1 of run t lived there")
        wait_for(lambda: 'restarts_total{fault="gpu_memory_error",run="t"} 1' in metrics(run))
        wait_for(lambda: ACTED in metrics(run))  # how the order ended is heard later
    finally:
        run.process.terminate()
        run.wait()


def test_what_a_program_wrote_is_not_the_kernels_word(tmp_path, kernel) -> None:
    agent = Agent(tmp_path, users=False)
    try:
        wait_for(lambda: agent.count() == 0.0)
        kernel(XID % 79)
        wait_for(lambda: "holdfast_kernel_lines_foreign_total 1" in agent.get("/metrics"))
        assert agent.count() == 0.0 and not agent.incidents()
    finally:
        agent.kill()


def without_core() -> None:
    """In the child: its crash leaves no file."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def line_of_a_crash(log: int, name: bytes) -> bytes:
    """The kernel's line about that program, among whatever else it says meanwhile."""
    deadline_s = time.monotonic() + CRASH_S
    while (left_s := deadline_s - time.monotonic()) > 0.0:
        if select.select([log], [], [], left_s)[0]:
            try:
                said = os.read(log, 8192)
            except BrokenPipeError:
                continue  # the ring went on over a record that was not read
            if name in said:
                return said
    pytest.skip("this kernel does not print crashes, or prints too many to print this one")


def test_the_name_of_a_program_that_crashes_is_not_the_kernels_word(tmp_path, kernel) -> None:
    gcc = shutil.which("gcc")
    if gcc is None:
        pytest.skip("gcc is missing (Debian package build-essential): no program that crashes")
    source, forged = tmp_path / "crash.c", tmp_path / (XID[3:] % 79)
    source.write_text("int main(void) { *(volatile int *)0 = 0; return 0; }\n")
    subprocess.run([gcc, "-O0", "-o", forged, source], check=True, timeout=60)
    agent = Agent(tmp_path, users=True)
    log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    try:
        wait_for(lambda: agent.count() == 0.0)
        os.lseek(log, 0, os.SEEK_END)
        crashed = subprocess.run([forged], cwd=tmp_path, timeout=60, preexec_fn=without_core)
        assert crashed.returncode == -signal.SIGSEGV
        said = line_of_a_crash(log, forged.name.encode())
        assert said.startswith(b"6,") and b"segfault at 0 " in said
        kernel((XID % 79).replace("4e", "5e"))  # read behind it
        wait_for(lambda: agent.count() >= 1.0)
        found = wait_for(agent.incidents)
        assert [one["subject"].rpartition("/")[2] for one in found] == ["0000:5e:00"]
        assert agent.count() == 1.0
    finally:
        os.close(log)
        agent.kill()
