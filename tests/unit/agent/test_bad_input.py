"""What comes from outside may be anything: every parser is fed junk, and none may break.

One test a source.  What must hold is said by value: bounded, finite, counted, an error by name.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from fakes import until
from hypothesis import given
from hypothesis import strategies as st
from junk import DEEP, FAST, FEW, JUNK, NUMBERS, mutated

from holdfast.agent.config.settings import Config
from holdfast.agent.system import procfs
from holdfast.agent.telemetry import collectors
from holdfast.agent.telemetry.collectors import Reply
from holdfast.collectors import PROBED, neuron
from holdfast.collectors.__main__ import _answer
from holdfast.collectors.compile_cache import CompileCacheCollector
from holdfast.collectors.contract import Metric, NoData, Pace, Roots, Sample
from holdfast.collectors.cpu import CpuCollector
from holdfast.collectors.disk import DiskCollector
from holdfast.collectors.host import HostCollector
from holdfast.collectors.nvidia import RECOVERY_FIELD, NvidiaCollector
from holdfast.collectors.sources import neuron_monitor

HERE = Path(__file__).resolve().parent


# ------------------------------------------------------------------------------ Neuron


def cores(first: int) -> dict:
    return {str(core): {"neuroncore_utilization": 50.0, "flops": 7} for core in (first, first + 1)}


REPORT = {
    "neuron_runtime_data": [{
        "pid": 9, "error": "", "report": {
            "neuroncore_counters": {"neuroncores_in_use": cores(0), "error": ""},
            "execution_stats": {
                "execution_summary": {"completed": 3, "timed_out": 1},
                "error_summary": {"hardware": 1, "numeric": 2},
                "latency_stats": {"total_latency": {"p50": 0.1, "p99": 0.2, "p100": None}},
            },
            "memory_used": {"neuron_runtime_used_bytes": {"usage_breakdown": {
                "neuroncore_memory_usage": {"0": {"tensors": 5}, "1": {"tensors": 6}}}}},
        },
    }],
    "system_data": {"neuron_hw_counters": {"error": "", "neuron_devices": [
        {"neuron_device_index": 0, "mem_ecc_corrected": 0, "sram_ecc_uncorrected": 1}]}},
    "neuron_hardware_info": {"neuroncore_per_device_count": 2, "error": "",
                             "neuron_device_memory_size": 1 << 35},
}


@FAST
@given(st.data())
def test_any_report_of_neuron_monitor_gives_bounded_finite_rows(data):
    text = json.dumps(mutated(REPORT, data.draw))
    report, totals = json.loads(text), {}
    if not isinstance(report, dict):
        return
    neuron_monitor.count(report, totals)
    assert all(math.isfinite(value) and value >= 0 for value in totals.values())
    assert len(totals) < 40
    try:
        rows = list(neuron_monitor.rows(report))
    except neuron_monitor.Broken as error:
        assert len(str(error)) < 300
        return
    assert len(rows) < 500
    for name, subject, value in rows:
        assert math.isfinite(value) and value >= 0 and name and "\n" not in subject


@pytest.fixture
def tools(tmp_path):
    """A folder with a neuron-monitor and a neuron-ls that say what `said` holds."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, after in (("neuron-monitor", "exec sleep 600"), ("neuron-ls", "exit 0")):
        (folder / name).write_text(f"#!/bin/sh\ncat {folder}/said\n{after}\n")
        (folder / name).chmod(0o755)
    return folder


STREAM = [DEEP, b"{", b'{"a": NaN}', b"\xff\xfe", b"null", b"9" * 5000, b"x" * (5 << 20), b""]


def test_a_monitor_that_says_junk_goes_on_to_be_heard(tools):
    good = json.dumps(REPORT).encode()
    (tools / "said").write_bytes(b"\n".join([*STREAM, good, b'{"half": ']))
    monitor = neuron_monitor.Monitor(f"{tools}/neuron-monitor", {})
    try:
        until_s = time.monotonic() + 60.0
        while not monitor.report(5.0).get("system_data") and time.monotonic() < until_s:
            time.sleep(0.01)
        assert monitor.report(0.0)["system_data"] == REPORT["system_data"]
        assert monitor.rejected >= 6
    finally:
        monitor.close()


@pytest.mark.parametrize("said", [
    *STREAM[:-2], b'[{"neuron_device": 0, "bdf": "a,b=c\\nd"}]', b'[{"neuron_device": 1e400}]',
    b'[{"neuron_device": -3, "bdf": []}, 5, null, {"bdf": 1}]', b'[' + b'{},' * 9000 + b'{}]',
], ids=range(10))
def test_whatever_neuron_ls_says_costs_only_addresses(tools, said):
    (tools / "said").write_bytes(said)
    found = neuron._pci_addresses(Roots(neuron=str(tools)))
    assert len(found) <= neuron_monitor.DEVICES_MAX and all(key >= 0 for key in found)


