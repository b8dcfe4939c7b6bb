"""Store, probes, collectors, evidence and the command line of the agent."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from fakes import until
from pages import same_as_golden
from waiting import LIMIT_S, wait_for

from holdfast.agent.config.load import load
from holdfast.agent.core.model import StoreWrite
from holdfast.agent.evidence import __main__ as evidence
from holdfast.agent.store.base import Conflict, StoreError
from holdfast.agent.store.sqlite import DirectoryLock, SqliteStore
from holdfast.agent.system.child_probe import Prober
from holdfast.agent.system.errors import ErrorCounters
from holdfast.agent.system.systemd import notify, watchdog_s
from holdfast.agent.telemetry.collectors import Runner
from holdfast.collectors.contract import FAST, Metric, NoData, Roots, Sample
from holdfast.collectors.cpu import CpuCollector
from holdfast.collectors.host import HostCollector
from holdfast.collectors.sources.kmsg import KernelLog, parse

GOLDEN = Path(__file__).parent / "recorded"

# ------------------------------------------------------------- store


def test_compare_and_set(tmp_path):
    async def scenario():
        store = SqliteStore(tmp_path)
        assert await store.put(StoreWrite("run/a", 0, b"1")) == 1
        assert await store.put(StoreWrite("run/a", 1, b"2")) == 2
        for version in (0, 1, 3):
            with pytest.raises(Conflict, match="version 2"):
                await store.put(StoreWrite("run/a", version, b"x"))
        store.close()
        again = SqliteStore(tmp_path)
        assert [(doc.key, doc.version, doc.body) for doc in again.view().docs] == [
            ("run/a", 2, b"2")
        ]
        again.close()

    asyncio.run(scenario())


def test_a_document_is_deleted_at_its_own_version_alone_and_the_store_goes_on(tmp_path):
    async def scenario():
        store = SqliteStore(tmp_path)
        for version in (0, 1):
            await store.put(StoreWrite("run/a", version, b"x"))
        for other in (0, 1, 3):
            with pytest.raises(Conflict, match="version 2"):
                await store.delete("run/a", other)
        assert [doc.version for doc in store.view().docs] == [2]
        await store.delete("run/a", 2)
        assert store.view().up and not list(store.view().docs)
        store.close()

    asyncio.run(scenario())


def test_every_document_but_a_lease_is_there_for_the_next_life(tmp_path):
    keys = ["build/a", "identity/a", "node/a", "run/a", "tested/a"]

    async def scenario():
        store = SqliteStore(tmp_path)
        assert [await store.put(StoreWrite(key, 0, b"x")) for key in keys] == [1] * len(keys)
        await store.put(StoreWrite("lease/a", 0, b"node"))
        assert [lease.holder for lease in store.view().leases] == ["node"]
        store.close()
        again = SqliteStore(tmp_path)
        assert [doc.key for doc in again.view().docs] == keys and not again.view().leases
        again.close()

    asyncio.run(scenario())


def test_a_full_disk_keeps_no_run_from_its_next_plan(tmp_path):
    """It is in force with the next version, and on the disk once that has room."""
    plan = b"x" * 100_000

    async def scenario():
        store = SqliteStore(tmp_path)
        assert await store.put(StoreWrite("run/a", 0, b"1")) == 1
        pages = store._database.execute("PRAGMA page_count").fetchone()[0]
        store._database.execute(f"PRAGMA max_page_count={pages}")
        assert await store.put(StoreWrite("run/a", 1, plan)) == 2
        assert store.view().up and "full" in store.problem
        with pytest.raises(Conflict, match="version 2"):
            await store.put(StoreWrite("run/a", 1, b"y"))
        assert [(doc.version, doc.body) for doc in store.view().docs] == [(2, plan)]
        assert await store.put(StoreWrite("run/a", 2, plan + b"y")) == 3
        assert not await store.save()
        store._database.execute("PRAGMA max_page_count=10000")
        assert await store.save() and not store.problem
        store.close()
        again = SqliteStore(tmp_path)
        assert [(doc.version, doc.body) for doc in again.view().docs] == [(3, plan + b"y")]
        again.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(("code", "remedy"), [
    (sqlite3.SQLITE_FULL, "make room"), (sqlite3.SQLITE_CORRUPT, "move the file away"),
    (sqlite3.SQLITE_NOTADB, "move the file away")])
def test_a_store_that_cannot_be_opened_says_what_helps(code, remedy, tmp_path, monkeypatch):
    error = sqlite3.DatabaseError("as the disk says")
    error.sqlite_errorcode = code

    class Failing:
        def execute(self, what):
            raise error

        def close(self):
            pass

    monkeypatch.setattr(sqlite3, "connect", lambda *_, **__: Failing())
    with pytest.raises(StoreError, match=f"as the disk says: {remedy}"):
        SqliteStore(tmp_path)


def test_a_store_that_fails_is_down_until_it_answers(tmp_path):
    async def scenario():
        store = SqliteStore(tmp_path)
        store._database.execute("PRAGMA busy_timeout=20")
        other = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match="locked"):
            await store.put(StoreWrite("run/a", 0, b"1"))
        assert not store.view().up
        other.execute("ROLLBACK")
        other.close()
        await store.refresh()
        assert store.view().up
        store.close()

    asyncio.run(scenario())


def test_the_second_agent_is_refused_with_the_firsts_pid(tmp_path):
    lock = DirectoryLock(tmp_path)
    with pytest.raises(StoreError, match=f"pid {os.getpid()}"):
        DirectoryLock(tmp_path)
    lock.release()
    DirectoryLock(tmp_path).release()


def test_a_damaged_store_is_named(tmp_path):
    (tmp_path / "store.db").write_bytes(b"SQLite format 3\0" + b"\x01" * 4000)
    with pytest.raises(StoreError, match="store.db.*move"):
        SqliteStore(tmp_path)


# ------------------------------------------------------------- probes


def test_probes_answer_fail_and_run_out_of_time(monkeypatch):
    monkeypatch.setattr("holdfast.agent.system.child_probe.KILL_WAIT_S", LIMIT_S)

    async def scenario():
        prober = Prober()
        good = await prober.ask("echo", ["echo", "hi"], LIMIT_S)
        assert good.ok and good.output == b"hi\n"
        bad = await prober.ask("false", ["false"], LIMIT_S)
        assert not bad.ok and "exit status 1" in bad.error
        none = await prober.ask("none", ["/nonexistent/tool"], LIMIT_S)
        assert "No such file" in none.error
        long = await prober.ask("yes", ["yes"], LIMIT_S)
        assert "longer than" in long.error
        slow = await prober.ask("sleep", ["sleep", "60"], 0.1)
        assert "no answer within 0.1 s" in slow.error and not slow.stuck
        stopped = asyncio.create_task(prober.ask("stop", ["sh", "-c", "kill -STOP $$"], 0.2))
        await asyncio.sleep(0)
        assert "still being asked" in (await prober.ask("stop", ["true"], 1.0)).error
        assert "no answer" in (await stopped).error  # SIGKILL ends a stopped child as well
        assert prober.stuck_children() == ()

    asyncio.run(scenario())


def test_a_child_that_cannot_be_killed_is_left_and_named(monkeypatch):
    async def scenario():
        prober = Prober()
        monkeypatch.setattr("holdfast.agent.system.child_probe.KILL_WAIT_S", 0.1)
        monkeypatch.setattr("asyncio.subprocess.Process.kill", lambda self: None)  # as in state D
        answer = await prober.ask("nfs", ["sleep", "60"], 0.1)
        assert answer.stuck and "cannot be killed" in answer.error
        (left,) = prober.stuck_children()
        assert left.name == "nfs"
        again = await prober.ask("nfs", ["true"], 1.0)
        assert again.stuck and str(left.pid) in again.error
        assert (await prober.ask("other", ["true"], LIMIT_S)).ok
        os.kill(left.pid, signal.SIGKILL)
        await until(lambda: not prober.stuck_children())
        assert (await prober.ask("nfs", ["true"], LIMIT_S)).ok

    asyncio.run(scenario())


# ------------------------------------------------------------- collectors


def test_the_host_collector_on_a_recorded_tree():
    roots = Roots(proc=str(GOLDEN / "proc"), sys=str(GOLDEN / "sys"))
    lines = [
        f"{sample.name}{{{sample.subject}}} {sample.value:.10g}"
        for collector in (CpuCollector(), HostCollector())
        for sample in collector.collect(roots, 1.0)
    ]
    same_as_golden(GOLDEN / "host.txt", "\n".join(lines) + "\n")
    declared = {metric.name for metric in CpuCollector.metrics + HostCollector.metrics}
    assert {line.split("{")[0] for line in lines} <= declared


def test_a_tree_without_proc_is_no_data(tmp_path):
    for collector in (HostCollector(), CpuCollector()):
        with pytest.raises(NoData):
            collector.collect(Roots(proc=str(tmp_path)), 1.0)


def test_rubbish_in_proc_costs_its_own_metrics_alone(tmp_path):
    (tmp_path / "stat").write_text("cpu0 a b c\n")
    (tmp_path / "loadavg").write_bytes(b"\xff\xfe")
    (tmp_path / "meminfo").write_text("MemTotal: 5 kB\n")
    samples = HostCollector().collect(Roots(proc=str(tmp_path), sys=str(tmp_path)), 1.0)
    assert samples == [Sample("host_memory_total_bytes", "", 5120.0, 1.0)]
    assert CpuCollector().collect(Roots(proc=str(tmp_path)), 1.0) == []


def test_one_collectors_fault_never_stops_another(monkeypatch):
    class Base:
        pace = FAST
        metrics = (Metric("x", "gauge", "x"),)

    class Good(Base):
        name = "good"

        def collect(self, roots, boot_s):
            return [Sample("x", "", 1.0, boot_s)]

    class Crashes(Base):
        name = "crashes"

        def collect(self, roots, boot_s):
            raise ZeroDivisionError("ours")

    class Hangs(Base):
        name = "hangs"

        def collect(self, roots, boot_s):
            let_go.wait(LIMIT_S)
            return []

    class Absent(Base):
        name = "absent"

        def collect(self, roots, boot_s):
            raise NoData("no such hardware")

    monkeypatch.setattr("holdfast.agent.telemetry.collectors.ALL", (Crashes, Hangs, Good, Absent))
    troubles, let_go = [], threading.Event()

    async def scenario():
        config = load(None, {"collectors.deadline_s": (1.0, "t"), "agent.tick_s": (0.05, "t"),
                             "agent.fast_s": (0.2, "t")}).config
        runner = Runner(config, lambda part, error: troubles.append(part))
        task = asyncio.create_task(runner.run())
        await until(lambda: runner.samples())
        health = {one.name: one for one in runner.health()}
        assert health["good"].up and not health["crashes"].up and not health["hangs"].up
        assert health["absent"].absent and health["hangs"].error.startswith("no answer within")
        await until(lambda: runner.health()[1].error == "still hanging")
        task.cancel()
        let_go.set()
        runner.close()

    asyncio.run(scenario())
    assert {"collector crashes", "collector hangs"} == set(troubles)


def test_a_name_that_is_no_text_never_leaves_the_runner(monkeypatch):
    class Named:
        name, pace, metrics = "named", FAST, (Metric("x", "gauge", "x", ("file",)),)
        failure = ""

        def collect(self, roots, boot_s):
            if self.failure:
                raise NoData(self.failure)
            return [Sample("x", "file=caf\u00e9", 1.0, boot_s),
                    Sample("x", os.fsdecode(b"file=\xff\xe9,more=\xc3\xa9"), 1.0, boot_s),
                    Sample("x", "file=\ud83d", 1.0, boot_s)]

    monkeypatch.setattr("holdfast.agent.telemetry.collectors.ALL", (Named,))

    async def scenario():
        config = load(None, {"agent.tick_s": (0.05, "t"), "agent.fast_s": (0.1, "t")}).config
        runner = Runner(config, lambda part, error: None)
        task = asyncio.create_task(runner.run())
        await until(lambda: runner.samples())
        assert [one.subject for one in runner.samples()] == [
            "file=caf\u00e9", "file=\ufffd\ufffd,more=\u00e9", "file=?"]
        Named.failure = "/sys/\udcff: gone"
        await until(lambda: runner.health()[0].absent)
        assert runner.health()[0].error == "/sys/\ufffd: gone"
        task.cancel()
        runner.close()

    asyncio.run(scenario())


def test_a_trouble_is_kept_as_text_that_a_page_takes(capsys):
    troubles = ErrorCounters()
    troubles("part", OSError("/sys/\udcff"))
    assert troubles.latest["part"] == "OSError: /sys/\ufffd" and troubles.counts == {"part": 1}
    assert "part: OSError" in capsys.readouterr().err


def test_what_the_agent_says_moves_no_cursor(capsys):
    ErrorCounters()("part", "\x1b[2J\x9bnothing is wrong\nsecond")
    assert capsys.readouterr().err == "holdfast agent: part: ?[2J?nothing is wrong\nsecond\n"


def test_kernel_lines_with_cursors_and_gaps(tmp_path):
    assert parse(b"6,100,5,-;oom-kill: x\n SUB=1\n", 1.0) == ("kmsg", 100, 1.0, "oom-kill: x")
    for rubbish in (b"", b"x", b";;;", b"6,x,1;t", b"\xff" * 100):
        assert parse(rubbish, 1.0) is None
    log = KernelLog(str(tmp_path / "none"))
    with pytest.raises(NoData, match="CAP_SYSLOG"):
        log.open()
    path = tmp_path / "fifo"
    os.mkfifo(path)
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    log = KernelLog(str(path))
    log._fd = fd
    with open(path, "wb", buffering=0) as writer:
        for number in (7, 8, 12):
            writer.write(b"6,%d,5,-;line\n" % number)
            assert [line.cursor for line in log.read(float(number))] == [number]
    assert log.missed == 3
    log.close()


# ------------------------------------------------------------- evidence

STALL = "import time\ndef outer():\n    inner()\ndef inner():\n    time.sleep(60)\nouter()\n"


@pytest.mark.parametrize("stop", [False, True])
def test_evidence_names_state_and_line(tmp_path, stop):
    script = tmp_path / "stall.py"
    script.write_text(STALL)
    child = subprocess.Popen([sys.executable, str(script)])
    try:
        deadline_s = time.monotonic() + LIMIT_S
        while True:
            found = evidence.look(child.pid)
            seen = (found["where"], found["state"]) == ("stall.py:5 in inner", "S")
            if seen or time.monotonic() > deadline_s:
                break
        if stop:
            child.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
            found = evidence.look(child.pid)
        if "not installed" in found["error"]:
            pytest.skip("py-spy is missing")
        assert found["where"] == "stall.py:5 in inner", found
        assert found["stack"][1] == "stall.py:3 in outer"
        assert found["state"] == ("T" if stop else "S")
        assert len(json.dumps(found)) < 20_000
    finally:
        child.kill()
        child.wait()


def test_evidence_of_nobody_and_without_the_tool(monkeypatch):
    assert evidence.look(2**22 + 5)["error"] == "no such process"
    monkeypatch.setattr(evidence.shutil, "which", lambda name: None)
    monkeypatch.setattr(evidence.Path, "exists", lambda self: False)
    found = evidence.look(os.getpid())
    assert "py-spy is not installed" in found["error"] and found["state"]


def test_evidence_names_the_folders_in_which_files_are_open(tmp_path):
    child = subprocess.Popen(["sleep", "60"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                             stderr=subprocess.DEVNULL)
    try:
        # What it reads from and writes to is no file; its libraries it closes as it begins.
        wait_for(lambda: evidence.look(child.pid)["open"] == [])
    finally:
        child.kill()
        child.wait()
    folders = [tmp_path / str(number) for number in range(evidence.FOLDERS_MAX + 4)]
    with contextlib.ExitStack() as kept:
        for folder in folders:
            folder.mkdir()
            kept.enter_context(open(folder / "shard", "w"))
        found = evidence.look(os.getpid())["open"]
    assert len(found) == evidence.FOLDERS_MAX and str(folders[-1]) in found


def test_where_prefers_the_users_own_code():
    frames = [
        {"filename": "/x/lib/python3.11/threading.py", "line": 5, "name": "wait"},
        {"filename": "/x/site-packages/torch/nn.py", "line": 6, "name": "forward"},
        {"filename": "/home/me/train.py", "short_filename": "train.py", "line": 7, "name": "step"},
    ]
    assert evidence.where(frames) == "train.py:7 in step"
    assert evidence.where(frames[:1]) == "/x/lib/python3.11/threading.py:5 in wait"
    assert evidence.where([]) == ""


# ------------------------------------------------------------- systemd and the command line


def test_notify_reaches_systemd(tmp_path, monkeypatch):
    assert not notify("READY=1")
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(path))
        monkeypatch.setenv("NOTIFY_SOCKET", str(path))
        assert notify("READY=1") and sock.recv(100) == b"READY=1"
    monkeypatch.setenv("WATCHDOG_USEC", "4000000")
    assert watchdog_s() == 2.0
    monkeypatch.setenv("WATCHDOG_PID", "1")
    assert watchdog_s() == 0.0


def agent_process(tmp_path, *more):
    return subprocess.Popen(
        [sys.executable, "-m", "holdfast.agent", "--state", str(tmp_path / "s"), "--runtime",
         str(tmp_path / "r"), "--listen", "127.0.0.1:0", *more],
        stderr=subprocess.PIPE, text=True,
    )


def test_the_process_serves_ends_on_sigterm_and_refuses_a_second(tmp_path):
    first = agent_process(tmp_path)
    try:
        deadline_s = time.monotonic() + LIMIT_S
        while not (tmp_path / "r" / "address").exists():
            assert time.monotonic() < deadline_s and first.poll() is None
            time.sleep(0.01)
        second = agent_process(tmp_path)
        _, error = second.communicate(timeout=LIMIT_S)
        # Not 78: the first may let go, and then the same command serves.
        assert second.returncode == 1 and f"pid {first.pid}" in error
        first.send_signal(signal.SIGHUP)
        first.send_signal(signal.SIGTERM)
        assert first.wait(LIMIT_S) == 0
        left = sorted(path.name for path in (tmp_path / "r").iterdir())
        assert left == []
    finally:
        first.kill()
        first.communicate()


def test_a_bad_configuration_ends_with_78(tmp_path):
    file = tmp_path / "agent.toml"
    file.write_text("[agent]\ntick = 1\n")
    done = agent_process(tmp_path, "--config", str(file))
    _, error = done.communicate(timeout=LIMIT_S)
    assert done.returncode == 78 and "agent.tick is unknown: did you mean tick_s?" in error
