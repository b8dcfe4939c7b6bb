"""Locks in the compile cache: whose owner may live, and whose cannot."""

from __future__ import annotations

import os
import time

import pytest

from holdfast.agent.core.detect import accelerator
from holdfast.collectors.compile_cache import CompileCacheCollector
from holdfast.collectors.roots import Roots
from holdfast.collectors.sample import NoData

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


def verdicts(roots):
    samples = tuple(CompileCacheCollector().collect(roots, 1.0))
    return accelerator.Accelerators("n").verdicts(samples, (), {})


def test_a_lock_without_any_compiler_is_named_with_its_age(roots):
    (verdict,) = verdicts(roots)
    assert verdict.fault == "compile_lock_stale" and not verdict.act
    assert f"{roots.compile_cache}/{LOCK} is 10 min old" in verdict.reason


def test_a_running_compiler_or_a_fresh_lock_is_no_fault(roots, tmp_path):
    command = b"/usr/bin/python3\0/opt/bin/neuronx-cc\0compile\0"
    (tmp_path / "proc/11/cmdline").write_bytes(command)
    assert not verdicts(roots)
    (tmp_path / "proc/11/cmdline").write_bytes(b"")
    os.utime(tmp_path / "cache" / LOCK)
    assert not verdicts(roots)


def test_without_locks_and_without_a_cache(roots, tmp_path):
    (tmp_path / "cache" / LOCK).unlink()
    (count,) = CompileCacheCollector().collect(roots, 1.0)
    assert (count.name, count.value) == ("compile_cache_locks", 0.0)
    with pytest.raises(NoData):
        CompileCacheCollector().collect(roots._replace(compile_cache=str(tmp_path / "no")), 1.0)
    assert CompileCacheCollector().here(Roots(sys=str(tmp_path)))
