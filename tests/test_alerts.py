"""The alert rules: every fault has its ticket, few names page, each fires when it should and is
still when it should not, and each address opens.  Prometheus' own tool is the judge."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from pages import promtool

from holdfast.agent.core.model import Runbook
from holdfast.agent.metrics.names import known
from holdfast.dashboards.rules import faults, files
from holdfast.runbooks import prose

ROOT = Path(__file__).resolve().parent.parent
BASE = "http://runbooks.example"
PAGES_MAX = 10
FAULTS = "holdfast_faults"  # the group of the tickets
RECORDED = re.compile(r"\w:\w+:\w")  # the name of a series that a rule records


def entries() -> list[faults.Entry]:
    found = []
    for name in prose.names():
        toml, sections = prose.split(prose.text_of(name))
        table = tomllib.loads(toml)
        book = Runbook(fault=name, severity=table["severity"], scope=table["scope"],
                       ladder=tuple(table["ladder"]), alert=table["alert"])
        found.append(faults.Entry(book, prose.first_sentence(sections["Meaning"])))
    return found


def rendered() -> str:
    return files.rules(entries(), BASE)


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load(rendered())["groups"]
    return [rule for group in groups for rule in group["rules"] if "alert" in rule]


class Case(NamedTuple):
    """Series as promtool writes them ("series{labels}": values, a minute apart), and a moment."""

    series: dict[str, str]
    at: str = "1h"


def up(count: int, dead: int) -> dict[str, str]:
    return {f'up{{job="holdfast",instance="n{i}"}}': f"{int(i >= dead)}x120" for i in range(count)}


def fault(name: str, severity: str, count: int = 1) -> dict[str, str]:
    return {f'holdfast_fault_active{{fault="{name}",severity="{severity}",subject="node/n{i}",'
            f'instance="n{i}"}}': "1x120" for i in range(count)}


def of_run(name: str, severity: str, run: str = "m5") -> dict[str, str]:
    return {f'holdfast_fault_active{{fault="{name}",severity="{severity}",'
            f'subject="run/{run}/rank/{i}",instance="n{i}"}}': "1x120" for i in range(2)}


def goodput(training: int, lost: int) -> dict[str, str]:
    """Seconds a minute of training and of start-up, over eight hours."""
    return {f'holdfast_node_seconds_total{{category="{name}",instance="n0"}}': f"0+{value}x480"
            for name, value in (("training", training), ("startup", lost), ("idle", 600))}


STEP = 'holdfast_train_step{run="m5",instance="n0"}'
AGE = 'holdfast_checkpoint_age_seconds{run="m5",instance="n0"}'
INTERVAL = 'holdfast_checkpoint_interval_seconds{run="m5",instance="n0"}'
RANKS = 'holdfast_run_ranks{run="m5",state="running",instance="n0"}'
ETA = 'holdfast_run_eta_seconds{run="m5",instance="n0"}'
DEADLINE = 'holdfast_run_deadline_timestamp_seconds{run="m5",instance="n0"}'
LEADS = ('holdfast_run_leading{run="m5",instance="n0"}',
         'holdfast_run_leading{run="m5",instance="n1"}')
VERDICTS = 'holdfast_detector_verdicts_total{detector="hang",instance="n0",outcome="%s"}'
# alert -> (cases in which it fires, cases in which it does not)
FLEET: dict[str, tuple[list[Case], list[Case]]] = {
    "HoldfastRunStopped": (
        [Case(of_run("budget_spent", "fatal")), Case(of_run("crash_loop", "fatal"))],
        [Case(of_run("rank_killed", "fatal")), Case(fault("gpu_needs_inspection", "fatal"))],
    ),
    "HoldfastNodeNeedsPerson": (
        [Case(fault("gpu_needs_inspection", "fatal")), Case(fault("cpu_machine_check", "fatal"))],
        # A corrected memory error; a GPU that comes back by itself; a moment.
        [Case(fault("cpu_machine_check", "warn")), Case(fault("gpu_fell_off_bus", "fatal")),
         Case({next(iter(fault("nic_error", "fatal"))): "1 0x120"}, "3m")],
    ),
    "HoldfastRunNotTraining": (
        [Case({STEP: "0+1x20 20x120"}), Case({STEP: "0x120"})],
        # It trains; its steps take ten minutes each; it began a short while ago; it is paused.
        [Case({STEP: "0+5x120"}), Case({STEP: "1x9 2x9 3x9 4x9 5x9 6x9 7x9 8x9"}),
         Case({STEP: "_x45 0x80"}),
         Case({STEP: "7x120", 'holdfast_paused{scope="run/m5",instance="n0"}': "1x120"}),
         Case({STEP: "7x120", 'holdfast_paused{scope="fleet",instance="n0"}': "1x120"})],
    ),
    "HoldfastNoVerifiedCheckpoint": (
        [Case({AGE: "0+60x120", INTERVAL: "600x120"})],
        # In time; a run that writes none; rank 0 is on another node now, and writes there.
        [Case({AGE: "0+60x120", INTERVAL: "3600x120"}), Case({AGE: "0+60x120"}),
         Case({INTERVAL: "600x120"}),
         Case({AGE: "0+60x120", INTERVAL: "600x120", AGE.replace("n0", "n1"): "300x120"})],
    ),
    "HoldfastBreakerOpen": (
        [Case({'holdfast_breaker_open{instance="n0"}': "1x120",
               'holdfast_breaker_open{instance="n1"}': "0x120"})],
        [Case({'holdfast_breaker_open{instance="n0"}': "0x120"})],
    ),
    "HoldfastAgentsAbsent": (
        # Of a small fleet more than half, or all there is.
        [Case(up(20, 4)), Case({'up{job="other",instance="x"}': "1x120"}), Case(up(1, 1)),
         Case(up(2, 2)), Case(up(3, 2))],
        # A dead node among few is a ticket; three among a hundred are.
        [Case(up(2, 1)), Case(up(4, 1)), Case(up(4, 2)), Case(up(100, 3)), Case(up(20, 0))],
    ),
    "HoldfastRunNodeLost": (
        [Case({RANKS: "8x50", 'up{job="holdfast",instance="n0"}': "1x50 0x70"}, "55m")],
        # The agent is back; the node had no run; its run had ended; it trains elsewhere.
        [Case({RANKS: "8x120", 'up{job="holdfast",instance="n0"}': "1x120"}),
         Case({'up{job="holdfast",instance="n0"}': "1x50 0x70"}, "55m"),
         Case({RANKS: "8x30 0x15", 'up{job="holdfast",instance="n0"}': "1x50 0x70"}, "55m"),
         Case({RANKS: "8x50", 'up{job="holdfast",instance="n0"}': "1x50 0x70",
               'holdfast_train_step{run="m5",instance="n1"}': "0+9x120"}, "55m")],
    ),
    "HoldfastStoreDown": (
        [Case({'holdfast_store_up{instance="n0"}': "0x120"})],
        [Case({'holdfast_store_up{instance="n0"}': "1x58 0x1 1x60"})],
    ),
    "HoldfastNoLeader": (
        [Case({LEADS[0]: "0x120", LEADS[1]: "0x120"})],
        [Case({LEADS[0]: "0x120", LEADS[1]: "1x120"})],
    ),
    "HoldfastGoodputBurn": (
        [Case(goodput(20, 40), "2h")],
        # Half of the time; and bad an hour ago, well now.
        [Case(goodput(30, 30), "2h"),
         Case({'holdfast_node_seconds_total{category="training",instance="n0"}': "0x90 0+60x60",
               'holdfast_node_seconds_total{category="startup",instance="n0"}': "0+60x90 5400x60"},
              "100m")],
    ),
    "HoldfastGoodputLow": (
        [Case(goodput(40, 20), "7h")], [Case(goodput(55, 5), "7h")],
    ),
    "HoldfastDeadlineAtRisk": (
        # promtool's time begins at 0: an hour to go at 60 minutes, and the deadline after 90.
        [Case({ETA: "3600x120", DEADLINE: "5400x120"})],
        # In time; without a deadline; it caught up after a restart.
        [Case({ETA: "3600-60x120", DEADLINE: "7200x120"}), Case({ETA: "3600x120"}),
         Case({ETA: "60x55 9000x4 60x60", DEADLINE: "7200x120"}, "62m")],
    ),
    "HoldfastAgentAbsent": ([Case(up(4, 1))], [Case(up(4, 0))]),
    "HoldfastReloadFailed": (
        [Case({'holdfast_config_reload_ok{instance="n0"}': "0x120"})],
        [Case({'holdfast_config_reload_ok{instance="n0"}': "1x120"})],
    ),
    "HoldfastPausedLong": (
        [Case({'holdfast_paused{scope="run/m5",instance="n0"}': "1x300"}, "5h"),
         Case({f'holdfast_paused{{scope="fleet",instance="n{one}"}}': "1x300"
               for one in range(3)}, "5h")],
        [Case({'holdfast_paused{scope="run/m5",instance="n0"}': "0x200 1x100"}, "5h")],
    ),
    "HoldfastVersionSkew": (
        [Case({f'holdfast_build_info{{version="{one}",instance="{one}"}}': "1x480"
               for one in ("1", "2")}, "7h")],
        [Case({'holdfast_build_info{version="1",instance="n0"}': "1x480"}, "7h")],
    ),
    "HoldfastDetectorPrecisionLow": (
        [Case({VERDICTS % "true": "0+1x300", VERDICTS % "false": "0+1x300"}, "4h"),
         Case({VERDICTS % "true": "0+9x300", VERDICTS % "false": "0x300",
               'holdfast_incident_labels_total{detector="hang",label="false",instance="n0"}':
               "0+4x300"}, "4h")],
        # Right nearly always; and too few to say.
        [Case({VERDICTS % "true": "0+99x300", VERDICTS % "false": "0+1x300"}, "4h"),
         Case({VERDICTS % "true": "0 1x300", VERDICTS % "false": "0 1x300"}, "4h")],
    ),
    "HoldfastErrorsRepeat": (
        [Case({'holdfast_agent_troubles_total{part="web",instance="n0"}': "0+2x120"})],
        [Case({'holdfast_agent_troubles_total{part="web",instance="n0"}': "0+0.1x120"})],
    ),
    # Nothing stills it: an empty Prometheus fires it, too.
    "HoldfastWatchdog": ([Case({})], []),
}


def judged(
    tests: Iterable[tuple[Case, str, Iterable[str]]], without: Iterable[str], folder: Path
) -> str:
    """What promtool says against (case, what of the alerts is counted, names that fire); "" for
    nothing.  Evaluates all groups but those: all together take minutes."""
    kept = [one for one in yaml.safe_load(rendered())["groups"] if one["name"] not in without]
    (folder / "alerts.yml").write_text(json.dumps({"groups": kept}))
    told = [{
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in case.series.items()]
                        or [{"series": "nothing", "values": "0x120"}],
        "promql_expr_test": [{
            "expr": f'count by (alertname) (ALERTS{{alertstate="firing",{matcher}}}) > bool 0',
            "eval_time": case.at,
            "exp_samples": [{"labels": f'{{alertname="{one}"}}', "value": 1} for one in fire],
        }],
    } for case, matcher, fire in tests]
    file = folder / "test.yml"
    file.write_text(json.dumps({"rule_files": ["alerts.yml"], "evaluation_interval": "1m",
                                "tests": told}))
    done = subprocess.run([promtool(), "test", "rules", str(file)], capture_output=True, text=True,
                          timeout=400, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def of_fleet(alert: str, case: Case, fires: bool) -> tuple[Case, str, list[str]]:
    return case, f'alertname="{alert}"', [alert] * fires


def test_every_alert_of_the_fleet_fires_when_it_should_and_only_then(tmp_path: Path) -> None:
    tickets = {one.runbook.alert for one in entries()}
    assert set(FLEET) == {one["alert"] for one in alerts()} - tickets
    assert all(fires for fires, _ in FLEET.values())
    assert [name for name, (_, still) in FLEET.items() if not still] == ["HoldfastWatchdog"]
    asking = {one["alert"] for one in alerts() if RECORDED.search(one["expr"])}
    assert asking == {"HoldfastGoodputBurn", "HoldfastGoodputLow", "HoldfastDetectorPrecisionLow"}
    for recorded in (True, False):  # what is recorded over hours costs most, and is asked by few
        tests = [of_fleet(name, case, fires) for name, both in FLEET.items()
                 if (name in asking) == recorded
                 for fires, some in zip((True, False), both, strict=True) for case in some]
        without = [FAULTS] if recorded else [FAULTS, "holdfast_recording"]
        assert judged(tests, without, tmp_path) == ""


def test_every_ticket_fires_by_its_own_fault_alone(tmp_path: Path) -> None:
    """In halves: what one half's faults fire, the other half's do not."""
    names = [one.runbook for one in entries()]
    all_but_faults = {one["name"] for one in yaml.safe_load(rendered())["groups"]} - {FAULTS}
    for half in (names[::2], names[1::2]):
        series = {name: "1x20" for book in half for name in fault(book.fault, book.severity)}
        fire = sorted(book.alert for book in half)
        assert judged([(Case(series, "20m"), 'fault!=""', fire)], all_but_faults, tmp_path) == ""


def test_a_wrong_expectation_is_noticed(tmp_path: Path) -> None:
    good = FLEET["HoldfastStoreDown"][0][0]
    for name, fires in (("HoldfastStoreDown", False), ("HoldfastNoLeader", True)):
        assert name in judged([of_fleet(name, good, fires)], [FAULTS], tmp_path)


def asked_of_prometheus(
    test: dict[str, Any], kept: Iterable[str], folder: Path, every: str = "15s"
) -> str:
    """What promtool says against a test of these groups as they are rendered; "" for nothing."""
    groups = [one for one in yaml.safe_load(rendered())["groups"] if one["name"] in kept]
    (folder / "alerts.yml").write_text(json.dumps({"groups": groups}))
    file = folder / "test.yml"
    file.write_text(json.dumps({"rule_files": ["alerts.yml"], "evaluation_interval": every,
                                "tests": [test]}))
    done = subprocess.run([promtool(), "test", "rules", str(file)], capture_output=True, text=True,
                          timeout=120, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_what_ec2_announces_is_told_before_the_node_is_gone(tmp_path: Path) -> None:
    """A spot instance has two minutes: its ticket fires with the first scrape, another's waits."""
    seen = {"ec2_spot_interruption": 1, "ec2_rebalance_recommended": 1, "ec2_scheduled_event": 1,
            "host_memory_low": 0}
    names = {one.runbook.fault: one.runbook.alert for one in entries()}
    series = {name: "_ 1x20" for one in seen for name in fault(one, "warn")}
    count = 'count by (alertname) (ALERTS{alertstate="firing"})'
    samples = [{"labels": f'{{alertname="{names[one]}"}}', "value": 1}
               for one, at_once in seen.items() if at_once]
    test = {
        "interval": "15s",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {"expr": count, "eval_time": "0s", "exp_samples": []},
            {"expr": count, "eval_time": "30s", "exp_samples": samples},
        ],
    }
    assert asked_of_prometheus(test, ["holdfast_faults"], tmp_path) == ""


