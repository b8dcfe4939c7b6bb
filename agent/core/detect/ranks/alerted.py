"""A restart that an alert from outside asks for.

Owns this detector of a run.  Which alerts still ask is decided in run/alerts.py.  Pure.
"""

from __future__ import annotations

from ..detector import Look, RanksView, RunDetector


class Alerted(RunDetector):
    """The first alert that nothing has answered yet: one restart answers all of them."""

    name = "alerts"

    def look(self, view: RanksView) -> Look:
        return Look(view.alerts[0]) if view.alerts and view.ranks else Look()
