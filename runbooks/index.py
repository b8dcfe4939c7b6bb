"""docs/runbooks.md: the shipped runbooks by what a person sees, and how each can be rehearsed.

Owns which symptom a page stands under; tests/test_runbooks.py holds that every page is under one.
What causes it on purpose is rehearsals.py's.
"""

from __future__ import annotations

from . import prose, rehearsals

SYMPTOMS: dict[str, tuple[str, ...]] = {
    "A rank died, and the run came back or did not": (
        "rank_killed", "rank_exited", "rank_oom_killed", "host_oom", "gpu_application_error",
        "log_root_cause", "crash_loop", "budget_spent", "node_lost", "fleet/run_node_lost"),
    "Training stands still, and nobody died": (
        "rank_hung", "rank_stopped", "rank_gil_held", "collective_mismatch", "collective_skipped",
        "compile_lock_stale", "mount_hung", "host_hung_task", "fleet/run_not_training"),
    "Training is slower than it was, or late": (
        "collectives_slow", "graph_recompiled", "nic_link_slow", "nic_error_rate",
        "tcp_retransmits_high", "mount_slow", "clock_source_slow", "host_core_pinned",
        "host_memory_low", "pcie_error", "fleet/goodput_low", "fleet/deadline_at_risk"),
    "A run does not start": (
        "start_refused", "check_failed", "check_ignored", "accelerator_lost",
        "gpu_needs_inspection"),
    "Checkpoints": (
        "checkpoint_bad", "checkpoint_failed", "snapshot_off", "mount_failed",
        "filesystem_readonly", "disk_space_low", "host_shm_full", "fleet/no_verified_checkpoint"),
    "A device": (
        "gpu_fell_off_bus", "gpu_memory_error", "gpu_needs_reset", "gpu_nvlink_error",
        "row_remap_failed", "row_remap_pending", "fabric_manager_down", "neuron_error",
        "neuron_memory_uncorrected", "cpu_machine_check", "nvme_failing", "host_disk_error"),
    "The network": (
        "nic_error", "nic_flapping", "nic_link_down", "nic_lost", "nic_reset", "nic_unresponsive",
        "dns_failed"),
    "The host": (
        "host_kernel_crash", "host_limit_near", "host_cgroup_leak", "host_zombies",
        "unit_crash_loop", "clock_unsynchronised", "ec2_rebalance_recommended",
        "ec2_scheduled_event", "ec2_spot_interruption"),
    "Holdfast itself": (
        "agent_config_bad", "collector_failed", "journal_stalled", "launcher_lost",
        "probe_stuck", "run_not_judged", "store_lost", "host_unknown", "fleet/agents_absent",
        "fleet/breaker_open", "fleet/detector_precision_low", "fleet/errors_repeat",
        "fleet/no_leader", "fleet/paused_long", "fleet/reload_failed", "fleet/store_down",
        "fleet/version_skew", "fleet/watchdog"),
}


def render_index() -> str:
    """The page."""
    pages = prose.pages()
    lines = [
        "# Runbooks by symptom", "",
        "Generated from runbooks/index.py; do not edit. `holdfast explain FAULT` shows a page with "
        "what would be done now; any agent serves all of them at `/runbooks`.", ""]
    for symptom, found in SYMPTOMS.items():
        lines += [f"## {symptom}", "", "| page | what it means |", "|---|---|"]
        for name in found:
            meaning = pages[name].partition("## Meaning")[2].strip()
            lines.append(f"| [{name}](../runbooks/{name}.md) | {prose.first_sentence(meaning)} |")
        lines.append("")
    lines += [
        "## Rehearsals", "",
        "On a run of your own, or on a node that nobody needs: what a page says is worth what the "
        "people who read it at night have seen before. `holdfast inject` needs `enabled = true` "
        "below `[inject]` on an agent of a node; a line for /dev/kmsg needs root and "
        "`kmsg_users = true` below `[collectors]`, and whatever `actions.allow` names is done for "
        "it.", "", "| page | how it is caused |", "|---|---|"]
    for name in (name for found in SYMPTOMS.values() for name in found):
        how = rehearsals.shown(rehearsals.REHEARSALS[name])
        lines.append(f"| [{name}](../runbooks/{name}.md) | {how} |")
    return "\n".join(lines) + "\n"