@FEW
@given(st.lists(JUNK, min_size=9, max_size=9))
def test_any_content_of_sysfs_costs_only_its_own_row(contents):
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "sys", neuron.DEVICES, "neuron0")
        files = [*(f"stats/hardware/{one}" for one in neuron.HARDWARE), "stats/power/utilization",
                 "core_count", "neuron_core0/stats/status/success/total", "info/serial_number",
                 "info/architecture/device_name", "../../../../module/neuron/version"]
        for name, content in zip(files, contents, strict=True):
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            root.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        (root.parent / "neuronX").mkdir()
        (root.parent / "neuron99999999999999999999").mkdir()
        roots = Roots(sys=f"{folder}/sys", neuron=f"{folder}/none")
        samples = neuron.NeuronCollector().collect(roots, 1.0)
    assert any(one.name == "accelerator_devices" for one in samples)
    for one in samples:
        assert math.isfinite(one.value) and one.value >= 0 and "\n" not in one.subject
        assert len(one.subject) < 500


# ------------------------------------------------------------------------------ NVML


STRUCTS = ("Rates", "MemoryInfo", "ViolationStatus", "Histogram", "_t", "PciInfo_v3")


class Struct:
    """A structure of NVML's whose every field holds what the draw gives."""

    def __init__(self, draw, **known) -> None:
        self.__dict__.update(known)
        self._draw = draw

    def __getattr__(self, name):
        if name.endswith("Val"):
            return self._draw(NUMBERS)
        return self._draw(st.integers(0, (1 << 64) - 1))


class Nvml:
    """A library of which every call answers, fails, or answers nonsense of the right type."""

    class NVMLError(Exception):
        def __init__(self, value) -> None:
            super().__init__(f"code {value}")
            self.value = value

    def __init__(self, draw) -> None:
        self._draw = draw

    def __getattr__(self, name):
        draw = self._draw

        def call(*arguments):
            if draw(st.integers(0, 7)) == 0:
                raise Nvml.NVMLError(draw(st.sampled_from([1, 3, 9, 15, 28, 999])))
            if name.endswith(("Name", "UUID")):
                if draw(st.integers(0, 3)) == 0:
                    b"\xff".decode()  # what pynvml does with a name
                return draw(st.text(max_size=200))
            if name == "nvmlDeviceGetFieldValues":
                return [Struct(draw, nvmlReturn=0, valueType=draw(st.integers(-1, 9)),
                               value=Struct(draw)) for _ in arguments[1]]
            if "Processes" in name or name.endswith("RetiredPages"):
                return [Struct(draw) for _ in range(draw(st.integers(0, 3)))]
            if "RemappedRows" in name:
                return draw(st.tuples(*[st.integers(0, (1 << 32) - 1)] * 4))
            if name.endswith(STRUCTS):
                return Struct(draw, busId=draw(st.binary(max_size=40)))
            return draw(st.integers(0, (1 << 32) - 1))

        return 3 if name == RECOVERY_FIELD else call


@FEW
@given(st.data())
def test_whatever_nvml_answers_a_reading_is_a_reading(data):
    collector = NvidiaCollector()
    collector._nvml = Nvml(data.draw)
    collector._nvml.nvmlDeviceGetCount = lambda: 2
    answer = _answer(collector, Roots(), 1.0)
    assert "error" not in answer, answer
    reply = msgspec.json.decode(json.dumps(answer).encode(), type=Reply)
    actions = {one.subject.partition("action=")[2] for one in reply.samples if
               one.name == "accelerator_recovery_action" and one.value}
    assert all(len(action) < 40 and "-" not in action for action in actions)
    assert len(reply.samples) < 2000


# ------------------------------------------------------------------------------ threads


class Half:
    """A collector that runs in a thread and reads nonsense beside what is so."""

    name, pace, metrics = "half", Pace(fast=True), (Metric("s", "gauge", "Signed.", signed=True),)

    def collect(self, roots, boot_s):
        values = {"a": float("nan"), "b": 1.0, "c": -1.0, "d": float("inf"), "s": -2.0}
        return [Sample(name, "", value, boot_s) for name, value in values.items()]


def test_a_reading_that_is_no_number_is_left_out_and_said(monkeypatch):
    monkeypatch.setattr(collectors, "ALL", (Half,))
    said = []

    async def scenario():
        made = collectors.Runner(Config(), lambda part, error: said.append((part, error)))
        running = asyncio.create_task(made.run())
        await until(made.samples)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        made.close()
        return [one.name for one in made.samples()], made.health()

    names, (health,) = asyncio.run(scenario())
    assert names == ["b", "s"] and health.up
    assert said == [("collector half", "3 readings were no numbers >= 0")]


# ------------------------------------------------------------------------------ the host


