"""Processes in trouble, made for real where one process may do that, and recorded where not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import LIMIT_S

from holdfast.collectors import tasks
from holdfast.collectors.contract import NoData, Roots, Sample
from holdfast.collectors.shared_memory import SharedMemoryCollector
from holdfast.collectors.tasks import TasksCollector, parse_task

KTHREAD = 0x00200040
STAT = "{pid} ({name}) {state} {ppid} 1 1 0 -1 {flags} 0 0 0 0 5 {kernel} 0 0 20 0 1 0 {start} " \
       "0 0 18446744073709551615 0 0 0 0 0 0 0 0 0 0 0 0 17 {cpu} 0 0 0 0 0\n"


class Proc:
    """A recorded /proc, of which the test writes the processes that it needs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.roots = Roots(proc=str(folder), sys=str(folder / "sys"))

    def task(self, pid: int, name: str = "python", state: str = "S", ppid: int = 1,
             flags: int = 0x40, kernel: int = 0, start: int = 100, cpu: int = 0,
             switches: int = 5) -> None:
        place = self.folder / str(pid)
        place.mkdir(exist_ok=True)
        (place / "stat").write_text(STAT.format(
            pid=pid, name=name, state=state, ppid=ppid, flags=flags, kernel=kernel, start=start,
            cpu=cpu))
        (place / "status").write_text(
            f"Name:\t{name}\nRssShmem:\t2048 kB\nvoluntary_ctxt_switches:\t{switches}\n"
            "nonvoluntary_ctxt_switches:\t1\n"
        )
        (place / "wchan").write_text("nfs_wait_bit_killable")


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Proc:
    """Kernel threads are looked at in each fourth pass."""
    monkeypatch.setattr(tasks, "KERNEL_EVERY", 4)
    return Proc(tmp_path)


def named(samples: list[Sample]) -> dict[str, float]:
    return {f"{one.name}{{{one.subject}}}": one.value for one in samples}


def until(collector: TasksCollector, what: str, limit_s: float = LIMIT_S) -> dict[str, float]:
    """Readings until one shows it; the clock that they carry is the test's own."""
    deadline_s = time.monotonic() + limit_s
    while True:
        found = named(collector.collect(Roots(), time.monotonic()))
        if any(one.startswith(what) for one in found):
            return found
        assert time.monotonic() < deadline_s, f"never seen: {what}"


# ------------------------------------------------------------- recorded


def test_who_waits_in_the_kernel_and_since_when(proc: Proc) -> None:
    proc.task(11, state="D", switches=7)
    proc.task(12, name="a (b) c,=", state="D", switches=7)
    proc.task(13, name="kworker", state="D", flags=KTHREAD)
    collector = TasksCollector()
    first = named(collector.collect(proc.roots, 100.0))
    assert first["host_blocked_processes{}"] == 2.0
    assert not any(one.startswith("task_blocked") for one in first)
    proc.task(12, name="a (b) c,=", state="D", switches=8)  # it ran meanwhile
    second = named(collector.collect(proc.roots, 115.0))
    third = named(collector.collect(proc.roots, 130.0))
    wait = "wait=nfs_wait_bit_killable"
    assert second[f"task_blocked_seconds{{pid=11,name=python,{wait}}}"] == 15.0
    assert third[f"task_blocked_seconds{{pid=11,name=python,{wait}}}"] == 30.0
    assert third[f"task_blocked_seconds{{pid=12,name=a (b) c__,{wait}}}"] == 15.0
    proc.task(11, state="D", start=999, switches=7)  # another process under its number
    fourth = named(collector.collect(proc.roots, 145.0))
    assert not any("pid=11" in one for one in fourth)


def test_zombies_belong_to_their_parent(proc: Proc) -> None:
    proc.task(5, name="launcher")
    for pid in range(20, 27):
        proc.task(pid, name="worker", state="Z", ppid=5 if pid < 25 else 77)
    found = named(TasksCollector().collect(proc.roots, 1.0))
    assert found["host_zombies{}"] == 7.0
    assert found["task_zombies{pid=5,name=launcher}"] == 5.0
    assert found["task_zombies{pid=77,name=?}"] == 2.0


