"""A short storm over one node: whatever happens, the promises that can be checked here hold.

The fleet's storms are in tests/sim; this one finds a broken step in seconds.
"""

from __future__ import annotations

import random

import pytest

from holdfast.agent.core.model import Ended, Now, SnapshotView
from holdfast.agent.core.run import validity

from .driver import Lab, replace

ERRORS = ("ValueError: x", "RuntimeError: Connection closed by peer", "KeyError: 3", "")


def shake(lab: Lab, dice: random.Random) -> None:
    """One random thing happens to the job, the store or the agent."""
    live = [r.rank for r in lab.view.ranks if r.state == "running"]
    what = dice.randrange(14)
    if what == 0 and live:
        lab.kill(dice.choice(live), dice.choice((9, 11, 15)))
    elif what == 1 and live:
        lab.raises(dice.choice(live), dice.choice(ERRORS))
    elif what == 2 and live:
        lab.change(dice.choice(live), proc_state="T", stopped_s=dice.random() * 3)
    elif what == 3 and live:
        lab.change(dice.choice(live), still_s=dice.random() * 30, beat_age_s=dice.random() * 3)
    elif what == 4:
        lab.store_up = not lab.store_up
    elif what == 5:
        lab.restart_agent()
    elif what == 6:
        lab.hold = set(dice.sample(("put", "start", "stop", "evidence"), dice.randrange(3)))
    elif what == 7 and live:
        lab.commit(lab.rank(live[0]).step)
    elif what == 8:
        lab.journal_stalled = not lab.journal_stalled
    elif what == 9 and live:
        step = lab.rank(live[0]).step
        lab.view = replace(lab.view, snapshot=SnapshotView(lab.view.generation, step, 2))
    elif what == 10:
        lab.refuse_puts = dice.randrange(3)
    elif what == 11:
        lab.view = replace(lab.view, connected=not lab.view.connected)


def go_on(lab: Lab, dice: random.Random) -> None:
    """Ranks do what ranks do: train, or park when a peer is gone."""
    broken = any(r.ended and r.ended.code for r in lab.view.ranks)
    for rank in lab.view.ranks:
        if rank.state != "running" or rank.proc_state == "T":
            continue
        if broken and lab.view.grade == "trainer":
            lab.park(rank.rank, rank.step, torn=dice.random() < 0.3)
        elif not broken:
            lab.change(rank.rank, step=rank.step + 1, phase="data", still_s=0.0, beat_age_s=0.0)


@pytest.mark.parametrize("seed", range(60))
def test_storm(seed: int) -> None:
    dice = random.Random(seed)
    grade = dice.choice(("trainer", "script", "opaque"))
    lab = Lab(grade=grade, nproc=dice.randrange(1, 4), max_restarts=50)
    generation = 0
    for _ in range(120):
        shake(lab, dice)
        go_on(lab, dice)
        lab.step(dice.choice((0.01, 0.1, 1.0)))
        first = lab.decision
        again = lab.node.step(Now(lab.boot_s, 1e9 + lab.boot_s, "b"), _before(lab))
        assert again.effects == () and _shown(again) == _shown(first)
        assert lab.view.generation >= generation
        generation = lab.view.generation
    _check_resumes(lab)
    _calm(lab)
    lab.step(30.0)
    for _ in range(400):
        lab.step(0.5)
        go_on(lab, dice)
        if lab.finishes() or _trains(lab):
            return
    raise AssertionError(f"nothing goes on after the storm: {lab.decision.reasons} {lab.view}")


def _before(lab: Lab):  # type: ignore[no-untyped-def]
    """The observation of the last step: without the outcomes that came after it."""
    return lab.seen


def _shown(decision):  # type: ignore[no-untyped-def]
    return [i for i in decision.incidents if i.state in ("open", "acted")]


def _check_resumes(lab: Lab) -> None:
    seen = [s.generation for s in lab.starts()]
    assert seen == sorted(seen)
    for start in lab.starts():
        if start.resume.kind in ("disk", "snapshot"):
            # The plan's own entry is the last; what it resumes from must be valid before it.
            earlier = start.history[:-1]
            assert validity.is_valid(start.resume.generation, start.resume.step, earlier)


def _calm(lab: Lab) -> None:
    lab.store_up, lab.hold, lab.refuse_puts, lab.journal_stalled = True, set(), 0, False
    lab.view = replace(lab.view, connected=True)
    for rank in lab.view.ranks:
        if rank.state == "running" and rank.proc_state == "T":
            lab.end(rank.rank, Ended(137, 9, boot_s=lab.boot_s))


def _trains(lab: Lab) -> bool:
    ranks = lab.view.ranks
    return bool(ranks) and all(r.state == "running" and r.step > 0 for r in ranks)
