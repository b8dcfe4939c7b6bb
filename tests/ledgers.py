"""An agent's ledger beside the clock of a test, which reads nothing of the agent's clocks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

SHARE = 0.001  # of the time between two readings may be missing, or be there twice
LOOKS_S = 3.0  # an agent settles its ledger once a second, and whenever something happens
LOOK_S = 0.003


class Reading(NamedTuple):
    at_s: float  # by the test's clock
    node: dict[str, float]  # category -> seconds
    run: dict[str, float]


class Between(NamedTuple):
    """What two readings differ by."""

    clock_s: float
    node_s: float
    run_s: float
    node: dict[str, float]
    run: dict[str, float]


def read(get: Callable[[], Any], run: str) -> Reading:
    """Of many readings the freshest, so that a clock read beside it means the same instant."""
    found: tuple[float, Reading] | None = None
    end_s = time.monotonic() + LOOKS_S
    while time.monotonic() < end_s:
        ledger, at_s = get(), time.monotonic()
        behind_s = at_s - sum(ledger["categories"].values())
        if found is None or behind_s < found[0]:
            found = behind_s, Reading(at_s, ledger["categories"], ledger["runs"].get(run, {}))
        time.sleep(LOOK_S)
    assert found is not None
    return found[1]


def between(early: Reading, late: Reading) -> Between:
    node, run = ({name: seconds - before.get(name, 0.0) for name, seconds in after.items()}
                 for before, after in ((early.node, late.node), (early.run, late.run)))
    return Between(late.at_s - early.at_s, sum(node.values()), sum(run.values()), node, run)
