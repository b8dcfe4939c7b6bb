"""Which of the known metrics the page of metrics holds, and the document that lists them all.

Owns the operator's choice of families (`agent.metrics`, `agent.metrics_hide`), how long a run that
is over is shown, and docs/metrics.md.  Pure: values in, values or text out; renders no page.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from holdfast.collectors.contract import DCGM_EXPORTER, EXPORTERS, Metric

from ..core.detect.devices import accelerator
from ..core.model import RunView, readings
from ..core.run.incidents import FINISHED_S
from . import names
from .exposition import PREFIX

ALERTED = (  # alerts and recording rules are made of these: hidden, nobody would see a fault
    "agent_troubles_total", "breaker_open", "build_info", "checkpoint_age_seconds",
    "checkpoint_interval_seconds", "config_reload_ok", "detector_verdicts_total", "fault_active",
    "incident_labels_total", "job_seconds_total", "lost_steps_total", "node_seconds_total",
    "paused", "recovery_seconds", "restarts_total", "run_deadline_timestamp_seconds",
    "run_eta_seconds", "run_leading", "run_ranks", "store_up", "train_step",
)
LOAD = "max by (instance, device) (holdfast_accelerator_utilization_ratio)"
POWER = "max by (instance, device) (holdfast_accelerator_power_watts)"
ON_DEVICE = " * on (instance, device) group_left () "
# Shown in the document, where a test takes them from: right also with several ranks a device.
QUERIES = (
    ("How busy each rank's device is:", f"holdfast_accelerator_run_info{ON_DEVICE}{LOAD}"),
    ("What each run draws, a device counted once however many ranks it has:",
     "sum by (run) (max by (instance, device, run) (holdfast_accelerator_run_info)"
     f"{ON_DEVICE}{POWER})"),
    ("Which collectors fail, without those that have nothing to read here:",
     "holdfast_collector_up == 0 unless holdfast_collector_absent == 1"),
)
SERVES_ALONE = {DCGM_EXPORTER: "vendor=nvidia"}  # exporter -> which series
Rows = Sequence[tuple[tuple[str, ...], float]]  # (label values, value)


class Choice(NamedTuple):
    """What an operator wants on the page.

    full  whether families that no alert and no summary needs are shown as well
    hide  exporters that serve some of the families already, and beginnings of names
    """

    full: bool = True
    hide: tuple[str, ...] = ()

    def shows(self, metric: Metric) -> bool:
        """Whether the family stands on the page at all."""
        if not (self.full or metric.minimal):
            return False
        exporter = metric.served_by
        if exporter in self.hide and exporter not in SERVES_ALONE:
            return False
        beginnings = tuple(word.removeprefix(PREFIX) for word in self.hide)
        return not metric.name.startswith(beginnings)

    def rows(self, metric: Metric, samples: readings.Rows) -> Sequence[readings.Reading]:
        """The family's samples, without those of devices that an exporter serves: one file of
        settings may be on nodes of several vendors, and that exporter knows one of them."""
        whose = SERVES_ALONE.get(metric.served_by, "")
        if not whose or metric.served_by not in self.hide:
            return samples
        return [one for one in samples if one[1].partition(",")[0] != whose]


EVERYTHING = Choice()


class Recent:
    """Which runs and which of their devices were here in the last minutes: short runs by the
    thousand must not leave a series each."""

    def __init__(self) -> None:
        self._runs: dict[str, float] = {}
        self._places: dict[tuple[str, ...], float] = {}

    def see(self, now_s: float, runs: tuple[RunView, ...], samples: readings.Rows) -> None:
        """Looks at what is here now, and forgets what left long ago.  A device that computes for
        somebody now has no rank of before: what it does would be counted as that one's too."""
        self._runs |= {view.run: now_s for view in runs}
        over = {(view.run, str(rank.rank)) for view in runs for rank in view.ranks
                if rank.state == "ended"}
        here = {
            (device, run, str(rank))
            for (_, device), ranks in accelerator.ranks_of(samples, runs).items()
            for run, rank in ranks}
        taken, moved = {key[0] for key in here}, {key[1:] for key in here}
        left = {key: seen_s for key, seen_s in self._places.items()
                if key[0] not in taken and key[1:] not in over | moved}
        self._places = left | dict.fromkeys(here, now_s)
        since_s = now_s - FINISHED_S
        self._runs = {run: seen_s for run, seen_s in self._runs.items() if seen_s >= since_s}
        self._places = {key: seen_s for key, seen_s in self._places.items() if seen_s >= since_s}

    def has(self, run: str) -> bool:
        return run in self._runs

    def places(self) -> Rows:
        """Rows of accelerator_run_info."""
        return [(key, 1) for key in sorted(self._places)]


