"""Alerts through a real Prometheus and real Alertmanagers: a restart that no detector here could
ask for, and one page for one dead node."""

from __future__ import annotations

import contextlib
import json
import re
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import yaml
from monitoring import Server, alertmanager, get, prometheus, servers
from running import Run, Runs, wait_for

from holdfast.agent.cli import main
from holdfast.dashboards.rules import files

TOKEN = "operator-token-of-this-test"
INTERVALS_S = 1.0  # of scraping and of evaluating, as these tests set them
BUSY_S = 14.0  # the promise is 1 s beyond the intervals; this machine may be doing other things
BOOK = """+++
severity = "degraded"
scope    = "run"
ladder   = ["restart_ranks"]
budget   = { count = 2, window_h = 24 }
+++
"""


def acting(runs: Runs) -> None:
    """A configuration that lets alerts act, with a runbook of the operator's own."""
    home = runs.home
    (home / "books").mkdir()
    (home / "books/fabric_storm.md").write_text(BOOK)
    (home / "tokens").write_text(f'"{TOKEN}" = "operator"\n')
    (home / "tokens").chmod(0o600)
    config = home / "agent.toml"
    config.write_text(
        f'[api]\ntokens_file = "{home}/tokens"\n[runbooks]\ndirectory = "{home}/books"\n'
        '[detect]\nact = ["ended", "hang", "kernel", "alerts"]\n')
    runs.environ["HOLDFAST_CONFIG"] = str(config)


def agent_address(run: Run) -> str:
    return (run.home / "rt" / run.name / "address").read_text().strip()


def receivers(url: str) -> dict[str, object]:
    """Alertmanager's configuration: everything to that agent, at once."""
    webhook = {"url": f"{url}/api/v1/alerts", "send_resolved": True,
               "http_config": {"authorization": {"credentials": TOKEN}}}
    return {
        "route": {"receiver": "holdfast", "group_by": ["alertname"], "group_wait": "0s",
                  "group_interval": "1s", "repeat_interval": "1s"},
        "receivers": [{"name": "holdfast", "webhook_configs": [webhook]}],
    }


def storm(*discards: int) -> list[str]:
    """What two switches count."""
    return [f'fabric_discards{{port="{number}"}} {value}\n'
            for number, value in enumerate(discards)]


RULES = yaml.safe_dump({"groups": [{"name": "fabric", "rules": [{
    # Neither switch alone is bad: no agent of one node could say so.
    "alert": "FabricStorm", "expr": "sum(last_over_time(fabric_discards[1m])) > 10",
    "labels": {"run": "t", "holdfast_runbook": "fabric_storm"},
    "annotations": {"summary": "two switches drop packets"},
}]}]})


def test_an_alert_over_two_nodes_restarts_the_run_once(runs: Runs) -> None:
    acting(runs)
    run = runs.script("plain.py", "100000")
    run.at_step(5)
    home = runs.home
    with contextlib.ExitStack() as stack:
        switches = stack.enter_context(servers(2))
        for switch, page in zip(switches, storm(4, 4), strict=True):
            switch.pages["/metrics"] = page
        config = receivers(agent_address(run))
        managers = [stack.enter_context(alertmanager(home / name, config)) for name in "ab"]
        asked = stack.enter_context(
            prometheus(home / "p", RULES, [one.address for one in switches], managers))
        wait_for(lambda: get(f"http://{asked}/api/v1/query?query=sum(fabric_discards)")
                 ["data"]["result"], 20, "both switches are scraped")
        assert run.status()["generation"] == 1

        begin_s = time.monotonic()
        switches[1].pages["/metrics"] = storm(4, 9)[1]
        wait_for(lambda: run.status()["generation"] == 2, 30, "a restart for the alert")
        took_s = time.monotonic() - begin_s
        # Both Alertmanagers deliver it, again and again, each second: what was started runs on.
        run.wait_output("step 30 rank 1 restarts 1")
        (alert,) = run.api("/api/v1/alerts")
        assert alert["outcome"] == "generation 2 was started for it"
        assert run.status()["generation"] == 2
        (incident,) = [one for one in run.incidents() if one["fault"] == "fabric_storm"]
        assert "two switches drop packets" in incident["reason"]

        switches[1].pages["/metrics"] = storm(4, 4)[1]
        wait_for(lambda: (found := run.try_api("/api/v1/alerts")) and not found[0]["firing"], 60,
                 "the alert ends")
    # Agent and run may be gone: the journal has it.
    run.kill_all()
    assert "fabric_storm" in {one["fault"] for one in run.incidents()}
    # At most 0.5 s to be scraped and 0.5 to be evaluated, then Alertmanager, agent and launcher.
    print(f"metric to restart: {took_s:.2f} s")
    assert took_s < INTERVALS_S + BUSY_S, f"metric to restart took {took_s:.2f} s"