def test_who_burns_a_core_in_the_kernel(proc: Proc) -> None:
    collector = TasksCollector()
    for look in range(6):
        proc.task(8, name="kubelet", kernel=1425 * look, cpu=3)
        proc.task(9, name="quiet", kernel=15 * look)
        proc.task(10, name="ksoftirqd/3", kernel=1500 * look, flags=KTHREAD, cpu=3)
        found = named(collector.collect(proc.roots, 15.0 * look))
        busy = {one: value for one, value in found.items() if one.startswith("task_kernel_ratio")}
        expected = {"task_kernel_ratio{pid=8,name=kubelet,cpu=3}": 0.95} if look else {}
        if look >= 2:  # a kernel thread is read at every fourth pass, and kept until the next
            expected["task_kernel_ratio{pid=10,name=ksoftirqd/3,cpu=3}"] = 1.0
        assert busy == pytest.approx(expected)


def test_a_time_that_goes_back_or_a_new_process_burns_nothing(proc: Proc) -> None:
    collector = TasksCollector()
    for kernel, start in ((5000, 1), (10, 1), (9000, 2)):
        proc.task(8, kernel=kernel, start=start)
        found = named(collector.collect(proc.roots, float(start * 15 + kernel % 7)))
        assert not any(one.startswith("task_kernel_ratio") for one in found)


def test_the_kernels_own_limits_and_counts(proc: Proc) -> None:
    limits = proc.folder / "sys/kernel"
    limits.mkdir(parents=True)
    (limits / "threads-max").write_text("1027903\n")
    (limits / "hung_task_detect_count").write_text("3\n")
    found = named(TasksCollector().collect(proc.roots, 1.0))
    assert found["host_threads_max{}"] == 1027903.0 and found["host_hung_tasks_total{}"] == 3.0
    (limits / "threads-max").write_text("-5\n")
    (limits / "hung_task_detect_count").write_bytes(b"\xff\x00")
    assert set(named(TasksCollector().collect(proc.roots, 1.0))) == {
        "host_processes_unread{}", "host_zombies{}", "host_blocked_processes{}"}


def test_junk_is_left_out(proc: Proc) -> None:
    proc.task(4, name="good", state="Z")
    for pid, text in ((5, b""), (6, b"6 (x"), (7, b"\xff" * 5000), (8, b"8 (x) S -1 " + b"1 " * 50),
                      (9, b"9 (x) S a b c"), (10, b") ("), (11, b"11 (x) SS 1 " + b"1 " * 50)):
        (proc.folder / str(pid)).mkdir()
        (proc.folder / str(pid) / "stat").write_bytes(text)
    (proc.folder / "12").mkdir()  # gone between list and read
    (proc.folder / "13").write_text("no folder")
    assert named(TasksCollector().collect(proc.roots, 1.0))["host_zombies{}"] == 1.0
    with pytest.raises(NoData):
        TasksCollector().collect(Roots(proc=str(proc.folder / "none")), 1.0)


@given(st.binary(max_size=300))
def test_any_line_is_a_task_or_none(text: bytes) -> None:
    for line in (text, b"5 (a) S " + text, b"5 (a) S 1 2 3 4 5 6 " + text):
        task = parse_task(5, line)
        assert task is None or not set(task.name) & set(",=\n{}")


