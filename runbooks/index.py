"""The runbooks by what a person sees, as docs/runbooks.md and as an agent serves it.

Owns which symptom a page stands under; tests/test_runbooks.py holds that every page is under one.
What causes it on purpose is rehearsals.py's.
"""

from __future__ import annotations

import html
import textwrap
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import quote

from . import prose, rehearsals

WIDTH = 80
MEANING_MAX = 300  # characters; a site's first sentence may be as long as its page
OWN = "Of this site"

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


class Entry(NamedTuple):
    name: str
    meaning: str  # in a sentence


def by_symptom(pages: Mapping[str, str]) -> dict[str, list[Entry]]:
    """Every page below its symptom; below OWN those that no shipped page has the name of
    (the loader bounds how many)."""
    places = {name: symptom for symptom, names in SYMPTOMS.items() for name in names}
    ordered = [*(name for name in places if name in pages),
               *sorted(name for name in pages if name not in places)]
    found: dict[str, list[Entry]] = {}
    for name in ordered:
        meaning = pages[name].partition("## Meaning")[2].strip()
        found.setdefault(places.get(name, OWN), []).append(
            Entry(name, textwrap.shorten(prose.first_sentence(meaning[:4 * MEANING_MAX]),
                                         MEANING_MAX, placeholder=" ...")))
    return found


def as_text(found: Mapping[str, list[Entry]], base: str) -> str:
    """For a terminal; `base` is the path below which each page is."""
    lines = textwrap.wrap(f"Runbooks by symptom. Each page is at {base}/NAME.md, as "
                          f"{base}/rank_hung.md.", WIDTH)
    for symptom, entries in found.items():
        lines += ["", symptom]
        for name, meaning in entries:
            lines += [f"  {name}.md", *textwrap.wrap(
                meaning, WIDTH, initial_indent="      ", subsequent_indent="      ")]
    return "\n".join(lines) + "\n"


def as_html(found: Mapping[str, list[Entry]], base: str) -> str:
    """For a browser: the same with links, without a script or a style of its own."""
    lines = ["<!doctype html>", '<html lang="en"><head><meta charset="utf-8">',
             '<meta name="viewport" content="width=device-width">',
             '<meta name="color-scheme" content="light dark">',
             "<title>Runbooks by symptom</title></head><body>", "<h1>Runbooks by symptom</h1>"]
    for symptom, entries in found.items():
        lines += [f"<h2>{html.escape(symptom)}</h2>", "<ul>"]
        lines += [f'<li><a href="{base}/{quote(name)}.md">{html.escape(name)}</a>: '
                  f"{html.escape(meaning)}</li>" for name, meaning in entries]
        lines.append("</ul>")
    return "\n".join([*lines, "</body></html>"]) + "\n"


def render_index() -> str:
    """docs/runbooks.md."""
    lines = [
        "# Runbooks by symptom", "",
        "Generated from runbooks/index.py; do not edit. `holdfast explain FAULT` shows a page with "
        "what would be done now; any agent serves this list and its pages at `/runbooks`.", ""]
    for symptom, entries in by_symptom(prose.pages()).items():
        lines += [f"## {symptom}", "", "| page | what it means |", "|---|---|"]
        lines += [f"| [{name}](../runbooks/{name}.md) | {meaning} |" for name, meaning in entries]
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
