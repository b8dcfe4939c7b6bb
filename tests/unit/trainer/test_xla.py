"""The trainer on XLA's own processor device: checkpoints both ways, shapes, and what the page says.

Each case runs in a Python with torch_xla (tests/own_python.py), once for all that is asked of it.
"""

from __future__ import annotations

import os
import shutil
import types
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from own_python import ROOT, on_xla

from holdfast.trainer import devices
from holdfast.trainer.config import ConfigError, load
from holdfast.trainer.devices import open_device
from holdfast.trainer.engines import precompile
from holdfast.trainer.engines.strategy import Member
from holdfast.trainer.engines.xla import DataParallel

HERE = Path(__file__).parent
TOLERANCE = 1e-5  # relative, of the losses of three steps
LIMIT_S = 240.0


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """`seen(case)`: what on_xla.py saw in it."""

    tools = tmp_path_factory.mktemp("tools")
    (tools / precompile.TOOL).write_text('#!/bin/sh\nexec "$@"\n')
    (tools / precompile.TOOL).chmod(0o755)

    @cache
    def asked(case):
        with on_xla(case, tmp_path_factory.mktemp(case),
                    PATH=f"{tools}:{os.environ['PATH']}") as run:
            return run.answer(LIMIT_S)

    return asked


def close(some, others):
    return all(abs(some[step] - others[step]) <= TOLERANCE * abs(others[step]) for step in others)


def test_a_checkpoint_goes_from_one_to_the_other_and_back(seen):
    found = seen("portability")
    saved, loaded = found["saved"], found["loaded"]
    assert len(saved["cpu"]["losses"]) == 4
    assert close(saved["xla"]["losses"], saved["cpu"]["losses"])
    assert saved["xla"]["digest"] != saved["cpu"]["digest"]  # the last bits: sums in another order
    for source in ("xla", "cpu"):
        for device in ("xla", "cpu"):
            one = loaded[f"{source} to {device}"]
            assert one["digest"] == saved[source]["digest"]
            assert len(one["losses"]) == 3
            assert close(one["losses"], loaded[f"{source} to cpu"]["losses"])


def test_a_compile_has_a_phase_and_only_warm_up_and_new_graphs_have_one(seen):
    usual = seen("portability")["saved"]["xla"]["seen"]
    assert usual[:2] == ["compile", "startup"] and usual.count("compile") == 1
    assert [one for one in usual if one.endswith("; 0.0 MB a rank over slow links a step")]
    turned = seen("shapes")["turning"]["seen"]
    assert turned.count("compile") == 2
    at = turned.index("compile", 1)
    assert turned[:at].count("end") == 5 and turned[at - 1 : at + 2] == [
        "forward_backward", "compile", "forward_backward"]


def test_a_batch_of_another_shape_is_named_or_padded(seen):
    found = seen("shapes")
    refused = found["refused"]
    assert "'x' of a batch is torch.float32 (3, 8)" in refused, refused
    assert "torch.float32 (4, 8)" in refused and "xla.pad = true" in refused
    assert found["padded"]["seen"].count("compile") == 1 and len(found["padded"]["losses"]) == 4


def test_a_device_that_hangs_ends_no_step_on_the_page(seen):
    found = seen("hangs")["seen"]
    assert found.count("end") == 2 and found.count("begin") == 3 and found[-1] == "begin"
    # Its graphs were compiled ahead by a stand-in, in the phase for that.
    assert found[0] == "compile" and "graphs compiled ahead" in found[1]


def test_the_first_line_says_what_a_rank_holds_and_sends():
    """Of an engine without a device: only what the line is made of."""
    engine = types.SimpleNamespace(
        graphs=types.SimpleNamespace(kind="CPU"), topology={},
        state=types.SimpleNamespace(nbytes=12_000_000), used=[torch.empty(1_000_000)])
    layout = DataParallel.lay_out(engine, [Member("a"), Member("a"), Member("b"), Member("b")])
    assert layout.words == (
        "ddp on XLA devices (CPU): all of it on each of 4 rank(s), 16.0 MB a rank: weights, "
        "gradients and moments; gradients are summed in host memory; 6.0 MB a rank over slow links "
        "a step")  # a ring of four


