"""A mount whose server stopped, and a rank that reads from it: named together, and waited out."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from running import Run, Runs, wait_for

pytest.importorskip("torch", reason="the trainer's extra is not installed")
SERVER = Path(__file__).parent / "hanging_mount.py"
FLOOR_S = 24.0  # of an act by cost: twice what the mount needs to be called hung, and no minute


@pytest.fixture()
def mount(runs: Runs) -> Iterator[Path]:
    """A FUSE file system; it hangs while runs.home/hangs is there."""
    place, flag = runs.home / "m", runs.home / "hangs"
    place.mkdir()
    server = subprocess.Popen([sys.executable, str(SERVER), str(place), str(flag)],
                              stderr=subprocess.PIPE)
    try:
        wait_for(lambda: os.path.ismount(place) or server.poll() is not None, 20, "a mount")
        if server.poll() is not None:
            assert server.stderr is not None
            pytest.skip(f"no FUSE here: {server.stderr.read().decode()}")
        yield place
    finally:
        flag.unlink(missing_ok=True)
        for run in runs.started:
            if run.process.poll() is None:
                run.kill_all()
        subprocess.run(["umount", "-l", str(place)], check=False)
        server.kill()
        server.communicate()


def the_incident(run: Run) -> dict[str, object]:
    return next((one for one in run.incidents() if one["run"] and one["state"] == "open"), {})


def test_a_hung_mount_explains_the_rank_that_reads_from_it(runs: Runs, mount: Path) -> None:
    config = runs.home / "agent.toml"
    config.write_text("[agent]\nfast_s = 1.0\nslow_s = 1.0\n[collectors]\ndeadline_s = 1.0\n"
                      f"[detect]\nscript_floor_s = {FLOOR_S}\n")
    run = runs.script("reads.py", str(mount / "data"), HOLDFAST_CONFIG=str(config),
                      flags=("--nproc-per-node", "4"))
    run.at_step(5)
    before = {rank: one["pid"] for rank, one in run.all_ranks().items()}
    (runs.home / "hangs").touch()
    hung_s = time.monotonic()
    explained = wait_for(lambda: (one := the_incident(run)) and one["would_have"] and one, 60,
                         "an incident that names the mount")
    assert explained["subject"] == "run/t/rank/1" and explained["fault"] == "rank_hung"
    assert "waits, and no restart is spent" in str(explained["would_have"])
    assert f"{mount} (fuse.hanging) has not answered" in str(explained["would_have"]), explained
    # What is tested is that time passes: more than it would be waited without a cause.
    over_s = hung_s + float(str(explained["reason"]).split("would act at ")[1].split(" s")[0]) + 2
    wait_for(lambda: time.monotonic() > over_s, 100)
    assert {rank: one["pid"] for rank, one in run.all_ranks().items()} == before, run.output
    step = run.all_ranks()[1]["step"]
    (runs.home / "hangs").unlink()
    run.at_step(step + 5)
    wait_for(lambda: not the_incident(run), 60, "the suspicion to be taken back")
    assert {rank: one["pid"] for rank, one in run.all_ranks().items()} == before, run.output
    assert run.status()["generation"] == 1 and run.status()["restarts"] == 0
