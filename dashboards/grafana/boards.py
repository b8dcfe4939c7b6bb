"""The dashboards: what a fleet, a run, a node and its recoveries show.

Owns titles, queries and their words; panels.py makes Grafana's JSON of them.
"""

from __future__ import annotations

import json
from importlib import resources

from .panels import Board, Link, Panel, render

COLOURS = (  # of the ledger's categories: what brings no training is warm
    ("training", "green"), ("collective_wait", "dark-green"), ("startup", "light-blue"),
    ("compile", "blue"), ("checkpoint_stall", "purple"), ("evaluation", "dark-purple"),
    ("health_check", "light-yellow"), ("detection", "orange"), ("recovery", "red"),
    ("recomputing", "dark-orange"), ("maybe_recomputing", "light-orange"),
    ("idle_no_spare", "dark-red"), ("idle", "#8e8e8e"), ("paused", "yellow"),
    ("unknown", "#c7c7c7"))
RED_ABOVE_0 = ((None, "green"), (1.0, "red"))
SEVERITIES = (("fatal", "red"), ("degraded", "orange"), ("warn", "yellow"))
EACH = ("mean", "lastNotNull", "max")  # of each line in a legend
SERVED = "http://${__data.fields.instance}/runbooks"  # by the agent that shows the fault
RUNBOOK = Link("Runbook", f"{SERVED}/${{__data.fields.fault}}.md")
RUN, NODE = 'run="$run"', 'instance="$node"'
_TO_RUN = Link("Run", "/d/holdfast-run?var-run=${__data.fields.run}&${__url_time_range}")
_TO_NODE = Link("Node", "/d/holdfast-node?var-node=${__data.fields.instance}&${__url_time_range}")


def began(series: str) -> str:
    """Where a counter grew; its first appearance counts, which increase() does not see.  One that
    begins at 0, as those of all known kernel events do with the agent, tells of nothing.  One that
    was away for a while, as after a scrape that failed, does not begin anew."""
    return (f"(increase({series}[$__rate_interval]) > 0 or ({series} > 0 "
            f"unless present_over_time({series}[1h] offset $__rate_interval)))")


def gained(series: str) -> str:
    """What a counter that appears at its first event gained in the time that is looked at."""
    last = f"max_over_time({series}[$__range])"
    return f"clamp_min({last} - ({series} offset $__range or {last} * 0), 0)"


def ledger(where: str = "") -> str:
    rate = f"rate(holdfast_node_seconds_total[$__rate_interval]){where}"
    return f"sum by (category) ({rate}) / on () group_left () sum({rate})"


def mean_recovery(phase: str) -> str:
    series = f'{{phase="{phase}"}}[$__range])'
    return (f"sum(increase(holdfast_recovery_seconds_sum{series}) / "
            f"(sum(increase(holdfast_recovery_seconds_count{series}) > 0)")


def _mean_start(phase: str) -> str:
    series = f'{{phase="{phase}"}}'
    return (f"sum(holdfast_job_start_seconds_sum{series}) / "
            f"(sum(holdfast_job_start_seconds_count{series}) > 0)")


def _ettr(kinds: str) -> str:
    return ('sum(holdfast_job_seconds_total{kind="training"}) '
            f'/ (sum(holdfast_job_seconds_total{{kind=~"{kinds}"}}) > 0)')


_LOST = 'holdfast_node_seconds_total{category!~"training|collective_wait"}'
_LOST_MONEY = (f"sum by (currency) (sum by (instance) (rate({_LOST}[$__rate_interval])) "
               "* on (instance) group_right () holdfast_node_price_per_hour)")
ACTIVE = "holdfast_fault_active > 0"
SINCE = (f"1000 * min by (instance, fault, subject, severity) ((min_over_time(timestamp({ACTIVE})"
         f"[$__range:1m]) or timestamp({ACTIVE})) and {ACTIVE})")
