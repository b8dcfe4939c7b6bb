"""`torchrun ARGS` -> `holdfast run ARGS`: same environment, same code, same traceback."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest
from ports import free_port
from running import SCRIPTS, Runs, wait_for

pytest.importorskip("torch", reason="the trainer's extra is not installed")


def test_ranks_see_torchruns_environment_and_their_arguments(runs: Runs) -> None:
    run = runs.script("env.py", flags=("--standalone", "--nproc_per_node=2", "--max-restarts=1"))
    assert run.wait() == 0, run.output
    lines = run.output.splitlines()
    seen = [json.loads(line[4:]) for line in lines if line.startswith("env ")]
    assert sorted(e["RANK"] for e in seen) == ["0", "1"]
    for environ in seen:
        assert all(value is not None for value in environ.values()), environ
        assert environ["WORLD_SIZE"] == environ["LOCAL_WORLD_SIZE"] == "2"
        assert environ["LOCAL_RANK"] == environ["RANK"] and environ["GROUP_RANK"] == "0"
        assert environ["MASTER_ADDR"] == "127.0.0.1" and int(environ["MASTER_PORT"]) > 0
        assert environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        assert environ["TORCHELASTIC_MAX_RESTARTS"] == "1" and environ["OMP_NUM_THREADS"] == "1"
    assert len({e["MASTER_PORT"] for e in seen}) == 1


@pytest.mark.parametrize(("word", "code"), [("3", 3), ("raise", 1)])
def test_the_scripts_own_code_comes_through(runs: Runs, word: str, code: int) -> None:
    run = runs.script("env.py", word, flags=("--nproc-per-node", "2", "--max-restarts", "0"))
    assert run.wait() == code, run.output
    assert "rank 1" in run.output
    if word == "raise":
        assert "ValueError: the reader's own mistake" in run.output
        assert "Traceback" in run.output and "holdfast/worker" not in run.output
        assert "worker/rank/rank.py" not in run.output  # the reader's own lines only


def test_a_death_over_a_name_that_is_no_utf8_reaches_the_agent(runs: Runs) -> None:
    """With an argument of that kind: the hello is taken, and so is the level with the death."""
    run = runs.script("badname.py", os.fsdecode(b"arg-\xfd"),
                      flags=("--nproc-per-node", "1", "--max-restarts", "1"))
    assert run.wait() == 1, run.output
    assert "ValueError: bad image c?.jpg" in run.output, run.output  # what the agent gave back
    assert "did not take what it was told" not in run.output
    assert "generation 2" in run.output, run.output


def test_a_scripts_75_is_not_ours(runs: Runs) -> None:
    run = runs.script("env.py", "75", flags=("--nproc-per-node", "2", "--max-restarts", "0"))
    assert run.wait() == 1, run.output
    assert "75" in run.output


def test_a_module_and_a_command_without_python(runs: Runs) -> None:
    module = runs.start(
        "run", "--nproc-per-node", "1", "-m", "env", "x", name="m", PYTHONPATH=":".join(
            [str(SCRIPTS), runs.environ["PYTHONPATH"]]),
    )
    assert module.wait() == 0, module.output
    assert "__main__" in module.output
    command = runs.start("run", "--nproc-per-node", "2", "--no-python", "sh", "-c",
                         'echo "rank $RANK of $WORLD_SIZE"; exit $RANK', name="c")
    assert command.wait() == 1
    assert "rank 0 of 2" in command.output and "rank 1 of 2" in command.output


def test_threads_executors_atexit_and_the_last_line_are_kept(runs: Runs) -> None:
    logs = runs.home / "logs"
    run = runs.script("ends.py", "well", flags=(
        "--nproc-per-node", "2", "--master-port", str(free_port()), "--log-dir", str(logs)))
    assert run.wait() == 0, run.output
    for rank in (0, 1):
        text = (logs / f"rank-{rank}" / "stdout.log").read_text()
        for what in ("atexit", "executor", "thread"):
            assert f"{what} ran on {rank}" in text, text
        assert "no newline at the end" in text and "no newline at the end" in run.output


def test_a_script_says_more_in_three_lines(runs: Runs) -> None:
    seen = runs.home / "seen"
    run = runs.script("ends.py", "well", str(seen), flags=("--nproc-per-node", "1"))
    wait_for(lambda: run.ranks().get(0, {}).get("phase") == "eval", what="the phase eval")
    seen.touch()
    assert run.wait() == 0, run.output


def test_record_and_its_error_file(runs: Runs) -> None:
    run = runs.script("ends.py", "recorded", flags=("--nproc-per-node", "1", "--max-restarts=0"))
    assert run.wait() == 1, run.output
    assert "first to fail: rank 0" in run.output
    assert "LookupError" in run.output.split("first to fail")[1], run.output


def test_it_runs_in_the_jobs_own_python(runs: Runs) -> None:
    """Another interpreter version, without torch and without Holdfast's packages."""
    mine = sys.version_info[:2]
    found = other_python(mine)
    if not found:
        pytest.skip("no second Python (3.9 or newer) on this machine")
    environ = {"PYTHONPATH": runs.environ["PYTHONPATH"]}
    run = runs.script(
        "env.py", flags=("--python", found, "--nproc-per-node", "2"), **environ
    )
    assert run.wait() == 0, run.output
    said = [line for line in run.output.splitlines() if line.startswith("argv")]
    assert len(said) == 2 and str(mine) not in run.output


