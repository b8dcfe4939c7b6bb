"""Devices on the page of metrics, in status and on the terminal."""

from __future__ import annotations

import asyncio
import os
import time

import pytest
from fakes import until

from holdfast.agent.cli import report, text
from holdfast.agent.core.model import FATAL, WARN, Verdict, readings_of
from holdfast.agent.daemon import own_faults
from holdfast.agent.metrics.families import Exposition
from holdfast.agent.system.child_probe import StuckChild
from holdfast.agent.telemetry.collectors import Health
from holdfast.agent.telemetry.devices import devices
from holdfast.agent.web import status
from holdfast.collectors.contract import Sample
from holdfast.collectors.neuron import NeuronCollector
from holdfast.collectors.nvidia import NvidiaCollector


class FakeRunner:
    """Two GPUs, one of them lost; nothing here is read."""

    def __init__(self) -> None:
        boot_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        self.up = True
        self.left: tuple[StuckChild, ...] = ()
        self.found = tuple(Sample(f"accelerator_{name}", f"vendor=nvidia,{more}", value, boot_s)
                           for name, more, value in (
            ("info", "device=0,name=H100,uuid=u,pci=p,driver=d", 1.0), ("lost", "device=0", 0.0),
            ("lost", "device=1", 1.0), ("clock_hertz", "device=0,domain=sm", 1e9),
            ("power_watts", "device=0", 600.0), ("process", "device=0,pid=11", 1.0),
        ))

    def samples(self):
        return readings_of(self.found if self.up else ())

    def last(self, name):
        return self.found if name == "nvidia" else ()

    def health(self):
        error = "" if self.up else "nvidia: no answer within 2 s"
        return (Health("nvidia", self.up, False, error, 0.1, 1.0),
                Health("neuron", False, True, "no Neuron driver on this machine", 0.0, 1.0))

    def metrics(self):
        both = (*NvidiaCollector.metrics, *NeuronCollector.metrics)
        return tuple({one.name: one for one in both}.values())

    def children(self):
        return {"nvidia": os.getpid()}

    def stuck_children(self):
        return self.left


@pytest.mark.parametrize(("settings", "shown"), [
    ({}, {"lost", "power_watts", "clock_hertz"}),
    ({"agent__metrics": "minimal"}, {"lost", "power_watts"}),
    ({"agent__metrics_hide": ("accelerator_power_", "accelerator_clock_")}, {"lost"}),
])
def test_full_minimal_and_hidden_families(agent, settings, shown):
    async def scenario():
        async with agent(**settings) as (daemon, _):
            await until(lambda: daemon.state.snapshot.number > 0)
            daemon.state.runner = FakeRunner()
            page = Exposition(daemon.state).text().decode()
        for name in ("lost", "power_watts", "clock_hertz"):
            assert (f"\nholdfast_accelerator_{name}{{" in page) == (name in shown)
        assert "holdfast_accelerator_process{" not in page
        assert '\nholdfast_probe_resident_memory_bytes{collector="nvidia"}' in page

    asyncio.run(scenario())


def test_absent_is_told_from_failed_and_every_stuck_child_is_counted(agent):
    class Reader:
        """Of journald, whose child the kernel holds."""

        up, pid = False, 0

        def stuck_children(self):
            return (StuckChild("journalctl", 78, 0.0, "nfs_wait"),)

    async def scenario():
        async with agent() as (daemon, _):
            await until(lambda: daemon.state.snapshot.number > 0)
            daemon.state.runner = runner = FakeRunner()
            runner.up, runner.left = False, (StuckChild("nvidia", 77, 0.0, "nv_lock"),)
            daemon.state.kernel.journal = Reader()
            page = Exposition(daemon.state).text().decode()
            daemon.state.kernel.journal = None
            return page

    page = asyncio.run(scenario())
    for collector, absent in (("nvidia", "0.0"), ("neuron", "1.0")):
        assert f'\nholdfast_collector_up{{collector="{collector}"}} 0.0' in page
        assert f'\nholdfast_collector_absent{{collector="{collector}"}} {absent}' in page
    assert "\nholdfast_probes_stuck 2.0" in page


