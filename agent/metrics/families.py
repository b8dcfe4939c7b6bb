"""The agent's metrics: one prometheus collector over the last snapshot.

Owns which values each family has; their names are names.py's, their text exposition.py's.  Holds
no numbers of its own and no global registry: what happened is counted in the journal, what is comes
from the snapshot.  The text is rendered at most once a snapshot.
"""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from holdfast.collectors.contract import Metric as Declared

from ..checks.table import BY_NAME, GROUP, NODE
from ..core.checks.verdict import CODES, UNKNOWN
from ..core.detect.devices import accelerator
from ..core.ledger import CATEGORIES
from ..core.model import FLEET, SEVERITIES, Readings, node_subject, run_subject
from ..core.run.stage import Stage
from ..daemon.state import AgentState
from ..history.incident_log import PHASES, RECOVERY_BUCKETS_S
from ..history.job_log import START_BUCKETS_S
from ..launchers import log_child
from ..store.base import Traffic
from ..system import procfs
from ..system.version import VERSION
from ..telemetry.collectors import Runner
from ..web import books, status
from . import collective_rates, selection
from .exposition import PREFIX, family_text, rows_text, text_of
from .names import LOG_CHILD, NAMES, OWN
from .selection import Rows

CONTENT_TYPE = CONTENT_TYPE_LATEST
Clock = Callable[[], float]  # CLOCK_MONOTONIC, seconds
FRESH_S = 0.25  # metrics of the agent itself move between snapshots, but no faster than this
KERNEL_SOURCES = ("kmsg", "journald")
STARTS = ("queue", "ranks", "first_step", "total")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
BOOKS = (
    "run_total_steps", "run_restarts_left", "run_eta_seconds", "run_deadline_timestamp_seconds",
    "train_samples_per_second", "train_tokens_per_second", "train_mfu_ratio")
COLLECTIVES = (
    "train_collective_seconds", "train_collective_bytes",
    "train_collective_bus_bandwidth_bytes_per_second")
TRAINING = "training"  # scope of what was measured in a run, and by no check
STATES = ("starting", "running", "parked", "ended")
# counter in the journal -> metric
JOURNALLED = {
    "events": "events_total",
    "incidents": "incidents_total",
    "actions": "actions_total",
    "restarts": "restarts_total",
    "lost_steps": "lost_steps_total",
    "labels": "incident_labels_total",
    "jobs": "jobs_total",
    "job_seconds": "job_seconds_total",
}


class Exposition:
    """The text of /metrics."""

    def __init__(self, state: AgentState, clock_s: Clock = time.monotonic) -> None:
        self._state = state
        self._clock_s = clock_s
        self._page = _Page(state, clock_s)
        self._number = -1
        self._made_s = 0.0
        self._text = b""

    def text(self) -> bytes:
        """Rendered anew when there is a newer snapshot, else as it was."""
        now_s = self._clock_s()
        number = self._state.snapshot.number
        if number != self._number and now_s - self._made_s > FRESH_S:
            self._text = encoded("".join(self._page.text()))
            self._number, self._made_s = number, now_s
        return self._text


