"""What smartctl, nvme, amd-smi and neuron-monitor printed on real machines, and what their kernels
counted: what becomes of it.
The collectors run as they do on a node, with a tool that says what was recorded.
HOLDFAST_GOLDEN=write makes the golden files anew.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from detectors import judged
from pages import same_as_golden
from waiting import wait_for

from holdfast.agent.core.detect.devices import accelerator
from holdfast.collectors.amd import AmdCollector
from holdfast.collectors.contract import NoData, Roots, Sample
from holdfast.collectors.hardware_errors import HardwareErrorsCollector
from holdfast.collectors.neuron import NeuronCollector
from holdfast.collectors.nvme import NvmeCollector
from holdfast.collectors.nvme_smart import NvmeSmartCollector

HERE = Path(__file__).resolve().parent


def values(samples: list[Sample], vendor: str = "") -> dict[str, float]:
    """`name rest-of-subject` -> value, without what all of one vendor share."""
    found = {}
    for one in samples:
        rest = one.subject.removeprefix(f"vendor={vendor}").removeprefix(",")
        found[f"{one.name.removeprefix('accelerator_')} {rest}".strip()] = one.value
    return found


def golden(name: str, found: dict[str, float]) -> None:
    lines = sorted(f"{key} = {value:.10g}\n" for key, value in found.items())
    same_as_golden(HERE / f"golden/{name}.txt", "".join(lines))


def put(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


# ------------------------------------------------------------- NVMe drives


def drive(folder: Path, tool: str, says: str) -> Roots:
    """A node with one drive, the permission, and that tool."""
    (folder / "sys/class/nvme/nvme0").mkdir(parents=True)
    put(folder / "proc/self/status", "CapEff:\t000001ffffffffff\n")
    put(folder / f"tools/{tool}", f"#!/bin/sh\ncat {HERE / 'smart' / says}\n")
    (folder / f"tools/{tool}").chmod(0o755)
    return Roots(proc=str(folder / "proc"), sys=str(folder / "sys"), tools=str(folder / "tools"))


# spare, its threshold, used, media errors, entries of the error log, unsafe shutdowns
@pytest.mark.parametrize(("says", "wanted"), [
    ("samsung_pm9a3.json", (1.0, 0.1, 0.03, 0, 0, 1)),
    ("micron_7450.json", (1.0, 0.1, 0.0, 0, 0, 15)),
    ("intel_p3700_worn.json", (0.99, 0.1, 0.41, 0, 0, 0)),
    ("samsung_970_media_errors.json", (0.99, 0.1, 0.03, 7, 62, 10)),
    ("nvme_cli.json", (1.0, 0.05, 0.15, 0, 17, 139)),
])
def test_a_drive_as_its_tool_tells(tmp_path, says, wanted):
    roots = drive(tmp_path, "nvme" if says == "nvme_cli.json" else "smartctl", says)
    collector = NvmeSmartCollector()
    wait_for(lambda: len(collector.collect(roots, 1.0)) > 1)
    found = values(collector.collect(roots, 1.0))
    names = ("spare_ratio", "spare_threshold_ratio", "used_ratio", "media_errors_total",
             "error_log_entries_total", "unsafe_shutdowns_total")
    said = tuple(found[f"host_nvme_{name} device=nvme0"] for name in names)
    assert said == pytest.approx(wanted)
    warnings = [value for name, value in found.items() if "critical_warning" in name]
    assert warnings == [0.0] * 6


def test_a_drive_that_the_tool_does_not_find_says_why(tmp_path):
    roots, collector = drive(tmp_path, "smartctl", "no_such_drive.json"), NvmeSmartCollector()
    with pytest.raises(NoData, match="smartctl: nvme0: /dev/nonexistent: Unable to detect device"):
        wait_for(lambda: not collector.collect(roots, 1.0))  # until the tool has answered


# ------------------------------------------------------------- AMD


def amd(folder: Path, metric: str, static: str = "", before: str = "") -> list[Sample]:
    """One reading of a machine whose tool says these, each behind other words."""
    (folder / "sys/module/amdgpu").mkdir(parents=True)
    (folder / "proc").mkdir()
    put(folder / "bin/mode", "say")
    shutil.copy(HERE.parent / "amd/amd-smi", folder / "bin")
    for verb, name in (("metric", metric), ("static", static)):
        if name:
            text = (HERE / f"amd/{name}.json").read_text()
            put(folder / f"bin/{verb}.json", before + text)
    roots = Roots(proc=str(folder / "proc"), sys=str(folder / "sys"), rocm=str(folder / "bin"))
    return AmdCollector().collect(roots, 1.0)


def test_a_card_without_sensors_for_all_says_what_it_knows(tmp_path):
    """A Navi 23 says 0 J for ever."""
    samples = amd(tmp_path, "navi23_metric", "navi23_static")
    golden("navi23", values(samples, "amd"))
    sights = accelerator.sights(tuple(samples))
    assert sights["amd", "0"].health == "ok"


def test_a_warning_before_the_document_is_no_part_of_it(tmp_path):
    """The same of a user who is in one of the two groups."""
    warning = (HERE / "amd/warning.txt").read_text()
    samples = amd(tmp_path, "navi23_metric", "navi23_static", warning)
    golden("navi23", values(samples, "amd"))


def test_a_driver_that_tells_its_kernels_whole_name(tmp_path):
    """An MI210 with the kernel's own driver: its version is a line of text, cut as any other."""
    (found,) = (one for one in amd(tmp_path, "mi210_static", "mi210_static")
                if one.name == "accelerator_info")
    assert found.subject.startswith(
        "vendor=amd,device=0,name=AMD Instinct MI210,uuid=,pci=,driver="
    )
    driver = found.subject.partition("driver=")[2]
    assert driver.startswith("Linuxversion6.14.0-24-generic") and "," not in driver


