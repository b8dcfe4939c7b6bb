"""Each guard of the edge is missed by the test that guards.py names for it."""

from __future__ import annotations

import pytest
from guards import GUARDS, TESTS_FAILED, Guard, without


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.name.replace(" ", "-"))
def test_a_guard_is_missed_by_the_test_that_is_named_for_it(guard: Guard) -> None:
    status, told = without(guard, guard.test)
    if not status and " skipped" in told:
        pytest.skip(f"{guard.test} needs what is not here")
    assert status == TESTS_FAILED and "1 failed" in told, told
