"""AWS Neuron: reports in the documented shape -> samples -> /metrics text, and a tool that dies,
stalls or prints half a line.  All values are invented; HOLDFAST_GOLDEN=write makes the
golden files anew.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from detectors import judged
from hypothesis import given
from hypothesis import strategies as st
from pages import page, same_as_golden
from waiting import wait_for

from holdfast.agent.core.detect.devices import accelerator
from holdfast.agent.system import procfs
from holdfast.collectors.contract import NoData, Roots, Sample
from holdfast.collectors.neuron import NeuronCollector
from holdfast.collectors.sources import neuron_monitor

HERE = Path(__file__).resolve().parent
GIB = 1 << 30
# type of device: (name, devices, logical cores of each, memory of each)
KINDS = {
    "trn1": ("trainium", 1, 2, 32 * GIB),
    "trn2": ("trainium2", 2, 4, 96 * GIB),
    "trn3": ("trainium3", 1, 4, 144 * GIB),
    "inf2": ("inferentia2", 1, 2, 32 * GIB),
}


def report(kind: str, **errors: int) -> dict:
    """One update of neuron-monitor; `errors` are counters of device 0."""
    name, devices, cores, memory = KINDS[kind]
    in_use = {str(core): {"neuroncore_utilization": 90.0 + core, "flops": 10**12}
              for core in range(devices * cores)}
    breakdown = {core: {"constants": GIB, "model_code": 0, "tensors": 2 * GIB} for core in in_use}
    ran = not errors
    return {
        "neuron_runtime_data": [{
            "pid": 4711, "address": "", "neuron_runtime_tag": "m5", "error": "",
            "report": {
                "neuroncore_counters": {"period": 5.0, "neuroncores_in_use": in_use, "error": ""},
                "execution_stats": {
                    "period": 5.0, "error": "",
                    "error_summary": {"generic": 0, "numerical": 0, "hardware": int(not ran)},
                    "execution_summary": {"completed": 3 * ran, "completed_with_err": int(not ran),
                                          "timed_out": 0},
                    "latency_stats": {"total_latency":
                                      {"p50": 1.85, "p99": 1.87, "p100": 1.88} if ran else None},
                },
                "memory_used": {"period": 5.0, "error": "", "neuron_runtime_used_bytes": {
                    "usage_breakdown": {"neuroncore_memory_usage": breakdown}}},
            },
        }],
        "system_data": {"neuron_hw_counters": {"period": 5.0, "error": "", "neuron_devices": [
            {"neuron_device_index": index, **dict.fromkeys(neuron_monitor.ECC, 0),
             **(errors if index == 0 else {})} for index in range(devices)]}},
        "instance_info": {"instance_type": f"{kind}.xlarge", "error": ""},
        "neuron_hardware_info": {
            "neuron_device_type": name, "neuron_device_count": devices,
            "neuron_device_memory_size": memory, "neuroncore_per_device_count": cores,
            "logical_neuroncore_config": 2 if kind == "trn2" else 1, "error": "",
        },
    }


class Machine:
    """A node: a tree of /sys and a directory of tools."""

    def __init__(self, folder: Path) -> None:
        self.tools, self.sys = folder / "bin", folder / "sys"
        self.tools.mkdir()
        self.sys.mkdir()

    def plays(self, *lines: str, **reports: dict) -> Machine:
        """The tool says this from its next start on."""
        for name, one in reports.items():
            (self.tools / name).write_text(json.dumps(one) + "\n")
        (self.tools / "script").write_text("".join(f"{line}\n" for line in lines))
        shutil.copy(HERE / "neuron-monitor", self.tools)
        return self

    def has(self, kind: str, repairable: int = 0) -> Machine:
        """Devices in sysfs, and neuron-ls."""
        name, devices, cores, _ = KINDS[kind]
        for index in range(devices):
            root = self.sys / "devices/virtual/neuron_device" / f"neuron{index}"
            files = {
                "core_count": cores, "info/serial_number": f"19fcda00f5ff6e{index:02d}",
                "info/architecture/device_name": name, "stats/power/utilization":
                "POWER_STATUS_VALID,1790000000,10.00,60.00,42.50",
                "stats/hardware/mem_ecc_uncorrected": 0,
                "stats/hardware/mem_ecc_repairable_uncorrected": repairable,
                "stats/hardware/sram_ecc_uncorrected": 0,
            } | {f"neuron_core{core}/stats/status/{status}/total": 100 * (status == "success")
                 for core in range(cores) for status in ("success", "timeout")}
            for path, value in files.items():
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                (root / path).write_text(f"{value}\n")
        listed = [{"neuron_device": index, "bdf": f"a0:1{index}.0"} for index in range(devices)]
        (self.tools / "neuron-ls").write_text(f"#!/bin/sh\necho '{json.dumps(listed)}'\n")
        (self.tools / "neuron-ls").chmod(0o755)
        return self

    @property
    def roots(self) -> Roots:
        return Roots(sys=str(self.sys), neuron=str(self.tools))

    def read(self, times: int = 1) -> list[dict]:
        done = subprocess.run(
            [sys.executable, "-m", "holdfast.collectors", "neuron", json.dumps(self.roots)],
            input="1.0\n" * times, capture_output=True, text=True, timeout=30, check=True,
        )
        return [json.loads(line) for line in done.stdout.splitlines()]

    def tool_runs(self) -> bool:
        """A dead one that nobody has reaped yet does not count."""
        pids = (self.tools / "pids").read_text().split()
        return any(
            stat is not None and stat.state not in "ZX"
            for stat in (procfs.parse_stat(procfs.read_small(f"/proc/{pid}/stat")) for pid in pids)
        )


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def samples_of(answer: dict) -> tuple[Sample, ...]:
    assert "samples" in answer, answer
    return tuple(Sample(*one) for one in answer["samples"])


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_node_as_the_page_shows_it(machine, kind):
    machine.has(kind).plays("say first", first=report(kind))
    text = page(samples_of(machine.read()[0]), NeuronCollector.metrics)
    same_as_golden(HERE / "golden" / f"{kind}.txt", text)
    wait_for(lambda: not machine.tool_runs(), what="the tool ends with its reader")


def test_a_memory_error_is_a_fault_of_its_device(machine):
    machine.plays("say bad", bad=report("trn2", mem_ecc_uncorrected=1))
    samples = samples_of(machine.read()[0])
    (verdict,) = judged(accelerator.Accelerators("n"), samples)
    assert (verdict.fault, verdict.subject) == ("neuron_memory_uncorrected", "node/n/neuron/0")
    values = {(one.name, one.subject): one.value for one in samples}
    assert values["accelerator_execution_errors_total", "vendor=neuron,error=hardware"] == 1
    assert not [one for one in samples if one.name == "accelerator_execution_latency_seconds"]


def sample(name: str) -> dict:
    return json.loads((HERE / f"samples/{name}.json").read_text())


def test_a_whole_trn1_32xlarge_as_its_tool_reports_it(machine):
    machine.plays("say first", first=sample("monitor"))
    samples = samples_of(machine.read()[0])
    text = page(samples, NeuronCollector.metrics)
    same_as_golden(HERE / "golden/trn1_32xlarge.txt", text)
    values = {(one.name, one.subject): one.value for one in samples}
    assert values["accelerator_devices", "vendor=neuron"] == 16
    assert not judged(accelerator.Accelerators("n"), samples)


def test_the_reported_fault_is_on_its_device_and_the_cores_of_no_other(machine):
    machine.plays("say bad", bad=sample("monitor_fault"))
    samples = samples_of(machine.read()[0])
    (verdict,) = judged(accelerator.Accelerators("n"), samples)
    assert (verdict.fault, verdict.subject) == ("neuron_memory_uncorrected", "node/n/neuron/3")
    values = {(one.name, one.subject): one.value for one in samples}
    idle = [labels for (name, labels), value in values.items()
            if name == "accelerator_core_utilization_ratio" and value == 0.0]
    assert idle == [f"vendor=neuron,device=3,core={core}" for core in (6, 7)]
    assert values["accelerator_execution_errors_total", "vendor=neuron,error=hardware"] == 1


def test_the_addresses_of_a_trn2_as_neuron_ls_lists_them(machine):
    machine.plays("say first", first=report("trn2"))
    listed = json.dumps(sample("ls_trn2"))
    (machine.tools / "neuron-ls").write_text(f"#!/bin/sh\ncat <<'END'\n{listed}\nEND\n")
    (machine.tools / "neuron-ls").chmod(0o755)
    samples = samples_of(machine.read()[0])
    labels = {one.subject for one in samples if one.name == "accelerator_info"}
    assert any("device=0," in one and "pci=a0:1a.0" in one for one in labels), labels


def test_a_repairable_error_is_in_sysfs_alone(machine):
    machine.has("trn1", repairable=1).plays("say good", good=report("trn1"))
    samples = samples_of(machine.read()[0])
    (verdict,) = judged(accelerator.Accelerators("n"), samples)
    assert verdict.fault == "neuron_memory_uncorrected"
    assert dict(verdict.evidence)["pci"] == "a0:10.0"


def test_half_a_line_and_rubbish_cost_themselves(machine):
    machine.plays("say one", "rubbish [1]", "rubbish {x", "say two", "sleep 0.2", "half one",
                  "die 7", one=report("trn1"), two=report("trn1"))
    totals: neuron_monitor.Totals = {}
    monitor = neuron_monitor.Monitor(str(machine.tools / "neuron-monitor"), totals)
    assert monitor.report(5.0)["system_data"]
    monitor._thread.join(5.0)
    with pytest.raises(neuron_monitor.Broken, match="ended with 7"):
        monitor.report(0.0)
    assert monitor.rejected == 2 and totals["executions", "completed"] == 6


def test_a_tool_that_dies_is_started_again_and_sysfs_goes_on(machine):
    machine.has("trn1").plays("die 3")
    collector = NeuronCollector()

    def read() -> dict[tuple[str, str], float]:
        found = collector.collect(machine.roots, 1.0)
        return {(one.name, one.subject): one.value for one in found}

    down = read()
    assert down["accelerator_monitor_up", "vendor=neuron"] == 0
    assert down["accelerator_devices", "vendor=neuron"] == 1
    machine.plays("say good", good=report("trn1"))
    collector._first = True  # waits for the first report
    up = read()
    assert up["accelerator_monitor_up", "vendor=neuron"] == 1
    assert up["accelerator_monitor_restarts_total", "vendor=neuron"] == 1
    collector._monitor.close()


def test_a_tool_that_falls_silent_is_ended(machine, monkeypatch):
    machine.plays("say good", good=report("trn1"))
    collector = NeuronCollector()
    assert collector.collect(machine.roots, 1.0) and machine.tool_runs()
    monkeypatch.setattr(neuron_monitor, "STALE_S", 0.0)
    with pytest.raises(neuron_monitor.Broken, match="said nothing"):
        collector.collect(machine.roots, 1.0)
    assert not machine.tool_runs()


def test_a_group_that_could_not_be_read_is_not_healthy(machine):
    bad = report("trn1")
    bad["system_data"]["neuron_hw_counters"] = {"error": "ioctl failed", "neuron_devices": []}
    machine.plays("say bad", bad=bad)
    assert "ioctl failed" in machine.read()[0]["error"]


def test_without_tools_and_sysfs_there_is_no_data(machine):
    with pytest.raises(NoData, match="no Neuron driver"):
        NeuronCollector().collect(machine.roots, 1.0)
    machine.has("inf2")
    assert NeuronCollector().here(machine.roots) == ""
    assert len(NeuronCollector().collect(machine.roots, 1.0)) > 5


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["0", "1", "x", "error", *KINDS]), inner, max_size=3),
    max_leaves=8,
)


@given(st.data())
def test_no_report_is_too_strange(data):
    """Any part of a report replaced by anything: rows, or Broken, and nothing else."""
    one = report("trn1")
    place = one
    while isinstance(place, dict) and place:
        key = data.draw(st.sampled_from(sorted(place)))
        if data.draw(st.booleans()) or not isinstance(place[key], (dict, list)):
            place[key] = data.draw(JSON)
            break
        place = place[key][0] if isinstance(place[key], list) and place[key] else place[key]
    totals: neuron_monitor.Totals = {}
    neuron_monitor.count(one, totals)
    try:
        rows = list(neuron_monitor.rows(one))
    except neuron_monitor.Broken:
        return
    assert all(value >= 0 for _, _, value in rows)
