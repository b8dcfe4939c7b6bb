"""A dashboard drawn from its JSON and a Prometheus's answers, as a page for a browser.

Owns how a panel looks: plain SVG and HTML at the places, with the queries, units, colours, axes and
legends that its JSON says.  No Grafana has a part in it, and a setting that is not known here is
passed by.  Knows no run and no dashboard by name.
"""

from __future__ import annotations

import html
import itertools
import json
import math
import re
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

COLUMN, ROW, HEAD = 52, 34, 44  # pixels of one cell of Grafana's grid, and above it
NAMED = {"green": "#73bf69", "dark-green": "#37872d", "light-blue": "#8ab8ff", "blue": "#5794f2",
         "purple": "#b877d9", "dark-purple": "#8f3bb8", "light-yellow": "#ffee52",
         "orange": "#ff9830", "red": "#f2495c", "dark-orange": "#fa6400", "dark-red": "#c4162a",
         "light-orange": "#ffb357", "yellow": "#fade2a", "text": "#ccccdc"}
PALETTE = ("#73bf69", "#f2cc0c", "#8ab8ff", "#ff780a", "#f2495c", "#5794f2", "#b877d9", "#705da0")
STYLE = """body{margin:0;background:#111217;color:#ccccdc;font:12px "DejaVu Sans",sans-serif}
#board{position:relative}.p{position:absolute;box-sizing:border-box;background:#181b1f;
border:1px solid #2c3235;border-radius:2px;padding:8px;overflow:hidden}
.p h4{margin:0 0 4px;font-weight:500;font-size:13px;white-space:nowrap}.low{padding:3px 8px}
.low h4{margin:0;font-size:11px}.row{position:absolute;font-size:15px;padding:6px 8px}
table{width:100%;border-collapse:collapse;font-size:11px}th{text-align:left;color:#6e9fff;
font-weight:500}td,th{padding:3px 6px;border-bottom:1px solid #2c3235}.l{font-size:11px;
color:#ccccdc}i{display:inline-block;width:12px;height:4px;margin:0 5px 2px 10px}
.graph{display:flex;gap:8px}.graph table{width:auto;flex:1;font-size:10px;align-self:start}
.graph td,.graph th{padding:1px 3px;border:0;text-align:right;white-space:nowrap}
.graph td:first-child,.graph th:first-child{text-align:left}.graph i{margin-left:0}
.none{color:#8e8e8e;padding-top:14px;text-align:center}.stats{display:flex;
gap:26px;white-space:nowrap;
justify-content:center;align-items:center;text-align:center}h2{margin:10px 12px;font-weight:500;
font-size:17px}"""
UNITS = {"s": (("d", 86400), ("h", 3600), ("min", 60), ("s", 1), ("ms", 1e-3), ("µs", 1e-6)),
         "bytes": (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1)),
         "decmbytes": (("TB", 1e6), ("GB", 1e3), ("MB", 1)),
         "Bps": (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3), ("B/s", 1)),
         "bps": (("Gb/s", 1e9), ("Mb/s", 1e6), ("kb/s", 1e3), ("b/s", 1)),
         "watt": (("kW", 1e3), ("W", 1)),
         "hertz": (("GHz", 1e9), ("MHz", 1e6), ("kHz", 1e3), ("Hz", 1)),
         "short": (("G", 1e9), ("M", 1e6), ("K", 1e3), ("", 1))}
SIGNS = {"currencyUSD": "$", "currencyEUR": "€", "currencyGBP": "£"}
WORDS = {"celsius": "°C", "percent": "%"}
CALCS: dict[str, tuple[str, Callable[[list[float]], float]]] = {
    "mean": ("Mean", lambda found: sum(found) / len(found)), "max": ("Max", max),
    "min": ("Min", min), "sum": ("Total", sum), "last": ("Last", lambda found: found[-1]),
    "lastNotNull": ("Last", lambda found: found[-1])}
LEFT, CLOCK = 44, 15  # pixels beside a graph and below it
STEPS = (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 15)  # of an axis, times a power of ten
TIMES_S = (30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400)
POINTS = 600  # of a line, at most


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
    if unit in WORDS and abs(value) < 1000:
        return f"{value:.3g} {WORDS[unit]}"
    return f"{value:.4g} {WORDS.get(unit, '')}".strip()


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