FAULTS = Panel("Faults that stand", "Which node has what, and since when in the time shown.",
               "dateTimeFromNow", ((SINCE, ""),), "table", 24, quiet="no fault", column="since",
               links=(RUNBOOK, _TO_NODE), colours=SEVERITIES, coloured="severity", high=7)
FLEET = Board("fleet", "Holdfast: fleet", "Which nodes and runs are sick, why, since when.", (
    Panel("Agents that answer", "Share of the agents that Prometheus reaches.", "percentunit",
          (('sum(up{job="holdfast"}) / count(up{job="holdfast"})', ""),), "stat", 6,
          ((None, "red"), (0.95, "green"))),
    Panel("Nodes with a fatal fault", "No run starts there until it is gone.", "none", (
        ('count(max by (instance) (holdfast_fault_active{severity="fatal"}) > 0) or vector(0)',
         ""),), "stat", 6, RED_ABOVE_0),
    Panel("Breaker open", "1: one fault is on so many nodes that nothing is done to nodes.",
          "none", (("max(holdfast_breaker_open)", ""),), "stat", 6, RED_ABOVE_0),
    Panel("Paused", "Scopes in which an operator told Holdfast not to act.", "none",
          (("sum(max by (scope) (holdfast_paused))", ""),), "stat", 6,
          ((None, "green"), (1.0, "yellow"))),
    FAULTS,
    Panel("Ranks that run", "Of each run, now; follow the link for why.", "none", (
        ('sum by (run) (holdfast_run_ranks{state="running"})', ""),), "table",
        links=(_TO_RUN,), quiet="no run", column="ranks"),
    Panel("Ledger of the fleet", "Where the nodes' time goes; training is what counts.",
          "percentunit", ((ledger(), "{{category}}"),), stacked=True, colours=COLOURS,
          calcs=("mean",), beside=True),
    Panel("Attempts that ended", "Of runs, by how, in the time shown.", "none", (
        ("sum by (outcome) (" + gained("holdfast_jobs_total") + ") > 0", ""),), "table", 6,
        quiet="none", column="attempts"),
    Panel("ETTR of attempts", "Training by wall time, and with the time in the queue.",
          "percentunit", (
              (_ettr("wall"), "without the queue"), (_ettr("wall|queued"), "with it")),
          "stat", 6, quiet="none ended"),
    Panel("Money an hour that brought no training", "At the price that each node was given.",
          "short", ((_LOST_MONEY, "{{currency}}"),), quiet="no price", money=True, calcs=EACH),
))
_OF_RUN = f" and on (instance) holdfast_run_generation{{{RUN}}}"


def _made_of(before: str = "") -> str:
    """Versions of what a node is made of, by component; `before`: an offset."""
    parts = (f"{name}{before}" for name in ("holdfast_software_info", "holdfast_firmware_info"))
    others = (
        f'label_replace(label_replace({name}{before}, "version", "$1", "{label}", "(.*)"), '
        f'"component", "{component}", "", "")'
        for name, label, component in (("holdfast_host_info", "kernel", "kernel"),
                                       ("holdfast_build_info", "version", "holdfast")))
    return f'group by (instance, component, version) ({" or ".join((*parts, *others))})'


# A version that was not there when the time shown began, of a part that was; 1000 * since when.
_SEEN = f"timestamp({_made_of()})"
_BEFORE = _made_of(" offset $__range")
CHANGED = (f"1000 * (min_over_time({_SEEN}[$__range:1m]) or {_SEEN}) and {_made_of()} "
           f"unless {_BEFORE} and on (instance, component) {_BEFORE}")