def test_two_cards_one_of_them_busy(tmp_path):
    """They say that their cores' highest clock is 0 MHz."""
    samples = amd(tmp_path, "two_cards_metric")
    golden("two_cards", values(samples, "amd"))
    sights = accelerator.sights(tuple(samples))
    assert [sights["amd", one].health for one in "01"] == ["ok", "ok"]


def test_a_part_of_an_mi300x_is_a_device_that_answers(tmp_path):
    found = values(amd(tmp_path, "mi300x_dpx_metric"), "amd")
    assert found == {
        "info device=0,name=,uuid=,pci=,driver=": 1, "utilization_ratio device=0": 0,
        "memory_utilization_ratio device=0": 0, "lost device=0": 0, "devices": 1,
    }


# ------------------------------------------------------------- Neuron


class Trainium:
    """A node whose neuron-monitor says a recorded report."""

    def __init__(self, folder: Path, says: str, kind: str = "") -> None:
        self.tools = tools = folder / "bin"
        line = json.dumps(json.loads((HERE / f"neuron/{says}.json").read_text()))
        put(tools / "first", f"{line}\n")
        put(tools / "script", "say first\n")
        shutil.copy(HERE.parent / "neuron/neuron-monitor", tools)
        for part in (HERE / "neuron/sysfs.txt").read_text().split("## ")[1:]:
            name, _, rows = part.partition("\n")
            for row in rows.splitlines() if name == kind else ():
                path, _, said = row.partition(" ")
                put(folder / "sys/devices/virtual/neuron_device/neuron0" / path, f"{said}\n")
        if kind:
            put(tools / "neuron-ls", f"#!/bin/sh\ncat {HERE / f'neuron/{kind}_ls.json'}\n")
            (tools / "neuron-ls").chmod(0o755)
        self.collector = NeuronCollector()
        self.roots = Roots(sys=str(folder / "sys"), neuron=str(tools))

    def read(self) -> list[Sample]:
        try:
            return self.collector.collect(self.roots, 1.0)
        finally:
            if self.collector._monitor is not None:
                self.collector._monitor.close()


def without_counts(samples: list[Sample]) -> dict[str, float]:
    """What it says of devices; nothing that is 0 of the executions."""
    return {name: value for name, value in values(samples, "neuron").items()
            if value or not name.startswith(("execution", "monitor"))}


def test_an_idle_trn1_without_counters_in_its_report(tmp_path):
    assert without_counts(Trainium(tmp_path, "trn1_idle", "trn1").read()) == {
        "info device=0,name=Trainium1,uuid=9ff5434815c8bd80,pci=0000:00:1e.0,driver=": 1,
        "devices": 1, "monitor_up": 1, "power_utilization_ratio device=0": 0,
    }


def test_the_same_without_sysfs_has_its_device(tmp_path):
    assert without_counts(Trainium(tmp_path, "trn1_idle").read()) == {
        "devices": 1, "monitor_up": 1,
    }


def test_an_inf2_under_load(tmp_path):
    samples = Trainium(tmp_path, "inf2_busy", "inf2").read()
    golden("inf2_busy", without_counts(samples))
    assert not judged(accelerator.Accelerators("n"), samples)


