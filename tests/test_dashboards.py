"""Dashboards: each panel says what a person needs, and each query finds the series that an agent
with faults serves.  promtool's own engine evaluates them; no Grafana server has loaded them."""

from __future__ import annotations

import json
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from drawing import Board, axis_around, axis_top, named, shown
from pages import promtool

from holdfast.agent.metrics import families
from holdfast.agent.metrics.names import known
from holdfast.dashboards.grafana import boards, panels
from holdfast.dashboards.rules import files

LABELS = {"run": "m5", "severity": "fatal", "fault": "rank_hung", "state": "running",
          "category": "training", "kind": "some", "period": "volatile"}
SEVERAL = {"job_seconds_total": ("kind", ("training", "wall", "queued")),
           "node_seconds_total": ("category", ("training", "startup"))}
VALUES = {"$run": "m5", "$node": "n0", "$__rate_interval": "5m", "$__range": "1h"}


def queries() -> list[str]:
    found = [expr for board in boards.BOARDS for one in board.panels for expr, _ in one.queries]
    return found + [expr for board in boards.BOARDS for _, expr, _ in board.annotations]


def served() -> dict[str, str]:
    """Every family once for node n0; counters grow, and there were recoveries and verdicts."""
    found = {'up{job="holdfast",instance="n0"}': "1x120"}
    for one in known():
        names = [f"holdfast_{one.name}"]
        extra = [""]
        if one.kind == "histogram":
            names = [names[0] + end for end in ("_sum", "_count")]
            extra = [f',phase="{phase}"' for phase in (*families.PHASES, *families.STARTS)]
            extra = list(dict.fromkeys(extra))
        elif one.name == "detector_verdicts_total":
            extra = [f',detector="hang",outcome="{word}"' for word in ("true", "false")]
        elif one.name in SEVERAL:
            label, words = SEVERAL[one.name]
            extra = [f',{label}="{word}"' for word in words]
        else:
            extra = ["".join(f',{name}="{LABELS.get(name, "0")}"' for name in one.labels)]
        values = "1x120" if one.kind == "gauge" else "0+1x120"
        found |= {f'{name}{{instance="n0"{more}}}': values for name in names for more in extra}
    # A link that went down, and a library that was replaced half an hour ago.
    found['holdfast_network_link_up{instance="n0",device="mlx5_1",port="1"}'] = "1x100 0x20"
    library = 'holdfast_software_info{instance="n0",component="nccl",version="%s"}'
    return found | {library % "2.18": "1x90 stale", library % "2.21": "_x90 1x30"}


