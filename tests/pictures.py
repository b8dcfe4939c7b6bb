"""The pictures of docs/: the live page, and dashboards drawn from their JSON, by headless Chromium.

`make pictures` trains for some minutes on this machine, breaks ranks, and has a real Prometheus
scrape the agent.  The dashboards' panels are drawn here, in plain SVG, at the places, with the
queries, units and colours that their JSON says: no Grafana has a part in it.
"""

from __future__ import annotations

import html
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from collections import Counter
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "e2e")]

from monitoring import get, prometheus  # noqa: E402
from network.tree import ib_node  # noqa: E402
from nvml import nvml_standin  # noqa: E402
from running import ROOT, Run, Runs, wait_for  # noqa: E402
from test_panels import SMALL  # noqa: E402

from holdfast.dashboards.grafana import boards  # noqa: E402

FOLDER = ROOT / "docs/pictures"
HIGH = 1750  # pixels of the live page, down to the ledger
COLUMN, ROW = 52, 34  # pixels of one cell of Grafana's grid
NAMED = {"green": "#73bf69", "dark-green": "#37872d", "light-blue": "#8ab8ff", "blue": "#5794f2",
         "purple": "#b877d9", "dark-purple": "#8f3bb8", "light-yellow": "#ffee52",
         "orange": "#ff9830", "red": "#f2495c", "dark-orange": "#fa6400", "dark-red": "#c4162a",
         "light-orange": "#ffb357", "yellow": "#fade2a"}
PALETTE = ("#73bf69", "#f2cc0c", "#8ab8ff", "#ff780a", "#f2495c", "#5794f2", "#b877d9", "#705da0")
STYLE = """body{margin:0;background:#111217;color:#ccccdc;font:12px "DejaVu Sans",sans-serif}
#board{position:relative}.p{position:absolute;box-sizing:border-box;background:#181b1f;
border:1px solid #2c3235;border-radius:2px;padding:8px;overflow:hidden}
.p h4{margin:0 0 4px;font-weight:500;font-size:13px}.big{font-size:30px;font-weight:500}
table{width:100%;border-collapse:collapse;font-size:11px}th{text-align:left;color:#6e9fff;
font-weight:500}td,th{padding:3px 6px;border-bottom:1px solid #2c3235}.l{font-size:11px;
color:#ccccdc}.l i{display:inline-block;width:12px;height:4px;margin:0 5px 2px 10px}
.none{color:#8e8e8e;padding-top:14px;text-align:center}.stats{display:flex;gap:34px;
justify-content:center;align-items:center;text-align:center}h2{margin:10px 12px;font-weight:500;
font-size:17px}"""
UNITS = {"s": (("d", 86400), ("h", 3600), ("min", 60), ("s", 1), ("ms", 1e-3), ("µs", 1e-6)),
         "bytes": (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1)),
         "Bps": (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3), ("B/s", 1)),
         "short": (("G", 1e9), ("M", 1e6), ("K", 1e3), ("", 1))}

SIGNS = {"currencyUSD": "$", "currencyEUR": "€", "currencyGBP": "£"}
CLOCK = 15  # pixels below a graph
STEPS = (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 15)  # of an axis, times a power of ten


def shown(value: float, unit: str) -> str:
    if unit == "percentunit":
        return f"{100 * value:.3g} %"
    if unit == "dateTimeFromNow":
        return f"{max(0.0, time.time() - value / 1000):.0f} s ago"
    if unit in SIGNS:
        return f"{SIGNS[unit]}{value:.4g}"
    if unit in UNITS:
        at_zero = next(one for one in UNITS[unit] if one[1] == 1)
        name, size = next((one for one in UNITS[unit] if abs(value) >= one[1]),
                          UNITS[unit][-1] if value else at_zero)
        return f"{value / size:.3g} {name}".strip()
    return f"{value:.4g} {dict(watt='W', celsius='°C').get(unit, '')}".strip()