ONE_RUN = Board("run", "Holdfast: run", "Is it training, and where does its time go.", (
    Panel("Doing", "As `holdfast status` has it on the node that leads the run.", "none", (
        (f"max by (stage) (holdfast_run_stage{{{RUN}}} "
         f"and on (instance) holdfast_run_leading{{{RUN}}} == 1)", "{{stage}}"),), "word", 6),
    Panel("Steps in two minutes", "0: it does not train.", "none", (
        (f"max(max_over_time(holdfast_train_step{{{RUN}}}[2m]) "
         f"- min_over_time(holdfast_train_step{{{RUN}}}[2m]))", ""),),
        "stat", 6, ((None, "red"), (1.0, "green"))),
    Panel("Ranks that run", "Ranks of the newest generation.", "none", (
        (f'sum(holdfast_run_ranks{{{RUN},state="running"}})', ""),), "stat", 4),
    Panel("Verified checkpoint's age", "What a fault now would cost at most.", "s", (
        (f"min(holdfast_checkpoint_age_seconds{{{RUN}}})", ""),), "stat", 4),
    Panel("Generation", "Grows by one with each restart.", "none", (
        (f"max(holdfast_run_generation{{{RUN}}})", ""),), "stat", 4),
    Panel("Done in", "At the pace of this run so far, losses included.", "s", (
        (f"max(holdfast_run_eta_seconds{{{RUN}}})", ""),), "stat", 6, quiet="no number of steps"),
    Panel("Spare time", "Between that and its deadline; below 0 it will be late.", "s", (
        (f"max(holdfast_run_deadline_timestamp_seconds{{{RUN}}}) - time() "
         f"- max(holdfast_run_eta_seconds{{{RUN}}})", ""),), "stat", 6,
        ((None, "red"), (0.0, "green")), quiet="no deadline"),
    Panel("MFU", "Model FLOPs by what the devices can do.", "percentunit", (
        (f"max(holdfast_train_mfu_ratio{{{RUN}}})", ""),), "stat", 6, quiet="no FLOPs given"),
    Panel("Tokens a second", "Of all ranks.", "short", (
        (f"max(holdfast_train_tokens_per_second{{{RUN}}})", ""),), "stat", 6,
        quiet="no tokens given"),
    Panel("Step time", "Median of the latest steps.", "s", (
        (f"max(holdfast_train_step_seconds{{{RUN}}})", "step"),), calcs=EACH),
    Panel("Loss", "As the run reported it last.", "short", (
        (f"max(holdfast_train_loss{{{RUN}}})", "loss"),), calcs=("lastNotNull", "min")),
    Panel("Ledger", "Time of the nodes that this run is on.", "percentunit", (
        (ledger(_OF_RUN), "{{category}}"),), stacked=True, colours=COLOURS, calcs=("mean",),
          beside=True),
    Panel("Stragglers", "A row a rank: how long its progress has stood still.", "s", (
        (f"max by (rank) (holdfast_rank_still_seconds{{{RUN}}})", "{{rank}}"),), "heatmap"),
    Panel("What changed", "Drivers, libraries, firmware, kernel and agent of this run's nodes that "
          "are newer than the begin of the time shown. `holdfast drift` compares nodes.",
          "dateTimeFromNow", ((CHANGED + _OF_RUN, ""),), "table", 24, links=(_TO_NODE,),
          quiet="nothing; holdfast drift says how the nodes differ", high=5, column="since"),
), (("run", "label_values(holdfast_run_generation, run)"),), (
    ("Restarts", began(f"holdfast_restarts_total{{{RUN}}}"), "restart: {{fault}}"),
    ("Incidents", began("holdfast_incidents_total") + _OF_RUN, "{{fault}} on {{instance}}"),
))


def _node(title: str, text: str, unit: str, expr: str, legend: str, quiet: str = "") -> Panel:
    return Panel(title, text, unit, ((expr, legend),), quiet=quiet, calcs=EACH, beside=True)


def _now(title: str, text: str, unit: str, expr: str, quiet: str = "",
         steps: tuple[tuple[float | None, str], ...] = ((None, "green"),)) -> Panel:
    return Panel(title, text, unit, ((expr, ""),), "stat", 4, steps, quiet=quiet)


