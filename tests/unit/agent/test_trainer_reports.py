"""What a rank says of itself: shown, counted, and never a word about the machine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fakes import serve, until

import holdfast.trainer
from holdfast.agent.daemon import trainer_reports


def test_what_the_trainer_reports_is_what_may_be_reported():
    folder = Path(holdfast.trainer.__file__).parent
    code = "".join(path.read_text("utf-8") for path in folder.rglob("*.py"))
    said = set(re.findall(r'report\(\s*"(\w+)"', code))
    assert said == set(trainer_reports.REPORTED)


def test_a_trainers_own_report_is_shown_and_counted(agent, tmp_path):
    async def scenario(daemon, node, launch):
        launcher = launch()
        launcher.hello()
        for _ in range(3):
            launcher.send(t="report", rank=0, fault="snapshot_off", text="does not fit")
        launcher.send(t="report", rank=0, fault="", text="for the terminal")
        await until(lambda: daemon.state.snapshot.decision.verdicts)
        assert daemon.state.snapshot.decision.verdicts[0].fault == "snapshot_off"
        key = ("events", ("trainer", "snapshot_off", "warn", ""))
        assert daemon.performer.counters[key] == 1
        launcher.close()

    serve(scenario, agent, tmp_path)


@pytest.mark.parametrize(("rank", "fault", "says"), [
    (0, "gpu_fell_off_bus", "only"), (0, "ec2_spot_interruption", "only"), (0, "nonsense", "only"),
    (2, "snapshot_off", "the run has 2 ranks"), (-2, "snapshot_off", "the run has 2 ranks"),
])
def test_no_rank_reports_what_it_cannot_know(agent, tmp_path, rank, fault, says):
    async def scenario(daemon, node, launch):
        launcher = launch()
        launcher.hello()
        launcher.send(t="report", rank=rank, fault=fault, text="pages somebody")
        assert says in (await launcher.receive("error"))["error"]
        assert not daemon.reports.kept and daemon.launchers.session("demo") is not None
        launcher.close()

    serve(scenario, agent, tmp_path)


def test_one_users_reports_leave_room_for_the_others(agent, tmp_path):
    async def scenario(daemon, node, launch):
        launcher = launch(nproc=1000)
        launcher.hello()
        for rank in range(trainer_reports.REPORTS_PER_UID + 20):
            launcher.send(t="report", rank=rank, fault="snapshot_off", text="no room")
        await until(lambda: len(daemon.reports.kept) == trainer_reports.REPORTS_PER_UID)
        daemon.launchers.session("demo").uid += 1  # as if another user's
        launcher.send(t="report", rank=999, fault="snapshot_off", text="no room")
        await until(lambda: ("demo", "snapshot_off", 999) in daemon.reports.kept)
        launcher.close()

    serve(scenario, agent, tmp_path)
