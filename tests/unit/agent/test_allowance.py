"""What one user may make the agent do: so much at once, then so much a second; none is refused."""

from __future__ import annotations

import os
import time

from fakes import rank_level, serve, until

from holdfast.agent.launchers import admission
from holdfast.agent.launchers.admission import Admission, Allowance


def test_what_is_overspent_is_waited_for_by_its_user_alone():
    allowance = Allowance(per_s=2.0, at_once=10.0)
    assert [allowance.spend(1, 5.0, 100.0) for _ in range(3)] == [0.0, 0.0, 2.5]
    assert allowance.spend(2, 5.0, 100.0) == 0.0
    assert allowance.spend(1, 1.0, 102.5) == 0.5  # that long ago it would have had its time
    assert allowance.spend(1, 10.0, 1000.0) == 0.0
    for uid in range(3, 3 * admission.USERS_MAX):
        assert allowance.spend(uid, 5.0, 1000.0) == 0.0
    assert len(allowance._spent) <= admission.USERS_MAX


def test_a_large_honest_run_never_waits():
    limits = Admission(alone=False)
    levels = [limits.pause_s(1, 60_000, False) for _ in range(200)]  # each of 200 ranks ends
    pages = [limits.pause_s(1, 100, False) for _ in range(1024)]
    hellos = [limits.pause_s(1, 1000, True) for _ in range(64)]  # all that one user may have
    assert not any(levels + pages + hellos)


def test_packets_of_a_user_who_sends_without_end_wait_and_none_is_lost(agent, tmp_path):
    async def scenario(daemon, node, launch):
        launcher = launch()
        launcher.hello()
        await launcher.receive("welcome")
        daemon.launchers._admission._packets = Allowance(per_s=100.0, at_once=10.0)
        begin_s = time.monotonic()
        for _ in range(40):
            launcher.levels(generation=1, state="running")
        await until(lambda: daemon.launchers.session("demo").levels.n == 40)
        assert time.monotonic() - begin_s >= 0.25  # 30 more than at once, 100 a second
        launcher.send(t="bye", code=0)
        await until(lambda: daemon.launchers.session("demo") is None)
        launcher.close()

    serve(scenario, agent, tmp_path)


def test_new_runs_of_a_user_who_starts_them_without_end_wait_and_none_is_refused(agent, tmp_path):
    async def scenario(daemon, node, launch):
        daemon.launchers._admission._runs = Allowance(per_s=20.0, at_once=4.0)
        begin_s = time.monotonic()
        for number in range(12):
            launcher = launch(run=f"run-{number}")
            launcher.hello()
            launcher.levels(state="idle")
            await launcher.receive("welcome")
            await until(lambda run=f"run-{number}": daemon.launchers.session(run).have_levels)
            launcher.close()
        assert time.monotonic() - begin_s >= 0.3  # 8 above the burst, 20 a second

    serve(scenario, agent, tmp_path)


def test_two_hundred_quick_runs_of_one_user_are_served_at_once(agent, tmp_path):
    async def scenario(daemon, node, launch):
        rests = []
        real = daemon.launchers._admission.pause_s

        def noted(*spent):
            rests.append(real(*spent))
            return rests[-1]

        daemon.launchers._admission.pause_s = noted
        for wave in range(4):
            launchers = [launch(run=f"quick-{wave}-{number}") for number in range(50)]
            for launcher in launchers:
                launcher.hello()
            for launcher in launchers:
                await launcher.receive("welcome")
                launcher.page(0, os.getpid())
                launcher.levels(generation=1, state="running",
                                ranks=[rank_level(0, os.getpid())])
            await until(lambda: len(node.seen[-1].runs) == 50)
            for launcher in launchers:
                launcher.levels(generation=1, state="done")
                launcher.send(t="bye", code=0)
            await until(lambda: not daemon.launchers.sessions()
                        and not daemon.launchers._connections)
            for launcher in launchers:
                launcher.close()
        assert len(rests) >= 800 and not any(rests)
        assert "connections" not in daemon.state.errors.counts

    serve(scenario, agent, tmp_path)
