"""Unmodified scripts lose ranks and come back; the agent may die and no rank notices."""

from __future__ import annotations

import os
import re
import signal
import time
import urllib.request
from functools import partial

import pytest
from running import Run, Runs, wait_for

pytest.importorskip("torch", reason="the trainer's extra is not installed")


def agent_pid(runs: Runs) -> int:
    agent = "holdfast.agent --private"
    return next(pid for pid, command in runs.left().items() if agent in command)


def test_ten_of_ten_restarts_train_on(runs: Runs) -> None:
    """torchrun's in-place restart reuses its store and hangs or fails in a minority of tries.  Each
    dies at the same count of its own steps, which for a script is no crash loop."""
    run = runs.script("plain.py", "16", "die-often",
                      flags=("--nproc-per-node", "2", "--max-restarts", "10"))
    assert run.wait(300) == 0, run.output
    assert run.output.count("finished") == 2
    assert "restarts 10" in run.output


def test_what_dies_before_its_first_step_is_a_crash_loop(runs: Runs) -> None:
    run = runs.script("plain.py", "16", "die-first",
                      flags=("--nproc-per-node", "2", "--max-restarts", "10"))
    assert run.wait() == 76, run.output
    assert "3 times before its first step" in run.output, run.output
    assert "crash_loop" in {one["fault"] for one in run.incidents()}


def generation_of(run: Run) -> int:
    """0 while no agent answers, or none knows the run yet."""
    answer = run.try_api("/api/v1/status")
    return int(answer["runs"][0]["generation"]) if answer and answer["runs"] else 0


def restarts_counted(run: Run) -> float:
    """By the metric, over all faults."""
    try:
        address = (run.home / "rt" / run.name / "address").read_text().strip()
        with urllib.request.urlopen(f"{address}/metrics", timeout=5) as answer:
            text = answer.read().decode()
    except OSError:  # the agent is being started
        return -1.0
    found = re.findall(rf'^holdfast_restarts_total{{[^}}]*run="{run.name}"[^}}]*}} (\S+)', text,
                       re.MULTILINE)
    return sum(map(float, found))


def reached(run: Run, generation: int) -> bool:
    return generation_of(run) >= generation


def counted(run: Run, restarts: int) -> bool:
    return restarts_counted(run) >= restarts


def test_agents_killed_behind_their_ranks_lose_and_count_nothing_twice(runs: Runs) -> None:
    """Whatever an agent had done of the restart when it was killed: the job lives, and each restart
    is counted once.  The waits differ, so that the kill meets it in different places."""
    run = runs.script("saving.py", "100000", str(runs.home / "state.pt"),
                      flags=("--nproc-per-node", "2", "--max-restarts", "20"))
    for restarts, wait_s in enumerate((0.0, 0.05, 0.1, 0.15, 0.3), 1):
        rank, agent = run.at_step(3), agent_pid(runs)
        os.kill(rank, signal.SIGKILL)
        time.sleep(wait_s)  # what is tested is when the second kill comes
        os.kill(agent, signal.SIGKILL)
        wait_for(partial(reached, run, restarts + 1), what=run.output)
        run.at_step(3)
        wait_for(partial(counted, run, restarts), 60, f"{restarts} restarts counted")
        assert (generation_of(run), restarts_counted(run)) == (restarts + 1, restarts), run.output
    assert run.process.poll() is None, run.output


@pytest.fixture(scope="module")
def clean(shared_runs: Runs) -> Run:
    """The same training without a fault."""
    run = shared_runs.script("saving.py", "80", str(shared_runs.home / "clean.pt"), name="clean")
    assert run.wait() == 0, run.output
    return run


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_script_that_saves_itself_survives(
    runs: Runs, clean: Run, number: signal.Signals
) -> None:
    run = runs.script("saving.py", "80", str(runs.home / "state.pt"), name="faulty")
    pid = run.at_step(8)
    os.kill(pid, number)
    incident = wait_for(run.own_incidents, 60, "an incident")[0]
    assert run.wait() == 0, run.output
    assert incident["fault"] == ("rank_killed" if number == signal.SIGKILL else "rank_stopped")
    assert "rank 1" in incident["culprit"] and str(pid) in incident["culprit"]
    assert int(re.findall(r"from (\d+) rank 0", run.output)[-1]) >= 6
    weights = re.compile(r"weights (\S+)")
    assert set(weights.findall(run.output)) == set(weights.findall(clean.output))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_script_without_state_survives(runs: Runs, number: signal.Signals) -> None:
    end = runs.home / "end"
    run = runs.script("plain.py", str(end))
    os.kill(run.at_step(6), number)
    run.wait_output("step 6 rank 0 restarts 1")
    end.touch()
    assert run.wait() == 0, run.output
    assert "finished rank 0 restarts 1" in run.output


def test_max_restarts_is_kept_and_the_infrastructures_fault_is_76(runs: Runs) -> None:
    run = runs.script("plain.py", "16", "die-often",
                      flags=("--nproc-per-node", "2", "--max-restarts", "1"))
    assert run.wait() == 76, run.output
    assert "restarts 2" not in run.output


def pids(run: Run) -> set[int]:
    return {int(rank["pid"]) for rank in run.all_ranks().values()}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_agents_end_touches_no_rank(runs: Runs, number: signal.Signals) -> None:
    end = runs.home / "end"
    run = runs.script("plain.py", str(end))
    run.at_step(5)
    ranks, old = pids(run), agent_pid(runs)
    os.kill(old, number)
    new = wait_for(lambda: [p for p, c in runs.left().items()
                            if "holdfast.agent --private" in c and p != old])
    assert new
    wait_for(lambda: run.ranks().get(1, {}).get("step", 0) > 8, what="steps seen by the new agent")
    assert pids(run) == ranks
    os.kill(max(ranks), signal.SIGKILL)  # and it acts
    run.wait_output("step 6 rank 1 restarts 1")
    end.touch()
    assert run.wait() == 0, run.output
    assert "restarts 2" not in run.output
    assert [incident["fault"] for incident in run.own_incidents()] == ["rank_killed"]


def test_a_frozen_agent_touches_no_rank(runs: Runs) -> None:
    run = runs.script("plain.py", "150")
    run.at_step(5)
    os.kill(agent_pid(runs), signal.SIGSTOP)
    run.wait_output("step 40 rank 1")
    os.kill(agent_pid(runs), signal.SIGCONT)
    assert run.wait() == 0, run.output
    assert "restarts 1" not in run.output