def test_status_names_devices_and_says_unknown_when_nothing_is_read(agent):
    async def scenario():
        async with agent() as (daemon, _):
            daemon.state.runner = runner = FakeRunner()
            good = status.status(daemon.state)["devices"]
            runner.up = False
            bad = status.status(daemon.state)["devices"]
            runner.left = (StuckChild("nvidia", 77, time.monotonic() - 5.0, "nv_lock"),)
            faults = {one.fault: one.reason for one in own_faults.verdicts(daemon.state)}
            return good, bad, faults

    good, bad, faults = asyncio.run(scenario())
    assert [(one["device"], one["health"]) for one in good] == [("0", "ok"), ("1", "fatal")]
    assert good[0]["name"] == "H100"
    assert {one["health"] for one in bad} == {"unknown"} and "no answer" in bad[0]["why"]
    assert set(faults) == {"collector_failed", "probe_stuck"}
    assert "pid 77" in faults["probe_stuck"] and "nv_lock" in faults["probe_stuck"]


class CardRunner(FakeRunner):
    """An interface and a card for EFA besides."""

    def last(self, name):
        boot_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        return super().last(name) if name != "network" else tuple(
            Sample("network_info", f"device={device},kind={kind},pci={pci},driver=x,firmware=",
                   1.0, boot_s)
            for device, kind, pci in (("ens5", "ethernet", "0000:00:05.0"),
                                      ("rdmap0", "efa", "0000:10:1b.0"))
        )

    def health(self):
        return (*super().health(), Health("network", True, False, "", 0.1, 1.0))


def test_status_names_cards_with_what_counters_and_the_kernel_say(agent):
    wrong = (
        Verdict("nic_unresponsive", "node/node-a/nic/rdmap0", FATAL, 1.0,
                "efa rdmap0 at 0000:10:1b.0: the card gave no sign of life for 75 s"),
        Verdict("nic_error", "node/node-a/nic/0000:10:1b.0", WARN, 1.0, "nic/0000:10:1b.0: slow"),
        Verdict("nic_error", "node/other/nic/ens5", FATAL, 1.0, "of another node"),
    )

    async def scenario():
        async with agent() as (daemon, node):
            node.extra = {"verdicts": wrong}
            await until(lambda: daemon.state.snapshot.decision.verdicts)
            daemon.state.runner = CardRunner()
            return status.status(daemon.state)["devices"]

    found = {one["device"]: one for one in asyncio.run(scenario()) if one["kind"] == "network"}
    assert {name: one["health"] for name, one in found.items()} == {"ens5": "ok", "rdmap0": "fatal"}
    assert found["rdmap0"]["why"] == "the card gave no sign of life for 75 s; slow"
    assert found["rdmap0"]["vendor"] == "efa" and found["rdmap0"]["ranks"] == []


NO_RUNS: tuple = ()
GOOD = Health("nvidia", True, False, "", 0.1, 1.0)


def gpus(*more):
    """GPU 3 and 4 as NVML has them, both well, read at 10 s."""
    return tuple(Sample(f"accelerator_{name}", f"vendor=nvidia,{labels}", value, 10.0)
                 for name, labels, value in (
        ("info", "device=3,name=H100,uuid=u,pci=00000000:4E:00.0,driver=d", 1.0),
        ("lost", "device=3", 0.0), ("lost", "device=4", 0.0), *more))


def rows_of(health, last, verdicts, now_s=11.0):
    found = devices(health, last, NO_RUNS, verdicts, "a", now_s, 15.0)
    return {one["device"]: (one["health"], one["why"]) for one in found}


def said_of(subject, severity=FATAL, detector="kernel", **more):
    reason = f"XID 79 on {subject} of a: GPU has fallen off the bus"
    return Verdict("gpu_fell_off_bus", f"node/a/{subject}", severity, 1.0, reason,
                   detector=detector, **more)


