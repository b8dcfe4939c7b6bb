"""Locks in the compile cache: whose owner may live, and whose cannot."""

from __future__ import annotations

import asyncio
import fcntl
import os
import time

import pytest
from detectors import of_node
from waiting import until

from holdfast.agent.config.load import load
from holdfast.agent.telemetry.collectors import ALL, Runner
from holdfast.collectors import compile_cache
from holdfast.collectors.compile_cache import CompileCacheCollector
from holdfast.collectors.contract import NoData, Roots

LOCK = "neuronxcc-2/MODULE_1/model.hlo_module.pb.lock"


@pytest.fixture
def roots(tmp_path):
    (tmp_path / "proc/11").mkdir(parents=True)
    (tmp_path / "proc/11/cmdline").write_bytes(b"python\0train.py\0")
    lock = tmp_path / "cache" / LOCK
    lock.parent.mkdir(parents=True)
    lock.touch()
    (lock.parent / "model.neff").touch()
    os.utime(lock, (time.time() - 600, time.time() - 600))
    return Roots(proc=str(tmp_path / "proc"), compile_cache=str(tmp_path / "cache"))


def values(collector, roots, boot_s=1.0):
    return {one.name.removeprefix("compile_cache_"): one.value
            for one in collector.collect(roots, boot_s) if not one.subject}


def compiler_is_old(tmp_path, age_s):
    """At 1,000 s after the boot, which is when verdicts() looks."""
    started = int((1000.0 - age_s) * os.sysconf("SC_CLK_TCK"))
    stat = f"11 (neuronx-cc) {'S ' + '0 ' * 18}{started} 0\n"
    (tmp_path / "proc/11/stat").write_text(stat)


def listed_as(path):
    """A file as the kernel's list of locks names it."""
    found = path.stat()
    return f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"


def verdicts(roots):
    samples = tuple(CompileCacheCollector().collect(roots, 1000.0))
    return of_node(samples)


def test_a_lock_without_any_compiler_is_named_with_its_age(roots):
    (verdict,) = verdicts(roots)
    assert verdict.fault == "compile_lock_stale" and not verdict.act
    assert f"{roots.compile_cache}/{LOCK} is 10 min old" in verdict.reason


def test_a_running_compiler_or_a_fresh_lock_is_no_fault(roots, tmp_path):
    command = b"/usr/bin/python3\0/opt/bin/neuronx-cc\0compile\0"
    (tmp_path / "proc/11/cmdline").write_bytes(command)
    compiler_is_old(tmp_path, 500.0)
    assert not verdicts(roots)
    (tmp_path / "proc/11/cmdline").write_bytes(b"")
    os.utime(tmp_path / "cache" / LOCK)
    assert not verdicts(roots)


def test_a_compiler_that_began_long_after_the_lock_does_not_own_it(roots, tmp_path):
    (tmp_path / "proc/11/cmdline").write_bytes(b"/opt/bin/neuronx-cc\0compile\0")
    compiler_is_old(tmp_path, 300.0)
    (verdict,) = verdicts(roots)
    assert verdict.fault == "compile_lock_stale"


def test_a_lock_in_a_shared_cache_may_be_another_nodes(roots, tmp_path):
    table = tmp_path / "proc/self/mountinfo"
    table.parent.mkdir()
    table.write_text("1 0 8:1 / / rw - ext4 /dev/sda1 rw\n"
                     f"2 1 0:9 / {tmp_path} rw - nfs4 server:/x rw\n")
    assert not verdicts(roots)
    os.utime(tmp_path / "cache" / LOCK, (time.time() - 8000, time.time() - 8000))
    assert verdicts(roots)
    os.utime(tmp_path / "cache" / LOCK, (time.time() - 600, time.time() - 600))
    table.write_text(f"{table.read_text()}3 2 8:2 / {roots.compile_cache} rw - ext4 /dev/sdb rw\n")
    assert verdicts(roots)


