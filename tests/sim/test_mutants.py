"""Mutants: each safety rule taken out of the real code, and each missed within 100 seeds.

A mutant replaces one function of the core, or one check of the store or the launcher, by one that
does not care.  If the simulator did not notice, its storms or its invariants would be too weak,
or the rule would be of no use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from msgspec.structs import replace

from holdfast.agent.core.effects import in_flight
from holdfast.agent.core.model import Observed
from holdfast.agent.core.nodes import breaker
from holdfast.agent.core.run import members, plan, reconcile, validity
from holdfast.agent.simulate import run_storm
from holdfast.agent.simulate.cluster import Cluster
from holdfast.agent.simulate.edge import Edge

SEEDS = 100

Patch = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Mutant:
    """One rule taken out, the storm that needs it, and the invariants that may notice."""

    name: str
    storm: str
    notices: tuple[str, ...]
    patch: Patch = lambda _: None
    hook: Callable[[Cluster], None] | None = None


def no_compare(cluster: Cluster) -> None:
    """The store sets without comparing versions."""
    cluster.store.compare = False


def no_lease_check(cluster: Cluster) -> None:
    """The store takes a plan from anybody, whoever holds the lease."""
    cluster.store.check_lease = False


def fatal_ignored(cluster: Cluster) -> None:
    """No core ever hears of a fatal fault."""

    def deaf(_: Edge, observed: Observed) -> Observed:
        beats = tuple(replace(beat, fatal="") for beat in observed.beats)
        return replace(observed, beats=beats)

    for edge in cluster.edges.values():
        edge.filter = deaf


def stale_is_live(patch: pytest.MonkeyPatch) -> None:
    """However old a beat is, its node counts as heard of."""
    patch.setattr(members, "is_fresh", lambda *_: True)
    patch.setattr(members, "is_lost", lambda *_: False)


def breaker_ignored(patch: pytest.MonkeyPatch) -> None:
    """The breaker never opens."""
    patch.setattr(breaker, "is_open", lambda *_: (False, "mutant"))


def everything_is_valid(patch: pytest.MonkeyPatch) -> None:
    """No plan voids a commit."""
    patch.setattr(validity, "is_valid", lambda *_: True)


def torn_is_whole(patch: pytest.MonkeyPatch) -> None:
    """A survivor's word that its state is torn is not listened to."""
    real = plan.survivor_resume

    def deaf(view: plan.PlanView, places: dict[int, str]) -> object:
        ranks = tuple(
            replace(r, parked=replace(r.parked, torn=False)) if r.parked else r for r in view.ranks
        )
        return real(replace(view, ranks=ranks), places)

    patch.setattr(plan, "survivor_resume", deaf)


def outcome_ignored(patch: pytest.MonkeyPatch) -> None:
    """What became of an effect is never looked at: it stays in flight."""
    patch.setattr(in_flight.InFlight, "settle", lambda *_: [])


def old_deletes_patch(patch: pytest.MonkeyPatch) -> None:
    """Whoever still runs a generation deletes."""
    patch.setattr(reconcile, "may_delete", lambda *_: True)


MUTANTS = (
    Mutant("no compare-and-set", "writes", ("compare_and_set", "one_plan_per_generation",
                                             "generations_grow"), hook=no_compare),
    Mutant("no lease check", "leases", ("only_the_leader_plans",), hook=no_lease_check),
    Mutant("fatal verdict ignored", "nodes", ("no_rank_on_unfit",), hook=fatal_ignored),
    Mutant("stale beat ignored", "nodes", ("all_goes_on",), stale_is_live),
    Mutant("breaker ignored", "fleet", ("breaker_holds",), breaker_ignored),
    Mutant("validity rule off", "commits", ("void_never_resumed", "one_chain"),
           everything_is_valid),
    Mutant("torn state taken", "default", ("torn_never_used",), torn_is_whole),
    Mutant("effect outcome ignored", "agents", ("all_goes_on",), outcome_ignored),
    Mutant("delete by an old generation", "commits", ("newest_deletes",), old_deletes_patch),
)


def first_caught(mutant: Mutant) -> tuple[int, str]:
    """(seed, invariant) of the first seed that notices; (-1, "") when none of 100 does."""
    for seed in range(SEEDS):
        report = run_storm(seed, mutant.storm, hook=mutant.hook)
        if not report.ok:
            return seed, report.invariant
    return -1, ""


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_a_mutant_is_caught_within_100_seeds(
    mutant: Mutant, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant.patch(monkeypatch)
    seed, invariant = first_caught(mutant)
    assert seed >= 0, f"{mutant.name}: no seed of {SEEDS} noticed"
    assert invariant in mutant.notices, f"{mutant.name}: seed {seed} noticed by {invariant}"
