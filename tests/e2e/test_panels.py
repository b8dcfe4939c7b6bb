"""Every panel's query against a real Prometheus that scrapes a real agent with faults in it: a
trainer after an attempt that ended, of which one rank was killed, one stopped and then both
killed, GPUs (NVML's stand-in) of which one is lost, InfiniBand (a tree of /sys), a kernel's log (a
file).  No query is empty but those that are listed."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import pytest
from monitoring import get, prometheus
from network.tree import ib_node
from nvml import nvml_standin
from running import ROOT, Run, Runs, wait_for

from holdfast.dashboards.grafana import boards

SMALL = ("model_options.width=32", "model_options.layers=1", "model_options.heads=2",
         "data_options.vocabulary=512", "batch=2", "micro_batches=2")
# Steps from one checkpoint to the next: seconds of these small steps, so that ranks can be killed
# while there is something to lose.
EVERY = 200
# Panel -> why it has nothing here.
EMPTY: dict[str, str] = {
    "What changed": "versions are read every ten minutes; tests/test_dashboards.py changes some",
}
KERNEL = "6,900,1000000,-;pcieport 0000:00:1b.2: AER: Correctable error received from 0000:03:04.0"


@pytest.fixture
def node(runs: Runs, tmp_path: Path) -> Iterator[dict[str, str]]:
    """What a run's environment says: where the stand-ins are."""
    try:
        library = nvml_standin.compile_library(tmp_path)
    except nvml_standin.Missing as error:
        pytest.skip(str(error))
    tree = ib_node(runs.home / "tree", ports=2)
    config = runs.home / "agent.toml"
    config.write_text(
        '[agent]\nfast_s = 1.0\nslow_s = 2.0\n[inject]\nenabled = true\n'
        '[cost]\nnode_hour = 98.32\n'
        f'[collectors]\nnvml = "{library}"\nsys = "{tree.roots.sys}"\n'
        f'kmsg = "{runs.home}/kmsg"\n')
    (runs.home / "kmsg").write_text(KERNEL + "\n")
    state = runs.home / "gpus.txt"
    state.write_text((ROOT / "tests/nvml/states/healthy.txt").read_text())
    yield {"HOLDFAST_CONFIG": str(config), "HOLDFAST_FAKE_NVML": str(state)}


def asked(server: str, expr: str, instance: str, moments: bool, begin_s: float) -> bool:
    """Whether Prometheus has an answer: now, or at some moment since the test began."""
    now_s = time.time()
    span = f"{int(now_s - begin_s) + 30}s"
    for name, value in (("$__rate_interval", "5s"), ("$__range", span), ("$run", "t"),
                        ("$node", instance)):
        expr = expr.replace(name, value)
    wanted = {"query": expr} if not moments else {
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
    runs: Runs, node: dict[str, str], tmp_path: Path
) -> None:
    # An attempt that is over: the next one's agent goes on with its journal.
    before = runs.start("train", "--nproc-per-node", "2", "steps=20",
                        f"work_dir={runs.home}/before", "checkpoint.every=10", *SMALL, **node)
    assert before.wait(240) == 0, before.output
    run = runs.start(
        "train", "--nproc-per-node", "2", "--deadline", "+1h", "--flops-per-step", "1e9",
        "--peak-flops", "1e12", "--max-restarts", "9", "steps=1000000",
        f"work_dir={runs.home}/work", "snapshot.enabled=false", f"checkpoint.every={EVERY}",
        *SMALL, **node)
    run.at_step(5, limit_s=240)
    address = (runs.home / "rt/t/address").read_text().strip().removeprefix("http://")
    begin_s = time.time()
    with prometheus(tmp_path / "p", "", [address], [], "500ms") as server:
        wait_for(lambda: asked(server, "count_over_time(holdfast_recovery_seconds_count[1m]) > 1",
                               address, False, begin_s), 60, "two scrapes, before anything breaks")
        broken(run)
        lost = (ROOT / "tests/nvml/states/gpu_lost.txt").read_text()
        Path(node["HOLDFAST_FAKE_NVML"]).write_text(lost)  # a fault that stands
        missing: dict[str, str] = {}

        def complete() -> bool:
            missing.clear()
            missing.update({name: expr for name, (expr, moments) in panels().items()
                            if not asked(server, expr, address, moments, begin_s)})
            return all(any(one in name for one in EMPTY) for name in missing)

        try:
            wait_for(complete, 60)
        except AssertionError:
            said = "\n".join(f"{one['fault']} {one['state']}" for one in run.incidents())
            raise AssertionError(
                f"empty: {json.dumps(missing, indent=1)}\n{said}\n{run.output}") from None


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
    for rank in run.ranks().values():
        os.kill(rank["pid"], signal.SIGKILL)
    wait_for(lambda: run.status()["generation"] >= 4, 60, "a restart from the disk")
    run.at_step(run.status()["step"] + 5)
