"""Nobody takes the whole agent: files, ranks and runs have their limits, each said by name."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time

import pytest
from fakes import rank_level, serve, until

from holdfast.agent.core.model import Verdict
from holdfast.agent.system import procfs
from holdfast.worker import page as layout

NO_ROOM = 3  # descriptors: whichever another thread closes meanwhile, none can be opened
AGAIN_S = 0.3


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


RAISED = """
import resource, sys
from holdfast.agent.launchers import admission as room
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
print(room.raise_open_files(), *resource.getrlimit(resource.RLIMIT_NOFILE),
      room.Admission(alone=False).ranks_max, room.Admission(alone=True).ranks_per_uid)
"""


@pytest.mark.parametrize(("soft", "hard", "says"), [
    (256, 2048, [2048, 2048, 2048, 512, 512]), (1024, 1024, [1024, 1024, 1024, 170, 170]),
    (64, 64, [64, 64, 64, 1, 1]),
])
def test_the_limit_of_open_files_is_raised_and_ranks_follow_from_it(soft, hard, says):
    done = subprocess.run([sys.executable, "-c", RAISED, str(soft), str(hard)],
                          capture_output=True, text=True, timeout=60, check=True)
    assert [int(word) for word in done.stdout.split()] == says


def test_an_agent_that_starts_raises_it_first():
    code = ("import resource; from holdfast.agent.__main__ import main;"
            "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 1024));"
            "main(['--config', '/no/such/file']);"
            "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          timeout=60, check=True)
    assert "/no/such/file" in done.stderr and done.stdout == "1024\n"


def test_a_user_has_as_many_ranks_as_one_user_may_and_the_dead_count_for_nothing(
    agent, tmp_path, monkeypatch
):
    async def scenario(daemon, node, launch):
        daemon.launchers._admission.ranks_per_uid = 6
        first, second = launch(run="a", nproc=4), launch(run="b", nproc=3)
        first.hello()
        await first.receive("welcome")
        second.hello()
        assert "has 4 on this node already" in (await second.receive("error"))["error"]
        first.hello()  # known, and no larger than it was
        await first.receive("welcome")
        first.close()
        await until(lambda: daemon.launchers.session("a").connection is None)
        second.hello()  # its launcher's process lives, and may come back
        assert "3 ranks are too many" in (await second.receive("error"))["error"]
        monkeypatch.setattr(procfs, "process_alive", lambda pid: False)
        second.hello()
        await second.receive("welcome")
        assert daemon.launchers.session("a") is None
        second.close()

    serve(scenario, agent, tmp_path, ready=True)


def test_all_users_together_have_what_the_limit_of_open_files_allows(agent, tmp_path):
    async def scenario(daemon, node, launch):
        daemon.launchers._admission.ranks_max = 6
        first, second = launch(run="a", nproc=4), launch(run="b", nproc=3)
        first.hello()
        await first.receive("welcome")
        second.hello()
        assert "follows 4 of the 6" in (await second.receive("error"))["error"]
        first.close()
        second.close()

    serve(scenario, agent, tmp_path, ready=True)


def test_a_launcher_brings_no_more_ranks_than_it_said(agent, tmp_path):
    async def scenario(daemon, node, launch):
        launcher = launch(nproc=2)
        launcher.hello()
        await launcher.receive("welcome")
        for rank in (0, 900):
            launcher.page(rank, os.getpid())
        await until(lambda: len(daemon.launchers.session("demo").monitors) == 2)
        before = open_files()
        for rank in range(1, 20):
            launcher.page(rank, os.getpid())
            said = (await launcher.receive("error"))["error"]
            assert said == f"page of rank {rank}: the 2 ranks of the hello have theirs"
            launcher.pages.pop(rank).release()
        await until(lambda: open_files() <= before + 2)  # a collector's own, for a moment
        launcher.page(900, os.getpid())  # a rank that is known may come anew
        ranks = [rank_level(rank, os.getpid()) for rank in range(3)]
        launcher.levels(generation=1, state="running", ranks=ranks)
        assert "3 ranks are more than the 2" in (await launcher.receive("error"))["error"]
        launcher.close()

    serve(scenario, agent, tmp_path, ready=True)


def test_without_a_file_to_open_the_agent_waits_and_does_not_spin(agent, tmp_path, monkeypatch):
    monkeypatch.setattr("holdfast.agent.launchers.server.ACCEPT_AGAIN_S", AGAIN_S)

    async def scenario(daemon, node, launch):
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        launcher = launch()  # connected; nothing is accepted before the loop runs
        resource.setrlimit(resource.RLIMIT_NOFILE, (NO_ROOM, limits[1]))
        try:
            refusals = lambda: daemon.state.errors.counts.get("sessions", 0)  # noqa: E731
            began_s = time.monotonic()
            await until(lambda: refusals() >= 3)
            assert refusals() <= (time.monotonic() - began_s) / AGAIN_S + 1
            assert "Too many open files" in daemon.state.errors.latest["sessions"]
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        launcher.hello()
        await launcher.receive("welcome")
        launcher.close()

    serve(scenario, agent, tmp_path, ready=True, agent__fast_s=60.0, agent__slow_s=600.0)


def test_a_page_whose_descriptors_found_no_room_is_refused_for_that(agent, tmp_path):
    async def scenario(daemon, node, launch):
        launcher = launch()
        launcher.hello()
        await launcher.receive("welcome")
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        page_fd, pidfd = layout.create(), os.pidfd_open(os.getpid())
        good = layout.readonly(page_fd)
        launcher.send([good, pidfd], t="page", rank=0, generation=1, pid=os.getpid())
        resource.setrlimit(resource.RLIMIT_NOFILE, (NO_ROOM, limits[1]))
        try:
            said = (await launcher.receive("error"))["error"]
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            for fd in (page_fd, pidfd, good):
                os.close(fd)
        assert "descriptors got lost" in said
        launcher.close()

    serve(scenario, agent, tmp_path, ready=True, agent__fast_s=60.0, agent__slow_s=600.0)


def test_an_odd_number_costs_its_own_packet_and_a_run_not_judged_is_counted(agent, tmp_path):
    async def scenario(daemon, node, launch):
        odd, good = launch(run="odd"), launch(run="good")
        for launcher in (odd, good):
            launcher.hello()
            await launcher.receive("welcome")
        odd.levels(commits=[{"generation": 1, "step": -(10**400), "path": "/c/1"}])
        assert "at `$.commits[0].step`" in (await odd.receive("error"))["error"]
        good.levels(generation=0, state="idle", ranks=[])
        await until(lambda: node.seen and [one.run for one in node.seen[-1].runs] == ["good"])
        assert "core" not in daemon.state.errors.counts
        node.extra = {"verdicts": (Verdict("run_not_judged", "run/odd", "degraded", 1.0, "why"),)}
        daemon.wake("test")
        await until(lambda: daemon.state.errors.latest.get("core") == "why")
        odd.close()
        good.close()

    serve(scenario, agent, tmp_path, ready=True)