def test_more_processes_than_are_looked_at_are_counted(
    proc: Proc, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.collectors.tasks.PROCESSES_MAX", 3)
    for pid in range(20, 25):
        proc.task(pid, state="Z")
    found = named(TasksCollector().collect(proc.roots, 1.0))
    assert (found["host_processes_unread{}"], found["host_zombies{}"]) == (2.0, 3.0)


# ------------------------------------------------------------- for real


def child(code: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", code]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)


def end(process: subprocess.Popen[bytes]) -> None:
    """With everything that it started."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)


def test_real_zombies_are_their_parents() -> None:
    process = child(
        "import os, signal\nfor _ in range(5):\n    os.fork() or os._exit(0)\nsignal.pause()"
    )
    try:
        deadline_s = time.monotonic() + LIMIT_S
        mine = 0.0
        while mine != 5.0 and time.monotonic() < deadline_s:
            found = named(TasksCollector().collect(Roots(), 1.0))
            mine = next((value for one, value in found.items()
                         if one.startswith(f"task_zombies{{pid={process.pid},")), 0.0)
        assert mine == 5.0 and found["host_zombies{}"] >= 5.0
    finally:
        end(process)


def test_a_real_process_in_state_d_is_named_with_its_wait() -> None:
    # A parent waits for its vfork in state D; the child, which shares its memory, just sleeps.
    process = child(
        "import ctypes\nlibc = ctypes.PyDLL(None)\nlibc.vfork() or libc.pause()"
    )
    try:
        found = until(TasksCollector(), f"task_blocked_seconds{{pid={process.pid},name=python")
        assert found["host_blocked_processes{}"] >= 1.0
    finally:
        end(process)


@pytest.mark.parametrize("sized", [True, False])
def test_a_real_process_near_its_own_limit_of_open_files(
    sized: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels before 6.2 do not say how many there are: then processes are listed in turn."""
    if sized and os.stat("/proc/self/fd").st_size == 0:
        pytest.skip("this kernel is older than 6.2")
    if not sized:
        monkeypatch.setattr(tasks, "_counts_files", lambda proc: False)
        monkeypatch.setattr(tasks, "LISTED_MAX", 7)
    process = child(
        "import os, resource, signal\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))\n"
        "kept = [os.dup(0) for _ in range(240)]\nsignal.pause()"
    )
    try:
        what = f"task_open_files_ratio{{pid={process.pid},name=python"
        found = until(TasksCollector(), what)
        share = next(value for one, value in found.items() if one.startswith(what))
        assert 0.93 < share <= 1.0 and found["host_process_open_files_ratio_max{}"] >= share
    finally:
        end(process)


# ------------------------------------------------------------- /dev/shm


# Of a file system of its own, in a mount namespace: what others do in /dev/shm is not seen.
SHM = """
import json, os, sys
from holdfast.collectors.contract import Roots
from holdfast.collectors.shared_memory import SharedMemoryCollector
collector, path = SharedMemoryCollector(), sys.argv[1]
read = lambda: {one.name: one.value for one in collector.collect(Roots(shm=path), 1.0)}
found = [read()]
fd = os.open(path + "/data", os.O_CREAT | os.O_RDWR, 0o600)
os.posix_fallocate(fd, 0, 8 << 20)
found.append(read())
os.unlink(path + "/data")
found.append(read())
print(json.dumps(found))
"""


def test_what_has_no_name_in_dev_shm_is_seen(tmp_path: Path) -> None:
    mounted = 'mount -t tmpfs -o size=32m tmpfs "$1" || exit 77; exec "$0" -c "$2" "$1"'
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c",
         mounted, sys.executable, str(tmp_path), SHM],
        capture_output=True, text=True, timeout=60, check=False,
    )
    if done.returncode == 77 or done.stderr.startswith("unshare:"):
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    before, linked, after = json.loads(done.stdout)
    assert linked["host_shm_used_bytes"] - before["host_shm_used_bytes"] == 8 << 20
    assert [one["host_shm_files"] for one in (before, linked, after)] == [0.0, 1.0, 0.0]
    assert after["host_shm_used_bytes"] == linked["host_shm_used_bytes"]
    gone = [one["host_shm_unlinked_bytes"] for one in (before, linked, after)]
    assert gone == [0.0, 0.0, 8 << 20]


def test_no_user_makes_the_agent_list_all_that_lies_in_dev_shm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = 0

    class Counted:
        """A listing that tells how much of it was taken."""

        def __init__(self, path: str) -> None:
            self.listing = scandir(path)

        def __enter__(self) -> Counted:
            return self

        def __exit__(self, *_: object) -> None:
            self.listing.close()

        def __iter__(self) -> Iterator[os.DirEntry[str]]:
            nonlocal taken
            for entry in self.listing:
                taken += 1
                yield entry

    scandir = os.scandir
    for number in range(60):
        (tmp_path / f"folder-{number}").mkdir()
    collector, roots = SharedMemoryCollector(), Roots(shm=str(tmp_path))
    monkeypatch.setattr("holdfast.collectors.shared_memory.os.scandir", Counted)
    for limit in ("ENTRIES_MAX", "FOLDERS_MAX"):
        taken = 0
        with monkeypatch.context() as patch:
            patch.setattr(f"holdfast.collectors.shared_memory.{limit}", 20, raising=False)
            found = named(collector.collect(roots, 1.0))
        assert taken <= 21
        assert "host_shm_unlinked_bytes{}" not in found  # a part says nothing about the rest
    found = named(collector.collect(roots, 1.0))
    assert taken > 60 and "host_shm_unlinked_bytes{}" in found


def test_who_may_hold_it_is_asked_only_when_it_is_nearly_full(
    proc: Proc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proc.task(5, name="loader")
    collector, roots = SharedMemoryCollector(), proc.roots._replace(shm=str(tmp_path))
    for near, shown in ((2.0, False), (0.0, True)):
        monkeypatch.setattr("holdfast.collectors.shared_memory.NEAR", near)
        found = named(collector.collect(roots, 1.0))
        assert ("shm_resident_bytes{pid=5,name=loader}" in found) == shown
    assert found["shm_resident_bytes{pid=5,name=loader}"] == 2048.0 * 1024
    with pytest.raises(NoData):
        collector.collect(roots._replace(shm=str(tmp_path / "none")), 1.0)
