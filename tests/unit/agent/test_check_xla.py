"""Checks of XLA devices: what was not compiled is not begun, and a compile is no slowness.

By a stand-in for torch_xla that computes on the processor and whose compiles take a while; and by
torch_xla itself in an interpreter that has it (tests/own_python.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from own_python import XLA

from holdfast.agent.checks import vendor, xla

COMPILE_S = 1.0
INIT = """
import torch
def device(): return torch.device("cpu")
def sync():
    from torch_xla.debug import metrics
    metrics.ran()
"""
METRICS = f"""
import time
count = steps = 0
def metric_data(name): return (count, 1.0, ()) if count else None
def ran():
    global count, steps
    steps += 1
    if steps % 3 == 0 and count < 2:  # now and then, also in the middle of what is measured
        count += 1
        time.sleep({COMPILE_S})
"""
MODEL = "def wait_device_ops(): pass\n"


@pytest.fixture
def standin(tmp_path: Path) -> Path:
    """A folder for PYTHONPATH."""
    package = tmp_path / "site/torch_xla"
    for name, text in (("__init__", INIT), ("core/__init__", ""), ("core/xla_model", MODEL),
                       ("debug/__init__", ""), ("debug/metrics", METRICS)):
        file = package / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    _version(tmp_path / "site", "2.9.0")
    return tmp_path / "site"


def _version(site: Path, version: str) -> None:
    for old in site.glob("*.dist-info"):
        (old / "METADATA").unlink()
        old.rmdir()
    info = site / f"torch_xla-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch-xla\nVersion: {version}\n")


def checked(state: Path, python: str, *words: str, **environ: str) -> dict[str, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "holdfast.agent.cli", "check", "--python", python, "--json", *words],
        env={**os.environ, "PJRT_DEVICE": "CPU", "HOLDFAST_STATE_DIR": str(state), **environ},
        capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode in (0, 1, 2, 3) and done.stdout, done
    return {one["check"]: one for one in json.loads(done.stdout)["checks"]}


def test_what_was_not_compiled_for_this_sdk_is_not_begun(tmp_path: Path, standin: Path) -> None:
    def found(*words: str, **environ: str) -> dict[str, dict[str, Any]]:
        return checked(tmp_path, sys.executable, *words, PYTHONPATH=str(standin), **environ)

    cold = found("gemm", "collectives")
    assert cold["gemm"]["status"] == "unknown" and "torch-xla 2.9.0" in cold["gemm"]["reason"]
    assert "check --warm" in cold["gemm"]["todo"] and "nccom-test" in cold["collectives"]["reason"]
    warm = found("--warm", "gemm", "tensor")
    assert {one["status"] for one in warm.values()} == {"ok"} and "compiled" in (
        warm["gemm"]["reason"])
    assert not (tmp_path / "checks/results.json").exists() or "compiled and" not in (
        tmp_path / "checks/results.json").read_text()
    hot = found("gemm", "tensor", HOLDFAST_CHECK_FLIP_BIT="3")
    assert hot["gemm"]["status"] == "ok" and hot["tensor"]["status"] == "critical"
    (measure,) = hot["gemm"]["measures"]
    least = 2 * xla.CHAIN * 256**3 / COMPILE_S  # what a compile among the repeats would leave
    assert measure["subject"] == "xla:0" and min(measure["samples"]) > least
    _version(standin, "2.10.0")
    assert "torch-xla 2.10.0" in found("gemm")["gemm"]["reason"]


def test_torch_xla_itself_computes_what_it_must(tmp_path: Path) -> None:
    python = XLA.path()
    names = ("tensor", "memory_bandwidth", "gemm", "host_copy")
    assert {one["status"] for one in checked(tmp_path, python, "--warm").values()} == {"ok"}
    found = checked(tmp_path, python, *names)
    assert {found[name]["status"] for name in names} == {"ok"}, found
    assert {one["subject"] for one in found["host_copy"]["measures"]} == {"xla:0"}
    flipped = checked(tmp_path, python, "tensor", HOLDFAST_CHECK_FLIP_BIT="3")["tensor"]
    assert flipped["status"] == "critical" and "xla:0" in flipped["reason"]


def test_a_repeat_with_a_compile_in_it_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    took = iter([9.0, 1.0, 50.0, 1.0, 1.0, 1.0])
    compiled = iter([0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2])  # in the first repeat and in the third
    clock = [0.0]
    monkeypatch.setattr(xla.time, "perf_counter", lambda: clock[0])

    def once() -> None:
        clock[0] += next(took)

    assert xla.timed(once, lambda: next(compiled), lambda: None) == [1.0, 1.0, 1.0]


def test_a_graph_that_is_compiled_every_time_has_no_rate() -> None:
    count = iter(range(1000))
    with pytest.raises(RuntimeError, match="compiled anew"):
        xla.timed(lambda: None, lambda: next(count), lambda: None)


@pytest.mark.parametrize(("environ", "cores"), [
    ({}, [0, 1, 2, 3]), ({"NEURON_RT_VISIBLE_CORES": "1-2"}, [1, 2]),
    ({"NEURON_RT_VISIBLE_CORES": "3"}, [3]), ({"NEURON_RT_VISIBLE_CORES": "0,2-3"}, [0, 2, 3]),
    ({"NEURON_RT_NUM_CORES": "2"}, [0, 1]), ({"NEURON_RT_NUM_CORES": "0"}, [0, 1, 2, 3]),
    ({"NEURON_RT_VISIBLE_CORES": "2", "NEURON_RT_NUM_CORES": "4"}, [2]),
])
def test_the_cores_are_those_that_the_environment_leaves(
    environ: dict[str, str], cores: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vendor, "_said", lambda *_: ('[{"nc_count": 2}, {"nc_count": 2}]', ""))
    assert vendor.neuron_cores(environ) == cores


@pytest.mark.parametrize(("environ", "words"), [
    ({"NEURON_RT_VISIBLE_CORES": "four"}, "NEURON_RT_VISIBLE_CORES=four is no list of cores"),
    ({"NEURON_RT_VISIBLE_CORES": "3-"}, "no list"), ({"NEURON_RT_VISIBLE_CORES": "2-9"}, "core 9"),
    ({"NEURON_RT_NUM_CORES": "16"}, "neuron-ls lists 4 cores"),
])
def test_an_environment_that_names_no_cores_here_is_said(
    environ: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vendor, "_said", lambda *_: ('[{"nc_count": 4}]', ""))
    with pytest.raises(LookupError, match=words):
        vendor.neuron_cores(environ)


def test_a_machine_whose_cores_nobody_lists_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vendor, "_said", lambda *_: ("", "neuron-ls is not installed"))
    with pytest.raises(LookupError, match="neuron-ls is not installed"):
        vendor.neuron_cores({})
    assert vendor.neuron_cores({"NEURON_RT_VISIBLE_CORES": "0-1"}) == [0, 1]


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"x": 3}', "\xff"])
def test_a_damaged_marker_counts_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / xla.MARKER).write_text(text)
    assert "gemm" not in xla._marked(str(tmp_path)).get(xla._key(), {})
    xla._mark(str(tmp_path), "gemm", 3.0)
    assert xla._marked(str(tmp_path))[xla._key()] == {"gemm": 3.0}
    xla._mark(str(tmp_path), "gemm", None)
    assert xla._marked(str(tmp_path))[xla._key()] == {}


def test_graphs_are_those_of_both_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes of a known product stand in device.py: changed there, it is compiled anew."""
    before = xla._key()
    assert xla._key() == before
    for module in (xla, xla.devices):
        changed = tmp_path / Path(module.__file__).name
        changed.write_bytes(Path(module.__file__).read_bytes() + b"\n")
        with monkeypatch.context() as patched:
            patched.setattr(module, "__file__", str(changed))
            assert xla._key() != before