def judged(series: dict[str, str], folder: Path) -> str:
    tests = []
    for query in queries():
        for name, value in VALUES.items():
            query = query.replace(name, value)
        tests.append({"expr": f"count({query}) > bool 0", "eval_time": "2h",
                      "exp_samples": [{"labels": "{}", "value": 1}]})
    file = folder / "test.yml"
    file.write_text(json.dumps({"evaluation_interval": "1m", "tests": [{
        "interval": "1m", "promql_expr_test": tests,
        "input_series": [{"series": one, "values": values} for one, values in series.items()]}]}))
    done = subprocess.run([promtool(), "test", "rules", str(file)], capture_output=True, text=True,
                          timeout=120, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_every_query_finds_what_an_agent_serves(tmp_path: Path) -> None:
    series = served()
    assert judged(series, tmp_path) == ""
    kept = {one: values for one, values in series.items() if "train_loss" not in one}
    assert "train_loss" in judged(kept, tmp_path)


def test_what_changed_is_what_was_replaced_and_not_what_is_new(tmp_path: Path) -> None:
    """Not a node that joined, not a part that was always there in two versions."""
    series = {"holdfast_run_generation{run=\"m5\",instance=\"n0\"}": "1x120",
              "holdfast_run_generation{run=\"m5\",instance=\"n1\"}": "_x90 1x30",
              "holdfast_run_generation{run=\"other\",instance=\"n2\"}": "1x120"}
    for node in ("n0", "n2"):
        made = f'{{instance="{node}",component="%s",version="%s"}}'
        series |= {
            "holdfast_software_info" + made % ("nccl", "2.18"): "1x90 stale",
            "holdfast_software_info" + made % ("nccl", "2.21"): "_x91 1x30",
            "holdfast_firmware_info" + made % ("nvme A", "1"): "1x120",
            "holdfast_firmware_info" + made % ("nvme A", "2"): "1x120",
            f'holdfast_host_info{{instance="{node}",kernel="6.1"}}': "1x100 stale",
            f'holdfast_host_info{{instance="{node}",kernel="6.8"}}': "_x101 1x20",
            f'holdfast_build_info{{instance="{node}",version="1",python="3.11"}}': "1x120"}
    series['holdfast_software_info{instance="n1",component="nccl",version="2.21"}'] = "_x90 1x30"
    expr = boards.CHANGED + boards._OF_RUN
    for name, value in VALUES.items():
        expr = expr.replace(name, value)
    file = tmp_path / "test.yml"
    found = [("nccl", "2.21", 91), ("kernel", "6.8", 101)]
    file.write_text(json.dumps({"evaluation_interval": "1m", "tests": [{
        "interval": "1m",
        "input_series": [{"series": one, "values": values} for one, values in series.items()],
        "promql_expr_test": [{"expr": expr, "eval_time": "2h", "exp_samples": [
            {"labels": f'{{instance="n0",component="{component}",version="{version}"}}',
             "value": 60_000 * minute} for component, version, minute in found]}]}]}))
    done = subprocess.run([promtool(), "test", "rules", str(file)], capture_output=True, text=True,
                          timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_counter_that_was_away_for_a_scrape_does_not_begin_anew(tmp_path: Path) -> None:
    series = {'holdfast_restarts_total{run="m5",fault="f",instance="n0"}':
              "_x30 1x30 stale 1x30 2x30"}
    expr = boards.began("holdfast_restarts_total").replace("$__rate_interval", "2m")
    file = tmp_path / "test.yml"
    file.write_text(json.dumps({"evaluation_interval": "1m", "tests": [{
        "interval": "1m",
        "input_series": [{"series": one, "values": values} for one, values in series.items()],
        "promql_expr_test": [
            {"expr": f"count({expr}) or vector(0)", "eval_time": f"{minute}m",
             "exp_samples": [{"labels": "{}", "value": begins}]}
            # Before, its first value, a standstill, back again, a second restart.
            for minute, begins in ((29, 0), (31, 1), (45, 0), (63, 0), (64, 0), (94, 1))]}]}))
    done = subprocess.run([promtool(), "test", "rules", str(file)], capture_output=True, text=True,
                          timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_precision_on_the_board_is_what_is_recorded_and_alerted(tmp_path: Path) -> None:
    """What a person labelled false had counted as true when it was acted upon."""
    verdicts = 'holdfast_detector_verdicts_total{detector="hang",outcome="%s",instance="n0"}'
    false = 'holdfast_incident_labels_total{detector="hang",label="false",instance="n0"}'
    file, rules = tmp_path / "test.yml", tmp_path / "rules.yml"
    rules.write_text(files.rules([], "x"))
    for labelled, share in (({}, 0.9), ({false: "0+4x120"}, 0.5)):
        series = {verdicts % "true": "0+9x120", verdicts % "false": "0+1x120"} | labelled
        file.write_text(json.dumps({"evaluation_interval": "1m", "rule_files": ["rules.yml"],
                                    "tests": [{
            "interval": "1m",
            "input_series": [{"series": one, "values": values} for one, values in series.items()],
            "promql_expr_test": [
                {"expr": f"round({expr}, 0.001)", "eval_time": "2h",
                 "exp_samples": [{"labels": '{detector="hang"}', "value": share}]}
                for expr in ("detector:holdfast_precision:ratio7d",
                             boards.PRECISION.replace("$__range", "1h"))]}]}))
        done = subprocess.run([promtool(), "test", "rules", str(file)], capture_output=True,
                              text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_family_that_a_panel_asks_for_is_served() -> None:
    names = {re.sub(r"_(sum|count)$", "", one)
             for query in queries() for one in re.findall(r"holdfast_[a-z0-9_]+", query)}
    assert len(names) > 20
    assert names <= {f"holdfast_{one.name}" for one in known()}


def test_the_files_are_what_grafana_reads() -> None:
    for text in boards.files().values():
        board = json.loads(text)
        cells = [(one["gridPos"]["y"], x) for one in board["panels"]
                 for x in range(one["gridPos"]["x"], one["gridPos"]["x"] + one["gridPos"]["w"])]
        assert len(cells) == len(set(cells)), "panels lie on each other"
        assert max(x for _, x in cells) < panels.COLUMNS
        assert len(board["links"]) == 3
    with pytest.raises(ValueError, match="no such unit"):
        panels.check(boards.FAULTS._replace(unit="parsec"))


def test_a_number_says_what_it_is() -> None:
    """In a table by a word of its own instead of the title again; in money by its currency."""
    found = [one for text in boards.files().values() for one in json.loads(text)["panels"]]
    for one in found:
        if one["type"] == "table":
            (word,) = one["transformations"][0]["options"]["renameByName"].values()
            assert 2 < len(word) < 12 and word != one["title"]
    (money,) = (one for one in found if "holdfast_node_price" in one["targets"][0]["expr"])
    units = {rule["matcher"]["options"]: rule["properties"] for rule in
             money["fieldConfig"]["overrides"]}
    assert units["EUR"] == [{"id": "unit", "value": "currencyEUR"}]
    with pytest.raises(ValueError, match="a word of their own"):
        panels.check(boards.FAULTS._replace(column=""))


def test_a_table_shows_the_colours_of_its_numbers_and_words() -> None:
    """Without a cell that is told to, Grafana colours nothing in a table."""
    found = {one["title"]: one for text in boards.files().values()
             for one in json.loads(text)["panels"] if one["type"] == "table"}
    for one in found.values():
        defaults = one["fieldConfig"]["defaults"]
        column = {rule["matcher"]["options"]: {what["id"]: what["value"]
                                               for what in rule["properties"]}
                  for rule in one["fieldConfig"]["overrides"] if rule["properties"][0]["id"]
                  == "custom.cellOptions"}
        (word,) = one["transformations"][0]["options"]["renameByName"].values()
        assert (word in column) == (len(defaults["thresholds"]["steps"]) > 1), one["title"]
    severity = {what["id"]: what["value"]
                for rule in found["Faults that stand"]["fieldConfig"]["overrides"]
                for what in rule["properties"] if rule["matcher"]["options"] == "severity"}
    assert severity["custom.cellOptions"] == {"type": "color-text"}
    assert severity["mappings"][0]["options"]["fatal"]["color"] == "red"
    with pytest.raises(ValueError, match="of one column's words"):
        panels.check(boards.FAULTS._replace(coloured=""))


def test_a_link_that_was_never_up_is_not_down(tmp_path: Path) -> None:
    """An empty port of a network card would be red for ever; one that went down before the time
    shown is down all the same."""
    links = {"never": "0x120", "always": "1x120", "lately": "1x100 0x20", "back": "1x80 0x9 1x31"}
    asked = {one.title: one.queries[0][0] for one in boards.ONE_NODE.panels if "down" in one.title}
    tests = []
    for minute, down in ((60, []), (85, ["back"]), (119, ["lately"])):
        drawn, now = (asked[title].replace("$node", "n0").replace("$__range", "5m")
                      for title in ("Links that were down", "Links down"))
        tests += [{"expr": f"sum by (device) ({drawn})", "eval_time": f"{minute}m", "exp_samples": [
            {"labels": f'{{device="{one}"}}', "value": 1} for one in down]},
            {"expr": now, "eval_time": f"{minute}m",
             "exp_samples": [{"labels": "{}", "value": len(down)}]}]
    file = tmp_path / "test.yml"
    file.write_text(json.dumps({"evaluation_interval": "1m", "tests": [{
        "interval": "1m", "promql_expr_test": tests,
        "input_series": [{"series": f'holdfast_network_link_up{{instance="n0",device="{one}"}}',
                          "values": values} for one, values in links.items()]}]}))
    done = subprocess.run([promtool(), "test", "rules", str(file)], capture_output=True, text=True,
                          timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_ended_before_the_time_shown_is_no_row_of_0(tmp_path: Path) -> None:
    asked = {one.title: one.queries[0][0].replace("$__range", "1h")
             for board in (boards.FLEET, boards.RECOVERY) for one in board.panels}
    series = {f'holdfast_{name}{{{label}="{word}"}}': values for name, label in (
        ("jobs_total", "outcome"), ("restarts_total", "fault"))
        for word, values in (("before", "3x120"), ("since", "3x90 4x30"))}
    file = tmp_path / "test.yml"
    file.write_text(json.dumps({"evaluation_interval": "1m", "tests": [{
        "interval": "1m",
        "input_series": [{"series": one, "values": values} for one, values in series.items()],
        "promql_expr_test": [
            {"expr": asked[title], "eval_time": "2h",
             "exp_samples": [{"labels": f'{{{label}="since"}}', "value": 1}]}
            for title, label in (("Attempts that ended", "outcome"),
                                 ("Restarts by fault", "fault"))]}]}))
    done = subprocess.run([promtool(), "test", "rules", str(file)], capture_output=True, text=True,
                          timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", boards.files())
def test_panels_fill_their_rows(name: str) -> None:
    """Without a hole, and without one above another."""
    places = [one["gridPos"] for one in json.loads(boards.files()[name])["panels"]]
    for y in {place["y"] for place in places}:
        row = [place for place in places if place["y"] == y]
        assert sum(place["w"] for place in row) == panels.COLUMNS
        (high,) = {place["h"] for place in row}
        assert y + high in {0, *(place["y"] for place in places)} or y == max(
            place["y"] for place in places)


def test_the_committed_dashboards_are_current() -> None:
    folder = Path(boards.__file__).parent / "rendered"
    assert {path.name: path.read_text() for path in folder.iterdir()} == boards.files(), (
        "run `make docs`")


def test_the_provisioning_files_name_the_folder_and_the_data_source() -> None:
    made = boards.provisioning("/srv/a \"b\"")
    providers = yaml.safe_load(made["holdfast-grafana-dashboards.yml"])["providers"]
    assert providers[0]["options"]["path"] == '/srv/a "b"'
    (source,) = yaml.safe_load(made["holdfast-grafana-datasource.yml"])["datasources"]
    assert source["type"] == panels.SOURCE["type"]
    scraped = yaml.safe_load(files.text("prometheus.yml"))["global"]["scrape_interval"]
    assert source["jsonData"]["timeInterval"] == scraped, "$__rate_interval is made of it"


@pytest.mark.parametrize(("most", "unit", "ticks"), [
    (0.0, "Bps", "0 B/s 0.25 B/s 0.5 B/s 0.75 B/s 1 B/s"),  # nothing was received
    (0.98, "percentunit", "0 % 25 % 50 % 75 % 100 %"),
    (0.05, "percentunit", "0 % 1.5 % 3 % 4.5 % 6 %"),
    (612.0, "watt", "0 W 200 W 400 W 600 W 800 W"),
    (21.8 * 2**30, "bytes", "0 B 6 GiB 12 GiB 18 GiB 24 GiB"),
    (0.7, "s", "0 s 200 ms 400 ms 600 ms 800 ms"),
    (134.0, "currencyUSD", "$0 $40 $80 $120 $160"),
])
def test_a_picture_has_round_numbers_at_its_axis(most: float, unit: str, ticks: str) -> None:
    top = axis_top(most, unit)
    assert top >= most
    assert " ".join(shown(top * part / 4, unit) for part in range(5)) == ticks


@pytest.mark.parametrize(("least", "most", "unit", "low", "top"), [
    (61.0, 74.0, "celsius", 60.0, 76.0),
    (-9e9, 8e9, "bps", -10e9, 10e9),
    (70.0, 70.0, "celsius", 70.0, 71.0),  # nothing moved
])
def test_an_axis_that_need_not_begin_at_0_has_round_numbers_too(
    least: float, most: float, unit: str, low: float, top: float
) -> None:
    assert axis_around(least, most, unit) == (low, top)


class Answered(Board):
    """A dashboard whose queries are answered from a table: labels and values by the metric."""

    ANSWERS = {"hot": ({"gpu": "0"}, (60.0, 80.0)), "sent": ({"card": "a"}, (1e9, 3e9))}

    def ask(self, expr: str, moments: bool) -> list[dict[str, Any]]:
        labels, values = self.ANSWERS[expr]
        points = [[self.now_s - 1 + at, str(value)] for at, value in enumerate(values)]
        return [{"metric": labels} | ({"values": points} if moments else {"value": points[-1]})]


def panel(kind: str, unit: str, targets: list[dict[str, Any]], options: dict[str, Any],
          *overrides: dict[str, Any], **defaults: Any) -> dict[str, Any]:
    steps = [{"value": None, "color": "green"}, {"value": 75, "color": "#EAB839"}]
    return {"type": kind, "title": kind, "gridPos": {"x": 0, "y": 0, "w": 12, "h": 8},
            "options": options, "targets": targets, "fieldConfig": {
                "overrides": list(overrides), "defaults": {
                    "unit": unit, "thresholds": {"steps": steps}, **defaults}}}


def test_what_others_boards_use_is_drawn_too() -> None:
    """A mean in a gauge, a legend as a table, lines below zero, a heading; what is hidden is not,
    and a kind of panel that is not known is named."""
    custom = {"drawStyle": "line", "fillOpacity": 10, "lineWidth": 2}
    beside = {"legend": {"calcs": ["mean", "max"], "displayMode": "table", "placement": "right"}}
    below = {"matcher": {"id": "byRegexp", "options": "/out/"},
             "properties": [{"id": "custom.transform", "value": "negative-Y"}]}
    text = json.dumps({"title": "Theirs", "annotations": {"list": [{"builtIn": 1}]}, "panels": [
        {"type": "row", "title": "Quick look", "gridPos": {"x": 0, "y": 0, "w": 24, "h": 1}},
        panel("gauge", "celsius", [{"expr": "hot"}], {"reduceOptions": {"calcs": ["mean"]}},
              min=0, max=100),
        panel("timeseries", "Bps", [{"expr": "hot", "hide": True, "legendFormat": "secret"},
                                    {"expr": "sent", "legendFormat": "out {{card}}"}],
              beside, below, custom=custom),
        panel("geomap", "none", [{"expr": "hot"}], {}, custom={})]})
    page = Answered(text, "", time.time() - 60, {}).page()
    assert "Quick look" in page
    assert "70 °C" in page and "#73bf69" in page  # of 60 and 80, below the second step
    assert "<th>Mean</th><th>Max</th>" in page and "<td>2 GB/s</td><td>3 GB/s</td>" in page
    assert "out a" in page and "secret" not in page
    assert ">-3 GB/s<" in page  # its axis goes below zero
    assert "a panel of kind geomap" in page


def test_a_label_that_a_series_lacks_is_not_in_the_pictures_legend() -> None:
    legend = "{{device}} {{port}}"
    assert named(legend, {"metric": {"device": "eth0"}}) == "eth0"
    assert named(legend, {"metric": {"device": "mlx5_0", "port": "1"}}) == "mlx5_0 1"
