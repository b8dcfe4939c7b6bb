"""The table of bench/engines.py: each row in words, beside its goal."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

Row = dict[str, Any]
BESIDE = {"mics": "fsdp", "hops": "flat", "sdp": "ddp"}  # case -> what it is measured against


def links(row: Row) -> str:
    other = BESIDE[row["case"]]
    mine, theirs = (statistics.mean(max(sent) for sent in row[f"{name}_sent"]) / 1e6
                    for name in (row["case"], other))
    return (f"{row['throughput']} times {other}'s throughput; {mine:.1f} MB a node and step "
            f"instead of {theirs:.1f}; gradients {row['apart']:.0e} apart")


def mics(row: Row) -> str:
    return (f"{links(row)}; {row['bytes_per_micro_step']} of the bytes of one micro-step each; "
            f"{row['throughput_of_hops']} times fsdp's gathered in two hops; links inside "
            f"{row['inside_mbit'] / row['cable_mbit']:.0f} times as fast")


def sdp(row: Row) -> str:
    return (f"{row['nodes']} nodes: {links(row)}; highest / lowest node "
            f"{row['highest_by_lowest']}, at one moment "
            f"{100 * max(row['apart_in_time']['sdp']):.1f} % of a step apart; {row['bound']} times "
            "is the most that the bytes allow")


def slow_stage(row: Row) -> str:
    return (f"one of {row['stages']} ranks {row['slower']:.0f} times slower: "
            f"{100 * row['back_median']:.0f} % of the lost throughput came back, "
            f"{100 * row['of_possible']:.0f} % of what the best cut could bring back")


def partition(row: Row) -> str:
    return f"worst {row['worst_ratio']} of brute force, a plan in {row['slowest_plan_s']} s at most"


def bubble(row: Row) -> str:
    return (f"{row['schedule']}, {row['stages']} stages, {row['micro_batches']} micro-batches: "
            f"{row['bubble']:.3f}, formula {row['formula']:.3f}")


def lost_rank(row: Row) -> str:
    took = row["recovery_s"]
    if not took:
        return f"{row['strategy']}: {row['why']}"
    return (f"{row['strategy']}: {row['recovery_median_s']} s ({min(took)} to {max(took)}), "
            f"{max(row['redone_steps'])} steps redone, weights "
            f"{'' if row['weights_equal'] else 'NOT '}equal")


def compiles(row: Row) -> str:
    return f"{row['compiles']} compiles in a second start, {row['compile_s']:.1f} s"


CASES: dict[str, tuple[Callable[[Row], str], str]] = {  # case -> its words, its goal
    "mics": (mics, "2.8 times; 1 / micro-steps of the bytes; 1e-6"),
    "hops": (links, "fewer bytes, equal bits"),
    "sdp": (sdp, "2 times; 1.01"),
    "slow-stage": (slow_stage, "80 %"),
    "partition": (partition, "1.03; 1 s a plan"),
    "bubble": (bubble, "within 10 % of the formula"),
    "lost-rank": (lost_rank, "1 s; no step redone while a copy lives; weights equal"),
    "compiles": (compiles, "none"),
}


def runs_of(row: Row) -> str:
    if "nets" in row:
        return f"{row['nets']} nets"
    return str(row["runs"]) if "runs" in row else f"best of {len(row['step_s'])}"


def table(rows: Sequence[Row]) -> str:
    """Markdown, of the rows of one invocation."""
    said = ["| case | measured | runs | goal | met |", "|---|---|---|---|---|"]
    for row in rows:
        words, goal = CASES[row["case"]]
        said.append(f"| {row['case']} | {words(row)} | {runs_of(row)} | {goal} | "
                    f"{'yes' if row['ok'] else 'no'} |")
    return "\n".join(said)
