"""What stands on the page of metrics: the operator's choice, and runs that are over."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
from typing import NamedTuple

import pytest
from fakes import FakeLauncher, rank_level, until
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import generate_latest

from holdfast.agent.config.load import ConfigError, load
from holdfast.agent.core.model import RankView, Runbook, RunView, readings_of
from holdfast.agent.metrics import exposition, names, selection
from holdfast.agent.metrics import families as metrics
from holdfast.collectors import ALL
from holdfast.collectors.contract import EXPORTERS, Metric, Sample
from holdfast.collectors.sources.accelerator import METRICS
from holdfast.dashboards.rules import faults, files

KNOWN = {one.name: one for one in names.known()}
NODE, DCGM = EXPORTERS


def on_page(text: str) -> set[str]:
    """Families without the prefix."""
    return {name.removeprefix("holdfast_") for name in re.findall(r"^# TYPE (\S+)", text, re.M)}


@pytest.mark.parametrize(("choice", "name", "shows"), [
    (selection.EVERYTHING, "host_cpu_seconds_total", True),
    (selection.Choice(full=False), "host_cpu_seconds_total", False),
    (selection.Choice(full=False), "host_oom_kills_total", True),
    (selection.Choice(full=False), "rank_still_seconds", False),
    (selection.Choice(full=False), "fault_active", True),
    (selection.Choice(hide=(NODE,)), "host_cpu_seconds_total", False),
    (selection.Choice(hide=(NODE,)), "host_cgroup_memory_bytes", True),
    (selection.Choice(hide=(NODE,)), "accelerator_power_watts", True),
    (selection.Choice(hide=(DCGM,)), "accelerator_power_watts", True),  # NVIDIA's rows alone go
    (selection.Choice(hide=("host_cpu_",)), "host_cpu_seconds_total", False),
    (selection.Choice(hide=("holdfast_host_cpu_",)), "host_cpu_seconds_total", False),
    (selection.Choice(hide=("host_cpu_",)), "host_load_average", True),
    (selection.Choice(hide=("train_loss",)), "train_loss", False),
])
def test_which_families_stand_on_the_page(choice, name, shows):
    assert choice.shows(KNOWN[name]) is shows


def test_an_exporter_hides_the_series_that_it_can_serve():
    power, links = METRICS["accelerator_power_watts"], METRICS["accelerator_link_up"]
    both = [Sample(one.name, f"vendor={vendor},device=0", 1.0, 1.0)
            for one in (power, links) for vendor in ("nvidia", "neuron")]
    choice = selection.Choice(hide=(DCGM,))
    page = "".join(metrics.families(readings_of(both), (power, links), choice))
    assert re.findall(r'^holdfast_(\w+){.*vendor="(\w+)"}', page, re.M) == [
        ("accelerator_power_watts", "neuron"), ("accelerator_link_up", "nvidia"),
        ("accelerator_link_up", "neuron"),
    ]


def test_every_declaration_says_what_it_is_for():
    assert all(one.served_by in ("", *EXPORTERS) and one.help.endswith(".")
               for one in KNOWN.values())
    silent = [one.name for one in ALL if not any(metric.minimal for metric in one.metrics)]
    assert not silent, f"nothing minimal: what does an alert or a summary need of {silent}?"
    served = {one.served_by for one in KNOWN.values()}
    assert served == {"", *EXPORTERS}


@pytest.mark.parametrize(("hide", "said"), [
    (("hots_",), "'hots_' begins no family's name: set node_exporter or dcgm-exporter"),
    (("",), "'' begins no family's name"),
    (("holdfast_",), "'holdfast_' begins no family's name"),
    (("fault_",), "'fault_' would hide fault_active"),
    (("host_", "node-exporter"), "'node-exporter' begins no"),
])
def test_a_word_that_hides_nothing_or_too_much_is_refused(tmp_path, hide, said):
    file = tmp_path / "agent.toml"
    file.write_text(f"[agent]\nmetrics_hide = {list(hide)}\n")
    with pytest.raises(ConfigError) as caught:
        load(file)
    (error,) = caught.value.errors
    assert error.startswith(f"{file}: agent.metrics_hide: ") and said in error


def test_what_alerts_are_made_of_cannot_be_hidden():
    runbook = Runbook(fault="x", severity="warn", scope="node", ladder=(), alert="HoldfastX")
    made = files.rules([faults.Entry(runbook, "s")])
    own = re.findall(r"(?<![:\w])holdfast_([a-z_]+?)(?:_sum|_count)?(?=[\[{) ])", made)
    needed = set(own) & set(names.NAMES)
    assert needed == set(selection.ALERTED)
    assert all(selection.wrong_with((name,), KNOWN.values()) for name in needed)


class Clock:
    """CLOCK_MONOTONIC that a test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_a_run_that_is_over_leaves_the_page_after_ten_minutes(agent, tmp_path):
    """Whatever labels a family has: no series may outlive its run for longer."""

    async def scenario():
        async with agent(agent__metrics_hide=()) as (daemon, node):
            clock = Clock()
            page = metrics.Exposition(daemon.state, clock)
            launcher = FakeLauncher(tmp_path / "run" / "agent.sock")
            launcher.hello()
            launcher.page(0, os.getpid())
            launcher.levels(generation=2, state="running", ranks=[rank_level(0, os.getpid())])
            await until(lambda: daemon.state.snapshot.observed.runs)
            daemon.performer.counters[("restarts", ("demo", "rank_killed"))] = 1.0
            daemon.performer.counters[("lost_steps", ("demo",))] = 12.0
            here = page.text().decode()
            launcher.send(t="bye")
            await until(lambda: not daemon.state.snapshot.observed.runs)

            async def later(by_s: float) -> str:
                clock.now_s += by_s
                number = daemon.state.snapshot.number
                daemon.wake("test")
                await until(lambda: daemon.state.snapshot.number > number)
                return page.text().decode()

            soon, late = await later(599.0), await later(2.0)
            launcher.close()
            return here, soon, late

    here, soon, late = asyncio.run(scenario())
    with_run = [set(re.findall(r'^holdfast_(\w+)\{.*run="demo"', text, re.M))
                for text in (here, soon, late)]
    counted = {"restarts_total", "lost_steps_total"}
    assert counted | {"run_generation", "run_ranks"} <= with_run[0]
    assert with_run[1] == counted and not with_run[2]
    assert "demo" not in late