def test_a_gpu_that_the_kernel_speaks_of_is_not_ok():
    """Its driver may go on answering, or may not have been asked yet."""
    told = (said_of("gpu/0000:4e:00"), said_of("gpu/0000:9f:00", WARN), said_of("nic/0000:4e:00"),
            said_of("neuron/4"))
    fell = "XID 79: GPU has fallen off the bus"
    assert rows_of(GOOD, gpus(), told) == {
        "3": ("fatal", fell), "4": ("ok", ""), "0000:9f:00": ("warn", fell)}
    wrong = rows_of(GOOD, gpus(("throttled", "device=3,reason=hw_slowdown", 1.0)), told)
    assert wrong["3"] == ("fatal", f"{fell}; clocks are held down: hw_slowdown")
    absent = GOOD._replace(up=False, absent=True, error="no driver")
    assert rows_of(absent, (), told[:1]) == {"0000:4e:00": ("fatal", fell)}
    assert rows_of(absent._replace(name="amd"), (), told) == {}
    neuron = (Sample("accelerator_lost", "vendor=neuron,device=4", 0.0, 10.0),)
    assert rows_of(GOOD._replace(name="neuron"), neuron, told) == {"4": ("fatal", fell)}


def test_what_stands_of_a_device_counts_while_nothing_is_read():
    down = GOOD._replace(up=False, error="no answer within 2 s")
    stands = Verdict("row_remap_failed", "node/a/gpu/3", FATAL, 1.0, "nvidia device 3 at P: a row "
                     "of memory could not be remapped", detector="accelerator")
    late = "no answer within 2 s; last read 1 s ago"
    assert rows_of(down, gpus(), (stands,)) == {
        "3": ("fatal", f"a row of memory could not be remapped; {late}"), "4": ("unknown", late)}
    failed = gpus(("row_remap_failed", "device=3", 1.0))
    assert rows_of(GOOD, failed, (stands,))["3"][1] == "a row of memory could not be remapped"


def test_devices_that_were_never_read_are_unknown_and_not_left_out():
    down = GOOD._replace(up=False, error="no answer within 2 s")
    assert rows_of(down, (), ()) == {"": ("unknown", "no answer within 2 s")}
    assert not rows_of(down._replace(absent=True), (), ())
    assert not rows_of(down._replace(read_s=0.0), (), ())  # nobody has looked yet
    (row,) = devices(down, (), NO_RUNS, (), "a", 1.0, 15.0)
    shown = text.plain(report._devices([row]))
    assert shown.splitlines()[2] == "  nvidia  unknown  none   no answer within 2 s"


def test_the_terminal_shows_what_is_unwell_or_used():
    device = {"vendor": "nvidia", "name": "H100", "pci": "", "why": "", "health": "ok",
              "age_s": 1.0, "ranks": []}
    lost = {"health": "fatal", "why": "the driver says that it is lost"}
    shown = [
        {**device, "device": "0", "ranks": [{"run": "m5", "rank": 0}]},
        {**device, "device": "1", **lost}, {**device, "device": "2"},
    ]
    assert text.plain(report._devices(shown)).splitlines() == [
        "",
        "  device    health  ranks  why",
        "  nvidia 0  ok      m5/0",
        "  nvidia 1  fatal   none   the driver says that it is lost",
        "  1 device ok, without a rank",
    ]
    assert report._devices([]) == []
    card = {**device, "kind": "network", "vendor": "infiniband"}
    cards = [{**card, "device": "mlx5_0"}, {**card, "device": "mlx5_1"},
             {**card, "device": "mlx5_3", "health": "degraded", "why": "its link is down"}]
    assert text.plain(report._devices(cards)).splitlines() == [
        "",
        "  device             health    ranks  why",
        "  infiniband mlx5_3  degraded         its link is down",
        "  2 network cards ok",
    ]
