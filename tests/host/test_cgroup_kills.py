"""Kills for memory by cgroup: what is news, and what is only seen for the first time."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from host.cgroup_trees import Version1, Version2, named

from holdfast.collectors.cgroups import CgroupsCollector
from holdfast.collectors.contract import Sample


def kills_seen(samples: list[Sample]) -> dict[str, float]:
    return {one.subject.partition(",")[0].removeprefix("cgroup="): one.value
            for one in samples if one.name == "cgroup_oom_kills_total"}


def test_kills_are_found_in_the_last_of_hundreds_and_old_ones_are_no_news(tmp_path: Path) -> None:
    machine, collector = Version2(tmp_path), CgroupsCollector()
    pods = [f"/kubepods/pod{number:03}/main" for number in range(300)]
    for pod in pods:
        machine.cgroup(pod)
    machine.kills(pods[299], 7)  # last week's
    first = collector.collect(machine.roots, 0.0)
    assert kills_seen(first) == {}
    assert named(first)["host_cgroup_oom_kills_total{cgroup=/kubepods}"] == 7.0
    for pod in pods[:200]:
        shutil.rmtree((machine.base / pod.strip("/")).parent)
    assert kills_seen(collector.collect(machine.roots, 15.0)) == {}
    machine.kills(pods[299], 2)
    machine.kills(pods[250], 1)
    machine.cgroup("/kubepods/pod900/main")
    machine.kills("/kubepods/pod900/main", 4)
    new = {pods[299]: 2.0, pods[250]: 1.0, "/kubepods/pod900/main": 4.0}
    seen = collector.collect(machine.roots, 30.0)
    assert kills_seen(seen) == new
    assert named(seen)["host_cgroup_oom_kills_total{cgroup=/kubepods}"] == 14.0
    shutil.rmtree(machine.base / "kubepods/pod900")
    assert kills_seen(collector.collect(machine.roots, 900.0)) == new
    machine.kills(pods[299], 1)
    assert kills_seen(collector.collect(machine.roots, 946.0)) == {pods[299]: 3.0, pods[250]: 1.0}


def test_kills_of_a_unit_go_on_in_its_next_cgroup(tmp_path: Path) -> None:
    machine, collector = Version2(tmp_path), CgroupsCollector()
    unit = "/system.slice/train.service"
    machine.cgroup(unit)
    assert kills_seen(collector.collect(machine.roots, 0.0)) == {}
    machine.kills(unit, 3)
    assert kills_seen(collector.collect(machine.roots, 15.0)) == {unit: 3.0}
    old = machine.base / "system.slice/old"
    (machine.base / unit.strip("/")).rename(old)  # kept, so that its inode is not given again
    machine.cgroup(unit)
    machine.kills(unit, 1)
    rows = [one for one in collector.collect(machine.roots, 30.0)
            if one.name == "cgroup_oom_kills_total"]
    assert [one.value for one in rows if one.subject.startswith(f"cgroup={unit},")] == [4.0]


def test_a_walk_that_was_cut_once_costs_no_later_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, collector = Version2(tmp_path), CgroupsCollector()
    machine.cgroup("/train")
    with monkeypatch.context() as patch:
        patch.setattr("holdfast.collectors.cgroups.KILLS_READS_MAX", 0)
        collector.collect(machine.roots, 0.0)
    collector.collect(machine.roots, 15.0)
    machine.kills("/train", 1)
    assert kills_seen(collector.collect(machine.roots, 30.0)) == {"/train": 1.0}


def test_version_1_tells_no_old_kills_of_what_slides_into_view(tmp_path: Path) -> None:
    machine, collector = Version1(tmp_path, 300), CgroupsCollector()
    for number in range(300):
        machine.cgroup(f"pods/{number:03}", kills=5 * (number == 299))
    assert kills_seen(collector.collect(machine.roots, 0.0)) == {}
    for number in range(100):
        shutil.rmtree(machine.base / f"pods/{number:03}")
    assert kills_seen(collector.collect(machine.roots, 15.0)) == {}
    machine.cgroup("pods/299", kills=6)
    machine.cgroup("pods/new", kills=1)
    assert kills_seen(collector.collect(machine.roots, 30.0)) == {
        "/pods/299": 1.0, "/pods/new": 1.0}