def wrong_with(hide: Iterable[str], known: Iterable[Metric]) -> list[str]:
    """What is wrong with `agent.metrics_hide`, a sentence for each word that cannot be meant."""
    declared = [metric.name for metric in known]
    wrong = []
    for word in hide:
        beginning = word.removeprefix(PREFIX)
        needed = [name for name in ALERTED if name.startswith(beginning)]
        if word in EXPORTERS:
            continue
        if beginning and needed:
            wrong.append(f"{word!r} would hide {needed[0]}, which alerts are made of: set a "
                         "longer beginning")
        elif not beginning or not any(name.startswith(beginning) for name in declared):
            wrong.append(f"{word!r} begins no family's name: set {' or '.join(EXPORTERS)}, or the "
                         "beginning of a name in docs/metrics.md")
    return wrong


_BIG = (names.SERIES_OF_NODE + 192 * names.SERIES_OF_CORE
        + 8 * (names.SERIES_OF_GPU + names.SERIES_OF_RANK))


def render_docs() -> str:
    """docs/metrics.md, one row a family."""
    lines = [
        "# Metrics", "",
        "Generated from agent/metrics/names.py and the collectors' declarations; do not edit.",
        "Served at /metrics (default http://127.0.0.1:9855/metrics). Base units; the run's label",
        "is `run`, never `job` or `instance`. Counters of events, actions and restarts go on",
        "after a restart of the agent: they are seeded from its journal. A run that is over",
        "leaves the page ten minutes later.", "",
        "`minimal`: stays with `agent.metrics = \"minimal\"`. `also by`: the exporter whose",
        "default settings tell the same; `agent.metrics_hide = [\"node_exporter\"]` leaves those",
        "families out, `[\"dcgm-exporter\"]` those series of NVIDIA's devices. Beginnings of names",
        "can be hidden as well: `agent.metrics_hide = [\"host_cpu_\", \"accelerator_link_\"]`.", "",
        "## Cardinality", "",
        f"A page has at most {names.SERIES_OF_NODE:,} series of the node, its cards and drives,",
        f"and {names.SERIES_OF_CORE} of each core, {names.SERIES_OF_GPU} of each GPU and "
        f"{names.SERIES_OF_RANK} of each rank: {_BIG:,} on a node of 8 GPUs and 192",
        "cores. `tests/unit/agent/test_series_budget.py` counts them there, and with a GPU fewer.",
        "A fault that is seen, an incident, an action and a restart add a series each, by its",
        "name and never by a process, a file or a message.", "",
        "## Queries", "",
        "Series of devices carry no label of a run: thousands of short runs would make each anew.",
        "`holdfast_accelerator_run_info` says which ranks compute on a device, and stands on",
        "the left of a join, because a device may have several.", "",
        *(row for title, query in QUERIES for row in (title, "", f"    {query}", "")),
        "## Families", "", "| metric | kind | labels | minimal | also by | meaning |",
        "|---|---|---|---|---|---|",
    ]
    for metric in names.known():
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        lines.append(
            f"| `{PREFIX}{metric.name}` | {metric.kind} | {labels} | "
            f"{'yes' if metric.minimal else ''} | {metric.served_by} | {metric.help} |")
    return "\n".join(lines) + "\n"
