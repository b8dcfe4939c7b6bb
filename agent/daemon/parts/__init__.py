"""The parts of the agent that run beside its steps, one file each.

Owns what a part is.  They are built in one list, in daemon.py, which runs each in a task of its
own; one that crashes is started again and touches no other.
"""

from __future__ import annotations

from typing import Protocol


class Part(Protocol):
    """Work beside the steps: it wakes the daemon, or leaves something for its next step."""

    @property
    def name(self) -> str:
        """Under which its errors are counted and said."""

    async def run(self) -> None:
        """Its whole life.  A part that returns has nothing more to do."""
