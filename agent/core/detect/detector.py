"""What a detector of a node declares, and what it is shown.

Owns the protocol and the view.  The table of them is agent/core/detect/registry.py.  Pure.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, Protocol

from ..model import Observed, Rows, Verdict


class NodeView(NamedTuple):
    """What a detector of a node looks at."""

    rows: Rows  # the readings that it declares: the very same tuple until one of them is newer
    observed: Observed
    memory: Any = None  # what it keeps over a restart of the agent; kept up by it in place


class Detector(Protocol):
    """One detector of a node.  A new one is a class that declares this, and its entry in the table.

    name     the `detector` of its verdicts
    reads    how the names of its readings begin: `view.rows` are these
    beside   what else it takes from `view.observed`: "runs", "events", or how names of readings
             begin.  Without any it is asked again only when a reading of its own is newer
    warm_s   how long its windows, which begin anew with the agent, take to find what was so before
    memory   the type of what it keeps over a restart of the agent, which makes an empty one when
             called; None keeps nothing
    of_boot  whether that memory means nothing in another boot
    """

    name: ClassVar[str]
    reads: ClassVar[tuple[str, ...]] = ()
    beside: ClassVar[tuple[str, ...]] = ()
    warm_s: ClassVar[float] = 0.0
    memory: ClassVar[Any] = None
    of_boot: ClassVar[bool] = True

    def __init__(self, node: str) -> None: ...

    def look(self, view: NodeView) -> list[Verdict]:
        """Faults now."""
        ...