def post(url: str, body: object) -> dict[str, str]:
    asked = urllib.request.Request(url, json.dumps(body).encode(),
                                   {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=10) as answer:
        return dict(json.loads(answer.read() or b"{}"))


def test_what_is_silenced_or_inhibited_restarts_nothing(runs: Runs) -> None:
    """A person's silence and Alertmanager's inhibition hold back what would restart the run."""
    acting(runs)
    run = runs.script("plain.py", "100000")
    run.at_step(5)
    config = receivers(agent_address(run)) | {"inhibit_rules": [{
        "source_matchers": ["alertname=Root"], "target_matchers": ["alertname=Inhibited"],
        "equal": ["run"]}]}

    def outcomes() -> dict[str, str]:
        return {one["name"]: one["outcome"] for one in run.try_api("/api/v1/alerts") or ()}

    with alertmanager(runs.home / "am", config) as manager:
        api = f"http://{manager}/api/v2"

        def fire(*names: str) -> None:
            # Root names no runbook: it is kept, and acts upon nothing.
            post(f"{api}/alerts", [{"labels": {
                "alertname": name, "run": run.name,
                **({} if name == "Root" else {"holdfast_runbook": "fabric_storm"})}}
                for name in names])

        def held() -> set[str]:
            return {one["labels"]["alertname"] for one in get(f"{api}/alerts")
                    if one["status"]["silencedBy"] or one["status"]["inhibitedBy"]}

        silence = post(f"{api}/silences", {
            "matchers": [{"name": "alertname", "value": "Silenced", "isRegex": False}],
            "startsAt": "2020-01-01T00:00:00Z", "endsAt": "2099-01-01T00:00:00Z",
            "createdBy": "ann", "comment": "known"})["silenceID"]
        fire("Root")
        wait_for(lambda: outcomes().get("Root"), 20, "the root is kept")
        fire("Silenced", "Inhibited", "Control")
        wait_for(lambda: outcomes().get("Control"), 20, "an alert that nothing holds back acts")
        wait_for(lambda: held() == {"Silenced", "Inhibited"}, 20, "both are held back")
        fire("Again")  # through the same dispatcher, after both
        wait_for(lambda: outcomes().get("Again"), 20, "one more comes through")
        assert set(outcomes()) == {"Root", "Control", "Again"}
        before = run.status()["generation"]
        assert before >= 2 and "generation" not in outcomes()["Root"], outcomes()

        # Nothing but the silence held it back.
        gone = urllib.request.Request(f"{api}/silence/{silence}", method="DELETE")
        urllib.request.urlopen(gone, timeout=10).close()
        wait_for(lambda: outcomes().get("Silenced"), 30, "it comes when its silence has ended")
        assert "Inhibited" not in outcomes()


def faster(text: str) -> str:
    """Each minute of a rule as a second, each hour as twenty, and nothing else changed."""
    def seconds(found: re.Match[str]) -> str:
        count, unit = int(found[1]), found[2]
        return f"{count * {'m': 1, 'h': 20, 'd': 60}[unit]}s"

    return re.sub(r"(?<![\w.])(\d+)([mhd])(?=[\])\s'\\]|$)", seconds, text, flags=re.M)


NODE = """holdfast_build_info{{version="1",python="3"}} 1
holdfast_store_up 1
holdfast_config_reload_ok 1
holdfast_breaker_open 0
holdfast_paused{{scope="node/{node}"}} 0
holdfast_run_ranks{{run="m5",state="running"}} 8
holdfast_run_leading{{run="m5"}} {leads}
holdfast_train_step{{run="m5"}} {step}
holdfast_checkpoint_age_seconds{{run="m5"}} 60
holdfast_checkpoint_interval_seconds{{run="m5"}} 600
holdfast_node_seconds_total{{category="training"}} {training}
holdfast_node_seconds_total{{category="detection"}} {lost}
"""


class Fleet:
    """Four agents' pages; a run over all of them stands when one is gone."""

    def __init__(self, nodes: list[Server]) -> None:
        self.nodes, self.living = nodes, list(range(len(nodes)))
        self.step, self.training, self.lost, self.faults = 100, 1000.0, 0.0, ""

    def begin_fault(self, fault: str, subject: str) -> None:
        """Its fatal form, as every living agent says it from now on."""
        self.faults += (f'holdfast_fault_active{{fault="{fault}",subject="{subject}",'
                        'severity="fatal"} 1\n')

    def second(self) -> None:
        if len(self.living) == len(self.nodes) and not self.faults:
            self.step, self.training = self.step + 1, self.training + 1
        else:
            self.lost += 1
        for number, node in enumerate(self.nodes):
            node.pages = {}
            if number in self.living:
                node.pages["/metrics"] = NODE.format(
                    node=number, leads=int(number == 0), step=self.step, training=self.training,
                    lost=self.lost) + self.faults


def told(server: Server, path: str) -> set[tuple[str, str]]:
    return {(one["labels"]["alertname"], one["labels"].get("instance", ""))
            for one in server.alerts(path)}


def shipped(folder: Path, people: Server) -> tuple[str, dict[str, object]]:
    """The rules and Alertmanager's sample as they are rendered, faster, with other receivers."""
    assert main(["dashboards", "render", "--to", str(folder)]) == 0
    rules = faster((folder / "holdfast-alerts.yml").read_text())
    sample = (folder / "holdfast-alertmanager.yml").read_text()
    config = yaml.safe_load(re.sub(r"http://localhost:\d+", f"http://{people.address}", sample))
    config["route"] |= {"group_wait": "1s", "group_interval": "1s"}
    return rules, config


class Watched:
    """A fleet under Prometheus and Alertmanager as they are shipped, and who is told."""

    def __init__(self, stack: contextlib.ExitStack, folder: Path, count: int) -> None:
        self.people, *nodes = stack.enter_context(servers(count + 1))
        self.nodes, self.fleet = nodes, Fleet(nodes)
        self.fleet.second()
        rules, config = shipped(folder / "rendered", self.people)
        manager = stack.enter_context(alertmanager(folder / "a", config))
        self.asked = stack.enter_context(prometheus(
            folder / "p", rules, [one.address for one in nodes], [manager], "1s"))

    def firing(self) -> dict[str, dict[str, str]]:
        found = get(f"http://{self.asked}/api/v1/alerts")["data"]["alerts"]
        return {one["labels"]["alertname"]: one["annotations"] for one in found
                if one["state"] == "firing"}

    def pass_by(self, seconds: int, until: str = "") -> None:
        for _ in range(seconds):
            self.fleet.second()
            time.sleep(1.0)
            if until and until in self.firing():
                return
        assert not until, f"{until} did not fire within {seconds} s"

    def pages(self) -> int:
        return len({json.dumps(body["groupLabels"]) for path, body in self.people.posted
                    if path == "/page"})


def one_dead_node(count: int, last: str, folder: Path) -> None:
    with contextlib.ExitStack() as stack:
        watched = Watched(stack, folder, count)
        people = watched.people
        watched.pass_by(8)
        assert told(people, "/page") == set(), "a healthy fleet wakes nobody"
        assert ("HoldfastWatchdog", "") in told(people, "/watchdog")
        lost = count // 2
        watched.fleet.living.remove(lost)
        watched.pass_by(150, until=last)
        watched.pass_by(5)
        assert told(people, "/page") == {("HoldfastRunNodeLost", watched.nodes[lost].address)}
        assert watched.pages() == 1
        broken = {name for name, texts in watched.firing().items() if "error" in json.dumps(texts)}
        assert not broken, "a text that Prometheus could not expand"
        (url,) = {one["annotations"]["runbook_url"] for one in people.alerts("/page")}
        assert count == 1 or re.fullmatch(
            r"http://127\.0\.0\.1:\d+/runbooks/fleet/run_node_lost\.md", url)


def a_run_that_was_given_up(folder: Path) -> None:
    """The page stands for the run's standstill, which has the run's name as well."""
    with contextlib.ExitStack() as stack:
        watched = Watched(stack, folder, 2)
        watched.pass_by(5)
        watched.fleet.begin_fault("budget_spent", "run/m5/rank/1")
        watched.pass_by(150, until="HoldfastRunNotTraining")
        watched.pass_by(5)
        assert {(one["labels"]["alertname"], one["labels"]["run"], one["labels"]["fault"])
                for one in watched.people.alerts("/page")} == {
                    ("HoldfastRunStopped", "m5", "budget_spent")}
        assert watched.pages() == 1
        assert "HoldfastBudgetSpent" in watched.firing()
        said = [one["labels"] for one in watched.people.alerts("/ticket")]
        assert not [one for one in said if one.get("run") == "m5"], "a ticket says nothing more"


def test_one_dead_node_and_a_run_that_was_given_up_are_one_page_each(tmp_path: Path) -> None:
    """Four fleets side by side: each waits half a minute, and wants little of a processor."""
    fleets = {
        "of four": partial(one_dead_node, 4, "HoldfastRunNotTraining"),
        "of two": partial(one_dead_node, 2, "HoldfastRunNotTraining"),
        # Nobody is left to say that its run stands: the last to come is another one.
        "alone": partial(one_dead_node, 1, "HoldfastAgentAbsent"),
        "given up": a_run_that_was_given_up,
    }
    for name in fleets:
        (tmp_path / name).mkdir()
    with ThreadPoolExecutor(len(fleets)) as pool:
        ends = [pool.submit(fleet, tmp_path / name) for name, fleet in fleets.items()]
    for end in ends:
        end.result()


def test_the_agent_serves_what_an_alert_links_to(runs: Runs) -> None:
    acting(runs)
    run = runs.script("plain.py", "100000", flags=("--nproc-per-node", "1"))
    run.at_step(2, rank=0)
    groups = yaml.safe_load(files.rules([], "RUNBOOKS"))["groups"]
    names = {rule["annotations"]["runbook_url"] for group in groups for rule in group["rules"]
             if "alert" in rule and "{{" not in rule["annotations"]["runbook_url"]}
    assert "RUNBOOKS/fleet/watchdog.md" in names
    for name in names:
        url = name.replace("RUNBOOKS", f"{agent_address(run)}/runbooks")
        with urllib.request.urlopen(url, timeout=10) as page:
            assert "## Mitigation" in page.read().decode()