def worded(alert: str, labels: dict[str, str], series: dict[str, str], description: str,
           folder: Path) -> str:
    """What promtool says against an alert's description, labels and all."""
    (rule,) = [one for one in alerts() if one["alert"] == alert]
    (group,) = [one["name"] for one in yaml.safe_load(rendered())["groups"] if rule in one["rules"]]
    url = rule["annotations"]["runbook_url"].replace("{{ $labels.fault }}", labels.get("fault", ""))
    texts = rule["annotations"] | {"description": description, "runbook_url": url}
    test = {
        "interval": "15s",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [{
            "eval_time": "10m", "alertname": alert,
            "exp_alerts": [{"exp_labels": rule["labels"] | labels, "exp_annotations": texts}],
        }],
    }
    return asked_of_prometheus(test, [group], folder)


def test_a_ticket_says_where_how_badly_in_how_many_places_and_what(tmp_path: Path) -> None:
    seen = 'holdfast_fault_active{fault="host_memory_low",severity="%s",subject="%s",instance="%s"}'
    # The first one's weight changes: it stays one alert, and says what holds now.
    series = {seen % ("warn", "node/n0", "n0:9855"): "1x20 stale",
              seen % ("degraded", "node/n0", "n0:9855"): "_x21 1x60"}
    labels = {"instance": "n0:9855", "subject": "node/n0"}
    meaning = next(one.summary for one in entries() if one.runbook.fault == "host_memory_low")
    text = f"node/n0 on n0:9855 (degraded; places in the fleet: 1): {meaning}"
    assert worded("HoldfastHostMemoryLow", labels, series, text, tmp_path) == ""
    wrong = worded("HoldfastHostMemoryLow", labels, series, "node/n0: Nothing.", tmp_path)
    assert text in wrong, "promtool compares descriptions"


