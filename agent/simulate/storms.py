"""Storms as data: which faults, how many, how long, and in which worlds.

Owns the tables.  The settings are the real ones with shorter times, so that a world needs tens of
virtual seconds where a cluster needs minutes.  The runbooks are the shipped ones, word by word.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from msgspec.structs import replace

from ..config.runbooks import load_runbooks
from ..core.model import Runbook, Settings
from ..core.model.settings import LINKS
from .cluster import Shape

SINGLE = Settings(
    script_floor_s=5.0, compile_limit_s=30.0, quiet_limit_s=20.0, stop_grace_s=1.0, lease_s=3.0,
    keep_checkpoints=3, single_node=True,
)
MANY = Settings(
    script_floor_s=5.0, compile_limit_s=30.0, quiet_limit_s=20.0, stop_grace_s=1.0, lease_s=3.0,
    keep_checkpoints=3, single_node=False, gather_s=4.0, drain_limit_s=15.0,
)


TESTED = replace(MANY, gate=replace(
    MANY.gate, peers=(LINKS,), peers_limit_s=20.0, suspects_limit_s=20.0))


@dataclass(frozen=True)
class Storm:
    """A kind of bad day.  `weights`: fault -> how often, relative to the others."""

    name: str
    weights: Mapping[str, float]
    faults: tuple[int, int] = (3, 9)
    storm_s: float = 40.0
    calm_s: float = 150.0
    single_share: float = 0.55
    shapes: tuple[Shape, ...] = field(default=(
        Shape(2, 1, 1, 1), Shape(2, 1, 1, 2), Shape(2, 2, 1, 1), Shape(3, 1, 1, 1),
        Shape(2, 1, 2, 1), Shape(4, 2, 1, 1), Shape(1, 1, 1, 2), Shape(1, 1, 1, 1)))
    dropped_wakes: float = 0.0
    many: Settings = MANY  # of a world of several nodes

    def shape(self, rng: random.Random) -> Shape:
        """A world for one seed."""
        if rng.random() < self.single_share:
            return Shape(1, 0, rng.choice((1, 1, 2)), rng.choice((1, 2, 2, 3)))
        return rng.choice(self.shapes)

    def draw(self, rng: random.Random) -> list[tuple[float, str, float, float]]:
        """(when, fault, u, v) of every fault, in order of time."""
        kinds, weights = list(self.weights), list(self.weights.values())
        count = rng.randint(*self.faults)
        return sorted((rng.uniform(3.0, self.storm_s), rng.choices(kinds, weights)[0],
                       rng.random(), rng.random()) for _ in range(count))


RANKS = {"rank_killed": 4.0, "rank_exited": 1.5, "rank_hung": 1.5, "rank_stopped": 1.5}
AGENTS = {"agent_killed": 2.0, "kill_mid_effect": 1.5, "twice": 0.5, "journal_stall": 0.7,
          "wall_jump": 0.5, "slow": 0.7}
DISK = {"commit_spoilt": 1.0, "slow_commits": 2.0, "generation_killed": 0.7}
STORE = {"store_down": 1.0, "cut_from_store": 1.5, "isolate": 1.5, "lost_ack": 1.0,
         "lost_request": 0.7, "stale_reads": 0.7, "frozen_at_put": 1.0}
NODES = {"node_crashed": 1.5, "node_gone": 0.7, "node_frozen": 2.0, "node_fatal": 1.0,
         "common_cause": 0.7, "launcher_killed": 0.7}
OUTSIDE = {"suspended": 1.5, "mount_hung": 1.5}  # nobody's fault, and no restart would help
PEOPLE = {"user_bug": 0.4, "operator": 0.7, "paused": 0.4, "preempted": 0.3}

STORMS: dict[str, Storm] = {
    "default": Storm("default", RANKS | AGENTS | DISK | STORE | NODES | PEOPLE,
                     single_share=0.4),
    "calm": Storm("calm", {"rank_killed": 1.0}, faults=(1, 2)),
    # A whole generation out of sight trains on beside its successor: void commits.
    "commits": Storm("commits", {
        "isolate": 4.0, "node_frozen": 3.0, "slow_commits": 2.0, "generation_killed": 2.0,
        "rank_killed": 4.0}, faults=(4, 9), single_share=0.0,
        shapes=(Shape(1, 1, 1, 2), Shape(1, 2, 1, 1), Shape(2, 2, 1, 1))),
    # Plans that arrive late, twice or unacknowledged.
    "writes": Storm("writes", {
        "frozen_at_put": 5.0, "rank_killed": 6.0, "lost_ack": 2.0, "agent_killed": 2.0,
        "operator": 2.0, "isolate": 1.0, "generation_killed": 1.0}, faults=(6, 12)),
    "leases": Storm("leases", {
        "frozen_at_put": 6.0, "rank_killed": 6.0, "generation_killed": 2.0, "node_frozen": 2.0},
        faults=(6, 12), single_share=0.0),
    "ranks": Storm("ranks", RANKS | DISK, faults=(4, 12)),
    # Nodes go and come: the world shrinks to what is left, and grows back.
    "sizes": Storm("sizes", {"node_crashed": 3.0, "node_frozen": 1.5, "launcher_killed": 2.0,
                             "rank_killed": 2.0, "isolate": 1.0, "agent_killed": 1.0,
                             "frozen_at_put": 0.5, "drained": 2.0},
                   faults=(2, 6), single_share=0.0,
                   shapes=(Shape(3, 0, 1, 1, 2), Shape(3, 1, 1, 1, 2), Shape(4, 0, 1, 2, 1),
                           Shape(2, 0, 2, 1, 1))),
    "outside": Storm("outside", OUTSIDE | {"agent_killed": 1.0}, faults=(1, 3)),
    "folders": Storm("folders", {"folder_moved": 3.0, "rank_killed": 3.0, "commit_spoilt": 2.0,
                                 "collective_left_out": 2.0, "slow_commits": 1.0, "operator": 1.0},
                     faults=(3, 8), single_share=0.8),
    # Peers hear nothing of one another, and the store hears all; two nodes die at once; all come.
    "cuts": Storm("cuts", {"peers_cut": 5.0, "leader_and_another": 2.0, "joins": 1.0,
                           "lost_beats": 1.5, "rank_killed": 2.0, "cut_from_store": 1.0,
                           "agent_killed": 1.0, "slow_commits": 1.0},
                  faults=(2, 6), single_share=0.0,
                  shapes=(Shape(4, 0, 1, 1, 2), Shape(4, 1, 1, 1, 2), Shape(3, 1, 1, 1, 2),
                          Shape(2, 2, 1, 1), Shape(6, 0, 1, 1, 3))),
    # Links that go up and down every few seconds, and whatever else happens meanwhile.
    "flapping": Storm("flapping", {"flapping": 5.0, "rank_killed": 2.0, "agent_killed": 1.0,
                                   "lost_beats": 0.5, "node_frozen": 0.7, "slow_commits": 0.7,
                                   "store_down": 0.5, "store_replaced": 0.7, "lost_ack": 0.5},
                      faults=(2, 6), single_share=0.0,
                      shapes=(Shape(2, 1, 1, 1), Shape(3, 1, 1, 1, 2), Shape(1, 2, 1, 2),
                              Shape(4, 0, 1, 1, 2), Shape(2, 2, 1, 1))),
    # A node is given up while it computes, and does not come to read of it.
    "fences": Storm("fences", {"replaced_unseen": 4.0, "unfit_unseen": 3.0, "isolate": 1.0,
                               "agent_killed": 1.0, "rank_killed": 1.0, "lost_ack": 0.5},
                    faults=(2, 5), single_share=0.0,
                    shapes=(Shape(1, 1, 1, 2), Shape(1, 2, 1, 2), Shape(1, 3, 1, 1),
                            Shape(2, 2, 1, 1, 1))),
    # Two runs take all GPUs of a node, and each node may serve either.
    "devices": Storm("devices", {"rank_killed": 3.0, "node_crashed": 1.5, "launcher_killed": 1.5,
                                 "joins": 1.0, "agent_killed": 1.5, "isolate": 1.0,
                                 "peers_cut": 0.5, "lost_ack": 0.5, "drained": 0.5},
                     faults=(2, 6), single_share=0.0,
                     shapes=(Shape(1, 1, 2, 1, gpus=True), Shape(1, 2, 2, 2, gpus=True),
                             Shape(2, 2, 2, 1, gpus=True), Shape(2, 3, 2, 1, gpus=True))),
    # Ranks stand still because of a card, or of themselves: tests between the nodes tell which.
    "suspects": Storm("suspects", {"node_weak": 4.0, "rank_hung": 3.0, "rank_killed": 2.0,
                                   "rank_exited": 1.0, "agent_killed": 1.0, "isolate": 0.5,
                                   "node_crashed": 0.5, "lost_ack": 0.5},
                      faults=(2, 6), storm_s=90.0, single_share=0.0, many=TESTED,
                      shapes=(Shape(3, 1, 1, 1), Shape(4, 0, 1, 1, 3), Shape(3, 2, 1, 2),
                              Shape(4, 2, 1, 1), Shape(6, 0, 1, 1, 4))),
    "network": Storm("network", STORE | DISK | {"rank_killed": 2.0, "node_frozen": 2.0,
                                                "flapping": 1.0, "store_replaced": 1.0},
                     single_share=0.0),
    # The store forgets what it was told last, or all of it, and only the agents remember.
    "restored": Storm("restored", {"store_restored": 4.0, "rank_killed": 4.0, "rank_exited": 1.0,
                                   "agent_killed": 1.5, "lost_ack": 0.5, "slow_commits": 1.0,
                                   "drained": 0.7, "operator": 0.7},
                      faults=(3, 8), single_share=0.0,
                      shapes=(Shape(2, 1, 1, 1), Shape(3, 1, 1, 1, 2), Shape(1, 2, 1, 2),
                              Shape(2, 1, 2, 1), Shape(2, 2, 1, 1))),
    "nodes": Storm("nodes", NODES | DISK | {"rank_killed": 1.0}, single_share=0.0),
    "fleet": Storm("fleet", {"common_cause": 3.0, "node_fatal": 1.0, "rank_killed": 1.0},
                   faults=(2, 5), single_share=0.0,
                   shapes=(Shape(4, 2, 1, 1), Shape(5, 3, 1, 1), Shape(2, 1, 1, 1, idle=3),
                           Shape(3, 0, 1, 1, 2, idle=3))),
    "agents": Storm("agents", AGENTS | {"rank_killed": 4.0}, faults=(4, 10)),
}


@cache
def shipped() -> dict[str, Runbook]:
    """The runbooks as the product loads them: budgets, windows and ladders are not shortened."""
    return load_runbooks()
