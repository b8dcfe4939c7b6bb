"""The pictures of docs/: the live page, and dashboards drawn from their JSON, by headless Chromium.

`make pictures` trains for some minutes on this machine, breaks ranks, and has a real Prometheus
scrape the agent.  With `--board` any dashboard's file is drawn, from a Prometheus that is there:

    python tests/pictures.py --board FILE --prometheus HOST:PORT --to PNG --set node=NAME
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "e2e")]

from drawing import COLUMN, Board  # noqa: E402
from monitoring import prometheus  # noqa: E402
from network.tree import ib_node  # noqa: E402
from nvml import nvml_standin  # noqa: E402
from running import ROOT, Run, Runs, wait_for  # noqa: E402
from test_panels import SMALL  # noqa: E402

from holdfast.dashboards.grafana import boards  # noqa: E402

FOLDER = ROOT / "docs/pictures"
HIGH = 1750  # pixels of the live page, down to the ledger


def screenshot(page: str, file: Path, width: int, height: int, *more: str) -> None:
    subprocess.run(
        ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
         "--hide-scrollbars", "--virtual-time-budget=6000", f"--window-size={width},{height}",
         f"--screenshot={file}", *more, page], check=True, timeout=180,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


class Nodes:
    """Two nodes on this machine, whose GPUs, cards and kernel's logs are files: one with the run
    whose ranks are broken, one with a GPU that was lost.  A thread moves their readings."""

    NAMES = ("gpu-node-17", "gpu-node-18")

    def __init__(self, home: Path) -> None:
        library = home / "nvml"
        library.mkdir()
        nvml_standin.compile_library(library)
        self.home, self.trees, self.entries = home, {}, 0
        self.over, self.lost = threading.Event(), threading.Event()
        for name in self.NAMES:
            tree = self.trees[name] = ib_node(home / name, ports=2)
            self.driver(name, "550.54.15")
            (home / f"{name}.toml").write_text(
                f'[agent]\nfast_s = 1.0\nslow_s = 2.0\nnode = "{name}"\n[inject]\nenabled = true\n'
                f'[cost]\nnode_hour = 98.32\n[collectors]\nnvml = "{library}"\n'
                f'sys = "{tree.roots.sys}"\nkmsg = "{home}/none"\n'
                f'journalctl = "{home}/{name}.journalctl"\n')
            # As journalctl --follow: the last entry, and then what comes.
            tool = home / f"{name}.journalctl"
            tool.write_text(f"#!/bin/sh\nexec tail -n 1 -f {home}/{name}.journal\n")
            tool.chmod(0o755)
            self.kernel(name, "Linux version 6.8.0-1021-aws")
            self._gpus(name, "")
        self.thread = threading.Thread(target=self._live)
        self.thread.start()

    def environ(self, name: str) -> dict[str, str]:
        return {"HOLDFAST_CONFIG": str(self.home / f"{name}.toml"),
                "HOLDFAST_FAKE_NVML": str(self.home / f"{name}.gpus")}

    def kernel(self, name: str, *texts: str) -> None:
        """What the kernel says now."""
        with (self.home / f"{name}.journal").open("a") as journal:
            for text in texts:
                self.entries += 1
                journal.write(json.dumps({
                    "__CURSOR": f"s=1;i={self.entries:x}", "SYSLOG_FACILITY": "0", "MESSAGE": text,
                    "__MONOTONIC_TIMESTAMP": str(time.monotonic_ns() // 1000)}) + "\n")

    def driver(self, name: str, version: str) -> None:
        self.trees[name].put("module/nvidia/version", version)

    def link(self, name: str, state: str) -> None:
        place = "class/infiniband/mlx5_1/ports/1"
        self.trees[name].put(f"{place}/state", state)
        self.trees[name].put(f"{place}/phys_state", "5: LinkUp" if state[0] == "4" else
                             "3: Disabled")

    def end(self) -> None:
        self.over.set()
        self.thread.join()

    def _gpus(self, name: str, more: str) -> None:
        file = self.home / f"{name}.gpus"
        file.with_suffix(".new").write_text(f"driver 550.90.07\ngpus 8\n{more}")
        file.with_suffix(".new").replace(file)

    def _live(self) -> None:
        chance = random.Random(17)
        while not self.over.wait(1.0):
            for name, tree in self.trees.items():
                lines = []
                for gpu in range(8):
                    busy = chance.gauss(93 - gpu, 2.5)
                    lines += [f"gpu {gpu} busy {min(100, int(busy))}",
                              f"gpu {gpu} power_mw {int(4_000 * busy + 9_000 * gpu + 180_000)}",
                              f"gpu {gpu} temp {int(45 + busy / 8 + gpu)}",
                              f"gpu {gpu} memory_temp {int(55 + busy / 8 + gpu)}"]
                if name == self.NAMES[1] and self.lost.is_set():
                    lines.append("gpu 3 lost 1")
                self._gpus(name, "\n".join(lines) + "\n")
                for card in range(2):  # in words of four bytes
                    tree.add(f"class/infiniband/mlx5_{card}/ports/1/counters/port_rcv_data",
                             int(chance.gauss(2.6e9, 2e8)))
                tree.add("class/net/eth0/statistics/rx_bytes", int(chance.gauss(4e8, 5e7)))


# A script that trains, and leaves the processors to the run whose ranks are broken.
VISION = """import time
import torch
weights = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(weights.parameters(), lr=0.01)
while True:
    weights(torch.ones(8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.2)
"""
# Of the kernel, while the run's ranks are broken.
SAID = {
    "kill": ("pcieport 0000:00:1b.2: AER: Correctable error received from 0000:03:04.0",),
    "stop": ("EDAC MC0: 1 CE memory read error on CPU_SrcID#0_Ha#0_Chan#1_DIMM#0 (channel:1 "
             "slot:0 page:0x4a0d75 offset:0x900 grain:32 syndrome:0x0)",
             "pcieport 0000:00:1b.2: AER: Correctable error received from 0000:03:04.0"),
    "stall": ()}
LOST = ("NVRM: Xid (PCI:0000:4e:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the "
        "bus.")


def begun_again(runs: Runs, run: Run) -> None:
    """Ends the run's agent; its launcher starts another, which listens at the same place."""
    place = run.home / "rt" / run.name / "address"
    address, agent = place.read_text(), f"holdfast.agent --private --run {run.name} "
    old = next(pid for pid, command in runs.left().items() if agent in command)
    os.kill(old, signal.SIGTERM)
    wait_for(lambda: any(pid != old and agent in command for pid, command in runs.left().items()),
             60, "another agent")
    wait_for(lambda: place.exists() and run.try_api("/api/v1/status"), 60, "its answer")
    if place.read_text() != address:
        raise SystemExit(f"the agent of {run.name} was at {address} and is at {place.read_text()}")


def broken(run: Run, nodes: Nodes) -> None:
    """A killed rank, one that is stopped, one that only waits, and then no survivor."""
    def over(generation: int) -> None:
        wait_for(lambda: run.status()["generation"] > generation, 90, "a restart")
        begin_step = run.status()["step"]
        time.sleep(16)  # so that the picture shows training, not a row of faults
        run.at_step(begin_step + 5)

    for fault, rank, more in (("kill", 1, {}), ("stop", 0, {}), ("stall", 1, {"seconds": 60})):
        generation = run.status()["generation"]
        nodes.kernel(nodes.NAMES[0], *SAID[fault])
        run.inject(fault, rank, **more)
        over(generation)
        if not nodes.lost.is_set():
            nodes.lost.set()
            nodes.kernel(nodes.NAMES[1], LOST)
    generation = run.status()["generation"]
    wait_for(lambda: run.status()["step"] >= run.status()["checkpoint"]["step"] + 8, 60,
             "steps since a checkpoint")
    for one in run.ranks().values():
        os.kill(one["pid"], signal.SIGKILL)
    over(generation)


def drawn(board: Board, file: Path) -> None:
    page = file.with_suffix(".html")
    page.write_text(board.page())
    try:
        screenshot(f"file://{page.resolve()}", file, 24 * COLUMN, board.high)
    finally:
        page.unlink()


def real_run() -> None:
    home = Path(tempfile.mkdtemp(prefix="hf-", dir="/tmp"))
    runs, nodes = Runs(home), Nodes(home)
    well, sick = nodes.NAMES
    trainer = ("train", "--nproc-per-node", "2", "--deadline", "+1d", "--flops-per-step", "1e9",
               "--peak-flops", "1e11", "--max-restarts", "12", f"work_dir={home}/work",
               "snapshot.enabled=false", "checkpoint.every=25", *SMALL)
    try:
        before = runs.start(*trainer, "steps=150", name="m5", **nodes.environ(well))
        if before.wait(240):
            raise SystemExit(before.output)  # an attempt that is over: the next one goes on
        run = runs.start(*trainer, "steps=40000", name="m5", **nodes.environ(well))
        (home / "vision.py").write_text(VISION)
        other = runs.start("run", "--nproc-per-node", "2", str(home / "vision.py"),
                           name="vision-8b", **nodes.environ(sick))
        run.at_step(155, limit_s=240)
        urls = {name: wait_for((home / f"rt/{of.name}/address").read_text).strip()
                for name, of in ((well, run), (sick, other))}
        named = {url.removeprefix("http://"): f"{name}:9858" for name, url in urls.items()}
        with prometheus(home / "p", "", [*named], [], "500ms", named) as server:
            begin_s = time.time()
            time.sleep(12)
            nodes.driver(well, "550.90.07")
            begun_again(runs, run)  # versions are read at an agent's begin
            broken(run, nodes)
            screenshot(urls[well], FOLDER / "live-page.png", 1100, HIGH)
            screenshot(urls[well], FOLDER / "live-page-dark.png", 1100, HIGH,
                       "--force-dark-mode", "--blink-settings=preferredColorScheme=0")
            nodes.link(well, "1: DOWN")
            nodes.kernel(well, "mlx5_core 0000:53:00.0 mlx5_1: Port: 1 Link DOWN")
            time.sleep(6)
            nodes.link(well, "4: ACTIVE")
            time.sleep(12)
            shown = {"run": "m5", "node": f"{well}:9858"}
            for name, text in boards.files().items():
                drawn(Board(text, server, begin_s, shown),
                      FOLDER / f"{name.removesuffix('.json')}.png")
    finally:
        nodes.end()
        for one in runs.started[-1:]:
            one.kill_all()
        shutil.rmtree(home, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--board", type=Path, help="JSON of a dashboard; else all pictures")
    parser.add_argument("--prometheus", help="HOST:PORT of a Prometheus that has its series")
    parser.add_argument("--to", type=Path, help="the picture")
    parser.add_argument("--minutes", type=float, default=15.0, help="as many, until now")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE",
                        help="a variable of the dashboard; __rate_interval is one too")
    asked = parser.parse_args()
    if asked.board is None:
        return real_run()
    if not asked.prometheus or not asked.to or not all("=" in one for one in asked.set):
        parser.error("--board needs --prometheus and --to, and --set NAME=VALUE")
    variables = dict(one.split("=", 1) for one in asked.set)
    drawn(Board(asked.board.read_text(), asked.prometheus, time.time() - 60 * asked.minutes,
                variables), asked.to)


if __name__ == "__main__":
    main()