def test_a_stopped_runs_page_is_one_and_names_the_run(tmp_path: Path) -> None:
    """However many agents and ranks say it."""
    labels = {"fault": "budget_spent", "run": "m5"}
    text = ("Run m5 was given up (budget_spent): nothing that Holdfast may do brings training "
            "back.")
    assert worded("HoldfastRunStopped", labels, of_run("budget_spent", "fatal"), text,
                  tmp_path) == ""


def test_a_ticket_about_a_run_names_it_for_the_pages_that_stand_for_it(tmp_path: Path) -> None:
    seen = 'holdfast_fault_active{fault="rank_killed",severity="fatal",%s}'
    where = {"instance": "n0", "subject": "run/m5/rank/1"}
    series = {seen % ",".join(f'{name}="{value}"' for name, value in where.items()): "1x60"}
    meaning = next(one.summary for one in entries() if one.runbook.fault == "rank_killed")
    text = f"run/m5/rank/1 on n0 (fatal; places in the fleet: 1): {meaning}"
    assert worded("HoldfastRankKilled", where | {"run": "m5"}, series, text, tmp_path) == ""


def fires_at(series: dict[str, str], moments: dict[str, list[str]], folder: Path) -> str:
    """What promtool says against the pages that fire at each moment, each alert once."""
    count = 'count by (alertname) (ALERTS{alertstate="firing",severity="critical"}) > bool 0'
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [{
            "expr": count, "eval_time": at,
            "exp_samples": [{"labels": f'{{alertname="{one}"}}', "value": 1} for one in names],
        } for at, names in moments.items()],
    }
    return asked_of_prometheus(test, ["holdfast_pages"], folder)


