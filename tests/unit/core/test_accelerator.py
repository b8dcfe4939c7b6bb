"""Accelerators in the core: which are lost, and whose ranks are said to have lived there."""

from __future__ import annotations

from detectors import judged

from holdfast.agent.core.detect.devices.absence import address_of
from holdfast.agent.core.detect.devices.accelerator import Accelerators
from holdfast.agent.core.model import RankView, Reading, RunView

RUN = RunView("m5", "n", "trainer", 1, ranks=(RankView(7, "n", 11, 1, "running"),))


class Gpus:
    """Eight of a vendor, each at an address of its own, read every 15 s."""

    def __init__(self, vendor: str = "nvidia", number: int = 8) -> None:
        self.vendor, self.mind, self.known = vendor, Accelerators("n"), dict[str, str]()
        self.boot_s = 100.0
        self.runs: tuple[RunView, ...] = ()
        self.on_bus = [f"0000:{0x10 + one:02x}:00.0" for one in range(number)]
        self.places = {one: self.on_bus[one] for one in range(number)}
        self.mute: set[int] = set()
        self.more: tuple[tuple[str, str, float], ...] = ()

    def read(self, times: int = 1) -> list[str]:
        for _ in range(times):
            self.boot_s += 15.0
            rows: list[Reading] = [("pci_bound", f"pci={one}", 1.0, self.boot_s)
                                   for one in self.on_bus]
            answering = self.places.keys() - self.mute
            rows.append(("accelerator_devices", f"vendor={self.vendor}", float(len(answering)),
                         self.boot_s))
            for device, place in self.places.items():
                whose = f"vendor={self.vendor},device={device}"
                pci = f"0000{place.upper()}" if place else ""
                rows.append(("accelerator_info", f"{whose},name=X,pci={pci}", 1.0, self.boot_s))
                if device in answering:
                    rows.append(("accelerator_lost", whose, 0.0, self.boot_s))
            rows += [(*one, self.boot_s) for one in self.more]
            found = judged(self.mind, rows, self.known, self.runs)
        return [f"{one.fault} ({one.severity}) {one.subject}: {one.reason}" for one in found]


def test_one_that_left_the_bus_is_lost_after_three_readings_and_by_name() -> None:
    node = Gpus()
    assert node.read() == []
    node.on_bus.pop(3)
    assert node.read(2) == []
    (lost,) = node.read()
    assert lost.startswith("accelerator_lost (fatal) node/n/gpu/3: nvidia device 3 at 00000000:13")
    node.mind = Accelerators("n")  # a restart of the agent, after which NVML lists seven
    del node.places[3]
    assert node.read(2) == []
    assert node.read()[0].startswith(
        "accelerator_lost (fatal) node/n/gpu/3: nvidia device 3 at 0000:13:00.0: it is not on the")


def test_a_second_loss_is_told_though_the_devices_were_numbered_anew() -> None:
    node = Gpus(number=3)
    node.read()
    first, second, third = node.on_bus
    node.on_bus, node.places = [second, third], {0: second, 1: third}
    (lost,) = node.read(3)
    assert f"node/n/gpu/{first}: " in lost
    node.on_bus, node.places = [third], {0: third}
    assert {one.split()[2].rstrip(":") for one in node.read(3)} == {
        f"node/n/gpu/{first}", f"node/n/gpu/{second}"}


def test_another_partitioning_loses_none() -> None:
    """MI300X from CPX to SPX: 64 devices become 8, the boards are the same."""
    node = Gpus("amd")
    boards = list(node.on_bus)
    node.places = {one: boards[one // 8].replace(".0", f".{one % 8}") for one in range(64)}
    assert node.read() == [] and len(node.known) == 8
    node.places = dict(enumerate(boards))
    assert node.read(10) == []


def test_one_that_does_not_answer_for_a_moment_is_not_lost_and_for_long_is_unwell() -> None:
    node = Gpus()
    node.read()
    node.mute = {5}
    assert node.read(7) == []
    (silent,) = node.read()
    assert silent.startswith("accelerator_lost (degraded) node/n/gpu/5: ")
    node.mute = set()
    assert node.read() == []


def test_one_without_an_address_is_lost_when_it_is_not_listed() -> None:
    node = Gpus("neuron", 4)
    node.places = dict.fromkeys(range(4), "")
    node.read()
    del node.places[2]
    assert node.read(2) == []
    assert node.read()[0].startswith("accelerator_lost (fatal) node/n/neuron/2: ")
    named = Gpus("neuron", 4)
    named.places = dict.fromkeys(range(4), "")
    named.read()
    named.places = dict(enumerate(named.on_bus))  # neuron-ls told the addresses late
    assert named.read(5) == []


def test_addresses_as_drivers_write_them() -> None:
    assert address_of("00000000:4E:00.0") == address_of("4e:00.0") == "0000:4e:00.0"
    assert address_of("") == address_of("neuron") == ""


def test_whose_rank_lived_there_is_told_of_that_run_alone() -> None:
    node = Gpus()
    whose = "vendor=nvidia,device=3"
    process = (("accelerator_process", f"{whose},pid=11", 1.0),)
    failed = (("accelerator_row_remap_failed", whose, 1.0),)
    node.runs, node.more = (RUN,), process
    node.read()
    node.more = failed  # the rank died of it, and is listed no more
    assert "rank 7 of m5 computed there" in node.read()[0]
    node.runs = ()
    assert "computed there" not in node.read()[0]
    idle = Gpus()
    idle.runs, idle.more = (RUN,), process
    idle.read()
    idle.more = ()
    idle.read()
    idle.more = failed
    assert "computed there" not in idle.read()[0]
