"""Tests between virtual nodes: the pre-flight that the real nodes drive, over what is truly so.

Owns what a test of a virtual node or link gives.  Which tests are made and what they prove is
agent/core/checks/preflight.py's; who is weak is the machines', who reaches whom the network's.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Protocol

from ..core.checks import node_tests, preflight
from ..core.checks.node_tests import Found
from ..core.checks.preflight import COMPUTE, REACH, Member, Outcome, Trial
from .machine import SLOW, Machine

RATE, SLOW_SHARE, NOISE = 1e9, 0.5, 0.03
LEFT = "it went away in the middle"


class Network(Protocol):
    """Who can reach whom."""

    def open(self, source: str, target: str) -> bool: ...


class Site(Protocol):
    """What is needed of a node's edge."""

    machine: Machine

    @property
    def alive(self) -> bool: ...

    def computes(self) -> str: ...


def comes(site: Site, to: str, network: Network) -> str:
    """Why a node takes no part in tests that another arranges; "" = it does."""
    name = site.machine.name
    if not (site.alive and site.machine.up and not site.machine.frozen):
        return f"{name} does not answer"
    if name != to and not (network.open(name, to) and network.open(to, name)):
        return f"{name} is not reached"
    return ""


def tested(
    sites: Mapping[str, Site], nodes: Sequence[str], away: Mapping[str, str], network: Network,
    rng: random.Random,
) -> Found:
    """What the nodes that came find of each other; `away`: who did not, and why."""
    here = [name for name in nodes if name not in away]
    members = [Member(name, name, error=_busy(sites[name])) for name in here]
    steps = preflight.preflight(here, members, {}, coordinator=here[0], groups=False)
    outcomes: list[Outcome] | None = None
    while True:
        try:
            batch = steps.send(outcomes)  # type: ignore[arg-type]
        except StopIteration as ended:
            found = node_tests.found_of(ended.value)
            break
        outcomes = [_outcome(sites, test, here[0], network, rng) for test in batch]
    return node_tests.with_away(found, away)


def _busy(site: Site) -> str:
    run = site.computes()
    return f"{run} trains here, and would be disturbed" if run else ""


def _outcome(
    sites: Mapping[str, Site], test: Trial, coordinator: str, network: Network, rng: random.Random
) -> Outcome:
    asked = test.nodes[:1] if test.kind == REACH else test.nodes
    gone = next((name for name in asked if comes(sites[name], coordinator, network)), "")
    if gone:
        return Outcome(test, False, error=LEFT, ran=False, gone=gone)
    machines = [sites[name].machine for name in test.nodes]
    if test.kind == COMPUTE:
        return Outcome(test, True, RATE * rng.uniform(1.0 - NOISE, 1.0 + NOISE))
    a, b = test.nodes
    joined = network.open(a, b) and network.open(b, a)
    if test.kind == REACH:
        return Outcome(test, joined and machines[1].up and not machines[1].frozen)
    weak = {machine.weak for machine in machines} - {""}
    if not joined or weak - {SLOW}:
        return Outcome(test, False, error="no answer from the other side")
    share = SLOW_SHARE if weak else 1.0
    return Outcome(test, True, RATE * share * rng.uniform(1.0 - NOISE, 1.0 + NOISE))