def of_fleet_with_ranks(count: int, dead: int) -> dict[str, str]:
    """A run over all nodes, which n0 leads; the first ones die after 50 minutes."""
    series = {}
    for i in range(count):
        here = f'instance="n{i}"'
        end = "stale" if i < dead else "8x200"
        series |= {
            f'up{{job="holdfast",{here}}}': "1x50 0x200" if i < dead else "1x250",
            f'holdfast_run_ranks{{run="m5",state="running",{here}}}': f"8x50 {end}",
            f'holdfast_run_leading{{run="m5",{here}}}':
                f"{int(not i)}x50 stale" if i < dead else "0x250",
        }
    return series


def test_the_last_node_of_a_fleet_is_one_page(tmp_path: Path) -> None:
    one = {"49m": [], "54m": ["HoldfastRunNodeLost"], "2h": ["HoldfastRunNodeLost"]}
    assert fires_at(of_fleet_with_ranks(1, 1), one, tmp_path) == ""
    # Without ranks it is missed all the same, and a run that was lost is not forgotten for it.
    idle = {name: values for name, values in of_fleet_with_ranks(1, 1).items() if "up{" in name}
    assert fires_at(idle, {"49m": [], "2h": ["HoldfastAgentsAbsent"]}, tmp_path) == ""


