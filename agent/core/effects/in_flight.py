"""Effects in flight: ids, one a subject, deadlines, outcomes.

Owns the promise that the same observation twice gives no new effect: what was asked for is pending
until its outcome, until levels show that it came true, or until its deadline.  It decides nothing.
"""

from __future__ import annotations

import msgspec

from ..model import Effect, EffectOutcome

ATTEMPTS_MAX = 512  # counters kept; the oldest generations' go first
RETRY_S = 1.0  # after a failure, before the same subject and kind is tried again
RETRY_MAX_S = 16.0


class Pending(msgspec.Struct):
    """An effect without an outcome yet."""

    effect: Effect
    since_boot_s: float


class EffectResult(msgspec.Struct, frozen=True):
    """What became of one effect in this step."""

    effect: Effect
    ok: bool
    error: str
    detail: str


class Attempt(msgspec.Struct):
    """How often one thing was asked for, and when it may be asked for again."""

    count: int = 0
    failures: int = 0
    not_before_s: float = 0.0


class InFlight(msgspec.Struct):
    """The table of one node."""

    pending: dict[str, Pending] = {}
    attempts: dict[str, Attempt] = {}
    # The highest number that is not among them any more: no id is given twice, or the performer
    # would take a new effect for an old one that is over.
    given: int = 0

    def settle(self, outcomes: tuple[EffectOutcome, ...], boot_s: float) -> list[EffectResult]:
        """Take outcomes of what is pending, and give up on what passed its deadline."""
        said = {o.id: o for o in outcomes}
        done: list[EffectResult] = []
        for effect_id in sorted(self.pending):
            item = self.pending[effect_id]
            outcome = said.get(effect_id)
            late = boot_s - item.since_boot_s > item.effect.deadline_s
            if outcome is None and not late:
                continue
            outcome = outcome or EffectOutcome(effect_id, ok=False, error="no outcome in time")
            done.append(EffectResult(item.effect, outcome.ok, outcome.error, outcome.detail))
            self._close(effect_id, outcome.ok, boot_s)
        return done

    def came_true(self, effect_id: str) -> None:
        """Levels show the effect; its outcome is no longer waited for."""
        if effect_id in self.pending:
            self._close(effect_id, True, 0.0)

    def busy(self, subject: str, kind: str = "") -> bool:
        """Something for this subject (of this kind) is in flight."""
        return any(
            p.effect.subject == subject and kind in ("", p.effect.kind)
            for p in self.pending.values())

    def of(self, kind: str, subject: str) -> list[Effect]:
        found = [p.effect for p in self.pending.values()]
        return [e for e in found if e.kind == kind and e.subject == subject]

    def asked(self, generation: int, subject: str, kind: str) -> bool:
        """Whether that was ever asked for."""
        return f"{generation}/{subject}/{kind}" in self.attempts

    def failures(self, generation: int, subject: str, kind: str) -> int:
        attempt = self.attempts.get(f"{generation}/{subject}/{kind}")
        return attempt.failures if attempt else 0

    def retry_at_s(self, boot_s: float) -> float:
        """Seconds until the next thing may be tried again or gives up; large when none."""
        waits = [a.not_before_s - boot_s for a in self.attempts.values()]
        waits += [p.since_boot_s + p.effect.deadline_s - boot_s for p in self.pending.values()]
        return min([w for w in waits if w > 0], default=3600.0)

    def new_boot(self) -> None:
        """Another boot's seconds mean nothing here."""
        self._forget(list(self.attempts))

    def add(self, generation: int, draft: Effect, boot_s: float) -> Effect | None:
        """Give the draft its id and keep it, or None when its subject is busy or must wait."""
        overtakes = draft.kind == "stop" and not self.busy(draft.subject, "stop")
        if self.busy(draft.subject) and not overtakes:
            return None
        key = f"{generation}/{draft.subject}/{draft.kind}"
        attempt = self.attempts.setdefault(key, Attempt(self.given))
        if boot_s < attempt.not_before_s:
            return None
        attempt.count += 1
        effect = msgspec.structs.replace(draft, id=f"{key}/{attempt.count}")
        self.pending[effect.id] = Pending(effect, boot_s)
        self._bound()
        return effect

    def _close(self, effect_id: str, ok: bool, boot_s: float) -> None:
        del self.pending[effect_id]
        attempt = self.attempts.setdefault(
            effect_id.rpartition("/")[0], Attempt(self.given))
        attempt.failures = 0 if ok else attempt.failures + 1
        pause_s = 0.0 if ok else min(RETRY_MAX_S, RETRY_S * 2 ** (attempt.failures - 1))
        attempt.not_before_s = boot_s + pause_s if pause_s else 0.0

    def _bound(self) -> None:
        extra = len(self.attempts) - ATTEMPTS_MAX
        if extra <= 0:
            return
        oldest = sorted(self.attempts, key=lambda k: int(k.split("/", 1)[0]))
        self._forget(oldest[:extra])

    def _forget(self, keys: list[str]) -> None:
        for key in keys:
            self.given = max(self.given, self.attempts.pop(key).count)
