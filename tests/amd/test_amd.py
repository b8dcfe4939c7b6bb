"""AMD GPUs: amd-smi's documents -> samples -> /metrics text, and a tool that hangs, dies or prints
half of one.  The documents have the tool's shape and invented values; HOLDFAST_GOLDEN=write makes
the golden file anew.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pages import page, same_as_golden
from waiting import wait_for

from holdfast.agent.core.detect.devices import accelerator
from holdfast.agent.system import procfs
from holdfast.collectors import amd
from holdfast.collectors.amd import AmdCollector, Broken
from holdfast.collectors.contract import NoData, Roots, Sample

HERE = Path(__file__).resolve().parent
DOCUMENT = json.loads((HERE / "documents/metric.json").read_text())


class Machine:
    """A node with the driver's directory in /sys and a tool that does what `mode` says."""

    def __init__(self, folder: Path) -> None:
        self.tools = folder / "bin"
        self.tools.mkdir()
        for name in ("metric.json", "static.json"):
            shutil.copy(HERE / "documents" / name, self.tools)
        shutil.copy(HERE / "amd-smi", self.tools)
        (folder / "sys/module/amdgpu").mkdir(parents=True)
        (folder / "proc").mkdir()
        self.roots = Roots(
            proc=str(folder / "proc"), sys=str(folder / "sys"), rocm=str(self.tools)
        )
        self.does("say")

    def does(self, mode: str) -> None:
        (self.tools / "mode").write_text(mode)

    def says(self, document: object) -> None:
        (self.tools / "metric.json").write_text(json.dumps(document))

    def calls(self) -> list[tuple[int, str]]:
        file = self.tools / "calls"
        rows = (line.split() for line in (file.read_text() if file.exists() else "").splitlines())
        return [(int(pid), verb) for pid, verb in rows]

    def runs(self) -> list[int]:
        """Processes of the tool that live; a dead one that nobody reaped yet does not."""
        stats = {pid: procfs.parse_stat(procfs.read_small(f"/proc/{pid}/stat"))
                 for pid, _ in self.calls()}
        return [pid for pid, stat in stats.items() if stat and stat.state not in "ZX"]

    def child(self) -> dict:
        """The answer of a collector's child that is asked once."""
        done = subprocess.run(
            [sys.executable, "-m", "holdfast.collectors", "amd", json.dumps(self.roots)],
            input="1.0\n", capture_output=True, text=True, timeout=30, check=True,
        )
        answer: dict = json.loads(done.stdout)
        return answer


@pytest.fixture
def machine(tmp_path):
    made = Machine(tmp_path)
    yield made
    (made.tools / "end").touch()  # whatever a failing test left hanging


@pytest.fixture
def quick(monkeypatch):
    """A short wait, so that a tool that hangs costs a test a moment."""
    monkeypatch.setattr(amd, "WAIT_S", 0.05)


def values(samples) -> dict[tuple[str, str], float]:
    return {(one.name, one.subject): one.value for one in samples}


def test_a_node_as_the_page_shows_it(machine):
    text = page([Sample(*one) for one in machine.child()["samples"]], AmdCollector.metrics)
    same_as_golden(HERE / "golden/mi300x.txt", text)


def test_an_uncorrected_error_makes_its_device_unwell(machine):
    DOCUMENT["gpu_data"][1]["ecc"]["total_uncorrectable_count"] = 1
    try:
        machine.says(DOCUMENT)
    finally:
        DOCUMENT["gpu_data"][1]["ecc"]["total_uncorrectable_count"] = 0
    sights = accelerator.sights(tuple(AmdCollector().collect(machine.roots, 1.0)))
    assert [sights["amd", one].health for one in "01"] == ["ok", "degraded"]


def test_one_that_says_nothing_does_not_answer(machine):
    machine.says([DOCUMENT["gpu_data"][0], {"gpu": 1, "usage": "N/A", "power": "N/A"}])
    samples = tuple(AmdCollector().collect(machine.roots, 1.0))
    assert values(samples)["accelerator_devices", "vendor=amd"] == 1
    assert "accelerator_lost" not in {n for n, s in values(samples) if "device=1" in s}


@pytest.mark.parametrize(("mode", "said"), [
    ("half", "printed no JSON"), ("rubbish", "printed no JSON"), ("die", "ended with 255"),
])
def test_a_document_that_is_none_is_an_error(machine, mode, said):
    machine.does(mode)
    assert said in machine.child()["error"]