class Board:
    """One dashboard over [begin, now] of a Prometheus."""

    def __init__(self, text: str, server: str, instance: str, begin_s: float) -> None:
        self.board: dict[str, Any] = json.loads(text)
        self.server, self.instance = server, instance
        self.begin_s, self.now_s = begin_s, time.time()

    def ask(self, expr: str, moments: bool) -> list[dict[str, Any]]:
        span = f"{int(self.now_s - self.begin_s)}s"
        for name, value in (("$__rate_interval", "8s"), ("$__range", span), ("$run", "m5"),
                            ("$node", self.instance)):
            expr = expr.replace(name, value)
        wanted = {"query": expr} | ({"start": self.begin_s, "end": self.now_s, "step": 1}
                                    if moments else {})
        route = "query_range" if moments else "query"
        answer = get(f"http://{self.server}/api/v1/{route}?{urllib.parse.urlencode(wanted)}")
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found

    def page(self) -> str:
        high = max(one["gridPos"]["y"] + one["gridPos"]["h"] for one in self.board["panels"])
        parts = [self._panel(one) for one in self.board["panels"]]
        return (f'<!doctype html><meta charset="utf-8"><style>{STYLE}</style>'
                f'<h2>{html.escape(self.board["title"])}</h2><div id="board" '
                f'style="width:{24 * COLUMN}px;height:{high * ROW}px">{"".join(parts)}</div>')

    def _panel(self, one: dict[str, Any]) -> str:
        at, default = one["gridPos"], one["fieldConfig"]["defaults"]
        width, height = at["w"] * COLUMN - 6, at["h"] * ROW - 6
        moments = one["type"] in ("timeseries", "heatmap")
        series = [(row, target["legendFormat"]) for target in one["targets"]
                  for row in self.ask(target["expr"], moments)]
        draw = {"stat": self._stat, "table": self._table, "timeseries": self._lines,
                "heatmap": self._heatmap}[one["type"]]
        body = draw(one, series, default["unit"], width - 18, height - 32) if series else (
            f'<div class="none">{html.escape(default["noValue"])}</div>')
        return (f'<div class="p" style="left:{at["x"] * COLUMN + 3}px;top:{at["y"] * ROW}px;'
                f'width:{width}px;height:{height}px"><h4>{html.escape(one["title"])}</h4>'
                f"{body}</div>")

    def _stat(self, one: dict[str, Any], series: list[Any], unit: str, _: int, height: int) -> str:
        steps = one["fieldConfig"]["defaults"]["thresholds"]["steps"]
        parts = []
        for row, legend in series[:4]:
            value = float(row["value"][1])
            colour = [s["color"] for s in steps if s["value"] is None or value >= s["value"]][-1]
            name = f'<div class="l">{html.escape(named(legend, row))}</div>' * (len(series) > 1)
            said = shown(value, unit)
            if one["options"]["textMode"] == "name":
                name, said = "", named(legend, row)
            size = 42 if len(series) == 1 else 28
            parts.append(f'<div>{name}<span class="big" style="font-size:{size}px;'
                         f'color:{NAMED[colour]}">{html.escape(said)}</span></div>')
        return f'<div class="stats" style="height:{height}px">{"".join(parts)}</div>'

    def _table(self, one: dict[str, Any], series: list[Any], unit: str, *_: int) -> str:
        names = [name for name in series[0][0]["metric"] if name not in ("job", "__name__")]
        (word,) = one["transformations"][0]["options"]["renameByName"].values()
        head = "".join(f"<th>{html.escape(name)}</th>" for name in [*names, word])
        rows = "".join(
            "<tr>" + "".join(f"<td>{html.escape(row['metric'].get(name, ''))}</td>"
                             for name in names)
            + f"<td>{html.escape(shown(float(row['value'][1]), unit))}</td></tr>"
            for row, _ in series[:9])
        return f"<table><tr>{head}</tr>{rows}</table>"

    def _lines(self, one: dict[str, Any], series: list[Any], unit: str, width: int, height: int
               ) -> str:
        own = {(rule["matcher"]["options"], what["id"]): what["value"]
               for rule in one["fieldConfig"]["overrides"] for what in rule["properties"]}
        custom = one["fieldConfig"]["defaults"]["custom"]
        stacked, bars = "stacking" in custom, custom["drawStyle"] == "bars"
        rows = [(named(legend, row), [(at, float(v)) for at, v in row["values"] if v != "NaN"])
                for row, legend in series[:24]]
        if stacked:
            rows = [(name, points) for name, points in rows if any(v > 1e-4 for _, v in points)]
        unit = own.get((rows[0][0], "unit"), unit) if rows else unit
        base: dict[float, float] = {}
        heights = Counter(dict.fromkeys((at for _, points in rows for at, _ in points), 0.0))
        for _, points in rows:
            for at, v in points:
                heights[at] = heights[at] + v if stacked else max(heights[at], v)
        most = min(max(heights.values(), default=0.0), 1.0 if unit == "percentunit" else math.inf)
        top = axis_top(most, unit)
        height -= 16 * (1 + len(rows) // 9) + CLOCK
        parts, legend_parts = [], []
        for number, (name, points) in enumerate(rows):
            colour = own.get((name, "color"), {}).get("fixedColor", PALETTE[number % len(PALETTE)])
            colour = NAMED.get(colour, colour)
            low = [(at, base.get(at, 0.0)) for at, _ in points] if stacked else []
            points = [(at, v + base.get(at, 0.0) * stacked) for at, v in points]
            base |= dict(points)
            tall = [(self._x(at, width), height - height * v / top) for at, v in points]
            foot = [height - height * v / top for _, v in low]
            draw = self._bars if bars else self._band if stacked else self._line
            parts.append(draw(tall, foot, colour))
            legend_parts.append(f'<i style="background:{colour}"></i>{html.escape(name)}')
        grid = "".join(
            f'<line x1="44" x2="{width}" y1="{height * k / 4:.0f}" y2="{height * k / 4:.0f}" '
            f'stroke="#2c3235"/><text x="0" y="{height * k / 4 + 10:.0f}" fill="#8e8e8e" '
            f'font-size="10">{html.escape(shown(top * (4 - k) / 4, unit))}</text>'
            for k in range(5))
        marks = "".join(f'<line x1="{self._x(at, width):.1f}" x2="{self._x(at, width):.1f}" y1="0" '
                        f'y2="{height}" stroke="#f2495c" stroke-dasharray="3 3"/>'
                        for at in self._moments())
        return (f'<svg width="{width}" height="{height + CLOCK}">{grid}{"".join(parts)}{marks}'
                f'{self._clock(width, height)}</svg><div class="l">{"".join(legend_parts)}</div>')

    def _bars(self, tops: list[tuple[float, float]], foot: list[float], colour: str) -> str:
        """One wide enough to be seen; the next moment's lies beside or upon it."""
        return "".join(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="5" height="{low - y:.1f}" fill="{colour}"/>'
            for (x, y), low in zip(tops, foot, strict=True))

    def _band(self, tops: list[tuple[float, float]], foot: list[float], colour: str) -> str:
        back = [(x, low) for (x, _), low in zip(tops, foot, strict=True)]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in [*tops, *reversed(back)])
        return f'<polygon points="{line}" fill="{colour}" fill-opacity=".75"/>'

    def _line(self, tops: list[tuple[float, float]], _: list[float], colour: str) -> str:
        """A gap of a moment or more is drawn as a gap."""
        widest = 1.5 * min((b[0] - a[0] for a, b in itertools.pairwise(tops)), default=1.0)
        pieces: list[list[tuple[float, float]]] = []
        for point in tops:
            if not pieces or point[0] - pieces[-1][-1][0] > widest:
                pieces.append([])
            pieces[-1].append(point)
        lines = (" ".join(f"{x:.1f},{y:.1f}" for x, y in (one * 2 if len(one) == 1 else one))
                 for one in pieces)
        return "".join(
            f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.4" '
            'stroke-linecap="round"/>' for line in lines)

    def _heatmap(self, one: dict[str, Any], series: list[Any], unit: str, width: int, height: int
                 ) -> str:
        rows = sorted((named(legend, row), row["values"]) for row, legend in series)
        most = max(float(v) for _, values in rows for _, v in values) or 1.0
        cell = max(2.0, (width - 44) / max(len(values) for _, values in rows))
        height -= CLOCK
        tall, parts = height / len(rows), []
        for number, (name, values) in enumerate(rows):
            parts.append(f'<text x="0" y="{number * tall + tall / 2:.0f}" fill="#8e8e8e" '
                         f'font-size="10">{html.escape(name)}</text>')
            parts += [f'<rect x="{self._x(at, width):.1f}" y="{number * tall + 1:.1f}" '
                      f'width="{cell:.1f}" height="{tall - 2:.1f}" fill="#ff780a" '
                      f'fill-opacity="{0.08 + 0.92 * (float(v) / most) ** 0.5:.2f}"/>'
                      for at, v in values]
        return (f'<svg width="{width}" height="{height + CLOCK}">{"".join(parts)}'
                f"{self._clock(width, height)}</svg>")

    def _clock(self, width: int, height: int) -> str:
        """The times below a graph."""
        whole = 30 if self.now_s - self.begin_s < 300 else 60
        times = range(math.ceil(self.begin_s / whole) * whole, int(self.now_s), whole)
        return "".join(
            f'<text x="{self._x(at, width):.0f}" y="{height + CLOCK - 2}" fill="#8e8e8e" '
            f'font-size="10" text-anchor="middle">{time.strftime("%H:%M:%S", time.gmtime(at))}'
            "</text>" for at in times if self._x(at, width) < width - 24)

    def _x(self, at: float, width: int) -> float:
        return 44 + (width - 44) * (at - self.begin_s) / (self.now_s - self.begin_s)

    def _moments(self) -> list[float]:
        """Where an annotation's query begins to have a value."""
        found = []
        for one in self.board["annotations"]["list"]:
            for row in self.ask(one["expr"], True):
                times = [at for at, _ in row["values"]]
                found += [at for at, before in zip(times, [0.0, *times], strict=False)
                          if at - before > 9]
        return found


