"""Whole nodes as /metrics shows them: recorded trees and stand-ins of drivers in, the text out.

The agent is the real one, with its own loop, children, journal and core; only what it reads is
recorded.  HOLDFAST_GOLDEN=write writes the expected texts anew; read the difference first.
"""

from __future__ import annotations

import asyncio
import importlib.util
import re
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pages import same_as_golden, taken_by_prometheus
from waiting import until

from holdfast.agent.__main__ import _make_node
from holdfast.agent.config.load import load
from holdfast.agent.daemon.daemon import Daemon, Options
from holdfast.agent.metrics.families import Exposition
from holdfast.collectors import ALL

HERE = Path(__file__).resolve().parent
NODES = HERE / "nodes"
LIMIT_S = 30.0
# Of each kind of node: its collectors, as far as there are any of that name, and one line of its
# kernel's log.  Each says what the page must count.
HOST = ("host", "cpu", "disk", "network", "tasks")
KINDS = {
    "cpu": ((*HOST, "units", "shared_memory"),
            "java invoked oom-killer: gfp_mask=0x280da, order=0, oom_score_adj=0"),
    "h100": ((*HOST, "rdma", "nvidia"),
             "NVRM: Xid (PCI:0000:68:00): 63, pid=1896, Row Remapper: New row marked for "
             "remapping, reset gpu to activate."),
    "mi300x": ((*HOST, "amd"), "mce: [Hardware Error]: Machine check events logged"),
    "trn1": ((*HOST, "rdma", "neuron", "compile_cache"),
             "NEURON_HW_ERR=DMA_ERROR nd-id=0 nc-id=1"),
    "trn2": ((*HOST, "rdma", "neuron", "compile_cache"),
             "NEURON_HW_ERR=HBM_UNCORRECTABLE_ERROR nd-id=1 nc-id=1"),
}
# What the machine and the moment decide: the family and its labels are held, the number is not.
VARIES = re.compile(
    r"^(holdfast_(?:agent_\w+|build_info|collector_duration_seconds|node_seconds_total|probe_\w+"
    r"|host_filesystem_(?!readonly)\w+|host_shm_(?!files)\w+)(?:\{.*\})?) \S+$", re.MULTILINE
)
BUILD = re.compile(r"^holdfast_build_info\{.*\}", re.MULTILINE)
# A row for each code that an alert may follow from; and what was written into the store so far.
LEFT_OUT = re.compile(r'^holdfast_(?:events_total\{.*\} 0\.0|actions_total\{action="put".*)\n',
                      re.MULTILINE)


def module_of(path: Path) -> ModuleType:
    """A stand-in that lives beside another folder's tests."""
    spec = importlib.util.spec_from_file_location(f"page_{path.parent.name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def node_of(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Makes the node; the settings with which an agent watches it."""
    collectors, line = KINDS[kind]
    network = module_of(HERE.parent / "network/tree.py")
    makes = {"h100": network.ib_node, "trn1": network.efa_node, "trn2": network.efa_node}
    tree = makes.get(kind, network.plain_node)(folder)
    for part in ("proc", "sys"):
        shutil.copytree(NODES / "host" / part, folder / part, dirs_exist_ok=True)
    (folder / "kmsg").write_text(f"4,17,1500,-;{line}\n")
    for name in ("cache", "neuron", "amd", "shm"):
        (folder / name).mkdir()
    (folder / "shm/psm_1").write_bytes(b"x")
    systemctl = folder / "systemctl"
    systemctl.write_text(f"#!/bin/sh\nexec cat '{NODES / 'host/systemctl.txt'}'\n")
    systemctl.chmod(0o755)
    settings = {
        "collectors.disable": tuple(one.name for one in ALL if one.name not in collectors),
        "collectors.proc": str(tree.proc), "collectors.sys": str(tree.sys),
        "collectors.kmsg": str(folder / "kmsg"), "collectors.neuron": str(folder / "none"),
        "collectors.compile_cache": str(folder / "cache"),
        "collectors.systemd": str(folder), "collectors.systemctl": str(systemctl),
        "collectors.shm": str(folder / "shm"),
    }
    if kind == "h100":
        standin = module_of(HERE.parent / "nvml/nvml_standin.py")
        try:
            settings["collectors.nvml"] = str(standin.compile_library(folder))
        except standin.Missing as error:
            pytest.skip(str(error))
        state = HERE.parent / "nvml/states/healthy.txt"
        monkeypatch.setenv("HOLDFAST_FAKE_NVML", str(state))
    if kind == "mi300x":
        amd = module_of(HERE.parent / "amd/test_amd.py").Machine(folder / "amd")
        shutil.copytree(amd.roots.sys, tree.sys, dirs_exist_ok=True)
        settings["collectors.rocm"] = str(amd.tools)
    if kind.startswith("trn"):
        tree.gone("class/dmi/id/product_name")  # else fewer cards than that type has are a fault
        neuron = module_of(HERE.parent / "neuron/test_neuron.py")
        machine = neuron.Machine(folder / "neuron").has(kind)
        machine.plays("say first", first=neuron.report(kind))
        shutil.copytree(machine.sys, tree.sys, dirs_exist_ok=True)
        settings["collectors.neuron"] = str(machine.tools)
    return settings


async def page_of(folder: Path, settings: dict[str, Any]) -> str:
    """The page once every collector and the kernel's log were read."""
    settings |= {"agent.state_dir": str(folder / "state"), "agent.runtime_dir": str(folder / "run"),
                 "agent.node": "node-a", "agent.listen": "",
                 "collectors.deadline_s": 10.0}
    overrides = {key: (value, "test") for key, value in settings.items()}
    daemon = Daemon(load(None, overrides), Options(False, "", None, overrides), _make_node)
    task = asyncio.create_task(daemon.run())
    try:
        await until(lambda: task.done() or daemon.state.runner is not None)
        runner = daemon.state.runner
        assert runner is not None, task.result()
        await until(lambda: all(one.read_s for one in runner.health()))
        await until(lambda: daemon.state.kernel.log.next == 18)
        number = daemon.state.snapshot.number
        daemon.wake("test")
        await until(lambda: daemon.state.snapshot.number > number)
        down = [one for one in runner.health() if not one.up]
        assert not down, down
        return Exposition(daemon.state).text().decode()
    finally:
        daemon.stop.set()
        await asyncio.wait_for(task, LIMIT_S)


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_node(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = asyncio.run(page_of(tmp_path, node_of(kind, tmp_path, monkeypatch)))
    held = BUILD.sub("holdfast_build_info{...}", VARIES.sub(r"\1 (varies)", text))
    held = LEFT_OUT.sub("", held)
    same_as_golden(NODES / f"{kind}.txt", held)
    taken_by_prometheus(text)
