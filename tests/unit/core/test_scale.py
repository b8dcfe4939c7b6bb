"""A leader's plan grows with its nodes, and not faster."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from bench.plan_scale import NPROC, Fleet


def calls_of(fleet: Fleet) -> int:
    """Python calls of one plan: a count that no other process disturbs."""
    count = 0

    def counted(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        fleet.plan_once()
    finally:
        sys.setprofile(None)
    return count


def test_a_plan_costs_no_more_for_each_node_of_a_larger_fleet() -> None:
    small, large = calls_of(Fleet(64)), calls_of(Fleet(256))
    assert large < 4.4 * small


def test_a_plan_of_2048_nodes_is_made_at_all() -> None:
    fleet = Fleet(2048)
    assert len(fleet.plan.ranks) == 2048 * NPROC
    assert calls_of(fleet) < 100 * 2048  # 99 a node; 0.04 s on a quiet machine: bench/plan_scale.py