@pytest.mark.parametrize(("living", "serves"), [((), "n0"), (("n2",), "n2")])
def test_a_link_opens_an_agent_that_answers_or_else_the_last_one(
    living: tuple[str, ...], serves: str, tmp_path: Path
) -> None:
    """Of three, of which two or all are gone: no address at all would lead nowhere for good."""
    groups = [one | {"rules": [rule for rule in one["rules"]
                               if rule.get("alert") == "HoldfastAgentsAbsent"]}
              for one in yaml.safe_load(files.rules([]))["groups"]
              if one["name"] == "holdfast_pages"]
    (tmp_path / "alerts.yml").write_text(json.dumps({"groups": groups}))
    gone = ["n0", "n1", "n2"][: 3 - len(living)]
    series = {f'up{{job="holdfast",instance="{one}"}}':
              "1x10 0x50" if one in gone else "1x60" for one in ("n0", "n1", "n2")}
    series |= {f'holdfast_build_info{{version="1",instance="{one}"}}':
               "1x10 stale" if one in gone else "1x60" for one in ("n0", "n1", "n2")}
    share = "100%" if not living else "66.67%"
    test = {"interval": "1m", "alert_rule_test": [{
        "eval_time": "30m", "alertname": "HoldfastAgentsAbsent", "exp_alerts": [{
            "exp_labels": {"severity": "critical"},
            "exp_annotations": {
                "summary": "Many agents do not answer, or none is scraped.",
                "description": f"{share} of the agents do not answer Prometheus.",
                "runbook_url": f"http://{serves}/runbooks/fleet/agents_absent.md"}}]}],
        "input_series": [{"series": name, "values": values} for name, values in series.items()]}
    file = tmp_path / "test.yml"
    file.write_text(json.dumps({"rule_files": ["alerts.yml"], "tests": [test]}))
    done = subprocess.run([promtool(), "test", "rules", str(file)], capture_output=True, text=True,
                          timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("count", "dead"), [(2, 1), (2, 2), (20, 4)])
