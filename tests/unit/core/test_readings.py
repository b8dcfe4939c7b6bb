"""A node's samples in parts, and who is asked again when only some of them are newer."""

from __future__ import annotations

from holdfast.agent.core.detect import accelerator
from holdfast.agent.core.model import RankView, RunView
from holdfast.agent.core.readings import Parts, Readings
from holdfast.collectors.sample import Sample

CORES = tuple(Sample("host_cpu_seconds_total", f"cpu={cpu},mode=user", 5.0, 1.0) for cpu in (0, 1))
LOAD = Sample("host_load_average", "window=1m", 1.0, 1.0)
LOST = Sample("accelerator_lost", "vendor=nvidia,device=3", 1.0, 1.0)
PROCESS = Sample("accelerator_process", "vendor=nvidia,device=3,pid=11", 1.0, 1.0)


def later(*samples: Sample) -> tuple[Sample, ...]:
    return tuple(one._replace(boot_s=2.0) for one in samples)


def test_a_part_stays_the_very_same_until_one_of_its_readings_is_newer() -> None:
    readings = Readings()
    first = readings.split((LOAD, *CORES, LOST))
    assert first == Parts(CORES, (LOAD,), (LOST,))
    second = readings.split((LOAD, *later(*CORES), LOST))
    assert second.host is first.host and second.rest is first.rest
    assert second.cores == later(*CORES)
    third = readings.split((*later(LOAD), *later(*CORES), *later(LOST)))
    assert third.cores is second.cores
    assert (third.host, third.rest) == (later(LOAD), later(LOST))
    assert readings.split(()) == Parts()


def test_devices_are_judged_again_when_a_reading_or_a_rank_is_new() -> None:
    mind = accelerator.Accelerators("n")
    samples = (LOST, PROCESS)
    lost = mind.verdicts(samples, (), {})
    assert [one.fault for one in lost] == ["accelerator_lost"]
    assert mind.verdicts(samples, (), {}) is lost
    view = RunView("m5", "n", "trainer", 1, ranks=(RankView(7, "n", 11, 1, "running"),))
    (named,) = mind.verdicts(samples, (view,), {})
    assert "rank 7 of m5 computed there" in named.reason
    assert not mind.verdicts((LOST._replace(value=0.0), PROCESS), (view,), {})
