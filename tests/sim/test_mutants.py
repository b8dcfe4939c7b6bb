"""Each guard is missed by a storm: a short form of mutants.py, from the seed that noticed last."""

from __future__ import annotations

import pytest
from mutants import MUTANTS, SEEDS, Mutant, first_caught


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_a_mutant_is_caught_within_100_seeds(mutant: Mutant) -> None:
    assert mutant.seed < SEEDS == 100, f"{mutant.name}: a storm that finds it sooner is needed"
    seed, invariant = first_caught(mutant, mutant.seed)
    assert seed >= 0, f"{mutant.name}: no seed of {SEEDS} noticed"
    assert invariant in mutant.notices, f"{mutant.name}: seed {seed} noticed by {invariant}"