def test_pages_of_one_cause_begin_together(count: int, dead: int, tmp_path: Path) -> None:
    """Else those for which another stands are sent before it is there."""
    fires = ["HoldfastRunNodeLost"]
    fires += ["HoldfastAgentsAbsent"] if dead > 1 else []
    fires += ["HoldfastNoLeader"] if dead < count else []
    moments = {"50m": [], "51m": [], "52m": [], "53m": sorted(fires), "1h": sorted(fires)}
    assert fires_at(of_fleet_with_ranks(count, dead), moments, tmp_path) == ""


def test_the_breakers_page_counts_nodes_and_not_their_devices(tmp_path: Path) -> None:
    series = {'holdfast_fault_active{fault="nic_error",severity="fatal",'
              f'subject="node/n{node}/nic/{card}",instance="n{node}"}}': "1x60"
              for node in range(3) for card in range(8)}
    # More devices, on one node.
    series |= {'holdfast_fault_active{fault="gpu_memory_error",severity="fatal",'
               f'subject="node/n0/gpu/{card}",instance="n0"}}': "1x60" for card in range(30)}
    series['holdfast_breaker_open{instance="n0"}'] = "1x60"
    text = ("nic_error stands on 3 nodes. Exclusions, reboots and replacements wait for a "
            "person.")
    assert worded("HoldfastBreakerOpen", {}, series, text, tmp_path) == ""


