"""The way from a cause to the next generation, by value: who is stopped, who is told, what is
waited for."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.agent.core.actions import EXCLUDE_NODE, REBOOT_NODE
from holdfast.agent.core.detect.ranks.ended import Cause
from holdfast.agent.core.effects import drafts
from holdfast.agent.core.effects.in_flight import InFlight
from holdfast.agent.core.ladder import MAY, PASS
from holdfast.agent.core.model import (
    FATAL,
    Beat,
    Commit,
    Ended,
    Now,
    Observed,
    RankView,
    Runbook,
    Settings,
    Stop,
)
from holdfast.agent.core.run.ending import STOP_WAIT_S, Endings
from holdfast.agent.core.run.incidents import RunIncidents
from holdfast.agent.core.run.log_questions import LogQuestions
from holdfast.agent.core.run.plan_document import Document
from holdfast.agent.core.run.policy import Grant
from holdfast.agent.core.run.progress import Life
from holdfast.agent.core.run.recovery import (
    EVIDENCE_WAIT_S,
    FAR_EVIDENCE_WAIT_S,
    PARK_LIMIT_S,
    PARK_STEPS,
    SAVE_LIMIT_S,
    Recoveries,
)
from holdfast.agent.core.run.state import Context, DocumentSeen, Progress, Recovery, RunState

from .driver import replace
from .test_rules import plan, rank, view

MANY, ONE = Settings(single_node=False), Settings()
BROKEN_S = 1000.0


class Way:
    """One run that broke at BROKEN_S, as node `a` sees it; each look takes no time."""

    def __init__(self, grade: str = "trainer", settings: Settings = ONE, **cause: Any) -> None:
        self.state = RunState("r", document=DocumentSeen(plan=plan(generation=1)))
        self.state.progress = Progress(broken_boot_s=BROKEN_S)
        found = Cause(**{"fault": "rank_killed", "generation": 1, "reason": "x", "rank": 0,
                         "node": "a"} | cause)
        self.state.recovery = Recovery(found, grant=Grant("restart", "x"))
        incidents = RunIncidents(self.state)
        document = Document(self.state, incidents)
        ending = Endings(self.state, document, incidents, LogQuestions(self.state, incidents))
        self.recoveries = Recoveries(self.state, incidents, ending)
        self.shown, self.settings = view(grade=grade, generation=1), settings
        self.in_flight = InFlight()
        self.beats: tuple[Beat, ...] = ()

    def context(self, after_s: float) -> Context:
        now = Now(BROKEN_S + after_s, 5000.0, "b")
        return Context(now, self.shown, Observed(beats=self.beats), self.settings, {},
                       self.in_flight, [], 0.0, False, {}, [], [], {})

    def look(self, *ranks: RankView, after_s: float = 0.0) -> tuple[bool, list[tuple[Any, ...]]]:
        """(whether the next generation may be planned, who is ordered to leave: node, ranks,
        whether to park)."""
        ctx = self.context(after_s)
        ready = self.recoveries.ready(ctx, ranks)
        for effect in ctx.effects:
            self.in_flight.came_true(effect.id)
        stops = [one.body for one in ctx.effects if isinstance(one.body, Stop)]
        return ready, [(body.node or "a", body.ranks, body.park) for body in stops]


DEAD = rank(0, state="ended", ended=Ended(137, 9))
LIVE, PARKED = rank(1), rank(1, state="parked")
FAR = rank(2, node="b")


def test_once_nobody_lives_the_next_generation_is_planned() -> None:
    assert Way().look(DEAD, PARKED) == (True, [])
    assert Way().look(DEAD, replace(LIVE, ended=Ended(0))) == (True, [])
    assert Way("script").look(DEAD, replace(DEAD, rank=1)) == (True, [])
    quiet = Way()
    quiet.state.recovery = None
    assert quiet.look(DEAD) == (False, [])


def test_survivors_of_a_trainer_have_their_time_to_park_and_then_are_stopped() -> None:
    way, wait_s = Way(), ONE.park_wait_s
    assert way.look(DEAD, LIVE) == (False, [])
    assert way.look(DEAD, LIVE, after_s=wait_s - 0.01) == (False, [])
    assert way.look(DEAD, LIVE, after_s=wait_s) == (False, [("a", (1,), False)])
    over_s = wait_s + STOP_WAIT_S
    assert way.look(DEAD, LIVE, after_s=over_s)[0] is False
    assert way.look(DEAD, LIVE, after_s=over_s + 0.01)[0] is True, "who does not go holds nobody"


def test_a_rank_to_blame_that_lives_is_stopped_at_once_and_its_peers_are_not() -> None:
    ready, orders = Way(fault="rank_hung").look(rank(0), LIVE)
    assert not ready and orders == [("a", (0,), False)]


def test_a_scripts_ranks_are_stopped_at_once_those_that_parked_as_well() -> None:
    ready, orders = Way("script").look(DEAD, LIVE, rank(3, state="parked"))
    assert not ready and orders == [("a", (1, 3), False)]
    assert Way("script").look(DEAD, PARKED)[1] == [("a", (1,), False)]


def test_what_no_rank_has_done_stops_the_living_and_keeps_the_parked() -> None:
    ready, orders = Way(fault="gpu_lost", rank=-1).look(rank(0), PARKED)
    assert not ready and orders == [("a", (0,), False)]
    victims = Way(fault="rank_exited", rank=-1)  # of a loss that nobody here saw: they park
    assert victims.look(DEAD, LIVE) == (False, [])


def test_ranks_are_told_to_leave_once_what_another_node_has() -> None:
    way = Way(fault="node_lost", rank=-1, node="b", settings=MANY)
    assert way.look(rank(0), LIVE) == (False, [("a", (), True)])
    assert way.look(rank(0), LIVE, after_s=0.1) == (False, [])
    assert way.look(rank(0), LIVE, after_s=MANY.park_wait_s)[1] == [("a", (0, 1), False)]
    assert Way(fault="node_lost", rank=-1, node="b", settings=MANY).look(PARKED) == (True, [])
    script = Way("script", fault="node_lost", rank=-1, node="b", settings=MANY)
    assert script.look(rank(0))[1] == [("a", (0,), False)]


@pytest.mark.parametrize(("grade", "cause", "told"), [
    ("trainer", {"rank": 2, "node": "b", "fault": "rank_hung"}, [("b", (2,), False)]),
    ("trainer", {}, []),  # they park by themselves
    ("script", {}, [("b", (2,), False)]),
    ("trainer", {"rank": -1, "fault": "gpu_lost"}, []),
])
def test_ranks_of_another_node_are_stopped_where_they_will_not_leave(
    grade: str, cause: dict[str, Any], told: list[tuple[Any, ...]]
) -> None:
    way = Way(grade, MANY, **cause)
    assert [one for one in way.look(DEAD, FAR)[1] if one[0] == "b"] == told
    assert [one for one in way.look(DEAD, FAR, after_s=0.1)[1] if one[0] == "b"] == []
    grace_s = 1.0 if grade == "script" else 0.0
    again_s = grace_s + STOP_WAIT_S
    assert [one for one in way.look(DEAD, FAR, after_s=again_s - 0.01)[1] if one[0] == "b"] == []
    assert [one for one in way.look(DEAD, FAR, after_s=again_s + 0.01)[1] if one[0] == "b"] == told


def test_an_order_to_stop_is_said_again_only_after_its_grace() -> None:
    way = Way("script", reason="x")
    grace_s = 1.0
    assert way.look(DEAD, LIVE)[1] == [("a", (1,), False)]
    again_s = grace_s + STOP_WAIT_S
    assert way.look(DEAD, LIVE, after_s=again_s - 0.01)[1] == []
    assert way.look(DEAD, LIVE, after_s=again_s)[1] == [("a", (1,), False)]
    more = Way("script")
    more.look(DEAD, LIVE)
    assert more.look(DEAD, LIVE, rank(3), after_s=0.1)[1] == [("a", (1, 3), False)], "one more"
    assert more.look(DEAD, rank(3), after_s=0.2)[1] == [], "it was named already"


@pytest.mark.parametrize(("grade", "charged", "grace_s"), [
    ("trainer", True, 0.0), ("script", True, 1.0), ("trainer", False, 5.0),
    ("script", False, 5.0)])
def test_the_grace_of_who_must_go(grade: str, charged: bool, grace_s: float) -> None:
    way = Way(grade, fault="rank_hung", charged=charged)
    ctx = way.context(0.0)
    assert not way.recoveries.ready(ctx, (rank(0), LIVE))
    assert [one.body.grace_s for one in ctx.effects] == [grace_s]  # type: ignore[union-attr]
    short = Way("script", Settings(stop_grace_s=0.3))
    ctx = short.context(0.0)
    short.recoveries.ready(ctx, (LIVE,))
    assert ctx.effects[0].body.grace_s == 0.3  # type: ignore[union-attr]


@pytest.mark.parametrize(("node", "limit_s"), [("a", EVIDENCE_WAIT_S), ("b", FAR_EVIDENCE_WAIT_S)])
def test_evidence_is_waited_for_a_moment(node: str, limit_s: float) -> None:
    way = Way(fault="rank_hung", node=node, settings=MANY)
    asked = way.in_flight.add(1, drafts.evidence(way.shown, rank(0, node=node), "x"), BROKEN_S)
    assert asked is not None
    ranks = (rank(0, node=node), PARKED)
    assert way.look(*ranks, after_s=limit_s - 0.01) == (False, [])
    assert way.look(*ranks, after_s=limit_s)[1] == [(node, (0,), False)]
    other = Way(fault="rank_hung", node=node, settings=MANY)
    assert other.look(*ranks)[1] == [(node, (0,), False)], "nothing was asked"


@pytest.mark.parametrize(("saves", "step_s", "limit_s"), [
    (False, 0.0, PARK_LIMIT_S), (True, 0.0, SAVE_LIMIT_S),
    (False, 60.0, 6.5 + PARK_STEPS * 60.0)])
def test_ranks_that_nothing_ails_come_to_the_end_of_their_step(
    saves: bool, step_s: float, limit_s: float
) -> None:
    way = Way(fault="restart_asked", rank=-1, node="", charged=False, parks=True, saves=saves)
    way.state.history.step_s = step_s
    for after_s in (0.0, limit_s):
        ctx = way.context(after_s)
        assert not way.recoveries.ready(ctx, (rank(0, step=7), rank(1, step=9)))
        assert "end of their step" in ctx.reason
        assert [one.kind for one in ctx.effects] == (["put"] if not after_s else [])
    late = way.look(rank(0, step=7), rank(1, step=9), after_s=limit_s + 0.1)
    assert late == (False, [("a", (0, 1), False)])
    assert way.look(rank(0, state="parked"), PARKED, after_s=0.1) == (True, [])


@pytest.mark.parametrize(("step_s", "heard_s", "after"), [
    (0.0, 0.0, 11), (1.0, 0.0, 13), (0.1, 0.0, 26), (1.0, 3.0, 16), (1.0, 99.0, 18)])
def test_all_leave_behind_a_step_that_is_still_ahead_when_the_last_node_hears_of_it(
    step_s: float, heard_s: float, after: int
) -> None:
    way = Way()
    way.state.history.step_s = step_s
    way.beats = (Beat("b", "r", 1, boot_s=BROKEN_S - heard_s), Beat("b", "other", 1, boot_s=0.0),
                 Beat("lost", "r", 1, boot_s=0.0))
    ctx, ranks = way.context(0.0), (rank(0, step=7), rank(1, step=9))
    assert way.recoveries.park_after(ctx, ranks, saves=False) == after
    assert way.recoveries.park_after(ctx, (), saves=False) == after - 9
    # What all are to save lacks the part of who hears of it too late.
    more = 60 - 5 if heard_s > 60.0 else 0
    assert way.recoveries.park_after(ctx, ranks, saves=True) == after + more


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("step_s", [0.001, 0.1, 1.0, 2.0, 5.0, 30.0, 100.0])
def test_the_step_behind_which_all_leave_comes_before_they_are_stopped(
    saves: bool, step_s: float
) -> None:
    way = Way(fault="world_grows", rank=-1, node="", charged=False, parks=True, saves=saves)
    way.state.history.step_s = step_s
    way.beats = (Beat("b", "r", 1, boot_s=0.0),)
    last = way.recoveries.park_after(way.context(0.0), (rank(0, step=9),), saves)
    assert not way.recoveries.park_is_over(way.context((last - 9) * step_s))


@pytest.mark.parametrize(("quick", "charged", "after_s", "ready"), [
    (6, True, 0.09, False), (6, True, 0.11, True), (5, True, 0.0, True), (9, True, 0.7, False),
    (9, False, 0.0, True)])
def test_a_loop_of_quick_failures_is_held_back(
    quick: int, charged: bool, after_s: float, ready: bool
) -> None:
    way = Way(charged=charged)
    way.state.progress = replace(way.state.progress, quick=quick)
    ctx = way.context(after_s)
    assert way.recoveries.ready(ctx, (DEAD, PARKED)) is ready
    assert (f"{quick} generations in a row broke within 5 s" in ctx.reason) is not ready
    if not ready:
        assert ctx.wake_s == pytest.approx(0.1 * 2 ** (quick - 6) - after_s)


# ------------------------------------------------------------------------------ what it costs


def test_a_leader_may_take_out_nodes_of_its_run_alone_and_asks_for_all_else() -> None:
    asked: list[str] = []

    def beyond(cause: Cause, action: str) -> tuple[int, Any]:
        asked.append(action)
        return 7, PASS

    def answers(settings: Settings, node: str, action: str) -> tuple[int, bool]:
        way = Way(settings=settings, node=node)
        ctx = way.context(0.0)
        ctx.beyond = beyond
        cause = way.state.recovery.cause  # type: ignore[union-attr]
        spent, leave = way.recoveries._beyond(ctx, plan(), cause, action)
        return spent, leave is MAY

    assert answers(MANY, "b", EXCLUDE_NODE) == (0, True) and not asked
    assert answers(MANY, "z", EXCLUDE_NODE) == (0, False) and not asked
    for settings, action in ((MANY, REBOOT_NODE), (MANY, "drain"), (ONE, EXCLUDE_NODE)):
        assert answers(settings, "b", action) == (7, False) and asked.pop() == action


ALL = (("f/x/r", 1), ("restarts", 2), ("signature/f/7/e", 2))


@pytest.mark.parametrize(("life", "commits", "left"), [
    (Life(0, False, False), (), ALL),
    (Life(9, True, False), (), ALL[:2]),  # it does not fail there again
    (Life(10, True, False), (), (("restarts", 1),)),
    (Life(0, True, True), (), (("restarts", 2),)),  # a script that came far, and from where?
    (Life(0, False, False), (Commit(1, 5, "p"),), (("restarts", 1),)),  # something durable
    (Life(0, False, False), (Commit(1, 5, "p", bad="x"),), ALL),
])
def test_progress_gives_back_what_this_generation_was_charged(
    life: Life, commits: tuple[Commit, ...], left: tuple[tuple[str, int], ...]
) -> None:
    way = Way()
    way.shown = replace(way.shown, commits=commits)
    paid = plan(generation=1, granted=("charged:f/x/r", "charged:restarts"), spent=ALL)
    assert way.recoveries._spent(way.context(0.0), paid, life) == left


@pytest.mark.parametrize(("cause", "left"), [
    ({"parks": True, "charged": False}, (("restarts", 1),)),
    ({"parks": False, "charged": False}, ALL),  # it ended as it was granted
    ({"parks": True, "charged": True}, ALL)])
@pytest.mark.parametrize("earned", ["a checkpoint", "steps"])
def test_a_generation_that_leaves_at_the_end_of_a_step_earns_until_then(
    cause: dict[str, Any], left: tuple[tuple[str, int], ...], earned: str
) -> None:
    """Nine steps before it was asked, two behind that; or the checkpoint that it leaves."""
    way = Way(fault="world_grows", **cause)
    charged = ("restarts",) if cause["charged"] else ()
    way.state.recovery = replace(way.state.recovery, grant=Grant(
        "restart", "x", spent=ALL, charged=charged))
    way.state.progress = replace(way.state.progress, earned_steps=9, moved=True, base_step=20)
    paid = plan(generation=1, granted=("charged:f/x/r", "charged:restarts"), spent=ALL)
    way.state.document = DocumentSeen(plan=paid)
    if earned == "steps":
        way.state.progress = replace(way.state.progress, seen_step=22)
    else:
        way.shown = replace(way.shown, commits=(Commit(1, 21, "p"),))
    ctx = way.context(0.0)
    ctx.leader = True
    way.recoveries.answer(ctx, paid)
    assert way.state.grant is not None
    assert way.state.grant.spent == left


def test_a_command_that_was_asked_to_leave_earns_nothing_by_waiting() -> None:
    way = Way("opaque", fault="world_grows", parks=True, charged=False)
    way.state.recovery = replace(way.state.recovery, grant=Grant("restart", "x", spent=ALL))
    way.state.progress = replace(way.state.progress, began_boot_s=BROKEN_S - 3.0)
    paid = plan(generation=1, granted=("charged:f/x/r",), spent=ALL)
    way.state.document = DocumentSeen(plan=paid)
    ctx = way.context(100.0)
    ctx.leader = True
    way.recoveries.answer(ctx, paid)
    assert way.state.grant is not None and way.state.grant.spent == ALL


def test_a_budget_is_whole_again_when_its_window_is_over() -> None:
    way = Way()
    books = {"f": Runbook("f", FATAL, "rank", ("restart_ranks",), budget_count=2,
                          budget_window_h=2.0)}
    paid = plan(generation=1, spent=(("f/x/r", 1), ("g/x/r", 3), ("restarts", 2),
                                     ("signature/f/7/e", 2)))

    def left(after_s: float) -> list[str]:
        ctx = way.context(after_s)
        ctx.runbooks = books
        return list(way.recoveries.unexpired(ctx, paid))

    everything = ["f/x/r", "g/x/r", "restarts", "signature/f/7/e"]
    assert left(0.0) == left(7200.0) == everything
    assert left(7201.0) == ["g/x/r", "restarts"], "a signature's window is its fault's"
    assert left(86400.0) == ["g/x/r", "restarts"] and left(86401.0) == ["restarts"]
    way.recoveries.new_boot()
    assert left(90000.0) == everything, "an age that is unknown begins anew"


def test_a_cause_is_held_until_a_later_plan() -> None:
    way = Way()
    assert not way.recoveries.planned(None) and not way.recoveries.planned(plan(generation=1))
    assert way.recoveries.planned(plan(generation=2))
    assert way.state.recovery is not None and way.state.recovery.planned
    assert way.state.recovery.grant is None and not way.recoveries.planned(plan(generation=3))