def axis_around(least: float, most: float, unit: str) -> tuple[float, float]:
    """From where to where an axis goes that need not begin at 0: round numbers about the values."""
    step = axis_top(most - least, unit) / 4
    low = math.floor(least / step) * step
    return low, low + step * max(4, math.ceil((most - low) / step))


def named(legend: str, row: Mapping[str, Any]) -> str:
    """A label that the series lacks is nothing, as in Grafana."""
    legend = re.sub(r"{{(\w+)}}", lambda found: row["metric"].get(found[1], ""), legend)
    return legend.strip() or ", ".join(row["metric"].values())


def coloured(field: Mapping[str, Any], value: float) -> str:
    """By the thresholds of a field."""
    steps = field["thresholds"]["steps"]
    name: str = [one["color"] for one in steps
                 if one.get("value") is None or value >= one["value"]][-1]
    return NAMED.get(name, name)


class Series(NamedTuple):
    """What a query answered, and what the panel says of it alone."""

    name: str
    labels: dict[str, str]
    points: list[tuple[float, float]]
    own: dict[str, Any]

    def reduced(self, calc: str) -> float:
        _, reduce = CALCS.get(calc, CALCS["lastNotNull"])
        return reduce([value for _, value in self.points])


class Line(NamedTuple):
    """A series as it is drawn."""

    series: Series
    colour: str
    fill: float
    stacked: bool

    @property
    def points(self) -> list[tuple[float, float]]:
        """Below zero where the panel turns it down."""
        turned = self.series.own.get("custom.transform") == "negative-Y"
        return [(at, -v) for at, v in self.series.points] if turned else self.series.points