def test_recorded_series_have_the_values_that_their_names_promise(tmp_path: Path) -> None:
    """Two nodes over 30 hours, in one-minute samples.  n0 trains 40 s of each minute, waits 5 s in
    collectives, starts for 15 s; n1 starts for 20 s of a minute and is idle for 40."""
    ledger = {("training", "n0"): 40, ("collective_wait", "n0"): 5, ("startup", "n0"): 15,
              ("startup", "n1"): 20, ("idle", "n1"): 40}
    series = {f'holdfast_node_seconds_total{{category="{category}",instance="{node}"}}':
              f"0+{seconds}x1800" for (category, node), seconds in ledger.items()}
    for phase, seconds in (("total", 12), ("detection", 3)):
        for end, value in (("sum", 2 * seconds), ("count", 2)):
            series[f'holdfast_recovery_seconds_{end}{{phase="{phase}",instance="n0"}}'] = (
                f"0+{value}x1800")
    series |= {
        'holdfast_restarts_total{run="m5",fault="rank_killed",instance="n0"}': "0+2x1800",
        'holdfast_lost_steps_total{run="m5",instance="n0"}': "0+3x1800",
        'holdfast_build_info{version="1",instance="n0"}': "1x1800",
        'holdfast_build_info{version="1",instance="n1"}': "1x1800",
        'holdfast_build_info{version="1",instance="n2"}': "1x1800",
        'holdfast_build_info{version="1",instance="n3"}': "1x1800",
        'holdfast_job_seconds_total{kind="training",instance="n0"}': "60x1800",
        'holdfast_job_seconds_total{kind="wall",instance="n0"}': "80x1800",
        'holdfast_job_seconds_total{kind="queued",instance="n0"}': "40x1800",
    } | fault("gpu_memory_error", "fatal") | fault("nic_error", "fatal")
    series = {name: "1x1800" if "fault_active" in name else values
              for name, values in series.items()}
    expected = {
        "holdfast:goodput:ratio_rate5m": 45 / 80, "holdfast:goodput:ratio_rate30m": 45 / 80,
        "holdfast:goodput:ratio_rate1h": 45 / 80, "holdfast:goodput:ratio_rate6h": 45 / 80,
        "holdfast:ettr:ratio": 45 / 120, "holdfast:ettr:ratio_rate1h": 45 / 120,
        "holdfast:mttr_seconds:rate1d": 12, "holdfast:mttd_seconds:rate1d": 3,
        "holdfast:mtbf_seconds:rate1d": 80 / 2, "run:holdfast_lost_steps:increase1d": 3 * 1440,
        "holdfast:nodes_well:ratio": 3 / 4,  # two fatal faults on one node of four
        "holdfast:job_ettr:ratio": 60 / 80, "holdfast:job_ettr_queued:ratio": 60 / 120,
    }
    (recording,) = [one for one in yaml.safe_load(rendered())["groups"]
                    if one["name"] == "holdfast_recording"]
    recorded = {one["record"] for one in recording["rules"]}
    # Precision has its cases at its alert.
    assert recorded - set(expected) == {"detector:holdfast_precision:ratio7d"}
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [{
            "expr": f"round({name}, 0.0001)", "eval_time": "30h",
            "exp_samples": [{"labels": '{run="m5"}' if name.startswith("run:") else "{}",
                             "value": round(value, 4)}],
        } for name, value in expected.items()],
    }
    assert asked_of_prometheus(test, ["holdfast_recording"], tmp_path, "1m") == ""
    # An hour's ETTR forgets what is older: n0 was lost for a day, and trains since two hours.
    late = 'holdfast_node_seconds_total{category="%s",instance="n0"}'
    test["input_series"] = [{"series": late % "training", "values": "0x1680 60+60x120"},
                            {"series": late % "startup", "values": "0+60x1680 100800x120"}]
    test["promql_expr_test"] = [
        {"expr": f"round({name}, 0.001)", "eval_time": "30h",
         "exp_samples": [{"labels": "{}", "value": value}]}
        for name, value in (("holdfast:ettr:ratio_rate1h", 1), ("holdfast:ettr:ratio", 0.067))]
    assert asked_of_prometheus(test, ["holdfast_recording"], tmp_path, "1m") == ""


