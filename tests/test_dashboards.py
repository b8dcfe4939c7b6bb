"""Dashboards: each panel says what a person needs, and each query finds the series that an agent
with faults serves.  promtool's own engine evaluates them; no Grafana server has loaded them."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from pages import promtool
from pictures import axis_top, named, shown

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
    # A library that was replaced half an hour ago.
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


def test_a_label_that_a_series_lacks_is_not_in_the_pictures_legend() -> None:
    legend = "{{device}} {{port}}"
    assert named(legend, {"metric": {"device": "eth0"}}) == "eth0"
    assert named(legend, {"metric": {"device": "mlx5_0", "port": "1"}}) == "mlx5_0 1"
