"""A killed compiler left its lock in the job's own cache, and a rank waits for it."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from running import Run, Runs, wait_for

pytest.importorskip("torch", reason="the trainer's extra is not installed")

OLD_S = 900.0  # no stage of a compile is quiet for so long
QUIET_S = 2.0  # a script's step here takes a fortieth of it


def left_lock(cache: Path, module: str) -> Path:
    """As neuronx-cc leaves it when it is killed."""
    lock = cache / "neuronxcc-2.21.0" / module / "model.hlo_module.pb.lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    os.utime(lock, (time.time() - OLD_S,) * 2)
    return lock


@pytest.fixture()
def cache(runs: Runs) -> Iterator[Path]:
    folder = runs.home / "compiled"
    runs.environ |= {"NEURON_COMPILE_CACHE_URL": f"file://{folder}",
                     "HOLDFAST_CONFIG": str(runs.home / "agent.toml")}
    yield folder


def configure(runs: Runs, *allow: str) -> None:
    (runs.home / "agent.toml").write_text(f"""
[agent]
fast_s = 2
slow_s = 2
[detect]
script_floor_s = {QUIET_S}
[actions]
allow = {json.dumps(allow)}
""")


def waits_for(run: Run, lock: Path) -> bool:
    return any(one["fault"] == "compile_lock_stale" and str(lock) in str(one)
               for one in run.incidents())


def test_a_lock_that_nobody_holds_is_removed_and_one_that_is_held_stays(
    runs: Runs, cache: Path
) -> None:
    configure(runs, "remove_lock")
    lock, held = left_lock(cache, "MODULE_1"), left_lock(cache, "MODULE_2")
    with open(held) as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        run = runs.script("plain.py", "30", "lock", str(lock))
        assert run.wait() == 0, run.output
        assert not lock.exists() and held.exists(), run.output
    assert waits_for(run, lock) and not waits_for(run, held), run.incidents()
    assert "restarts 1" not in run.output, run.output


def test_nobody_is_restarted_against_a_lock_and_it_goes_on_once_that_is_gone(
    runs: Runs, cache: Path
) -> None:
    configure(runs)
    lock = left_lock(cache, "MODULE_1")
    run = runs.script("plain.py", "30", "lock", str(lock))
    run.at_step(6)
    wait_for(lambda: waits_for(run, lock), 30, run.output)
    # That nothing is done needs the time in which it would be, as the agent counts it.
    wait_for(lambda: run.all_ranks()[1]["phase_age_s"] > 5 * QUIET_S, what=run.output)
    assert run.status()["generation"] == 1, run.output
    lock.unlink()
    assert run.wait() == 0, run.output
    assert "restarts 1" not in run.output, run.output
