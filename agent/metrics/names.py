"""Every metric of the agent's own: its name, kind, labels and help text.

Owns these declarations, as collectors own theirs, and the list of all that a node may show.
Imports nothing that reads or renders one, so that the configuration can be checked against it.
"""

from __future__ import annotations

from typing import NamedTuple

from holdfast.collectors import ALL
from holdfast.collectors.contract import Metric

from ..core.run.stage import Stage

# The most series that /metrics may have, as docs/metrics.md states them.
SERIES_OF_NODE, SERIES_OF_CORE, SERIES_OF_GPU, SERIES_OF_RANK = 1500, 8, 200, 2
_COLLECTIVE = ("run", "op", "ranks", "tensors")


class Name(NamedTuple):
    """One metric of the agent's own; the fields are those of a collector's declaration."""

    kind: str
    help: str
    labels: tuple[str, ...] = ()
    minimal: bool = True


NAMES: dict[str, Name] = {
    "build_info": Name("gauge", "Always 1; which agent this is.", ("version", "python")),
    "store_up": Name("gauge", "1 when the store answers."),
    "store_requests_total": Name(
        "counter", "Requests to the store of many nodes, by what was asked: of etcd's gateway.",
        ("call", "outcome"),
    ),
    "store_sent_bytes_total": Name(
        "counter", "Bytes of HTTP that this node sent to the store of many nodes."),
    "store_received_bytes_total": Name("counter", "Bytes of HTTP that it got from there."),
    "store_answer_seconds": Name("gauge", "How long the store's latest answer took."),
    "store_answer_seconds_total": Name(
        "counter", "How long all answers took; a quotient with those requests is the mean."),
    "nodes_out_of_touch": Name(
        "gauge", "Nodes that this agent exchanges no beats with: in a large cluster those that "
        "share no run with it, beyond 256."),
    "breaker_open": Name(
        "gauge", "1 when one fault is on so many nodes that nothing is done to nodes."
    ),
    "paused": Name("gauge", "1 when an operator told the agent not to act.", ("scope",)),
    "fault_active": Name(
        "gauge", "1 for each fault that is seen now.", ("fault", "subject", "severity")
    ),
    "events_total": Name(
        "counter", "Events that the kernel (docs/kernel-events.md) or a trainer told, each once.",
        ("source", "code", "class", "action"),
    ),
    "incidents_total": Name(
        "counter", "Incidents opened; many events may be one.", ("detector", "fault", "severity")
    ),
    "actions_total": Name("counter", "Effects with an outcome.", ("action", "fault", "outcome")),
    "restarts_total": Name("counter", "Generations that were started because of a fault.",
                           ("run", "fault")),
    "recovery_seconds": Name(
        "histogram",
        "Time to come back: total = last step before the fault to the first new one; of it "
        "detection = until the verdict, decision = until the first plan, restart = from there on.",
        ("phase",),
    ),
    "lost_steps_total": Name("counter", "Steps that had to be done again.", ("run",)),
    "detector_verdicts_total": Name(
        "counter", "Verdicts that turned out true or false.", ("detector", "outcome")
    ),
    "incident_labels_total": Name(
        "counter", "Incidents of which a person said whether they were right.",
        ("detector", "label"),
    ),
    "node_seconds_total": Name(
        "counter", "The ledger: each second of this node in one category, once settled.",
        ("category",),
    ),
    "jobs_total": Name("counter", "Attempts of runs that ended, by how.", ("outcome",)),
    "job_start_seconds": Name(
        "histogram", "Time to begin: queue = until its launcher began, where it says when it was "
        "queued; ranks = until ranks ran; first_step = from then to a finished step; total = from "
        "the launcher's begin to that.", ("phase",),
    ),
    "job_seconds_total": Name(
        "counter", "Of attempts that ended: training = what counts, wall = from begin to end, "
        "queued = before. ETTR is training by wall, without or with queued.", ("kind",),
    ),
    "node_price_per_hour": Name("gauge", "What an hour of this node costs.", ("currency",)),
    "run_total_steps": Name("gauge", "Steps that the run is to make.", ("run",)),
    "run_restarts_left": Name("gauge", "Restarts before the run is given up.", ("run",)),
    "run_budget_left": Name(
        "gauge", "How often a runbook still allows an action before the next one is taken, where "
        "it was done most; only of budgets that the newest plan has charged. One whose window is "
        "over is full again with the next fault.", ("run", "fault", "action")),
    "run_eta_seconds": Name(
        "gauge", "Until its last step, at the pace of this run so far, losses included.", ("run",)
    ),
    "run_deadline_timestamp_seconds": Name(
        "gauge", "When the run must be done, as it was started with.", ("run",)
    ),
    "train_samples_per_second": Name("gauge", "Of all ranks, at the median step.", ("run",)),
    "train_tokens_per_second": Name(
        "gauge", "The same in tokens, or as the trainer says it.", ("run",)
    ),
    "train_mfu_ratio": Name(
        "gauge", "Model FLOPs utilization: --flops-per-step by step time and --peak-flops.",
        ("run",),
    ),
    "train_step": Name("gauge", "Optimizer steps done by the slowest rank.", ("run",)),
    "train_loss": Name("gauge", "Latest loss that the run reported.", ("run",)),
    "train_step_seconds": Name("gauge", "Median duration of the latest steps.", ("run",)),
    "run_generation": Name("gauge", "Generation that runs now.", ("run",)),
    "run_ranks": Name("gauge", "Ranks by state.", ("run", "state")),
    "run_stage": Name(
        "gauge", f"1 for what the run is doing here, of {len(Stage)} words ({', '.join(Stage)}); "
        "the others have no series.", ("run", "stage")
    ),
    "rank_still_seconds": Name(
        "gauge", "How long a rank's progress has stood still.", ("run", "rank"), False
    ),
    "checkpoint_verified_step": Name(
        "gauge", "Step of the newest checkpoint whose every byte was read back.", ("run",)
    ),
    "checkpoint_age_seconds": Name(
        "gauge", "Age of that checkpoint; of a run that wrote some and could verify none, the time "
        "since its first step.", ("run",)
    ),
    "checkpoint_interval_seconds": Name(
        "gauge", "Median time between this run's verified checkpoints, of those that are kept; of "
        "fewer than two, between all that it wrote.", ("run",)
    ),
    "run_leading": Name("gauge", "1 when this agent leads the run: it alone plans.", ("run",)),
    "collector_up": Name("gauge", "1 when the collector's last reading went well.", ("collector",)),
    "collector_absent": Name(
        "gauge", "1 when the collector has nothing to read on this machine, which is no failure.",
        ("collector",),
    ),
    "collector_duration_seconds": Name(
        "gauge", "How long the collector's last reading took.", ("collector",)
    ),
    "probes_stuck": Name("gauge", "Children of the agent that the kernel does not let end."),
    "probe_resident_memory_bytes": Name(
        "gauge", "Resident memory of a collector's child, which the agent's own leaves out.",
        ("collector",),
    ),
    "probe_cpu_seconds": Name(
        "gauge", "Processor time of a collector's child; begins anew with each child.",
        ("collector",),
    ),
    "accelerator_run_info": Name(
        "gauge", "Always 1; the run and rank whose process computes on the device.",
        ("device", "run", "rank"),
    ),
    "check_status": Name(
        "gauge", "What `holdfast check` found last: 0 ok, 1 warning, 2 critical, 3 unknown.",
        ("check",),
    ),
    "collective_bus_bandwidth_bytes_per_second": Name(
        "gauge",
        "Bus bandwidth of the last collective test, as nccl-tests defines it; with scope training "
        "at least that of a run's last measured sum of gradients.",
        ("op", "size", "scope", "run"),
    ),
    "train_collective_wait_seconds": Name(
        "gauge",
        "How long the rank that came last waited in a step: for its gradients behind its backward "
        "pass in the last iteration that torch's DDP measured, else in all waits for collectives "
        "on CPU tensors, on average over two of its last 20 steps.", ("run",)
    ),
    "train_collective_seconds": Name(
        "gauge",
        "Mean time of a collective that Python enters, from its call to the end of the wait for "
        "it, over two of the last 20 steps; of the ranks here the one with the shortest. Over "
        "nodes the minimum counts.", _COLLECTIVE
    ),
    "train_collective_bytes": Name(
        "gauge", "Mean bytes of such a collective; what counts as bytes is as in nccl-tests.",
        _COLLECTIVE
    ),
    "train_collective_bus_bandwidth_bytes_per_second": Name(
        "gauge",
        "Bus bandwidth of such collectives at least, as nccl-tests defines it: of all-reduces, and "
        "of what is larger than sockets hold. Over nodes the maximum counts.", _COLLECTIVE
    ),
    "kernel_log_up": Name("gauge", "1 where the kernel's log is read from.", ("source",)),
    "kernel_lines_missed_total": Name("counter", "Kernel's log: lines overwritten before read."),
    "kernel_lines_foreign_total": Name("counter", "Kernel's log: lines of programs, unbelieved."),
    "kernel_lines_broken_total": Name("counter", "Kernel's log: records of no known form."),
    "config_reload_ok": Name("gauge", "0 when the last reload was refused."),
    "journal_stalled": Name("gauge", "1 when the journal cannot be written."),
    "journal_dropped_total": Name("counter", "Records given up while the journal was stalled."),
    "agent_steps_total": Name("counter", "Steps of the state machine.", (), False),
    "agent_step_seconds": Name("gauge", "Duration of the last step.", (), False),
    "agent_event_loop_lag_seconds": Name(
        "gauge", "Worst lateness of the loop, fading in 10 s.", (), False
    ),
    "agent_troubles_total": Name("counter", "Failures of the agent's own parts.", ("part",)),
    "agent_resident_memory_bytes": Name("gauge", "Resident memory of the agent."),
    "agent_cpu_seconds_total": Name("counter", "Processor time of the agent, children apart."),
}
OWN = tuple(Metric(name, *what) for name, what in NAMES.items())
_RUN = ("run",)
LOG_CHILD = (  # what launchers say of the children that read their ranks' logs
    Metric("log_read_bytes_total", "counter",
           "Bytes of the ranks' logs that the log child read.", _RUN),
    Metric("log_skipped_bytes_total", "counter",
           "Bytes of the ranks' logs that the sample of a live run left out.", _RUN),
    Metric("log_lines_total", "counter", "Lines of the ranks' logs that a signature knows.",
           ("run", "signature", "role", "culprit")),
    Metric("log_child_cpu_seconds_total", "counter",
           "Processor time of the log child, which the agent's own leaves out.", _RUN),
    Metric("log_child_resident_memory_bytes", "gauge",
           "Resident memory of the log child; 0 while there is none.", _RUN),
    Metric("log_child_failures_total", "counter",
           "Log children that died, or did not answer in time.", _RUN),
)


def known() -> tuple[Metric, ...]:
    """Every family that any node may show, each once."""
    declared = [metric for collector in ALL for metric in collector.metrics]
    return (*OWN, *{metric.name: metric for metric in (*declared, *LOG_CHILD)}.values())