_ACC, _NET, _HOST = "holdfast_accelerator_", "holdfast_network_", "holdfast_host_"
_DEVICE = "{{vendor}} {{device}}"
_UP = f"{_NET}link_up{{{NODE}}}"
# A port into which nothing was ever plugged is no fault.  Not by the time that is shown: in an
# hour's view a link that went down two hours ago would be none.
_WAS_UP = f"max_over_time({_UP}[7d] @ end()) == 1"
ONE_NODE = Board("node", "Holdfast: node", "Devices, links, host and kernel on one time line.", (
    _now("Faults", "Degraded or fatal, that its agent tells; the fleet's table names them.", "none",
         f'count(holdfast_fault_active{{{NODE},severity=~"degraded|fatal"}} > 0) '
         f"or 0 * max(holdfast_build_info{{{NODE}}})", "no agent", RED_ABOVE_0),
    _now("Devices that answer", "Accelerators that their driver can ask.", "none",
         f"sum({_ACC}devices{{{NODE}}})", "no device"),
    _now("Hottest device", "Of its core; most GPUs slow down at some 87 degrees.", "celsius",
         f'max({_ACC}temperature_celsius{{{NODE},sensor!~"memory|hotspot"}})', "no device",
         ((None, "green"), (83.0, "orange"), (87.0, "red"))),
    _now("Power of all devices", "What they draw together.", "watt",
         f"sum({_ACC}power_watts{{{NODE}}})", "no device"),
    _now("Links down", "Of those that were up in the last seven days.", "none",
         f"sum((1 - {_UP}) and {_WAS_UP})", "no link", RED_ABOVE_0),
    _now("Memory in use", "Share of the machine's memory that programs cannot have any more.",
         "percentunit", f"1 - {_HOST}memory_available_bytes{{{NODE}}} / "
         f"{_HOST}memory_total_bytes{{{NODE}}}",
         steps=((None, "green"), (0.8, "orange"), (0.9, "red"))),
    Panel("Kernel events", "What the kernel told, and how often.", "none", (
        # Extrapolated, one event may be a little more or less than one.
        ("round(sum by (source, code) (" + began(f"holdfast_events_total{{{NODE}}}") + ")) > 0",
         "{{source}} {{code}}"),), quiet="no event", bars=True),
    _node("Devices busy", "Share of time in which a kernel ran.", "percentunit",
          f"{_ACC}utilization_ratio{{{NODE}}}", _DEVICE, "no device"),
    _node("Power", "Of each device.", "watt", f"{_ACC}power_watts{{{NODE}}}", _DEVICE,
          "no device"),
    _node("Temperature", "Of each device, where it is hottest.", "celsius",
          f"max by (vendor, device) ({_ACC}temperature_celsius{{{NODE}}})", _DEVICE,
          "no device")._replace(zero=False),
    _node("Device memory", "In use on each device.", "bytes",
          f"{_ACC}memory_used_bytes{{{NODE}}}", _DEVICE, "no device"),
    _node("Device memory errors", "Corrected or not, since the driver was loaded.", "none",
          f'sum by (vendor, device) ({_ACC}ecc_errors_total{{{NODE},period="volatile"}})',
          _DEVICE, "no device that counts them")._replace(calcs=("lastNotNull",)),
    Panel("Links that were down", "One bar a link, of those that were up in the last seven days.",
          "none", ((f"(1 - {_UP}) > 0 and {_WAS_UP}", "{{device}} {{port}}"),), quiet="none",
          bars=True),
    _node("Received", "Bytes a second by card.", "Bps",
          f"rate({_NET}receive_bytes_total{{{NODE}}}[$__rate_interval])", "{{device}}"),
    _node("Memory available", "What programs can have without swapping.", "bytes",
          f"{_HOST}memory_available_bytes{{{NODE}}}", "available")._replace(beside=False),
    _node("Pressure", "Share of time in which some task waited.", "percentunit",
          # Extrapolated, a rate over few samples may be more than all of the time.
          f'clamp_max(rate({_HOST}pressure_seconds_total{{{NODE},kind="some"}}'
          "[$__rate_interval]), 1)",
          "{{resource}}"),
), (("node", "label_values(holdfast_build_info, instance)"),), (
    ("Kernel events", began(f"holdfast_events_total{{{NODE}}}"), "{{source}} {{code}}"),))