def view_of(run: str, *ranks: tuple[int, int, str]) -> RunView:
    """A run of these ranks: (rank, pid, state)."""
    return RunView(run, "n", "trainer", len(ranks), ranks=tuple(
        RankView(rank, "n", pid, 1, state) for rank, pid, state in ranks))


def processes(*places: tuple[str, int]) -> tuple:
    """What a driver lists: (device, pid)."""
    return readings_of(
        Sample("accelerator_process", f"vendor=neuron,device={device},pid={pid}", 1.0, 1.0)
        for device, pid in places).of("accelerator_process")


def test_a_device_is_of_the_run_that_computes_there_now():
    recent = selection.Recent()
    old, new = view_of("old", (0, 11, "running"), (1, 12, "running")), view_of("new", (0, 21, "up"))
    recent.see(0.0, (old,), processes(("3", 11), ("3", 12), ("4", 11)))
    assert [key for key, _ in recent.places()] == [
        ("3", "old", "0"), ("3", "old", "1"), ("4", "old", "0")]
    recent.see(1.0, (new,), processes(("3", 21)))
    assert [key for key, _ in recent.places()] == [("3", "new", "0"), ("4", "old", "0")]
    recent.see(2.0, (view_of("new", (0, 21, "running")),), ())  # nothing could be read
    assert ("3", "new", "0") in [key for key, _ in recent.places()]
    recent.see(2.5, (view_of("new", (0, 21, "running")),), processes(("5", 21)))  # it moved
    assert [key for key, _ in recent.places()] == [("4", "old", "0"), ("5", "new", "0")]
    recent.see(3.0, (view_of("new", (0, 21, "ended")),), ())
    assert [key for key, _ in recent.places()] == [("4", "old", "0")]


