"""Every panel's query against a real Prometheus that scrapes a real agent with faults in it: a
trainer after an attempt that ended under an older driver, of which one rank was killed, one stopped
and then both killed, GPUs (NVML's stand-in) of which one is lost, InfiniBand of which a link goes
down, and the driver's version (a tree of /sys), a kernel's log (a file).  No query is empty."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.parse
from pathlib import Path
from typing import NamedTuple

import pytest
from monitoring import get, prometheus
from network.tree import Tree, ib_node
from nvml import nvml_standin
from ports import free_port
from running import ROOT, Run, Runs, wait_for

from holdfast.dashboards.grafana import boards

SMALL = ("model_options.width=32", "model_options.layers=1", "model_options.heads=2",
         "data_options.vocabulary=512", "batch=2", "micro_batches=2")
# Steps from one checkpoint to the next: seconds of these small steps, so that ranks can be killed
# while there is something to lose.
EVERY = 200
DRIVER, OLDER, NEWER = "module/nvidia/version", "535.183.01", "550.90.07"
KERNEL = "6,900,1000000,-;pcieport 0000:00:1b.2: AER: Correctable error received from 0000:03:04.0"


class Node(NamedTuple):
    """What stands in for a machine, and where its agents listen, one after the other."""

    environ: dict[str, str]  # of its runs: where the stand-ins are
    tree: Tree
    gpus: Path
    address: str


@pytest.fixture
def node(runs: Runs, tmp_path: Path) -> Node:
    try:
        library = nvml_standin.compile_library(tmp_path)
    except nvml_standin.Missing as error:
        pytest.skip(str(error))
    tree = ib_node(runs.home / "tree", ports=2)
    tree.put(DRIVER, OLDER)
    config, address = runs.home / "agent.toml", f"127.0.0.1:{free_port()}"
    config.write_text(
        f'[agent]\nlisten = "{address}"\nfast_s = 1.0\nslow_s = 2.0\n'
        '[inject]\nenabled = true\n[cost]\nnode_hour = 98.32\n'
        f'[collectors]\nnvml = "{library}"\nsys = "{tree.roots.sys}"\n'
        f'kmsg = "{runs.home}/kmsg"\n')
    (runs.home / "kmsg").write_text(KERNEL + "\n")
    gpus = runs.home / "gpus.txt"
    gpus.write_text((ROOT / "tests/nvml/states/healthy.txt").read_text())
    environ = {"HOLDFAST_CONFIG": str(config), "HOLDFAST_FAKE_NVML": str(gpus)}
    return Node(environ, tree, gpus, address)


def asked(server: str, expr: str, instance: str, moments: bool, begin_s: float) -> bool:
    """Whether Prometheus has an answer: now, or at some moment of the time shown."""
    now_s = time.time()
    span = f"{int(1000 * (now_s - begin_s))}ms"
    for name, value in (("$__rate_interval", "5s"), ("$__range", span), ("$run", "t"),
                        ("$node", instance)):
        expr = expr.replace(name, value)
    wanted = {"query": expr, "time": now_s} if not moments else {
        "query": expr, "start": begin_s, "end": now_s, "step": 1}
    route = "query_range" if moments else "query"
    answer = get(f"http://{server}/api/v1/{route}?{urllib.parse.urlencode(wanted)}")
    assert answer["status"] == "success", expr
    values = [value for one in answer["data"]["result"]
              for _, value in one.get("values", [one.get("value")])]
    return any(value != "NaN" for value in values)


def panels() -> dict[str, tuple[str, bool]]:
    """Name -> query, and whether it is drawn over time."""
    found = {f"{board.name}: {one.title} ({number})": (expr, one.kind in ("timeseries", "heatmap"))
             for board in boards.BOARDS for one in board.panels
             for number, (expr, _) in enumerate(one.queries, 1)}
    return found | {f"{board.name}: annotation {name}": (expr, True) for board in boards.BOARDS
                    for name, expr, _ in board.annotations}


def test_every_panel_shows_something_of_an_agent_with_faults(
    runs: Runs, node: Node, tmp_path: Path
) -> None:
    with prometheus(tmp_path / "p", "", [node.address], [], "500ms") as server:
        begin_s = ended_under_an_older_driver(runs, node, server)
        run = runs.start(
            "train", "--nproc-per-node", "2", "--deadline", "+1h", "--flops-per-step", "1e9",
            "--peak-flops", "1e12", "--max-restarts", "9", "steps=1000000",
            f"work_dir={runs.home}/work", "snapshot.enabled=false", f"checkpoint.every={EVERY}",
            *SMALL, **node.environ)
        run.at_step(5, limit_s=240)
        broken(run)
        lost = (ROOT / "tests/nvml/states/gpu_lost.txt").read_text()
        node.gpus.write_text(lost)  # a fault that stands
        node.tree.put("class/infiniband/mlx5_1/ports/1/state", "1: DOWN")
        missing: dict[str, str] = {}

        def complete() -> bool:
            missing.clear()
            missing.update({name: expr for name, (expr, moments) in panels().items()
                            if not asked(server, expr, node.address, moments, begin_s)})
            return not missing

        try:
            wait_for(complete, 60)
        except AssertionError:
            said = "\n".join(f"{one['fault']} {one['state']}" for one in run.incidents())
            raise AssertionError(
                f"empty: {json.dumps(missing, indent=1)}\n{said}\n{run.output}") from None


def ended_under_an_older_driver(runs: Runs, node: Node, server: str) -> float:
    """An attempt that is over, whose agent's journal the next one's goes on with.  Then the driver
    is replaced.  Returns a moment at which Prometheus had the older one: there the time that is
    shown begins."""
    attempt = runs.start("train", "--nproc-per-node", "2", "steps=20",
                         f"work_dir={runs.home}/before", "checkpoint.every=10", *SMALL,
                         **node.environ)
    began_s = time.time()
    version = f'holdfast_software_info{{component="nvidia_driver",version="{OLDER}"}}'
    wait_for(lambda: asked(server, version, node.address, False, began_s), 120,
             f"{version} at {node.address}\n{attempt.output}")
    shown_s = time.time()
    assert attempt.wait(240) == 0, attempt.output
    node.tree.put(DRIVER, NEWER)
    return shown_s


def broken(run: Run) -> None:
    """A killed rank, then one that is stopped, then no survivor: it goes on from the disk."""
    run.inject("kill", 1)
    wait_for(lambda: run.status()["generation"] >= 2, 60, "a restart")
    run.at_step(run.status()["step"] + 5)
    run.inject("stop", 0)
    wait_for(lambda: run.status()["generation"] >= 3, 60, "another restart")
    run.at_step(run.status()["step"] + 5)

    def behind() -> bool:
        """Whether there is a verified checkpoint, and steps since, and the next one is far."""
        status = run.status()
        newest = status["checkpoint"]
        return newest is not None and 3 <= status["step"] - newest["step"] <= EVERY // 2

    wait_for(behind, 60, "steps since a verified checkpoint")
    for rank in run.all_ranks().values():
        os.kill(rank["pid"], signal.SIGKILL)
    wait_for(lambda: run.status()["generation"] >= 4, 60, "a restart from the disk")
    run.at_step(run.status()["step"] + 5)