def test_few_names_wake_a_person() -> None:
    pages = {one["alert"] for one in alerts() if one["labels"]["severity"] == "critical"}
    assert 5 <= len(pages) <= PAGES_MAX
    names = [one["alert"] for one in alerts()]
    assert len(names) == len(set(names)), "a name means one thing"


def test_every_alert_says_what_a_person_needs() -> None:
    opens = prose.pages()
    for one in alerts():
        texts = one["annotations"]
        assert set(texts) == {"summary", "description", "runbook_url"}, one["alert"]
        assert one["labels"]["severity"] in ("critical", "warning", "info", "none")
        assert re.fullmatch(r"\d+[smh]", one["for"]), one["alert"]
        assert texts["summary"].endswith(".") and texts["description"]
        name = texts["runbook_url"].removeprefix(BASE + "/").removesuffix(".md")
        assert name in opens or name == "{{ $labels.fault }}", one["alert"]
    fleet = {name for name in opens if name.startswith("fleet/")}
    used = {one["annotations"]["runbook_url"].removeprefix(BASE + "/").removesuffix(".md")
            for one in alerts()}
    assert fleet <= used, "a page that no alert leads to"


def test_the_page_names_every_recorded_series() -> None:
    text = (ROOT / "docs/alerts.md").read_text().replace(
        "`holdfast:goodput:ratio_rate5m` (`30m`, `1h`, `6h`)",
        " ".join(f"`holdfast:goodput:ratio_rate{one}`" for one in ("5m", "30m", "1h", "6h")))
    recorded = {rule["record"] for group in yaml.safe_load(rendered())["groups"]
                for rule in group["rules"] if "record" in rule}
    assert len(recorded) > 10
    assert {one for one in recorded if f"`{one}`" not in text} == set()


def test_every_fault_has_the_ticket_that_its_runbook_names() -> None:
    tickets = {one["labels"].get("fault"): one for one in alerts()}
    for one in entries():
        assert tickets[one.runbook.fault]["alert"] == one.runbook.alert
        assert tickets[one.runbook.fault]["labels"]["severity"] in ("warning", "info")


def test_every_metric_that_a_rule_asks_for_is_served() -> None:
    served = {f"holdfast_{one.name}" for one in known()}
    served |= {f"holdfast_recovery_seconds_{end}" for end in ("sum", "count")}
    asked = set(re.findall(r"(?<![:\w])holdfast_[a-z_]+(?=[\[{) ])",
                           "\n".join(rule["expr"] for group in yaml.safe_load(rendered())["groups"]
                                     for rule in group["rules"])))
    assert len(asked) > 12
    assert asked <= served


def test_prometheus_takes_the_rules_and_the_samples(tmp_path: Path) -> None:
    tool = promtool()
    file = tmp_path / "holdfast-alerts.yml"

    def check(kind: str, path: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run([tool, "check", kind, str(path)], capture_output=True, text=True,
                              timeout=120, check=False)

    file.write_text(rendered())
    good = check("rules", file)
    assert good.returncode == 0, good.stderr
    assert f"{len(alerts()) + rendered().count('- record:')} rules found" in good.stdout
    (tmp_path / "prometheus.yml").write_text(files.text("prometheus.yml"))
    good = check("config", tmp_path / "prometheus.yml")
    assert good.returncode == 0, good.stdout + good.stderr
    file.write_text(rendered().replace("max by", "maxi by"))
    assert check("rules", file).returncode != 0


def test_alertmanager_takes_its_sample(tmp_path: Path) -> None:
    tool = shutil.which("amtool")
    if tool is None:
        pytest.skip("amtool is missing (Debian package prometheus-alertmanager)")
    file = tmp_path / "alertmanager.yml"
    file.write_text(files.text("alertmanager.yml"))
    done = subprocess.run([tool, "check-config", str(file)], capture_output=True, text=True,
                          timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
