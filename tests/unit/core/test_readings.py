"""A node's readings by name, and who is asked again when only some of them are newer."""

from __future__ import annotations

from holdfast.agent.core.detect.registry import NodeWatch
from holdfast.agent.core.model import (
    Observed,
    RankView,
    Readings,
    RunView,
    Selection,
    Verdict,
    by_name,
    readings_of,
)
from holdfast.collectors.contract import Sample

CORES = tuple(Sample("host_cpu_seconds_total", f"cpu={cpu},mode=user", 5.0, 1.0) for cpu in (0, 1))
LOAD = Sample("host_load_average", "window=1m", 1.0, 1.0)
LOST = Sample("accelerator_lost", "vendor=nvidia,device=3", 1.0, 1.0)
PROCESS = Sample("accelerator_process", "vendor=nvidia,device=3,pid=11", 1.0, 1.0)
READONLY = Sample("host_filesystem_readonly", "mount=/data", 1.0, 1.0)


def later(*samples: Sample) -> tuple[Sample, ...]:
    return tuple(one._replace(boot_s=2.0) for one in samples)


def test_readings_by_name_in_the_order_of_their_collector() -> None:
    host = by_name((CORES[0], LOAD, CORES[1]))
    found = Readings((host, by_name((LOST, PROCESS))))
    assert found.of("host_cpu_seconds_total") == CORES and found.of("nothing") == ()
    assert found.under("host_") == (*CORES, LOAD)
    assert found.under("host_l", "accelerator_l") == (LOAD, LOST)
    assert set(found.names()) == {one.name for one in found}
    assert len(found) == 5 and set(found) == {*CORES, LOAD, LOST, PROCESS}
    assert not Readings()


def test_a_name_stays_the_very_same_until_its_collector_is_read_again() -> None:
    host, devices = by_name((*CORES, LOAD)), by_name((LOST,))
    first = Readings((host, devices))
    second = Readings((by_name(later(*CORES, LOAD)), devices))
    assert second.of("accelerator_lost") is first.of("accelerator_lost")
    assert second.of("host_load_average") == later(LOAD)


def test_a_selection_is_the_very_same_until_one_of_its_own_is_newer() -> None:
    host, devices = by_name((*CORES, LOAD)), by_name((LOST, PROCESS))
    picked = Selection(lambda name: name.startswith(("accelerator_", "disk_")))
    first = picked.of(Readings((host, devices)))
    assert first == (LOST, PROCESS)
    assert picked.of(Readings((by_name(later(*CORES, LOAD)), devices))) is first
    equal = Readings((host, by_name((LOST._replace(), PROCESS))))
    assert picked.of(equal) is first, "read again and nothing is newer"
    assert picked.of(Readings((host, by_name(later(LOST, PROCESS))))) == later(LOST, PROCESS)
    assert picked.of(Readings((host, by_name((LOST,))))) == (LOST,)
    assert picked.of(Readings((host,))) == ()


def test_a_name_that_two_collectors_share_keeps_the_readings_of_both() -> None:
    other = Sample("accelerator_lost", "vendor=amd,device=0", 0.0, 1.0)
    parts = (by_name((LOST,)), by_name((other,)))
    assert Readings(parts).of("accelerator_lost") == (LOST, other)
    assert parts == (by_name((LOST,)), by_name((other,)))


def said(watch: NodeWatch, name: str, samples: Readings, *runs: RunView) -> list[Verdict]:
    watch.look(Observed(samples=samples, runs=runs))
    return watch.seats[name].verdicts


def test_devices_are_judged_again_when_a_reading_or_a_rank_is_new() -> None:
    watch = NodeWatch("n", {})
    samples = readings_of((LOST, PROCESS))
    lost = said(watch, "accelerator", samples)
    assert [one.fault for one in lost] == ["accelerator_lost"]
    assert said(watch, "accelerator", samples) is lost
    assert said(watch, "accelerator", readings_of((LOAD, LOST, PROCESS))) is lost
    view = RunView("m5", "n", "trainer", 1, ranks=(RankView(7, "n", 11, 1, "running"),))
    (named,) = said(watch, "accelerator", samples, view)
    assert "rank 7 of m5 computed there" in named.reason
    healed = readings_of((LOST._replace(value=0.0), PROCESS))
    assert not said(watch, "accelerator", healed, view)


def test_the_host_is_judged_again_when_one_of_its_own_readings_is_new() -> None:
    watch = NodeWatch("n", {"storage": ["/data"]})
    found = said(watch, "storage", readings_of((READONLY, *CORES)))
    assert [one.subject for one in found] == ["node/n/mount/data"]
    assert said(watch, "storage", readings_of((READONLY, *later(*CORES)))) is found
    again = said(watch, "storage", readings_of(later(READONLY)))
    assert again == found and again is not found