def test_what_cannot_be_is_a_sentence(monkeypatch):
    with pytest.raises(ConfigError, match="this Python has no torch_xla: install torch_xla 2.9"):
        open_device(load(None, ["device=xla"]))
    monkeypatch.setattr("holdfast.trainer.devices.importlib.util.find_spec", lambda name: name)
    with pytest.raises(ConfigError, match='strategy = "fsdp": set strategy = "ddp"'):
        open_device(load(None, ["device=xla", "strategy=fsdp"]))
    monkeypatch.setenv("NEURON_CC_FLAGS", "--model-type=unet")
    assert open_device(load(None, ["device=xla", "xla.neuron_cc_flags=-O1"])).compiles
    assert os.environ["NEURON_CC_FLAGS"] == "-O1"
    assert "NEURON_RT_VISIBLE_CORES" not in os.environ  # there is no such device here
    with pytest.raises(ConfigError, match="device = 'tpu': set one of auto, cpu, cuda"):
        load(None, ["device=tpu"])


@pytest.mark.parametrize(("given", "core"), [
    ({}, "3"), ({"NEURON_RT_VISIBLE_CORES": "8-15"}, "8-15"), ({"NEURON_RT_NUM_CORES": "1"}, None),
    ({"LOCAL_RANK": ""}, "0"),
])
def test_each_process_takes_one_core_unless_its_user_chose(monkeypatch, tmp_path, given, core):
    (tmp_path / "neuron0").touch()
    monkeypatch.setattr(devices, "NEURON_DEVICES", str(tmp_path / "neuron[0-9]*"))
    monkeypatch.setattr("holdfast.trainer.devices.importlib.util.find_spec", lambda name: name)
    chosen = {"NEURON_RT_VISIBLE_CORES": "", "NEURON_RT_NUM_CORES": "", "LOCAL_RANK": "3", **given}
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
        if not value:
            monkeypatch.delenv(name)
    open_device(load(None, ["device=xla"]))
    assert os.environ.get("NEURON_RT_VISIBLE_CORES") == core



TOOL = """#!/bin/sh
echo "$@" >> {log}
echo 'no such SDK'
[ -e {broken} ] && exit 3
exec "$@"
"""


def test_graphs_are_compiled_ahead_once_a_node(tmp_path, monkeypatch):
    """By a stand-in that runs what it is given, as the real tool does first."""
    log, broken, tool = tmp_path / "log", tmp_path / "broken", tmp_path / precompile.TOOL
    config = load(None, ["device=cpu", "model=tiny:Still", "data=tiny:Data", "batch=4",
                         "xla.precompile=true", f"work_dir={tmp_path / 'w'}"])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / ".types"), str(HERE)]))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert "is not installed" in precompile.precompile(config)
    tool.write_text(TOOL.format(log=log, broken=broken))
    tool.chmod(0o755)
    broken.touch()
    with pytest.raises(ConfigError, match="ended with code 3: no such SDK: mend that, or set"):
        precompile.precompile(config)
    broken.unlink()
    assert "graphs compiled ahead" in precompile.precompile(config)
    assert precompile.precompile(config) == ""
    trial = log.read_text()
    assert trial.count(" -P -c ") == trial.count("loop.prepare(") == 2
    assert trial.count('"precompile": false') == 2
    other = load(None, ["device=cpu", "model=tiny:Still", "data=tiny:Data", "batch=5",
                        "xla.precompile=true", f"work_dir={tmp_path / 'w'}"])
    assert "graphs compiled ahead" in precompile.precompile(other)


def test_graphs_are_compiled_ahead_again_where_they_would_be_others_or_are_gone(
        tmp_path, monkeypatch):
    """Another compiler, other code of the model, a cache that was wiped."""
    cache, code, tool = tmp_path / "cache", tmp_path / "code", tmp_path / precompile.TOOL
    graph = cache / "neuronxcc-2/MODULE_1"
    code.mkdir()
    (code / "modelcode.py").write_text("import tiny\n\n\nclass Model(tiny.Still): ...")
    monkeypatch.syspath_prepend(str(code))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / ".types"), str(HERE), str(code)]))
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", str(cache))
    tool.write_text(f"#!/bin/sh\nmkdir -p {graph}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    config = load(None, ["device=cpu", "model=modelcode:Model", "data=tiny:Data",
                         "xla.precompile=true", f"work_dir={tmp_path / 'w'}"])

    def again():
        return "graphs compiled ahead" in precompile.precompile(config)

    assert again() and not again()
    shutil.rmtree(graph)
    assert again() and not again()
    tool.write_text(tool.read_text() + "# another release\n")
    assert again() and not again()
    (code / "modelcode.py").write_text("import tiny\n\n\nclass Model(tiny.Still): 'another'")
    assert again() and not again()