def test_a_trn1_that_trains_is_well(tmp_path):
    """23692 errors of the kind `generic` in a second in which all 260 executions went well: that
    count means nothing.  No memory size and no FLOPS were told, and none is made up."""
    samples = Trainium(tmp_path, "trn1_training").read()
    golden("trn1_training", without_counts(samples))
    assert not judged(accelerator.Accelerators("n"), samples)


def test_four_processes_that_each_list_all_four_cores(tmp_path):
    """Each says 0 of the cores of the others."""
    found = without_counts(Trainium(tmp_path, "inf1_four_processes").read())
    cores = [found[f"core_utilization_ratio device=0,core={core}"] for core in range(4)]
    assert cores == pytest.approx([0.029264, 0.030803, 0.025171, 0.024884], abs=1e-6)
    assert found["utilization_ratio device=0"] == pytest.approx(sum(cores) / 4, abs=1e-6)
    assert found["memory_used_bytes device=0"] == 4 * 63105088
    assert found["processes device=0"] == 4
    assert found["executions_total status=completed"] == 50 + 52 + 43 + 42
    assert found["execution_latency_seconds percentile=p99"] == 0.0673987865447998
    assert not [name for name in found if "flops" in name or "unreadable" in name]


def test_a_process_is_on_the_device_of_its_own_core(tmp_path):
    """The same, were the four cores on two devices: who is asked when one of them breaks."""
    node = Trainium(tmp_path, "inf1_four_processes")
    report = json.loads((node.tools / "first").read_text())
    report["neuron_hardware_info"]["neuroncore_per_device_count"] = 2
    put(node.tools / "first", json.dumps(report) + "\n")
    found = without_counts(node.read())
    assert {name for name in found if name.startswith("process ")} == {
        "process device=0,pid=20843", "process device=0,pid=21050",
        "process device=1,pid=21411", "process device=1,pid=21741",
    }


def test_sections_that_are_null(tmp_path):
    found = without_counts(Trainium(tmp_path, "trn1_null", "trn1").read())
    assert (found["devices"], found["monitor_up"]) == (1, 1)


# ------------------------------------------------------------- memory and processors


def test_memory_modules_by_the_names_on_their_board(tmp_path):
    """Nine corrected errors; the same once more by row, which must not count twice."""
    for row in (HERE / "edac.txt").read_text().splitlines():
        path, _, said = row.partition(" ")
        put(tmp_path / path, f"{said}\n")
    put(tmp_path / "proc/interrupts", (HERE / "interrupts.txt").read_text())
    roots = Roots(proc=str(tmp_path / "proc"), sys=str(tmp_path / "sys"))
    found = values(HardwareErrorsCollector().collect(roots, 1.0))
    memory = {name.removeprefix("host_memory_errors_total controller="): value
              for name, value in found.items() if value and "memory" in name}
    assert memory == {
        f"{module},error=corrected": value for module, value in (
            ("mc0,module=N0 DIMM_A0", 1), ("mc0,module=N0 DIMM_D0", 1),
            ("mc0,module=N0 DIMM_E0", 1), ("mc0,module=N0 DIMM_G0", 2),
            ("mc1,module=N1 DIMM_I0", 1), ("mc1,module=N1 DIMM_L0", 1),
            ("mc1,module=N1 DIMM_O0", 2),
        )
    }
    assert found["host_machine_checks_total kind=thermal"] == 8 * 1236488
    assert found["host_machine_checks_total kind=exception"] == 0


def test_a_drive_whose_model_ends_in_blanks(tmp_path):
    folder = tmp_path / "sys/class/nvme/nvme0"
    for file, said in (
        ("model", "Samsung SSD 970 PRO 512GB               "),
        ("state", "live"),
        ("firmware_rev", "1B2QEXP7"),
        ("serial", "S680HF8N190894I     "),
    ):
        put(folder / file, f"{said}\n")
    collector, roots = NvmeCollector(), Roots(sys=str(tmp_path / "sys"))
    wait_for(lambda: len(collector.collect(roots, 1.0)) > 1)
    found = values(collector.collect(roots, 1.0))
    name = "model=Samsung SSD 970 PRO 512GB,serial=S680HF8N190894I,firmware=1B2QEXP7"
    assert found[f"host_nvme_info device=nvme0,{name}"] == 1
    assert found["host_nvme_live device=nvme0,state=live"] == 1