def other_python(mine: tuple[int, int]) -> str:
    import glob
    import shutil
    import subprocess

    beside = Path(sys.base_prefix).parent / "3.*" / "bin" / "python"  # where versions lie together
    named = [shutil.which(f"python3.{minor}") or "" for minor in range(9, 16)]
    for python in [*named, *sorted(glob.glob(str(beside)))]:
        code = "import sys; print(*sys.version_info[:2])"
        if python:
            said = subprocess.run([python, "-c", code], capture_output=True, text=True).stdout
            version = tuple(int(word) for word in said.split())
            if version >= (3, 9) and version != mine:
                return python
    return ""


def test_a_preload_that_started_threads_falls_back_to_spawn(runs: Runs) -> None:
    path = ":".join([str(SCRIPTS), runs.environ["PYTHONPATH"]])
    run = runs.script(
        "plain.py", "3", flags=("--nproc-per-node", "2", "--preload", "threads"), PYTHONPATH=path
    )
    assert run.wait() == 0, run.output
    assert run.output.count("ranks start cold") == 1
    assert run.output.count("finished") == 2


def test_a_preload_that_does_not_exist_is_said_and_the_job_runs(runs: Runs) -> None:
    run = runs.script("env.py", flags=("--nproc-per-node", "1", "--preload", "no_such_module"))
    assert run.wait() == 0
    assert "preload no_such_module" in run.output


def test_what_ddp_measures_of_its_sums_is_shown_of_a_script(runs: Runs, tmp_path: Path) -> None:
    run = runs.script("sums.py", str(tmp_path / "enough"))

    def shown() -> dict[str, float]:
        answer = run.try_api("/api/v1/status")
        return dict(answer["runs"][0]["collectives"]) if answer and answer["runs"] else {}

    seen = wait_for(shown, 60.0, "a measured iteration")
    assert seen.keys() == {"wait_s"} and 0.0 <= seen["wait_s"] < 5.0
    (tmp_path / "enough").touch()
    assert run.wait() == 0, run.output


def test_an_interrupt_leaves_nothing(runs: Runs) -> None:
    run = runs.script("plain.py", "2000", flags=("--nproc-per-node", "2", "--grace", "300"))
    run.wait_output("step 3 rank 1")
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.wait() == 130, run.output
    wait_for(lambda: not runs.left(), 30, "every process gone")


def test_sigterm_is_a_preemption(runs: Runs) -> None:
    run = runs.script("plain.py", "2000", flags=("--nproc-per-node", "2", "--grace", "300"))
    run.wait_output("step 3 rank 1")
    run.process.terminate()
    assert run.wait() == 75, run.output


def test_the_launchers_death_ends_every_rank(runs: Runs) -> None:
    run = runs.script("plain.py", "2000")
    run.wait_output("step 3 rank 1")
    run.process.kill()
    run.process.wait()
    wait_for(lambda: not runs.left(), 60, "ranks, store and private agent gone")


def test_what_a_rank_leaves_behind_is_ended(runs: Runs) -> None:
    run = runs.start(
        "run", "--nproc-per-node", "1", "--no-python", "sh", "-c",
        "setsid sleep 600 & sleep 0.5", name="o",
    )
    assert run.wait() == 0, run.output
    assert not runs.left()


def test_a_file_that_does_not_exist_is_one_line_and_78(runs: Runs) -> None:
    run = runs.start("run", "missing.py")
    assert run.wait() == 78
    assert run.output.strip().count("\n") == 0 and "missing.py: no such file" in run.output