def test_a_cache_behind_a_link_goes_by_its_true_name(roots, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(roots.compile_cache)
    (verdict,) = verdicts(roots._replace(compile_cache=str(link)))
    assert f"{roots.compile_cache}/{LOCK}" in verdict.reason


def test_a_jobs_own_cache_is_looked_at_beside_the_nodes(roots, tmp_path):
    own = tmp_path / "job" / LOCK
    own.parent.mkdir(parents=True)
    own.touch()
    os.utime(own, (time.time() - 600, time.time() - 600))
    caches = (str(tmp_path / "job"), str(tmp_path / "job/neuronxcc-2"), str(tmp_path / "none"))
    assert len(verdicts(roots._replace(job_caches=caches))) == 2
    (verdict,) = verdicts(roots._replace(job_caches=caches, compile_cache=str(tmp_path / "no")))
    assert str(own) in verdict.reason
    assert CompileCacheCollector().here(Roots(sys=str(tmp_path), job_caches=caches)) == ""


def test_the_cache_of_a_job_that_comes_later_is_looked_at_with_the_next_reading(tmp_path):
    own = tmp_path / "job" / LOCK
    own.parent.mkdir(parents=True)
    own.touch()
    os.utime(own, (time.time() - 600, time.time() - 600))
    caches: tuple[str, ...] = ()

    async def scenario():
        nonlocal caches
        others = [one.name for one in ALL if one is not CompileCacheCollector]
        config = load(None, {
            "agent.slow_s": (2.0, "t"), "collectors.deadline_s": (2.0, "t"),
            "agent.tick_s": (0.05, "t"), "agent.fast_s": (0.1, "t"),
            "collectors.sys": (str(tmp_path), "t"), "collectors.disable": (others, "t")}).config
        runner = Runner(config, lambda part, error: None, lambda: caches)
        task = asyncio.create_task(runner.run())
        await until(lambda: runner.health()[0].absent)
        caches = (str(tmp_path / "job"),)
        await until(lambda: runner.samples().of("compile_cache_lock_age_seconds"))
        task.cancel()
        runner.close()

    asyncio.run(scenario())


def test_a_lock_whose_holder_is_seen_to_be_dead_is_named_at_once(roots, tmp_path):
    path, listed = tmp_path / "cache" / LOCK, tmp_path / "proc/locks"
    os.utime(path)
    (tmp_path / "proc/99").mkdir()
    listed.write_text(f"1: FLOCK  ADVISORY  WRITE 99 {listed_as(path)} 0 EOF\n")
    collector = CompileCacheCollector()
    assert not of_node(tuple(collector.collect(roots, 1000.0)))
    listed.write_text("")
    assert not of_node(tuple(collector.collect(roots, 1000.0)))  # let go, by who still lives
    (tmp_path / "proc/99").rmdir()
    (verdict,) = of_node(tuple(collector.collect(roots, 1000.0)))
    assert "0 s old and process 99, which held it, is dead" in verdict.reason
    assert dict(verdict.evidence) == {"path": str(path), "uid": str(os.getuid()), "age_s": "0"}


def test_without_locks_and_without_a_cache(roots, tmp_path):
    (tmp_path / "cache" / LOCK).unlink()
    assert values(CompileCacheCollector(), roots)["locks"] == 0.0
    with pytest.raises(NoData):
        CompileCacheCollector().collect(roots._replace(compile_cache=str(tmp_path / "no")), 1.0)
    node = Roots(sys=str(tmp_path), root=str(tmp_path))
    assert CompileCacheCollector().here(node) == "no Neuron driver on this machine"
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/neuron0").touch()
    assert CompileCacheCollector().here(node) == ""


def test_what_comes_in_is_a_miss_and_what_is_read_is_a_hit(roots, tmp_path):
    collector, folder = CompileCacheCollector(), (tmp_path / "cache" / LOCK).parent
    first = values(collector, roots)
    assert (first["programs"], first["misses_total"], first["hits_total"]) == (1, 0, 0)
    for _ in range(3):
        (folder / "model.neff").read_bytes()
    (folder / "compile_flags.json").write_text("{}")
    (folder / "compile_flags.json").read_text()  # no program
    made = tmp_path / "cache/neuronxcc-2/MODULE_2"
    made.mkdir()
    (made / "model.neff").write_bytes(b"x")
    second = values(collector, roots)
    assert (second["programs"], second["misses_total"], second["hits_total"]) == (2, 1, 3)
    (made / "model.neff").read_bytes()
    (made / "model.neff").unlink()
    third = values(collector, roots)
    assert (third["programs"], third["misses_total"], third["hits_total"]) == (1, 1, 4)
    collector._watcher.close()


def test_where_the_kernel_tells_nothing_hits_are_unknown_and_not_zero(roots, monkeypatch):
    def refuse(self):
        raise OSError(24, "no room")

    monkeypatch.setattr("holdfast.collectors.sources.inotify.Watcher.__init__", refuse)
    found = values(CompileCacheCollector(), roots)
    assert "hits_total" not in found and found["misses_total"] == 0


@pytest.mark.parametrize(("stat", "age_s"), [
    (f"11 (neuronx-cc ) x) {'S ' + '0 ' * 18}2000 0\n", 80.0), ("11 (a) S 1\n", 0.0), ("", 0.0),
    (f"11 (a) {'S ' + '0 ' * 18}-5", 0.0), (f"11 (a) {'S ' + '0 ' * 18}{'9' * 40}", 0.0),
])
def test_compilers_are_counted_with_the_age_of_the_oldest(roots, tmp_path, stat, age_s):
    assert values(CompileCacheCollector(), roots)["compilers"] == 0
    (tmp_path / "proc/11/cmdline").write_bytes(b"/opt/bin/neuronx-cc\0compile\0")
    (tmp_path / "proc/11/stat").write_text(stat)
    found = values(CompileCacheCollector(), roots, 100.0)
    assert found["compilers"] == 1 and found["compiler_age_seconds"] == pytest.approx(age_s)


def test_a_lock_that_a_process_holds_is_nobodys_leftover(roots, tmp_path):
    path = tmp_path / "cache" / LOCK
    assert verdicts(roots)
    with open(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert not verdicts(roots)
    assert verdicts(roots)
    (tmp_path / "proc/locks").write_text(f"1: POSIX  ADVISORY  WRITE 11 {listed_as(path)} 0 EOF\n")
    assert not verdicts(roots)


def test_a_lock_on_another_device_with_the_same_inode_is_another_files(roots, tmp_path):
    path, listed = tmp_path / "cache" / LOCK, tmp_path / "proc/locks"
    row = f"1: POSIX  ADVISORY  WRITE 11 {{}}:{path.stat().st_ino} 0 EOF\n"
    listed.write_text(row.format("07:2b"))
    assert verdicts(roots)
    listed.write_text(row.format("junk"))
    assert verdicts(roots)
    # A subvolume: stat tells a device of its own, the kernel's list that of the whole file system.
    (tmp_path / "proc/self").mkdir()
    (tmp_path / "proc/self/mountinfo").write_text(
        f"1 0 8:1 / / rw - ext4 /dev/sda1 rw\n2 1 7:43 /sub {tmp_path} rw - btrfs /dev/sdb rw\n")
    listed.write_text(row.format("07:2b"))
    assert not verdicts(roots)
    listed.write_text(row.format("08:01"))
    assert verdicts(roots)


def test_the_kernels_own_list_names_the_holder(roots, tmp_path):
    """As this kernel writes it, of a lock that is truly held."""
    path = str(tmp_path / "cache" / LOCK)
    with open(path, "r+") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        assert compile_cache._holder(path, roots._replace(proc="/proc")) == os.getpid()
    assert compile_cache._holder(path, roots._replace(proc="/proc")) == 0
