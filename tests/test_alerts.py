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

BASE = "http://runbooks.example"
PAGES_MAX = 10


def entries() -> list[faults.Entry]:
    found = []
    for name in prose.names():
        toml, sections = prose.split(prose.text_of(name))
        table = tomllib.loads(toml)
        book = Runbook(fault=name, severity=table["severity"], scope=table["scope"],
                       ladder=tuple(table["ladder"]), alert=table["alert"])
        texts = (prose.first_sentence(sections[one]) for one in ("Meaning", "Impact"))
        found.append(faults.Entry(book, *texts))
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
        [Case(fault("budget_spent", "fatal")), Case(fault("crash_loop", "fatal"))],
        [Case(fault("rank_killed", "fatal")), Case(fault("gpu_needs_inspection", "fatal"))],
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
        [Case({AGE: "0+60x120", INTERVAL: "3600x120"}), Case({AGE: "0+60x120"})],
    ),
    "HoldfastBreakerOpen": (
        [Case({'holdfast_breaker_open{instance="n0"}': "1x120",
               'holdfast_breaker_open{instance="n1"}': "0x120"})],
        [Case({'holdfast_breaker_open{instance="n0"}': "0x120"})],
    ),
    "HoldfastAgentsAbsent": (
        [Case(up(20, 4)), Case({'up{job="other",instance="x"}': "1x120"})],
        # A dead node among few is a ticket; three among a hundred are.
        [Case(up(4, 1)), Case(up(100, 3)), Case(up(20, 0))],
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


def judged(tests: Iterable[tuple[Case, str, Iterable[str]]], tickets: bool, folder: Path) -> str:
    """What promtool says against (case, what of the alerts is counted, names that fire); "" for
    nothing.  Evaluates the tickets or the rest: all together take minutes."""
    groups = yaml.safe_load(rendered())["groups"]
    kept = [one for one in groups if (one["name"] == "holdfast_faults") == tickets]
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
    tests = [of_fleet(name, case, fires) for name, both in FLEET.items()
             for fires, some in zip((True, False), both, strict=True) for case in some]
    assert judged(tests, False, tmp_path) == ""


def test_every_ticket_fires_by_its_own_fault_alone(tmp_path: Path) -> None:
    """In halves: what one half's faults fire, the other half's do not."""
    names = [one.runbook for one in entries()]
    for half in (names[::2], names[1::2]):
        series = {name: "1x20" for book in half for name in fault(book.fault, book.severity)}
        fire = sorted(book.alert for book in half)
        assert judged([(Case(series, "20m"), 'fault!=""', fire)], True, tmp_path) == ""


def test_a_wrong_expectation_is_noticed(tmp_path: Path) -> None:
    good = FLEET["HoldfastStoreDown"][0][0]
    for name, fires in (("HoldfastStoreDown", False), ("HoldfastNoLeader", True)):
        assert name in judged([of_fleet(name, good, fires)], False, tmp_path)


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
                              timeout=30, check=False)

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
                          timeout=30, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