def test_a_flood_ends_at_its_bound(machine, monkeypatch):
    monkeypatch.setattr(amd, "DOCUMENT_MAX_BYTES", 1 << 20)
    machine.does("flood")
    with pytest.raises(Broken, match="printed no JSON"):
        AmdCollector().collect(machine.roots, 1.0)


def test_a_tool_that_hangs_delays_nothing_and_ends_with_its_child(machine):
    command = [sys.executable, "-m", "holdfast.collectors", "amd", json.dumps(machine.roots)]
    machine.does("hang")
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(b"1.0\n")
        child.stdin.flush()
        wait_for(machine.runs)
    finally:
        child.kill()
        child.communicate(timeout=10.0)
    wait_for(lambda: not machine.runs(), what="the tool ends with its reader")


def test_a_late_answer_is_taken_by_the_next_reading_with_its_own_time(machine, quick):
    collector = AmdCollector()
    assert collector.collect(machine.roots, 1.0)
    machine.does("hang")
    collector._due_s = 0.0
    held = collector.collect(machine.roots, 20.0)
    assert {one.boot_s for one in held} == {1.0}, "what was known stays, with its age"
    (hanging,) = wait_for(machine.runs)  # it may be just starting
    assert collector.collect(machine.roots, 35.0) == held and machine.runs() == [hanging]
    collector._call._since_s -= amd.LIMIT_S
    with pytest.raises(Broken, match="no answer within 30 s"):
        collector.collect(machine.roots, 50.0)
    wait_for(lambda: not machine.runs())


def test_a_slow_tool_is_asked_again_as_soon_as_it_has_answered(machine, quick):
    collector = AmdCollector()
    collector.collect(machine.roots, 1.0)
    machine.does("wait")
    collector._due_s = 0.0
    collector.collect(machine.roots, 20.0)
    (slow,) = wait_for(machine.runs)
    (machine.tools / "go").touch()
    wait_for(lambda: slow not in machine.runs())
    assert {one.boot_s for one in collector.collect(machine.roots, 35.0)} == {20.0}
    assert collector._call is not None and collector._call.wait(10.0)
    assert [verb for _, verb in machine.calls()] == ["static", "metric", "metric", "metric"]


def test_none_is_started_beside_one_that_the_kernel_holds(machine, tmp_path):
    held = tmp_path / "proc/77"
    held.mkdir()
    (held / "cmdline").write_bytes(b"python3\0/opt/rocm/bin/amd-smi\0metric\0")
    (held / "stat").write_text("77 (python3) D 1 77 77")
    assert "pid 77) hangs in the kernel" in machine.child()["error"]
    assert not (machine.tools / "calls").exists()
    (held / "stat").write_text("77 (python3) S 1 77 77")
    assert "samples" in machine.child()


def test_without_driver_or_tool_there_is_no_data(machine, tmp_path):
    (machine.tools / "amd-smi").chmod(0o644)
    with pytest.raises(NoData, match="no amd-smi in"):
        AmdCollector().collect(machine.roots, 1.0)
    (tmp_path / "sys/module/amdgpu").rmdir()
    assert AmdCollector().here(machine.roots) == "no AMD driver on this machine"


@pytest.mark.parametrize(("value", "found"), [
    (5, 5e6), ({"value": 2, "unit": "GHz"}, 2e9), ({"value": 2.5}, 2.5e6), ("N/A", None),
    (True, None), (-1, None), (float("nan"), None), (10**400, None), (None, None), ([], None),
    ({"value": 1, "unit": "furlong"}, None), ({"value": "7", "unit": "MHz"}, None),
    ({"value": 1, "unit": []}, 1e6),
])
def test_numbers_come_with_and_without_units(value, found):
    assert amd.measure(value, "MHz") == found


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["gpu", "gpu_data", "value", "unit"]), inner, max_size=3),
    max_leaves=8,
)


@given(st.data())
def test_no_document_is_too_strange(data):
    """Any part replaced by anything: rows that are numbers, or ValueError, and nothing else."""
    document = json.loads(json.dumps(DOCUMENT))
    place = document
    while True:
        keys = sorted(place) if isinstance(place, dict) else range(len(place))
        if not keys:
            break
        key = data.draw(st.sampled_from(keys))
        if data.draw(st.booleans()) or not isinstance(place[key], (dict, list)):
            place[key] = data.draw(JSON)
            break
        place = place[key]
    try:
        devices = amd.by_device(document)
    except ValueError:
        return
    for device in devices.values():
        assert all(value >= 0 for _, _, value in amd.rows(device))
