"""Commands that read their own arguments: `agent` and `simulate`.

Owns only where they live.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

PLACES = {"agent": "holdfast.agent.__main__", "simulate": "holdfast.agent.simulate.__main__"}


def hand_over(command: str, argv: Sequence[str]) -> int:
    """Runs the command's own main(argv) and returns its exit code."""
    return int(import_module(PLACES[command]).main(list(argv)) or 0)