class Board:
    """One dashboard over [begin, now] of a Prometheus, with a value for each of its variables."""

    def __init__(self, text: str, server: str, begin_s: float, variables: Mapping[str, str]
                 ) -> None:
        self.board: dict[str, Any] = json.loads(text)
        self.server, self.variables = server, {"__rate_interval": "8s", **variables}
        self.begin_s, self.now_s = begin_s, time.time()
        self.high = HEAD + ROW * max(one["gridPos"]["y"] + one["gridPos"]["h"]
                                     for one in self.board["panels"])

    def ask(self, expr: str, moments: bool) -> list[dict[str, Any]]:
        span_s = int(self.now_s - self.begin_s)
        values = {**self.variables, "__range": f"{span_s}s"}
        expr = re.sub(r"\$(?:(\w+)|{(\w+)})",
                      lambda found: values.get(found[1] or found[2], found[0]), expr)
        wanted: dict[str, Any] = {"query": expr} | (
            {"start": self.begin_s, "end": self.now_s, "step": max(1, span_s // POINTS)}
            if moments else {"time": self.now_s})
        route = "query_range" if moments else "query"
        url = f"http://{self.server}/api/v1/{route}?{urllib.parse.urlencode(wanted)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        return found

    def page(self) -> str:
        parts = [self._panel(one) for one in self.board["panels"]]
        return (f'<!doctype html><meta charset="utf-8"><style>{STYLE}</style>'
                f'<h2>{html.escape(self.board["title"])}</h2><div id="board" '
                f'style="width:{24 * COLUMN}px;height:{self.high - HEAD}px">{"".join(parts)}</div>')

    def _panel(self, one: dict[str, Any]) -> str:
        at, title = one["gridPos"], html.escape(one["title"])
        place = f'left:{at["x"] * COLUMN + 3}px;top:{at["y"] * ROW}px'
        if one["type"] == "row":
            return f'<div class="row" style="{place}">⌄ {title}</div>'
        draw = {"stat": self._stat, "gauge": self._gauge, "table": self._table,
                "timeseries": self._graph, "heatmap": self._heatmap}.get(one["type"])
        width, height, low = at["w"] * COLUMN - 6, at["h"] * ROW - 6, at["h"] < 3
        if draw is None:
            body = f'<div class="none">a panel of kind {html.escape(one["type"])}</div>'
        elif series := self._series(one):
            body = draw(one, series, width - 18, height - (21 if low else 32))
        else:
            none = one["fieldConfig"]["defaults"].get("noValue", "no data")
            body = f'<div class="none">{html.escape(none)}</div>'
        return (f'<div class="p{" low" * low}" style="{place};width:{width}px;height:{height}px">'
                f"<h4>{title}</h4>{body}</div>")

    def _series(self, one: dict[str, Any]) -> list[Series]:
        """What each query of a panel that is not hidden has an answer for."""
        reduce = one["options"].get("reduceOptions", {"calcs": ["lastNotNull"]})["calcs"]
        moments = one["type"] in ("timeseries", "heatmap") or reduce[0] in ("mean", "sum", "max")
        found = []
        for target in one["targets"]:
            for row in [] if target.get("hide") else self.ask(target["expr"], moments):
                name = named(target.get("legendFormat", "").removeprefix("__auto"), row)
                for what in one.get("transformations", ()):
                    if what["id"] == "renameByRegex":
                        name = re.sub(what["options"]["regex"], r"\1", name)
                points = [(at, float(v)) for at, v in row.get("values") or [row["value"]]
                          if v != "NaN"]
                if points:
                    found.append(Series(name, row["metric"], points, _own(one, name)))
        return found

    def _stat(self, one: dict[str, Any], series: list[Series], width: int, height: int) -> str:
        field, options = one["fieldConfig"]["defaults"], one["options"]
        parts = []
        for found in series[:4]:
            value = found.reduced(options["reduceOptions"]["calcs"][0])
            colour = NAMED["text"] if options["colorMode"] == "none" else coloured(field, value)
            name = f'<div class="l">{html.escape(found.name)}</div>' * (len(series) > 1)
            said = shown(value, field["unit"])
            if options["textMode"] == "name":
                name, said = "", found.name
            size = min(42 if len(series) == 1 else 28, int(height * 0.62),
                       int((width / len(series) - 26) / len(said) * 1.6))
            parts.append(f'<div>{name}<span style="font-size:{size}px;font-weight:500;'
                         f'color:{colour}">{html.escape(said)}</span></div>')
        return f'<div class="stats" style="height:{height}px">{"".join(parts)}</div>'

    def _gauge(self, one: dict[str, Any], series: list[Series], width: int, height: int) -> str:
        """Half a ring, of which as much is coloured as the value is of the way to the end."""
        field = one["fieldConfig"]["defaults"]
        value = series[0].reduced(one["options"]["reduceOptions"]["calcs"][0])
        low, top = field.get("min", 0), field.get("max", 100)
        share = (value - low) / (top - low)
        size, x, y = min(width / 2, height) * 0.8 - 8, width / 2, height - 8.0

        def arc(until: float, colour: str) -> str:
            turn = math.pi * min(max(until, 0.0), 1.0)
            end = f"{x - size * math.cos(turn):.1f} {y - size * math.sin(turn):.1f}"
            return (f'<path d="M {x - size:.1f} {y} A {size} {size} 0 0 1 {end}" fill="none" '
                    f'stroke="{colour}" stroke-width="{size / 3:.0f}"/>')

        colour = coloured(field, value)
        return (f'<svg width="{width}" height="{height}">{arc(1.0, "#2c3235")}{arc(share, colour)}'
                f'<text x="{x}" y="{y}" text-anchor="middle" font-size="{size / 2.6:.0f}" '
                f'fill="{colour}">{html.escape(shown(value, field["unit"]))}</text></svg>')

    def _table(self, one: dict[str, Any], series: list[Series], _: int, height: int) -> str:
        field = one["fieldConfig"]["defaults"]
        names = [name for name in series[0].labels if name not in ("job", "__name__")]
        (word,) = one["transformations"][0]["options"]["renameByName"].values()

        def cell(column: str, said: str, value: float | None) -> str:
            own, colour = _own(one, column), NAMED["text"]
            if "custom.cellOptions" in own and value is not None:
                colour = coloured(field, value)
            elif "custom.cellOptions" in own:
                name = own["mappings"][0]["options"].get(said, {"color": "text"})["color"]
                colour = NAMED[name]
            return f'<td style="color:{colour}">{html.escape(said)}</td>'

        head = "".join(f"<th>{html.escape(name)}</th>" for name in [*names, word])
        rows = "".join(
            f'<tr>{"".join(cell(name, found.labels.get(name, ""), None) for name in names)}'
            f'{cell(word, shown(found.points[0][1], field["unit"]), found.points[0][1])}</tr>'
            for found in series[:height // 20 - 1])
        return f"<table><tr>{head}</tr>{rows}</table>"

    def _lines(self, one: dict[str, Any], series: list[Series]) -> list[Line]:
        custom = one["fieldConfig"]["defaults"]["custom"]
        found = []
        for number, each in enumerate(series[:24]):
            stacking = each.own.get("custom.stacking") or custom.get("stacking", {})
            stacked = stacking.get("mode", "none") != "none" and bool(stacking["group"])
            if stacked and all(value <= 1e-4 for _, value in each.points):
                continue
            colour = each.own.get("color", {}).get("fixedColor", PALETTE[number % len(PALETTE)])
            fill = each.own.get("custom.fillOpacity", custom.get("fillOpacity", 0)) / 100
            found.append(Line(each, NAMED.get(colour, colour), fill, stacked))
        return found

    def _graph(self, one: dict[str, Any], series: list[Series], width: int, height: int) -> str:
        field, legend = one["fieldConfig"]["defaults"], one["options"]["legend"]
        lines = self._lines(one, series)
        unit = series[0].own.get("unit", field["unit"])
        said = legend_of(lines, legend["calcs"], unit, legend["displayMode"] == "table")
        beside = legend["placement"] == "right"
        if beside:
            width -= (30 + 6 * max(len(one.series.name) for one in lines)
                      + 55 * len(legend["calcs"]))
        else:
            height -= 16 * (1 + (len(lines) - 1) // 9)
        graph = self._axes(field, lines, unit, width, height - CLOCK)
        return (f'<div class="{"graph" * beside}"><svg width="{width}" height="{height}" '
                f'style="flex:none">{graph}{self._clock(width, height)}</svg>{said}</div>')

    def _axes(self, field: dict[str, Any], lines: list[Line], unit: str, width: int, height: int
              ) -> str:
        """The lines upon their grid."""
        sums_at: dict[float, float] = {}
        for one in lines:
            for at, v in one.points if one.stacked else ():
                sums_at[at] = sums_at.get(at, 0.0) + v
        values = [v for one in lines for _, v in one.points]
        most, least = max((*sums_at.values(), *values), default=0.0), min(values, default=0.0)
        if unit == "percentunit":
            most = min(most, 1.0)
        low, top = min(0.0, least), axis_top(most, unit)
        if "max" in field:
            top = float(field["max"])
        elif "min" not in field and "axisSoftMin" not in field["custom"] or least < 0:
            low, top = axis_around(least, most, unit)
        base: dict[float, float] = {}
        parts = []
        for one in lines:
            under = base if one.stacked else {}
            sums = [(at, v + under.get(at, 0.0)) for at, v in one.points]
            tall = [(self._x(at, width), height * (top - v) / (top - low)) for at, v in sums]
            foot = [height * (top - max(low, under.get(at, 0.0))) / (top - low) for at, _ in sums]
            parts.append(_drawn(tall, foot, one, field["custom"]))
            if one.stacked:
                base |= dict(sums)
        steps = 4 if top - low < 4.5 * axis_top(top - low, unit) / 4 else 5
        grid = "".join(
            f'<line x1="{LEFT}" x2="{width}" y1="{height * k / steps:.0f}" '
            f'y2="{height * k / steps:.0f}" stroke="#2c3235"/><text x="0" '
            f'y="{height * k / steps + 10:.0f}" fill="#8e8e8e" font-size="10">'
            f"{html.escape(shown(top - (top - low) * k / steps, unit))}</text>"
            for k in range(steps + 1))
        marks = "".join(f'<line x1="{self._x(at, width):.1f}" x2="{self._x(at, width):.1f}" y1="0" '
                        f'y2="{height}" stroke="#f2495c" stroke-dasharray="3 3"/>'
                        for at in self._moments())
        return f"{grid}{''.join(parts)}{marks}"

    def _heatmap(self, _: dict[str, Any], series: list[Series], width: int, height: int) -> str:
        rows = sorted(series)
        most = max(v for one in rows for _, v in one.points) or 1.0
        cell = max(2.0, (width - LEFT) / max(len(one.points) for one in rows))
        height -= CLOCK
        tall, parts = height / len(rows), []
        for number, one in enumerate(rows):
            parts.append(f'<text x="0" y="{number * tall + tall / 2:.0f}" fill="#8e8e8e" '
                         f'font-size="10">{html.escape(one.name)}</text>')
            parts += [f'<rect x="{self._x(at, width):.1f}" y="{number * tall + 1:.1f}" '
                      f'width="{cell:.1f}" height="{tall - 2:.1f}" fill="#ff780a" '
                      f'fill-opacity="{0.08 + 0.92 * (v / most) ** 0.5:.2f}"/>'
                      for at, v in one.points]
        return (f'<svg width="{width}" height="{height + CLOCK}">{"".join(parts)}'
                f"{self._clock(width, height + CLOCK)}</svg>")

    def _clock(self, width: int, height: int) -> str:
        """The times below a graph, as many as have room."""
        span_s = self.now_s - self.begin_s
        whole = next((one for one in TIMES_S if span_s / one * 70 < width - LEFT),
                     math.ceil(span_s / 4))
        times = range(math.ceil(self.begin_s / whole) * whole, int(self.now_s), whole)
        return "".join(
            f'<text x="{self._x(at, width):.0f}" y="{height - 2}" fill="#8e8e8e" '
            f'font-size="10" text-anchor="middle">{time.strftime("%H:%M:%S", time.gmtime(at))}'
            "</text>" for at in times if self._x(at, width) < width - 24)

    def _x(self, at: float, width: int) -> float:
        return LEFT + (width - LEFT) * (at - self.begin_s) / (self.now_s - self.begin_s)

    def _moments(self) -> list[float]:
        """Where an annotation's query begins to have a value."""
        found = []
        for one in self.board["annotations"]["list"]:
            for row in self.ask(one["expr"], True) if "expr" in one else ():
                times = [at for at, _ in row["values"]]
                found += [at for at, before in zip(times, [0.0, *times], strict=False)
                          if at - before > 9]
        return found


def _own(one: dict[str, Any], name: str) -> dict[str, Any]:
    """What a panel says of a series or a column by its name; the last word counts."""
    found: dict[str, Any] = {}
    for rule in one["fieldConfig"]["overrides"]:
        by, what = rule["matcher"]["id"], rule["matcher"]["options"]
        if by == "byName" and what == name or (
                by == "byRegexp" and re.search(what.strip("/"), name)):
            found |= {setting["id"]: setting["value"] for setting in rule["properties"]}
    return found


def legend_of(lines: list[Line], calcs: list[str], unit: str, is_table: bool) -> str:
    """A list of names, or a table of what each line comes to."""
    names = [f'<i style="background:{one.colour}"></i>{html.escape(one.series.name)}'
             for one in lines]
    if not is_table:
        names = [name + "".join(
            f" &nbsp;{CALCS[calc][0]}: {html.escape(shown(one.series.reduced(calc), unit))}"
            for calc in calcs) for name, one in zip(names, lines, strict=True)]
        return f'<div class="l">{"".join(names)}</div>'
    head = "".join(f"<th>{CALCS[calc][0]}</th>" for calc in calcs)
    rows = "".join(
        f"<tr><td>{name}</td>" + "".join(
            f"<td>{html.escape(shown(one.series.reduced(calc), unit))}</td>" for calc in calcs)
        + "</tr>" for name, one in zip(names, lines, strict=True))
    return f"<table><tr><th>Name</th>{head}</tr>{rows}</table>"


def _drawn(tops: list[tuple[float, float]], foot: list[float], one: Line, custom: dict[str, Any]
           ) -> str:
    """Bars, each wide enough to be seen, or a line with what is filled below it.  A gap of a moment
    or more is drawn as a gap."""
    if custom["drawStyle"] == "bars":
        return "".join(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="5" height="{low - y:.1f}" fill="{one.colour}"/>'
            for (x, y), low in zip(tops, foot, strict=True))
    widest = 1.5 * min((b[0] - a[0] for a, b in itertools.pairwise(tops)), default=1.0)
    pieces: list[list[tuple[float, float, float]]] = []
    for (x, y), low in zip(tops, foot, strict=True):
        if not pieces or x - pieces[-1][-1][0] > widest:
            pieces.append([])
        pieces[-1].append((x, y, low))
    parts = []
    for piece in pieces:
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in (piece * 2 if len(piece) == 1 else piece))
        back = " ".join(f"{x:.1f},{low:.1f}" for x, _, low in reversed(piece))
        parts.append(f'<polygon points="{line} {back}" fill="{one.colour}" '
                     f'fill-opacity="{one.fill}"/><polyline points="{line}" fill="none" '
                     f'stroke="{one.colour}" stroke-width="{0.4 + custom["lineWidth"]}" '
                     'stroke-linecap="round"/>')
    return "".join(parts)