class _Page:
    """Everything of the last snapshot."""

    def __init__(self, state: AgentState, clock_s: Clock) -> None:
        self._state = state
        self._clock_s = clock_s
        self._recent = selection.Recent()

    def text(self) -> Iterator[str]:
        observed, runner = self._state.snapshot.observed, self._state.runner
        samples = runner.samples() if runner is not None else Readings()
        self._recent.see(self._clock_s(), observed.runs, samples.of(accelerator.PROCESS))
        agent = self._state.config.agent
        choice = selection.Choice(agent.metrics == "full", agent.metrics_hide)
        # prometheus_client keeps a counter's name without its end
        hidden = {PREFIX + metric.name.removesuffix("_total")
                  for metric in OWN if not choice.shows(metric)}
        histograms = (self._histogram("recovery", "recovery_seconds", PHASES, RECOVERY_BUCKETS_S),
                      self._histogram("job_start", "job_start_seconds", STARTS, START_BUCKETS_S))
        own = chain(self._agent(), self._journalled(), histograms, self._runs(), self._books(),
                    self._checks(), self._collectives(), self._collectors())
        yield text_of(made for made in own if made.name not in hidden)
        if runner is not None:
            yield from families(samples, runner.metrics(), choice)
        logs = log_child.rows(self._state.launchers.sessions(), self._state.loaded)
        yield from (rows_text(metric, logs[metric.name])
                    for metric in LOG_CHILD if choice.shows(metric))

    def _agent(self) -> Iterator[Metric]:
        state, snapshot = self._state, self._state.snapshot
        usage = os.times()
        yield family("build_info", [((VERSION, platform.python_version()), 1)])
        yield family("store_up", [((), int(snapshot.observed.store.up))])
        yield from _store(state.store_traffic)
        yield family("nodes_out_of_touch", [((), state.out_of_touch())])
        yield family("breaker_open", [((), int(status.breaker_open(state)))])
        paused = [((node_subject(state.name),), int(status.node_paused(state)))]
        paused += [
            ((run_subject(view.run),), int(status.run_paused(state, view.run)))
            for view in snapshot.observed.runs
        ]
        paused.append(((FLEET,), int(status.fleet_paused(state))))
        yield family("paused", paused)
        active = {
            (verdict.fault, verdict.subject, verdict.severity): 1
            for verdict in snapshot.decision.verdicts
            if verdict.severity in SEVERITIES
        }
        yield family("fault_active", sorted(active.items()))
        # A counter never goes back: a second counts when it is settled.
        ledger = dict.fromkeys(CATEGORIES, 0.0) | dict(snapshot.decision.ledger_settled)
        yield family("node_seconds_total", [((name,), value) for name, value in ledger.items()])
        yield family("detector_verdicts_total", [
            ((detector, outcome), count)
            for detector, outcome, count in snapshot.decision.detector_counts
        ])
        log, source = state.kernel.log, state.kernel.source
        yield family("kernel_log_up", [((name,), int(name == source)) for name in KERNEL_SOURCES])
        for name in ("missed", "foreign", "broken"):
            yield family(f"kernel_lines_{name}_total", [((), getattr(log, name))])
        yield family("config_reload_ok", [((), int(state.reload_ok))])
        yield family("journal_stalled", [((), int(snapshot.observed.journal_stalled))])
        yield family("journal_dropped_total", [((), state.journal.dropped)])
        yield family("agent_steps_total", [((), state.steps)])
        yield family("agent_step_seconds", [((), state.step_s)])
        yield family("agent_event_loop_lag_seconds", [((), state.loop_lag_s)])
        yield family("agent_troubles_total", [
            ((part,), count) for part, count in sorted(state.errors.counts.items())
        ])
        yield family("agent_resident_memory_bytes", [((), procfs.rss_bytes())])
        yield family("agent_cpu_seconds_total", [((), usage.user + usage.system)])

    def _journalled(self) -> Iterator[Metric]:
        counters = self._state.counters
        for name, metric in JOURNALLED.items():
            width = len(NAMES[metric].labels)
            yield family(metric, sorted(
                (labels, value) for (counter, labels), value in counters.items()
                if counter == name and len(labels) == width
                and (NAMES[metric].labels[0] != "run" or self._recent.has(labels[0]))
            ))

    def _histogram(
        self, counter: str, metric: str, phases: tuple[str, ...], bounds_s: tuple[float, ...]
    ) -> Metric:
        """Of what the journal counts by phase and bucket."""
        counters, name = self._state.counters, NAMES[metric]
        histogram = HistogramMetricFamily(PREFIX + metric, name.help, labels=name.labels)
        for phase in phases:
            buckets = [
                (bound, counters.get((f"{counter}_bucket", (phase, bound)), 0.0))
                for bound in (*(f"{seconds:g}" for seconds in bounds_s), "+Inf")
            ]
            total = counters.get((f"{counter}_sum", (phase,)), 0.0)
            histogram.add_metric((phase,), buckets, total)
        return histogram

    def _books(self) -> Iterator[Metric]:
        """What runs bring, and what the node costs."""
        state = self._state
        rows: dict[str, list[tuple[tuple[str, ...], float]]] = {name: [] for name in BOOKS}
        for view in state.snapshot.observed.runs:
            found = books.rates(state, view)
            values = (
                found.total_steps or None, found.restarts_left, found.eta_s,
                found.deadline_wall_s or None, found.samples_s, found.tokens_s, found.mfu)
            for name, value in zip(BOOKS, values, strict=True):
                if value is not None:
                    rows[name].append(((view.run,), value))
        for name, found_rows in rows.items():
            yield family(name, found_rows)
        cost = state.config.cost
        yield family("node_price_per_hour",
                     [((cost.currency,), cost.node_hour)] if cost.node_hour else [])

    def _runs(self) -> Iterator[Metric]:
        state = self._state
        rows: dict[str, list[tuple[tuple[str, ...], float]]] = {
            "train_step": [], "train_loss": [], "train_step_seconds": [], "run_generation": [],
            "run_ranks": [], "rank_still_seconds": [], "checkpoint_verified_step": [],
            "checkpoint_age_seconds": [], "checkpoint_interval_seconds": [], "run_leading": [],
            "run_stage": [], "run_budget_left": [],
        }
        for view in state.snapshot.observed.runs:
            label = (view.run,)
            running = [rank for rank in view.ranks if rank.state == "running"]
            times = sorted(rank.step_time_s for rank in running if rank.step_time_s > 0)
            loss = books.loss(state.launchers.session(view.run), running)
            checkpoint = status.checkpoint(state, view)
            rows["run_generation"].append((label, view.generation))
            for name in STATES:
                count = sum(rank.state == name for rank in view.ranks)
                rows["run_ranks"].append(((view.run, name), count))
            for rank in running:
                key = (view.run, str(rank.rank))
                rows["rank_still_seconds"].append((key, rank.still_s))
            if running:
                rows["train_step"].append((label, min(rank.step for rank in running)))
            if loss is not None:
                rows["train_loss"].append((label, loss))
            if times:
                rows["train_step_seconds"].append((label, times[len(times) // 2]))
            if checkpoint is not None:
                rows["checkpoint_verified_step"].append((label, checkpoint["step"]))
            for name, value_s in (
                ("checkpoint_age_seconds", status.checkpoint_age_s(state, view)),
                ("checkpoint_interval_seconds", status.checkpoint_interval_s(state, view)),
            ):
                if value_s is not None:
                    rows[name].append((label, value_s))
            rows["run_leading"].append((label, int(status.leads(state, view.run))))
            doing = state.snapshot.stages.get(view.run, Stage.UNKNOWN)
            rows["run_stage"].append(((view.run, str(doing)), 1))
            rows["run_budget_left"] += [
                ((view.run, *key), left)
                for key, left in sorted(books.budgets_left(state, view.run).items())]
        for name, values in rows.items():
            yield family(name, values)

    def _checks(self) -> Iterator[Metric]:
        """Of checks that the table knows (the file is whoever's may write into the state folder),
        and of the collectives in training."""
        known = [(BY_NAME[one.check], one) for one in self._state.checks if one.check in BY_NAME]
        yield family("check_status", [((check.name,), CODES.get(one.status, CODES[UNKNOWN]))
                                      for check, one in known])
        rates = {
            (measure.name, size, scope or NODE, ""): measure.value
            for check, one in known if check.scope == GROUP for measure in one.measures
            if measure.name in check.measures and math.isfinite(measure.value)
            # "1048576 bytes" within the node, "1048576 bytes, whole" between nodes
            for size, _, scope in (measure.subject.replace(" bytes", "").partition(", "),)
        }
        here = {view.run for view in self._state.snapshot.observed.runs}
        paces = {run: pace for run, pace in self._state.snapshot.paces.items() if run in here}
        rates |= {("all_reduce", str(pace.size_bytes), TRAINING, run): pace.bandwidth
                  for run, pace in paces.items() if pace.bandwidth > 0.0}
        yield family("train_collective_wait_seconds", [
            ((run,), pace.newest.wait_s) for run, pace in paces.items() if pace.newest])
        yield family("collective_bus_bandwidth_bytes_per_second", sorted(rates.items()))

    def _collectives(self) -> Iterator[Metric]:
        """Of the runs' own, as the ranks here timed them."""
        rows: dict[str, list[tuple[tuple[str, ...], float]]] = {name: [] for name in COLLECTIVES}
        for view in self._state.snapshot.observed.runs:
            session = self._state.launchers.session(view.run)
            monitors = session.monitors.values() if session is not None else ()
            pages = [one.view for one in monitors if one.view is not None
                     and one.view.generation == view.generation]
            for rate in collective_rates.rates(pages):
                labels = (view.run, rate.op, str(rate.ranks), rate.tensors)
                values = (rate.call_s, rate.call_bytes, rate.bandwidth)
                for name, value in zip(COLLECTIVES, values, strict=True):
                    if value is not None:
                        rows[name].append((labels, value))
        for name, found in rows.items():
            yield family(name, found)

    def _collectors(self) -> Iterator[Metric]:
        runner = self._state.runner
        if runner is None:
            return
        health = runner.health()
        yield family("collector_up", [((h.name,), int(h.up)) for h in health])
        yield family("collector_absent", [((h.name,), int(h.absent)) for h in health])
        yield family("collector_duration_seconds", [((h.name,), h.duration_s) for h in health])
        yield family("probes_stuck", [((), len(self._state.stuck_children()))])
        yield from _children(runner, self._state.kernel.children())
        yield family("accelerator_run_info", self._recent.places())


def _store(traffic: Traffic | None) -> Iterator[Metric]:
    """Of a store elsewhere: what this node asks of it."""
    said = [traffic] if traffic is not None else []
    yield family("store_requests_total", sorted(traffic.requests.items()) if traffic else [])
    yield family("store_sent_bytes_total", [((), one.sent_bytes) for one in said])
    yield family("store_received_bytes_total", [((), one.received_bytes) for one in said])
    yield family("store_answer_seconds", [((), one.latest_answer_s) for one in said])
    yield family("store_answer_seconds_total", [((), one.answers_s) for one in said])


def _children(runner: Runner, more: dict[str, int]) -> Iterator[Metric]:
    """What the collectors' children cost, apart from the agent."""
    children = runner.children() | more
    stats = {
        name: procfs.parse_stat(procfs.read_small(f"/proc/{pid}/stat"))
        for name, pid in children.items()
    }
    yield family("probe_resident_memory_bytes", [
        ((name,), procfs.rss_bytes(pid)) for name, pid in children.items()
    ])
    yield family("probe_cpu_seconds", [
        ((name,), stat.cpu_ticks / TICKS_PER_S) for name, stat in stats.items() if stat
    ])


def encoded(text: str) -> bytes:
    """UTF-8.  One odd label must not cost the page."""
    return text.encode("utf-8", "replace")


def families(
    samples: Readings, metrics: Iterable[Declared], choice: selection.Choice = selection.EVERYTHING
) -> Iterator[str]:
    """The text of what collectors read; a sample that nobody declared is not shown."""
    for metric in metrics:
        if choice.shows(metric):
            yield family_text(metric, choice.rows(metric, samples.of(metric.name)))


def family(name: str, rows: Rows) -> Metric:
    """One of the agent's own families with its rows (label values, value)."""
    what = NAMES[name]
    made: CounterMetricFamily | GaugeMetricFamily
    if what.kind == "counter":
        made = CounterMetricFamily(PREFIX + name, what.help, labels=what.labels)
    else:
        made = GaugeMetricFamily(PREFIX + name, what.help, labels=what.labels)
    for labels, value in rows:
        made.add_metric(labels, value)
    return made