def test_the_joins_of_the_documentation_hold(tmp_path):
    """With one rank a device, with several, and after one run followed another on the same."""
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool is missing (Debian package prometheus)")
    recent = selection.Recent()
    recent.see(0.0, (view_of("gone", (0, 9, "running")),), processes(("3", 9)))
    runs = (view_of("one", (0, 11, "running")),
            view_of("two", (0, 21, "running"), (1, 22, "running")))
    recent.see(1.0, runs, processes(("3", 11), ("4", 21), ("4", 22)))
    series = {
        f'holdfast_accelerator_run_info{{device="{device}",run="{run}",rank="{rank}"': 1
        for (device, run, rank), _ in recent.places()
    }
    for device, busy, watts in (("3", 0.5, 100), ("4", 0.25, 300), ("5", 0.0, 50)):
        of = f'vendor="neuron",device="{device}"'
        series[f"holdfast_accelerator_utilization_ratio{{{of}"] = busy
        series[f"holdfast_accelerator_power_watts{{{of}"] = watts
    for name, up, absent in (("host", 1, 0), ("nvidia", 0, 1), ("disk", 0, 0)):
        series[f'holdfast_collector_up{{collector="{name}"'] = up
        series[f'holdfast_collector_absent{{collector="{name}"'] = absent
    page = selection.render_docs()
    by_rank, by_run, failing = re.findall(r"^    (holdfast_.*|sum by.*)$", page, re.M)
    tests = [{
        "interval": "1m",
        "input_series": [{"series": f'{name},instance="{node}"}}', "values": f"{value} {value}"}
                         for name, value in series.items() for node in ("a", "b")],
        "promql_expr_test": [
            {"expr": by_rank, "eval_time": "1m", "exp_samples": [
                {"labels": f'{{instance="{node}",device="{device}",run="{run}",rank="{rank}"}}',
                 "value": value}
                for node in ("a", "b") for device, run, rank, value in (
                    ("3", "one", 0, 0.5), ("4", "two", 0, 0.25), ("4", "two", 1, 0.25))]},
            {"expr": by_run, "eval_time": "1m", "exp_samples": [
                {"labels": '{run="one"}', "value": 200}, {"labels": '{run="two"}', "value": 600}]},
            {"expr": failing, "eval_time": "1m", "exp_samples": [
                {"labels": f'holdfast_collector_up{{instance="{node}",collector="disk"}}',
                 "value": 0} for node in ("a", "b")]},
        ],
    }]
    file = tmp_path / "joins.yml"
    file.write_text(json.dumps({"tests": tests}))
    done = subprocess.run([tool, "test", "rules", str(file)], capture_output=True, text=True,
                          timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_minimal_page_and_the_health_of_every_collector(agent):
    async def scenario():
        async with agent(agent__metrics="minimal", collectors__nvml="") as (daemon, _):
            await until(lambda: daemon.state.runner is not None)
            await until(lambda: all(one.read_s for one in daemon.state.runner.health()), 20.0)
            number = daemon.state.snapshot.number
            daemon.wake("test")
            await until(lambda: daemon.state.snapshot.number > number)
            return metrics.Exposition(daemon.state).text().decode()

    text = asyncio.run(scenario())
    assert on_page(text) <= {name for name, one in KNOWN.items() if one.minimal}
    assert {one.name for one in names.OWN if one.minimal} <= on_page(text)
    for metric in ("collector_up", "collector_absent", "collector_duration_seconds"):
        rows = re.findall(rf'^holdfast_{metric}{{collector="(\w+)"}}', text, re.M)
        assert sorted(rows) == sorted(one.name for one in ALL)


NAMES = st.text("abcxyz_", min_size=1, max_size=8)
ODD = st.text('"\\\n{} ü', max_size=6)
ROWS = st.lists(st.tuples(ODD, ODD, st.floats()), max_size=4)
HELP = 'Says "how many",\nby C:\\place.'


class Family(NamedTuple):
    kind: str
    name: str
    rows: list[tuple[str, str, float]]

    def of_the_library(self):
        kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
        made = kinds[self.kind](f"holdfast_{self.name}", HELP, labels=("zone", "a"))
        for first, second, value in self.rows:
            made.add_metric((first, second), value)
        return made

    def declared(self) -> Metric:
        return Metric(self.name + "_total" * (self.kind == "counter"), self.kind, HELP,
                      ("zone", "a"))

    def samples(self) -> list[Sample]:
        return [Sample(self.declared().name, f"a={second},zone={first}", value, 1.0)
                for first, second, value in self.rows]


@given(st.lists(st.builds(Family, st.sampled_from(["gauge", "counter"]), NAMES, ROWS), max_size=3))
def test_the_text_is_the_one_that_the_library_makes(families):
    made = [one.of_the_library() for one in families]

    class Registry:
        def collect(self):
            return made

    text = generate_latest(Registry()).decode()
    assert exposition.text_of(made) == text
    straight = [exposition.family_text(one.declared(), one.samples()) for one in families]
    assert "".join(straight) == text


def test_a_lone_surrogate_does_not_cost_the_page():
    """The library has no page then."""
    metric = KNOWN["host_filesystem_readonly"]
    text = exposition.family_text(metric, [Sample(metric.name, "mount=/\udcff", 1.0, 1.0)])
    assert 'mount="/?"' in metrics.encoded(text).decode()
