"""A stale lock of a compile cache: removed where allowed, once a day, by a run that is here."""

from __future__ import annotations

import pytest

from holdfast.agent.config.runbooks import load_runbooks
from holdfast.agent.core.model import Observed, RemoveLock, RunView, Settings
from holdfast.agent.core.node import Node

from .driver import Lab, replace

PATH = "/var/tmp/neuron-compile-cache/x/model.hlo_module.pb.lock"
LOCK = ("compile_cache_lock_age_seconds", f"path={PATH},uid=1000", 600.0, 1.0)


def lab(*allow: str, cls: type[Lab] = Lab) -> Lab:
    made = cls(settings=Settings(allow=allow), uid=1000)
    made.node = Node("a", made.settings, load_runbooks())
    made.begin()
    made.samples = (LOCK,)
    return made


def orders(made: Lab, steps: int = 3, seconds: float = 1.0) -> list[RemoveLock]:
    before = len(made.log)
    for _ in range(steps):
        made.step(seconds)
    return [one.body for one in made.log[before:] if one.kind == "remove_lock"]


def test_it_is_asked_for_once_a_day_and_again_by_the_next_day() -> None:
    made = lab("remove_lock")
    assert orders(made) == [RemoveLock("r", PATH)]
    assert orders(made, 3, 600.0) == []
    made.node = Node("a", made.settings, load_runbooks(), made.node.memory())
    assert orders(made) == []  # a restart of the agent gives no other
    made.boot_s += 86400.0
    assert orders(made) == [RemoveLock("r", PATH)]


def test_the_runbook_says_how_often_a_day() -> None:
    made = lab("remove_lock")
    books = load_runbooks()
    books["compile_lock_stale"] = replace(books["compile_lock_stale"], budget_count=2)
    made.node = Node("a", made.settings, books)
    assert orders(made) == [RemoveLock("r", PATH)]  # what was read before it is no second one
    assert orders(made, 9, 600.0) == [RemoveLock("r", PATH)]


def test_a_day_of_the_runbook_is_a_whole_one() -> None:
    made = lab("remove_lock")
    assert orders(made, 1) == [RemoveLock("r", PATH)]
    assert orders(made, 2, (86400.0 - 10.0) / 2) == []
    assert orders(made, 1, 11.0) == [RemoveLock("r", PATH)]


def test_a_clock_that_was_set_back_gives_no_other_at_once() -> None:
    made = lab("remove_lock")
    books = load_runbooks()
    books["compile_lock_stale"] = replace(books["compile_lock_stale"], budget_count=2)
    made.node = Node("a", made.settings, books)
    assert orders(made) == [RemoveLock("r", PATH)]
    made.wall_ahead_s = -30.0
    assert orders(made) == []


@pytest.mark.parametrize("why", ["not allowed", "no run", "paused", "journal", "young"])
def test_what_leaves_the_lock_where_it_is(why: str) -> None:
    made = lab(*([] if why == "not allowed" else ["remove_lock"]))
    if why == "no run":
        made.view = replace(made.view, connected=False)
    if why == "paused":
        made.node.kept.paused = "maintenance"
    made.journal_stalled = why == "journal"
    if why == "young":
        made.samples = ((*LOCK[:2], 60.0, 1.0),)
    assert orders(made) == []


class Shared(Lab):
    """A node with runs of others besides."""

    more: tuple[RunView, ...] = ()

    def observed(self) -> Observed:
        seen = super().observed()
        return replace(seen, runs=tuple(sorted((*seen.runs, *self.more), key=lambda v: v.run)))


def test_the_owner_of_the_lock_is_asked_and_nobody_else() -> None:
    made = lab("remove_lock", cls=Shared)
    assert isinstance(made, Shared)
    alice = replace(made.view, run="!alice", uid=1001)
    made.more = (alice,)
    assert orders(made) == [RemoveLock("r", PATH)]
    made = lab("remove_lock", cls=Shared)
    assert isinstance(made, Shared)
    made.view = replace(made.view, connected=False)
    made.more = (alice,)
    assert orders(made) == []
    made.view = replace(made.view, connected=True)  # it was not spent on who could not do it
    assert orders(made) == [RemoveLock("r", PATH)]


def test_of_the_owners_runs_the_one_that_waits_is_asked() -> None:
    made = lab("remove_lock", cls=Shared)
    assert isinstance(made, Shared)
    made.more = (replace(made.view, run="z", compiling=f"rank 0 holds or awaits {PATH}"),)
    assert orders(made) == [RemoveLock("z", PATH)]
