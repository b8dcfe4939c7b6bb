"""Cgroups and units: recorded trees of both versions, and a stand-in for systemctl."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from host.cgroup_trees import Version1, Version2, named
from hypothesis import given
from hypothesis import strategies as st
from waiting import LIMIT_S, wait_for

from holdfast.agent.config.runbooks import load_runbooks
from holdfast.agent.core.model import Now, Observed, Settings, readings_of
from holdfast.agent.core.node import Node
from holdfast.agent.launchers.protocol import RankLevel
from holdfast.agent.launchers.rank_monitor import RankMonitor
from holdfast.agent.system import procfs
from holdfast.agent.system.child_probe import Helper, Prober
from holdfast.collectors import cgroups, units
from holdfast.collectors.cgroups import CgroupsCollector
from holdfast.collectors.contract import NoData, Roots
from holdfast.collectors.units import UnitsCollector

SYSTEMCTL = """#!/bin/sh
echo "$@" > "$0.asked"
cat "$0.answer"
exit $(cat "$0.code")
"""


# ------------------------------------------------------------- recorded


def test_version_1_counts_what_the_kernel_holds_against_directories(tmp_path: Path) -> None:
    machine = Version1(tmp_path, 68_312)
    machine.cgroup("system.slice/sshd.service")
    machine.cgroup("job", limit=4 << 30, usage=4 << 30, cache=1 << 30, kills=2)
    found = named(CgroupsCollector().collect(machine.roots, 1.0))
    assert found == {
        "host_memory_cgroups{state=in_use}": 4.0,
        "host_memory_cgroups{state=dying}": 68_308.0,
        "host_cgroup_oom_kills_total{cgroup=/job}": 2.0,
        "host_cgroup_memory_ratio{cgroup=/job}": 0.75,
        "cgroup_memory_ratio{cgroup=/job}": 0.75,
        "cgroup_memory_max_bytes{cgroup=/job}": float(4 << 30),
    }
    (machine.base / "release_agent").unlink()  # a container sees a part of the machine's tree
    seen = named(CgroupsCollector().collect(machine.roots, 1.0))
    assert "host_memory_cgroups{state=dying}" not in seen
    assert seen["host_memory_cgroups{state=in_use}"] == 4.0


def test_version_2_says_below_which_cgroup_most_of_them_are(tmp_path: Path) -> None:
    machine = Version2(tmp_path)
    machine.cgroup("/", dying=900, below=40)
    machine.cgroup("/system.slice", dying=850, below=30)
    machine.cgroup("/system.slice/ecs.service", dying=840)
    machine.cgroup("/system.slice/sshd.service", dying=2)
    machine.cgroup("/user.slice", dying=50)
    machine.cgroup("/job", memory_max=f"{1 << 30}\n", memory_current=f"{1 << 29}\n",
                   memory_stat="inactive_file 0\n", pids_max="100\n", pids_current="95\n",
                   memory_events="oom 1\noom_kill 3\n",
                   memory_events__local="oom 1\noom_kill 3\n")
    found = named(CgroupsCollector().collect(machine.roots, 1.0))
    assert found == {
        "host_memory_cgroups{state=in_use}": 40.0,
        "host_memory_cgroups{state=dying}": 900.0,
        "cgroup_dying{cgroup=/system.slice/ecs.service}": 840.0,
        "host_cgroup_oom_kills_total{cgroup=/job}": 3.0,
        "host_cgroup_memory_ratio{cgroup=/job}": 0.5,
        "cgroup_memory_ratio{cgroup=/job}": 0.5,
        "cgroup_tasks_ratio{cgroup=/job}": 0.95,
        "cgroup_memory_max_bytes{cgroup=/job}": float(1 << 30),
        "host_cgroup_tasks_ratio{cgroup=/job}": 0.95,
    }
    (machine.base / "cgroup.stat").write_text(
        "nr_descendants 40\nnr_subsys_memory 33\nnr_dying_descendants 900\n"
        "nr_dying_subsys_memory 7\n")
    newer = named(CgroupsCollector().collect(machine.roots, 1.0))
    assert newer["host_memory_cgroups{state=in_use}"] == 33.0
    assert newer["host_memory_cgroups{state=dying}"] == 7.0


def test_where_many_share_them_the_place_above_is_named(tmp_path: Path) -> None:
    machine = Version2(tmp_path)
    machine.cgroup("/", dying=900, below=40)
    machine.cgroup("/kubepods", dying=880)
    for pod, dying in enumerate((300, 290, 290)):
        machine.cgroup(f"/kubepods/pod{pod}", dying=dying)
    found = named(CgroupsCollector().collect(machine.roots, 1.0))
    assert found["cgroup_dying{cgroup=/kubepods}"] == 880.0


def test_births_count_for_whoever_is_made_anew() -> None:
    before = {"/a": 1, "/a/b": 2, "/s": 3, "/s/x": 4}
    assert cgroups.births(before, before) == {}
    again = cgroups.births(before, {"/a": 1, "/a/b": 9, "/s": 3, "/s/y": 5, "/s/z": 6})
    assert again == {"/a/b": 1, "/s": 2}
    whole = cgroups.births(before, {"/a": 8, "/a/b": 9, "/a/b/c": 10, "/new": 11})
    assert whole == {"/a": 1, "/": 1}


def test_births_add_up_over_readings(tmp_path: Path) -> None:
    machine, collector = Version1(tmp_path, 5), CgroupsCollector()
    for number in range(4):
        machine.cgroup(f"ecs.service/try,{number}")
        found = named(collector.collect(machine.roots, float(number)))
        place = machine.base / f"ecs.service/try,{number}"
        for file in place.iterdir():
            file.unlink()
        place.rmdir()
    assert found["cgroup_births_total{cgroup=/ecs.service,place=/ecs.service}"] == 3.0
    assert found["host_cgroup_births_total{cgroup=/ecs.service}"] == 3.0


@pytest.mark.parametrize(("path", "place"), [
    ("/", "/"),
    ("/system.slice/ecs.service", "/system.slice/ecs.service"),
    ("/system.slice/k3s.service/x", "/system.slice/k3s.service/x"),
    ("/system.slice/sshd@3-10.0.0.1:22.service", "/system.slice"),
    ("/system.slice/run-r0fa1.service", "/system.slice"),
    ("/system.slice/slurmstepd.scope/job_7/step_0", "/system.slice/slurmstepd.scope"),
    ("/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1f.slice/cri-a9.scope",
     "/kubepods.slice/kubepods-burstable.slice"),
    ("/docker/6c0a", "/docker"),
    ("/user.slice/user-1000.slice/session-4.scope", "/user.slice"),
])
def test_the_place_of_a_cgroup_is_what_stays(path: str, place: str) -> None:
    assert cgroups.place_of(path) == place


def test_a_thousand_jobs_leave_one_series_whose_count_only_grows(tmp_path: Path) -> None:
    machine, collector = Version1(tmp_path, 5), CgroupsCollector()
    declared = {metric.name for metric in CgroupsCollector.metrics}
    series = set[str]()
    for job in range(40):
        machine.cgroup(f"slurm/job_{job}", limit=1000, usage=900 + job % 3, kills=job % 2)
        machine.cgroup("slurm/job_x9", limit=1000, usage=10, kills=7)
        found = named(collector.collect(machine.roots, float(job)))
        series |= {key for key in found if key.partition("{")[0] in declared}
        assert found["host_cgroup_memory_ratio{cgroup=/slurm}"] == (900 + job % 3) / 1000
        assert found["host_cgroup_oom_kills_total{cgroup=/slurm}"] == 7.0 + (job + 1) // 2
        shutil.rmtree(machine.base / f"slurm/job_{job}")
    assert {key for key in series if "job" in key} == set() and len(series) <= 6


def test_a_cgroup_whose_name_is_no_text_is_read_and_named_as_one(tmp_path: Path) -> None:
    machine, collector = Version1(tmp_path, 5), CgroupsCollector()
    for name in ("one", "two"):
        machine.cgroup(os.fsdecode(b"job\xff/") + name, limit=1000, usage=990, kills=1)
        found = collector.collect(machine.roots, 1.0)
    for sample in found:
        sample.subject.encode()
    assert {one.subject for one in found if one.name == "cgroup_memory_max_bytes"} == {
        "cgroup=/job\ufffd/one", "cgroup=/job\ufffd/two"}
    assert any(one.name == "cgroup_births_total" and "/job\ufffd" in one.subject for one in found)


def test_an_incident_of_a_cgroup_whose_name_is_no_text_can_be_remembered(tmp_path: Path) -> None:
    machine, collector = Version1(tmp_path, 5), CgroupsCollector()
    machine.cgroup(os.fsdecode(b"job\xff"), limit=1000, usage=990)
    node = Node("a", Settings(), load_runbooks())
    for second in range(1000, 1090, 15):
        samples = tuple(collector.collect(machine.roots, float(second)))
        decision = node.step(Now(float(second), 1e9, "b"), Observed(samples=readings_of(samples)))
    (incident,) = decision.incidents
    assert incident.fault == "host_memory_low" and "/job\ufffd" in incident.reason
    assert incident.id.encode() in node.memory()


def test_junk_and_a_large_tree_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Version1(tmp_path, 100)
    for number in range(12):
        machine.cgroup(f"job{number}", limit=1000, usage=500)
    place = machine.base / "job0"
    (place / "memory.limit_in_bytes").write_bytes(b"\xff\xfe\x00")
    (place / "memory.oom_control").write_text("oom_kill\noom_kill -3\n\n= =")
    (machine.base / "job1/memory.usage_in_bytes").write_text("-1\n")
    found = named(CgroupsCollector().collect(machine.roots, 1.0))
    assert "cgroup_memory_ratio{cgroup=/job0}" not in found
    assert found["cgroup_memory_ratio{cgroup=/job1}"] == 0.0
    machine.proc.write_text("memory\nmemory x y\n")
    assert "host_memory_cgroups{state=dying}" not in named(
        CgroupsCollector().collect(machine.roots, 1.0))
    machine.holds(100)
    monkeypatch.setattr("holdfast.collectors.cgroups.DIRECTORIES_MAX", 5)
    cut = named(CgroupsCollector().collect(machine.roots, 1.0))
    assert cut["host_memory_cgroups{state=in_use}"] == 6.0  # so far; and no number of the rest
    assert "host_memory_cgroups{state=dying}" not in cut
    with pytest.raises(NoData):
        CgroupsCollector().collect(Roots(sys=str(tmp_path / "none")), 1.0)


def test_a_ranks_cgroup_is_the_one_that_its_memory_is_charged_to(tmp_path: Path) -> None:
    (tmp_path / "5").mkdir()
    for text, expected in (
        ("9:name=systemd:/init\n4:cpu,memory:/job/a:b\n0::/other\n", "/job/a:b"),
        ("0::/system.slice/slurmstepd.scope/job_1\n", "/system.slice/slurmstepd.scope/job_1"),
        ("4:cpu:/x\n\nrubbish\n:\n", ""),
    ):
        (tmp_path / "5/cgroup").write_text(text)
        assert procfs.memory_cgroup(5, str(tmp_path)) == expected
        assert RankMonitor(0, 5, 1, str(tmp_path)).level(
            RankLevel(0, 5, 1, "running"), "a", 1.0).cgroup == expected
    assert procfs.memory_cgroup(6, str(tmp_path)) == ""


# ------------------------------------------------------------- units


@pytest.fixture
def systemctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tool = tmp_path / "bin/systemctl"
    tool.parent.mkdir()
    tool.write_text(SYSTEMCTL)
    tool.chmod(0o755)
    Path(f"{tool}.code").write_text("0")
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    return tool


def test_units_that_restart_and_units_that_failed(systemctl: Path) -> None:
    Path(f"{systemctl}.answer").write_text(
        "Id=ecs.service\nNRestarts=412\nActiveState=activating\n\n"
        "Id=sshd.service\nNRestarts=0\nActiveState=active\n\n\n"
        "NRestarts=7\nActiveState=failed\n\nhalf a li"
        "\n\nId=x=y,z.service\nNRestarts=-3\nActiveState=failed\nActiveState=active\n"
        "\nId=big.service\nNRestarts=99999999999999999999\n"
    )
    assert named(UnitsCollector().collect(Roots(), 1.0)) == {
        "host_units{}": 4.0, "host_unit_restarts_total{unit=ecs.service}": 412.0,
        "host_unit_failed{unit=x_y_z.service}": 1.0,
    }
    asked = Path(f"{systemctl}.asked").read_text()
    assert asked.startswith("show ") and asked.endswith(" *.service\n")


def test_a_tool_that_fails_is_an_error_and_none_is_no_data(
    systemctl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(f"{systemctl}.answer").write_text("")
    Path(f"{systemctl}.code").write_text("1")
    with pytest.raises(OSError, match="exit status 1"):
        UnitsCollector().collect(Roots(), 1.0)
    monkeypatch.setenv("PATH", str(systemctl.parent / "none"))
    with pytest.raises(NoData):
        UnitsCollector().collect(Roots(), 1.0)


@pytest.mark.parametrize(("load", "file", "active", "wanted"), [
    ("loaded", "enabled", "active", {1.0}), ("loaded", "disabled", "active", {1.0}),
    ("loaded", "enabled", "inactive", {0.0}), ("loaded", "enabled", "activating", {0.0}),
    ("loaded", "disabled", "failed", {0.0}),
    ("loaded", "disabled", "inactive", set()),  # it may run in a container
    ("not-found", "", "inactive", set()),  # another unit speaks of it, and it is not here
    ("not-found", "", "failed", set()),  # removed since
])
def test_whether_what_the_hardware_needs_runs(
    systemctl: Path, load: str, file: str, active: str, wanted: set[float]
) -> None:
    rows = f"LoadState={load}\nUnitFileState={file}\nActiveState={active}\n"
    Path(f"{systemctl}.answer").write_text(
        f"Id=nvidia-fabricmanager.service\n{rows}\nId=sshd.service\n{rows}")
    found = UnitsCollector().collect(Roots(), 1.0)
    active_rows = [one for one in found if one.name == "host_unit_active"]
    assert {one.value for one in active_rows} == wanted
    assert {one.subject for one in active_rows} <= {"unit=nvidia-fabricmanager.service"}
    asked = Path(f"{systemctl}.asked").read_text()
    assert all(one in asked for one in ("LoadState", "UnitFileState", "ActiveState", "NRestarts"))


def test_where_systemd_and_its_tool_are_is_a_setting(systemctl: Path, tmp_path: Path) -> None:
    Path(f"{systemctl}.answer").write_text("Id=a.service\nNRestarts=1\n")
    other = systemctl.rename(tmp_path / "bin/other")
    for end in ("answer", "code"):
        Path(f"{systemctl}.{end}").rename(f"{other}.{end}")
    roots = Roots(systemd=str(tmp_path), systemctl=str(other))
    collector = UnitsCollector()
    assert collector.here(roots) == ""
    assert "host_unit_restarts_total{unit=a.service}" in named(collector.collect(roots, 1.0))
    assert "no systemd" in collector.here(roots._replace(systemd=str(tmp_path / "none")))
    with pytest.raises(NoData):
        collector.collect(roots._replace(systemctl=str(systemctl)), 1.0)


def test_a_systemctl_that_never_answers_is_killed_with_its_child(
    systemctl: Path, tmp_path: Path
) -> None:
    systemctl.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/pid\n"
                         "exec sleep 600\n")

    async def scenario() -> None:
        prober = Prober()
        command = (sys.executable, "-P", "-m", "holdfast.collectors", "units", json.dumps(Roots()))
        helper = Helper(prober, "units", command, {})
        asking = asyncio.create_task(helper.ask(b"1.0", LIMIT_S))
        while not asking.done() and not (tmp_path / "pid").exists():
            await asyncio.sleep(0.01)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await helper.close()
        assert prober.stuck_children() == ()

    asyncio.run(scenario())
    pid = int((tmp_path / "pid").read_text())
    wait_for(lambda: not procfs.process_alive(pid))


@given(st.binary(max_size=400))
def test_any_answer_of_systemctl_is_survived(output: bytes) -> None:
    for text in (output, b"Id=a\n" + output, b"Id=\xff\nNRestarts=5\n" + output):
        for one in units.samples(units.parse(text), 1.0):
            assert one.value >= 0.0 and "\n" not in one.subject