@FEW
@given(st.data())
def test_any_content_of_proc_costs_only_its_own_part(data):
    recorded = HERE / "recorded/proc"
    files = sorted(one.relative_to(recorded) for one in recorded.rglob("*") if one.is_file())
    with tempfile.TemporaryDirectory() as folder:
        for name in files:
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            whole = (recorded / name).read_bytes()
            at = data.draw(st.integers(0, len(whole)))
            path.write_bytes(whole[:at] + data.draw(JUNK))
        mounts = data.draw(JUNK)
        Path(folder, "self/mountinfo").write_bytes(
            b"1 0 8:1 / / rw - ext4 a rw\n2 1 8:2 / /\x00x rw - ext4 b rw\n" + mounts
            + b" 8:3 / / rw - ext4\n")
        roots = Roots(proc=folder, sys=f"{folder}/none")
        for collector in (HostCollector(), CpuCollector()):
            with suppress(NoData):
                assert collector.collect(roots, 1.0) is not None
        assert {one.name for one in DiskCollector().collect(roots, 1.0)}


@FAST
@given(JUNK, st.binary(max_size=60))
def test_what_proc_says_of_a_process_may_be_anything(junk, more):
    with tempfile.TemporaryDirectory() as folder:
        task = Path(folder, "7/task/7")
        task.mkdir(parents=True)
        for name in ("stat", "status", "io", "statm", "cmdline"):
            Path(folder, "7", name).write_bytes(b"rchar: TracerPid:\t"[: len(more) % 19] + junk)
        (task / "children").write_bytes(junk + b" " + more)
        procfs.parse_stat(junk)
        assert isinstance(procfs.is_traced(7, folder), bool)
        assert min(procfs.io_bytes(7, folder)) >= 0 and procfs.rss_bytes(7, folder) >= 0
        assert len(procfs.children_of(7, folder)) <= procfs.CHILDREN_MAX
        assert procfs.activity(7, folder).moved_bytes >= 0


def test_a_file_that_vanishes_or_may_not_be_read_is_no_data(tmp_path, monkeypatch):
    listed = os.listdir

    def vanishing(path):
        found = listed(path)
        for name in found:
            if name.startswith("neuron"):
                Path(path, name, "core_count").unlink(missing_ok=True)
        return found

    device = tmp_path / neuron.DEVICES / "neuron0"
    (device / "stats/hardware").mkdir(parents=True)
    (device / "core_count").write_text("2\n")
    (device / "stats/hardware/sram_ecc_uncorrected").mkdir()  # read() fails on a folder
    monkeypatch.setattr(neuron.os, "listdir", vanishing)
    samples = neuron.NeuronCollector().collect(Roots(sys=str(tmp_path), neuron="/no"), 1.0)
    assert [one.name for one in samples][:1] == ["accelerator_devices"]
    with pytest.raises(NoData):
        HostCollector().collect(Roots(proc=str(tmp_path / "gone")), 1.0)


def test_names_of_files_that_are_no_text_break_neither_answer_nor_page(tmp_path):
    folder = os.fsencode(tmp_path)
    for name in (b"\xff\xfe.lock", b"a\nb.lock", b"a,b=c.lock", b"good.lock"):
        with open(os.path.join(folder, name), "wb"):
            pass
    roots = Roots(proc=str(tmp_path), compile_cache=str(tmp_path))
    answer = json.dumps(_answer(CompileCacheCollector(), roots, 1.0)).encode()
    reply = msgspec.json.decode(answer, type=Reply)
    (counted,) = [one.value for one in reply.samples if one.name == "compile_cache_locks"]
    named = [one.subject for one in reply.samples if "path=" in one.subject]
    good = f"path={tmp_path}/good.lock,uid={os.getuid()},dead=0"
    assert counted == 4 and good in named and len(named) == 2
    for one in named:
        one.encode()  # what a page of metrics does


class Says:
    """A collector whose samples are the test's."""

    name, metrics = "says", ()

    def __init__(self, samples) -> None:
        self.samples = samples

    def collect(self, roots, boot_s):
        return self.samples


@FAST
@given(st.lists(st.tuples(st.text(max_size=9), st.text(max_size=9), NUMBERS, st.just(1.0)),
                max_size=9))
def test_a_childs_answer_holds_only_numbers_and_can_be_read(rows):
    samples = [Sample(*row) for row in rows]
    answer = _answer(Says(samples), Roots(), 1.0)
    reply = msgspec.json.decode(json.dumps(answer).encode(), type=Reply)
    assert len(reply.samples) + reply.dropped == len(rows)
    assert all(math.isfinite(one.value) and one.value >= 0 for one in reply.samples)


def test_a_child_that_is_asked_junk_ends_and_says_nothing_wrong():
    command = [sys.executable, "-P", "-m", "holdfast.collectors", PROBED[0].name,
               json.dumps(Roots(proc="/no", sys="/no"))]
    done = subprocess.run(command, input=b"1.0\n", capture_output=True, timeout=60, check=False)
    assert msgspec.json.decode(done.stdout, type=Reply).samples == ()
    done = subprocess.run(command, input=b"x\n", capture_output=True, timeout=60, check=False)
    assert done.returncode == 1 and done.stdout == b""
