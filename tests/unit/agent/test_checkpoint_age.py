"""What /metrics says of a run's checkpoints, and whether the page about them fires."""

from __future__ import annotations

import asyncio
import os
import re
import time

import aiohttp
import pytest
from fakes import FakeLauncher, rank_level, until

PAGE = re.compile(r'^holdfast_checkpoint_(age|interval)_seconds\{run="demo"\} (\S+)$', re.M)


def served(agent, tmp_path, commits, began_s, startup_s=60.0, enough=2):
    """{"age": s, "interval": s} as served of a run that began `began_s` ago; commits are (age in
    s, verified, bad)."""
    listed = []
    for number, (age_s, verified, bad) in enumerate(commits):
        path = tmp_path / f"step-{number}"
        path.mkdir()
        os.utime(path, (time.time() - age_s, time.time() - age_s))
        listed.append({"generation": 1, "step": 10 * number, "path": str(path), "world": 1,
                       "bad": bad, "verified": verified})

    async def scenario():
        async with agent() as (daemon, node):
            await until(lambda: daemon.launchers.address)
            launcher = FakeLauncher(
                tmp_path / "run" / "agent.sock",
                started_boot_s=time.clock_gettime(time.CLOCK_BOOTTIME) - began_s)
            launcher.hello()
            launcher.page(0, os.getpid())
            launcher.levels(generation=1, state="running", startup_s=startup_s,
                            ranks=[rank_level(0, os.getpid())], commits=listed)
            await until(lambda: node.seen and node.seen[-1].runs)
            view = node.seen[-1].runs[0]
            assert len(view.commits) == len(commits)
            ages = daemon.state.checkpoints
            # The directories' times are read beside the loop.
            await until(lambda: all(
                abs(ages.age_s("demo", commit) - age_s) < 30
                for commit, (age_s, _, _) in zip(view.commits, commits, strict=True)))
            async with aiohttp.ClientSession(daemon.launchers.address) as client:
                async with client.get("/metrics") as answer:
                    text = await answer.text()
            launcher.close()
            return text

    text = asyncio.run(scenario())
    assert "# TYPE holdfast_checkpoint_age_seconds gauge" in text
    found = {name: float(value) for name, value in PAGE.findall(text)}
    assert len(found) == enough, text
    return found


def fires(found):
    """The rule's expression, of one node."""
    return found["age"] > 3 * found["interval"]


def test_a_run_whose_checkpoints_never_verify_has_an_age_and_an_interval(agent, tmp_path):
    found = served(agent, tmp_path, [
        (4000, False, ""), (3400, False, ""), (2800, False, "digest"), (2200, False, "digest"),
    ], began_s=4660)
    assert found["age"] == pytest.approx(4600, abs=60)
    assert found["interval"] == pytest.approx(600, abs=30)
    assert fires(found)


def test_one_verified_checkpoint_counts_with_the_interval_of_all(agent, tmp_path):
    found = served(agent, tmp_path, [
        (4000, True, ""), (3400, False, ""), (2800, False, "")], began_s=4660)
    assert found["age"] == pytest.approx(4000, abs=30)
    assert found["interval"] == pytest.approx(600, abs=30)
    assert fires(found)


def test_a_run_that_verifies_or_has_just_begun_to_write_does_not_fire(agent, tmp_path):
    assert not fires(served(agent, tmp_path, [
        (1300, True, ""), (700, True, ""), (100, False, "")], began_s=5000))


def test_a_run_in_its_second_interval_does_not_fire(agent, tmp_path):
    assert not fires(served(agent, tmp_path, [
        (700, False, ""), (100, False, "")], began_s=1400))


@pytest.mark.parametrize("commits", [
    [],  # a script, or checkpoints are off
    [(90_000, False, ""), (89_990, False, "")],  # found in the directory: an earlier run's
])
def test_a_run_that_wrote_none_is_not_spoken_of(agent, tmp_path, commits):
    assert served(agent, tmp_path, commits, began_s=5000, enough=0) == {}
