"""An alert that came from outside: what it names, and what became of it.

Owns the value, and the identity by which the same alert is the same whoever delivers it, however
often and in whatever order.
"""

from __future__ import annotations

from .time import Value


class Alert(Value, frozen=True, omit_defaults=False):
    """One firing of one alert, as the store keeps it."""

    id: str  # fingerprint and start: two Alertmanagers that deliver it give it the same
    name: str
    runbook: str  # label `holdfast_runbook`; "" or unknown: shown, never acted on
    run: str  # label `run`
    summary: str
    taken_wall_s: float
    generation: int = 0  # of the run when the alert was taken: a later one has answered it
    firing: bool = True
    outcome: str = ""  # what became of it, for people; "" = not settled yet
    by: str = ""  # who delivered it first
    node: str = ""  # label `node`: the agent's own name of its node

    def waits(self) -> bool:
        """Whether it asks for something and has no answer."""
        return self.firing and not self.outcome

    def has_words(self) -> bool:
        """What an old one has lost."""
        return bool(self.name or self.summary or self.by)
