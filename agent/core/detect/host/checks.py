"""Checks of this node that failed: each is a condition that stands until the check passes.

Owns no limit: what a check's answer means was said when it was made.  Only what failed twice in a
row is a fault.  Shown; that no run starts meanwhile is agent/core/run/start_gate.py's.
"""

from __future__ import annotations

from ...model import DEGRADED, Verdict, node_subject
from ..detector import Detector, NodeView

FAULT = "check_failed"


class Checks(Detector):
    name = "checks"
    beside = ("checks",)

    def __init__(self, node: str) -> None:
        self._node = node

    def look(self, view: NodeView) -> list[Verdict]:
        return [
            Verdict(
                fault=FAULT, subject=node_subject(self._node, f"check/{one.check}"),
                severity=DEGRADED, confidence=1.0, detector=self.name,
                reason=f"check {one.check}: {one.reason}", evidence=(("do", one.todo),))
            for one in view.observed.checks if one.proven]