def axis_top(most: float, unit: str) -> float:
    """Where an axis from 0 ends, in four steps of round numbers; a share ends at 1."""
    if unit == "percentunit" and 0.5 < most <= 1.0:
        return 1.0
    if most <= 0.0:
        return 1.0
    size = next((size for _, size in UNITS.get(unit, ()) if most >= size), 1.0)
    power = 10.0 ** math.floor(math.log10(most / size / 4))
    step = next(one for one in STEPS if 4 * one * power * size >= most * 0.9999)
    return 4 * step * power * size


def named(legend: str, row: dict[str, Any]) -> str:
    """A label that the series lacks is nothing, as in Grafana."""
    legend = re.sub(r"{{(\w+)}}", lambda found: row["metric"].get(found[1], ""), legend)
    return legend.strip() or ", ".join(row["metric"].values())


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


def main() -> None:
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
            broken(run, nodes)
            screenshot(urls[well], FOLDER / "live-page.png", 1100, HIGH)
            screenshot(urls[well], FOLDER / "live-page-dark.png", 1100, HIGH,
                       "--force-dark-mode", "--blink-settings=preferredColorScheme=0")
            nodes.link(well, "1: DOWN")
            nodes.kernel(well, "mlx5_core 0000:53:00.0 mlx5_1: Port: 1 Link DOWN")
            time.sleep(6)
            nodes.link(well, "4: ACTIVE")
            time.sleep(12)
            for name, text in boards.files().items():
                board = Board(text, server, f"{well}:9858", begin_s)
                file = home / f"{name}.html"
                file.write_text(board.page())
                high = max(one["gridPos"]["y"] + one["gridPos"]["h"]
                           for one in board.board["panels"])
                screenshot(f"file://{file}", FOLDER / f"{name.removesuffix('.json')}.png",
                           24 * COLUMN, high * ROW + 44)
    finally:
        nodes.end()
        for one in runs.started[-1:]:
            one.kill_all()
        shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    main()