_VERDICTS = f'sum by (detector) ({gained("holdfast_detector_verdicts_total")})'
# As the recorded detector:holdfast_precision:ratio7d, over the time that is looked at.
PRECISION = (
    "clamp_min(sum by (detector) ("
    + gained('holdfast_detector_verdicts_total{outcome="true"}')
    + ") - (sum by (detector) (" + gained('holdfast_incident_labels_total{label="false"}')
    + f") or {_VERDICTS} * 0), 0) / ({_VERDICTS} > 0)")
RECOVERY = Board("recovery", "Holdfast: recovery", "How fast faults are found and cured.", (
    Panel("MTTD", "From the last step to the verdict.", "s", (
        (mean_recovery("detection"), ""),), "stat", 4,
        quiet="no recovery"),
    Panel("MTTR by phase", "From the last step to the first new one: until the verdict, until the "
          "first plan, until training goes on.", "s", (
              (mean_recovery("detection"), "detection"), (mean_recovery("decision"), "decision"),
              (mean_recovery("restart"), "restart"), (mean_recovery("total"), "total")), "stat", 10,
          quiet="no recovery"),
    Panel("Start", "From a launcher's begin to ranks, and on to a finished step: means.", "s", (
        (_mean_start("ranks"), "ranks"), (_mean_start("first_step"), "first step")), "stat", 6,
        quiet="none began"),
    Panel("Lost steps", "Steps that had to be done again.", "none", (
        ("sum by (run) (" + gained("holdfast_lost_steps_total") + ")", "{{run}}"),), "stat", 4,
        quiet="none"),
    Panel("Restarts by fault", "Generations that a fault made necessary.", "none", (
        ("sum by (fault) (" + gained("holdfast_restarts_total") + ") > 0", ""),), "table",
        quiet="none", high=6, column="restarts"),
    Panel("Restarts left", "Of --max-restarts; at 0 the next fault ends the run.", "none", (
        ("min by (run) (holdfast_run_restarts_left)", ""),), "table",
        steps=((None, "red"), (1.0, "green")), links=(_TO_RUN,), quiet="no run", high=6,
        column="left"),
    Panel("Detector precision", "Verdicts that turned out true, less those that a person "
          "labelled false.", "percentunit", ((PRECISION, ""),), "table",
          quiet="no verdict yet", high=6, column="precision"),
    Panel("Budgets left", "Of each runbook that was spent from; at 0 the next such fault climbs "
          "its ladder.", "none", (
              ("min by (run, fault, action) (holdfast_run_budget_left)", ""),), "table",
          steps=((None, "red"), (1.0, "green")), links=(_TO_RUN,), quiet="none was spent from",
          high=6, column="left"),
))
BOARDS = (FLEET, ONE_RUN, ONE_NODE, RECOVERY)
PROVISIONING = ("dashboards.yml", "datasource.yml")
FOLDER = "/var/lib/grafana/dashboards/holdfast"  # as the samples have it


def files(runbook_base: str = SERVED) -> dict[str, str]:
    """Each dashboard's file by its name, with links to the runbooks below `runbook_base`."""
    base = json.dumps(runbook_base.rstrip("/"))[1:-1]
    return {f"holdfast-{one.name}.json": render(one, BOARDS).replace(SERVED, base)
            for one in BOARDS}


def text(name: str) -> str:
    """A file of this folder's provisioning/."""
    return resources.files(__package__).joinpath("provisioning", name).read_text(encoding="utf-8")


def provisioning(folder: str) -> dict[str, str]:
    """The samples for Grafana's provisioning by their names; dashboards are read from `folder`."""
    return {f"holdfast-grafana-{name}": text(name).replace(FOLDER, json.dumps(folder))
            for name in PROVISIONING}
