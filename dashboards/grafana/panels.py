"""Panels and dashboards as values, and the JSON that Grafana reads.

Owns the form: layout, data source, null handling, and what every panel must say.  Knows no query.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

COLUMNS = 24
UNITS = {"none", "short", "s", "percentunit", "bytes", "Bps", "watt", "celsius", "dateTimeFromNow"}
CURRENCIES = ("USD", "EUR", "GBP", "JPY", "CHF", "INR", "KRW")  # of which Grafana knows the sign
KINDS = {"stat": 4, "word": 4, "timeseries": 8, "heatmap": 8, "table": 8}  # and how high each is
SOURCE_VARIABLE = "datasource"
SOURCE = {"type": "prometheus", "uid": f"${{{SOURCE_VARIABLE}}}"}


class Link(NamedTuple):
    title: str
    url: str


class Panel(NamedTuple):
    title: str
    text: str  # what a reader should make of it
    unit: str
    queries: tuple[tuple[str, str], ...]  # (PromQL, legend)
    kind: str = "timeseries"
    width: int = 12
    steps: tuple[tuple[float | None, str], ...] = ((None, "green"),)  # from here on, this colour
    stacked: bool = False
    bars: bool = False  # of what is there for a moment; stacked
    quiet: str = ""  # shown where there is nothing, which a healthy fleet may have
    links: tuple[Link, ...] = ()
    colours: tuple[tuple[str, str], ...] = ()  # of series by name, or of the words in a column
    coloured: str = ""  # of a table: the column whose words have these colours
    column: str = ""  # of a table: what its numbers are, in a word
    calcs: tuple[str, ...] = ()  # what the legend says of each line, in Grafana's words
    beside: bool = False  # the legend is a table beside the lines, for there are many
    zero: bool = True  # the axis begins at 0, where that means something
    money: bool = False  # series are named by their currencies
    high: int = 0  # 0: as its kind is

    @property
    def height(self) -> int:
        return self.high or KINDS[self.kind]


class Board(NamedTuple):
    name: str
    title: str
    text: str
    panels: tuple[Panel, ...]
    variables: tuple[tuple[str, str], ...] = ()  # (name, query of label_values)
    annotations: tuple[tuple[str, str, str], ...] = ()  # (name, PromQL, title)


def check(panel: Panel) -> None:
    """Grafana shows a wrong unit or an empty description without a word."""
    if panel.unit not in UNITS or panel.kind not in KINDS:
        raise ValueError(f"{panel.title}: no such unit or kind: {panel.unit}, {panel.kind}")
    if not (panel.title and panel.text.endswith(".") and panel.queries and panel.steps):
        raise ValueError(f"{panel.title}: title, sentence, query and a first colour are needed")
    if bool(panel.column) != (panel.kind == "table"):
        raise ValueError(f"{panel.title}: a table's numbers have a word of their own, and no other")
    if bool(panel.coloured) != (panel.kind == "table" and bool(panel.colours)):
        raise ValueError(f"{panel.title}: colours in a table are of one column's words")


# What each kind of panel shows and how: Grafana fills in what is missing by its release, so that a
# panel would look otherwise in the next one.
_STAT = {
    "colorMode": "value", "graphMode": "none", "justifyMode": "auto", "orientation": "auto",
    "percentChangeColorMode": "standard", "showPercentChange": False, "textMode": "auto",
    "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}, "wideLayout": True}
OPTIONS: dict[str, dict[str, Any]] = {
    "stat": _STAT,
    "word": _STAT | {"textMode": "name"},  # a stat of which the legend is read, not the number
    "timeseries": {"tooltip": {"hideZeros": True, "mode": "multi", "sort": "desc"}},
    "heatmap": {
        "calculate": False, "cellGap": 1, "exemplars": {"color": "rgba(255,0,255,0.7)"},
        "color": {"exponent": 0.5, "fill": "dark-orange", "mode": "scheme", "reverse": False,
                  "scale": "exponential", "scheme": "Oranges", "steps": 32},
        "legend": {"show": True}, "rowsFrame": {"layout": "auto"}, "showValue": "never",
        "tooltip": {"mode": "single", "showColorScale": True, "yHistogram": False},
        "yAxis": {"axisPlacement": "left"}},
    "table": {"cellHeight": "sm", "frameIndex": 0, "showHeader": True},
}
# A gap is drawn as a gap: an agent that is away has no value.
CUSTOM: dict[str, dict[str, Any]] = {
    "timeseries": {"axisSoftMin": 0, "drawStyle": "line", "fillOpacity": 0, "lineWidth": 1,
                   "showPoints": "auto", "spanNulls": False},
    "table": {"align": "auto", "inspect": False},
}
_IN_COLOUR = {"type": "color-text"}  # without it a table shows no threshold and no word's colour
HIDDEN = ("Time", "__name__", "job")  # columns that say nothing


def _panel(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    check(panel)
    table = panel.kind == "table"
    custom, options = dict(CUSTOM.get(panel.kind, {})), OPTIONS[panel.kind]
    if panel.kind == "timeseries":
        options = options | {"legend": {
            "calcs": list(panel.calcs), "showLegend": True,
            "displayMode": "table" if panel.beside else "list",
            "placement": "right" if panel.beside else "bottom"}}
    if not panel.zero:
        del custom["axisSoftMin"]
    if panel.stacked:
        custom |= {"stacking": {"mode": "normal", "group": "A"}, "fillOpacity": 60}
    if panel.bars:
        custom |= {"stacking": {"mode": "normal", "group": "A"}, "fillOpacity": 100,
                   "drawStyle": "bars", "lineWidth": 0}
    stat = panel.kind in ("stat", "word")
    instant = stat or table
    return {
        "id": number, "type": "stat" if stat else panel.kind, "title": panel.title,
        "description": panel.text,
        "datasource": SOURCE, "options": options,
        "gridPos": {"h": panel.height, "w": panel.width, "x": x, "y": y},
        "fieldConfig": {"overrides": _overrides(panel), "defaults": {
            "unit": panel.unit, "noValue": panel.quiet or "no data", "custom": custom,
            "color": {"mode": "palette-classic" if panel.kind == "timeseries" else "thresholds"},
            "thresholds": {"mode": "absolute", "steps": [
                {"value": value, "color": colour} for value, colour in panel.steps]},
            "links": [{"title": one.title, "url": one.url} for one in panel.links],
        }},
        "transformations": [{"id": "organize", "options": {
            "excludeByName": dict.fromkeys(HIDDEN, True),
            "renameByName": {"Value": panel.column}}}] if table else [],
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": SOURCE, "expr": expr,
             "legendFormat": legend, "instant": instant, "range": not instant,
             "format": "table" if table else "time_series"}
            for i, (expr, legend) in enumerate(panel.queries)],
    }


def _overrides(panel: Panel) -> list[dict[str, Any]]:
    """What single series or columns have of their own, by their names."""
    found: list[tuple[str, str, Any]] = []
    if panel.coloured:
        words = {word: {"color": colour, "index": index}
                 for index, (word, colour) in enumerate(panel.colours)}
        found += [(panel.coloured, "mappings", [{"type": "value", "options": words}]),
                  (panel.coloured, "custom.cellOptions", _IN_COLOUR)]
    else:
        found += [(name, "color", {"mode": "fixed", "fixedColor": colour})
                  for name, colour in panel.colours]
    if panel.kind == "table" and len(panel.steps) > 1:
        found.append((panel.column, "custom.cellOptions", _IN_COLOUR))
    if panel.money:
        found += [(name, "unit", f"currency{name}") for name in CURRENCIES]
    return [{"matcher": {"id": "byName", "options": name},
             "properties": [{"id": what, "value": value}]} for name, what, value in found]


def render(board: Board, others: tuple[Board, ...]) -> str:
    """The dashboard's file.  `others` are linked, with the time that is looked at."""
    panels, x, y, high = [], 0, 0, 0
    for number, panel in enumerate(board.panels, 1):
        if x + panel.width > COLUMNS:
            x, y, high = 0, y + high, 0
        panels.append(_panel(panel, number, x, y))
        x, high = x + panel.width, max(high, panel.height)
        for beside in panels:  # a row has one height, so that none leaves a hole
            if beside["gridPos"]["y"] == y:
                beside["gridPos"]["h"] = high
    variables: list[dict[str, Any]] = [
        {"name": SOURCE_VARIABLE, "label": "Prometheus", "type": "datasource",
         "query": "prometheus"}]
    variables += [{"name": name, "type": "query", "datasource": SOURCE, "refresh": 2, "sort": 1,
                   "query": {"query": query, "refId": name}} for name, query in board.variables]
    return json.dumps({
        "uid": f"holdfast-{board.name}", "title": board.title, "description": board.text,
        "tags": ["holdfast"], "schemaVersion": 39, "editable": True, "graphTooltip": 1,
        "refresh": "30s", "time": {"from": "now-6h", "to": "now"}, "timezone": "browser",
        "templating": {"list": variables},
        "annotations": {"list": [
            {"name": name, "datasource": SOURCE, "enable": True, "expr": expr,
             "titleFormat": title, "iconColor": "red"} for name, expr, title in board.annotations]},
        "links": [{"type": "link", "title": one.title, "url": f"/d/holdfast-{one.name}",
                   "tooltip": one.text, "icon": "dashboard", "tags": [], "asDropdown": False,
                   "includeVars": False, "keepTime": True, "targetBlank": False}
                  for one in others if one.name != board.name],
        "panels": panels,
    }, indent=1, sort_keys=True) + "\n"
