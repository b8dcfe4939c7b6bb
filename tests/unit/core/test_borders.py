"""What decides, at the very edge of its numbers: one less, and one more.

A threshold that is off by one, a clock read with the wrong sign and a list taken at its other end
change no story that is told with room to spare.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.agent.core import ledger
from holdfast.agent.core.detect.ranks import ended, limits
from holdfast.agent.core.detect.ranks.ended import Cause
from holdfast.agent.core.effects.in_flight import RETRY_S, InFlight
from holdfast.agent.core.model import (
    Effect,
    EffectOutcome,
    Ended,
    Event,
    Lease,
    Now,
    Plan,
    RankView,
    Resume,
    RunView,
    Settings,
    Stop,
)
from holdfast.agent.core.nodes import breaker
from holdfast.agent.core.run import plan as planning
from holdfast.agent.core.run import progress, stage, validity
from holdfast.agent.core.run.operator import Operator, OperatorRequest
from holdfast.agent.core.run.state import (
    DocumentSeen,
    Ending,
    LauncherSeen,
    Progress,
    Recovery,
    RunState,
)
from holdfast.agent.core.series.wait_history import History

from .driver import Lab


def rank(number: int, **how: object) -> RankView:
    return RankView(number, "a", 100 + number, 1, "running", **how)  # type: ignore[arg-type]


def dead(number: int, boot_s: float, error: str = "", **how: object) -> RankView:
    end = Ended(1, outcome="exception", error=error or "ValueError: x", boot_s=boot_s)
    return rank(number, ended=msgspec.structs.replace(end, **how))


# ---------------------------------------------------------------------------------- the breaker


@pytest.mark.parametrize("fleet", [0, 1, 2, 3, 10, 59, 60, 61, 79, 80, 100, 120, 139, 140, 2000])
def test_the_breaker_opens_at_three_nodes_and_above_a_twentieth(fleet: int) -> None:
    """More than 5 % of them, and at least 3: both, and it says how many that is."""
    least = max(3, fleet // 20 + 1)
    for count in range(least + 2):
        nodes = tuple(f"n{number}" for number in range(count))
        opened, why = breaker.is_open({"f": nodes, "g": nodes * 9}, "f", fleet, Settings())
        assert opened is (count >= least)
        assert not opened or f"{least} open the breaker" in why


# ------------------------------------------------------------------------------ what is in flight


def draft(deadline_s: float = 10.0) -> Effect:
    return Effect("", "stop", "run/r", "because", deadline_s, body=Stop("r", 1, (0,), 5.0, ""))


def asked(table: InFlight, boot_s: float, deadline_s: float = 10.0) -> Effect:
    effect = table.add(1, draft(deadline_s), boot_s)
    assert effect is not None
    return effect


def test_what_is_tried_again_or_given_up_next_is_told_to_the_fraction_of_a_second() -> None:
    table = InFlight()
    assert table.retry_at_s(1000.0) == 3600.0
    effect = asked(table, 1000.0)
    assert table.retry_at_s(1000.0) == 10.0 and table.retry_at_s(1009.5) == 0.5
    assert table.retry_at_s(1010.5) == 3600.0
    table.settle((EffectOutcome(effect.id, ok=False, error="no"),), 1004.0)
    assert table.retry_at_s(1004.0) == RETRY_S and table.retry_at_s(1004.0 + RETRY_S / 4) < RETRY_S
    assert table.add(1, draft(), 1004.0 + RETRY_S / 2) is None
    asked(table, 1004.0 + RETRY_S)


def test_what_the_levels_show_may_be_asked_for_again_at_once() -> None:
    table = InFlight()
    table.came_true(asked(table, 0.25).id)
    assert not table.busy("run/r") and table.failures(1, "run/r", "stop") == 0
    asked(table, 0.5)


# ------------------------------------------------------------------------------- who is to blame


def test_the_first_end_opens_the_window_and_a_consequence_is_no_root() -> None:
    gone = "connection reset by peer"
    first, later = dead(1, 100.0, gone), dead(0, 100.0 + ended.CASCADE_S)
    assert ended.first_root([first, later]) == (later, True)
    late = dead(0, 100.0 + ended.CASCADE_S + 0.1)
    assert ended.first_root([first, late]) == (first, False)
    assert ended.first_root([]) == (None, False)
    assert ended.first_root([rank(2), first]) == (None, False)
    assert ended.first_root([first, rank(2)]) == (first, False)


def test_only_our_own_ranks_that_the_kernel_killed_for_memory_are_named() -> None:
    def event(fault: str, pid: int) -> Event:
        return Event("host", "x", "host", "watch", "warn", "a line", fault=fault, pid=pid)

    events = (event(ended.OUT_OF_MEMORY, 101), event(ended.OUT_OF_MEMORY, 7), event("other", 102))
    assert ended.oom_pids(events, (101, 102)) == [101]


def test_of_sixty_four_ranks_that_the_kernel_killed_for_memory_each_is_known() -> None:
    lab, most = Lab(nproc=64), 64
    lab.begin()
    pids = tuple(one.pid for one in lab.view.ranks)
    lab.events = tuple(Event("host", "x", "host", "watch", "warn", "a line", pid=pid,
                             fault=ended.OUT_OF_MEMORY) for pid in pids)
    lab.step(0.1)
    assert lab.node.cases["r"].state.progress.oom_pids == pids
    lab.step(0.1)
    assert len(lab.node.cases["r"].state.progress.oom_pids) == most, "and it is bounded"


@pytest.mark.parametrize(("end", "reason", "final"), [
    (Ended(139, 11), "crashed with SIGSEGV", False), (Ended(134, 6), "crashed with SIGABRT", False),
    (Ended(5), "exit code 5", False), (Ended(127), "exit code 127", True),
    (Ended(139, 11, error="Fatal Python error"), "Fatal Python error", False),
])
def test_a_rank_that_left_no_word_is_known_by_how_its_process_ended(
    end: Ended, reason: str, final: bool
) -> None:
    cause = ended.cause_of(rank(3, ended=end), 0, ())
    assert cause.reason.endswith(f" ended by itself: {reason}") and cause.final is final
    assert (cause.fault, cause.user, cause.rank, cause.pid) == ("rank_exited", True, 3, 103)


def test_of_ranks_that_disagree_the_one_that_aborts_is_no_culprit() -> None:
    cause = ended.cause_of(dead(3, 9.0, f"RuntimeError: {ended.MISMATCH} in bytes"), 0, ())
    assert (cause.fault, cause.user) == ("collective_mismatch", True)
    assert (cause.rank, cause.node, cause.pid, cause.confidence) == (-1, "", 0, 0.9)


def test_of_victims_alone_nobody_is_the_culprit() -> None:
    cause = ended.victims_only(dead(3, 9.0, "gloo: connection closed by peer"), 2, ())
    assert (cause.rank, cause.node, cause.pid, cause.confidence) == (-1, "", 0, 0.5)


def test_what_a_script_did_itself_is_its_own_doing() -> None:
    plain = rank(0, ended=Ended(3))
    for one in (dead(0, 1.0), dead(0, 1.0, outcome="exit"), plain):
        assert ended.cause_of(one, 0, ()).user
    killed = rank(0, ended=Ended(137, signal=9))
    assert not ended.cause_of(killed, 0, ()).user
    assert not ended.cause_of(killed, 0, (100,)).user


@pytest.mark.parametrize(
    ("outcome", "code", "well"),
    [("done", 1, True), ("exit", 0, True), ("exit", 2, False), ("exception", 0, False),
     ("bad_checkpoint", 0, False), ("", 0, True), ("", 1, False)])
def test_the_workers_own_word_says_how_it_ended(outcome: str, code: int, well: bool) -> None:
    said = "".join([*outcome])  # no constant: equal is enough
    assert ended.ended_well(Ended(code, outcome=said)) is well


# -------------------------------------------------------------------------- leases and histories


def test_a_lease_leads_to_its_last_instant_and_no_longer() -> None:
    leases = (Lease("r", "a", 100.0), Lease("s", "b", 200.0))
    for boot_s, leads in ((99.9, True), (100.0, False), (100.1, False), (5000.0, False)):
        assert planning.is_leader("r", "a", leases, Now(boot_s, 0.0, "b")) is leads
    now = Now(1.0, 0.0, "b")
    assert not planning.is_leader("r", "b", leases, now)
    assert not planning.is_leader("s", "a", leases, now)


HISTORIES = st.lists(
    st.tuples(st.integers(1, 12), st.integers(0, 60)), max_size=8, unique_by=lambda one: one[0])


@given(HISTORIES, st.integers(1, 12), st.integers(0, 60))
def test_a_longer_history_keeps_just_what_a_later_plan_does_not_cover(
    entries: list[tuple[int, int]], generation: int, step: int
) -> None:
    history = tuple(sorted(entries))
    longer = validity.extend_history(history, generation, step)
    assert longer[-1] == (generation, step)
    assert set(longer[:-1]) == {(g, s) for g, s in history if g < generation and s < step}


# --------------------------------------------------------------------------- what people ask for


def operator(**state: object) -> Operator:
    return Operator(RunState("r", **state))  # type: ignore[arg-type]


def planned(generation: int, granted: tuple[str, ...] = ()) -> Plan:
    return Plan("r", generation, ("a",), ((0, "a"),), Resume("fresh"), "because", granted=granted)


def test_each_request_gets_its_own_answer() -> None:
    cause = ended.Cause("restart_asked", 1, "asked", request="m")
    asking = operator(recovery=Recovery(cause))
    asking.restart = OperatorRequest("why", id="".join(["p", "q"]))
    assert asking.answer("m", True) is None and asking.answer("pq", True) is None
    for other in ("a", "n", "z", ""):
        answer = asking.answer(other, True)
        assert answer is not None and not answer.ok and "another request" in answer.text
    assert asking.answer("m", False) is not None and asking.answer("pq", False) is not None
    done = operator(document=DocumentSeen(plan=planned(4, ("m",))))
    assert done.answer("m", True).ok  # type: ignore[union-attr]
    over = operator(ending=Ending(0))
    over.restart = OperatorRequest("why", id="p")
    assert over.answer("p", True).text == "the run is over"  # type: ignore[union-attr]


def test_a_request_that_names_no_rank_is_about_no_rank() -> None:
    assert OperatorRequest("why").rank == -1


def test_a_node_that_leaves_ends_what_lives_and_nothing_else() -> None:
    for ranks, drained in (((), True), ((rank(0),), True),
                           ((msgspec.structs.replace(rank(0), state="ended"), rank(1)), True),
                           ((msgspec.structs.replace(rank(0), state="ended"),), False)):
        leaving = operator()
        leaving.leave(RunView("r", "a", "trainer", 2, ranks=ranks), "maintenance")
        assert bool(leaving.state.held.drain) is drained, ranks


# --------------------------------------------------------------------------------- how long it is


def test_a_cost_that_is_not_known_is_no_second_and_a_run_has_started() -> None:
    costs = limits.Costs("script")
    assert (costs.startup_s, costs.hang_limit_s, costs.steps_to_redo, costs.started) == (
        0.0, 0.0, 0, True)
    still = rank(0, phase="startup")
    settings = Settings()
    assert limits.act_s(still, costs, History(), settings) == settings.quiet_limit_s


def step_of(boot_s: float, grade: str = "trainer") -> Any:
    return SimpleNamespace(now=Now(boot_s, 0.0, "b"), view=SimpleNamespace(grade=grade))


# ------------------------------------------------------------------------------ loops and waits


def test_each_act_by_cost_at_the_same_step_doubles_the_next_wait_up_to_its_bound() -> None:
    state, waits = RunState("r"), []
    for _ in range(8):
        progress.broken_off(step_of(100.0), state, Cause("rank_hung", 1, "x", step=7), True)
        waits.append(state.progress.backoff)
    assert waits == [2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 64.0, 64.0]
    progress.broken_off(step_of(100.0), state, Cause("rank_hung", 1, "x", step=8), True)
    assert state.progress.backoff == 2.0


@pytest.mark.parametrize(("lived_s", "quick"), [(4.9, 1), (5.0, 0), (5.5, 0)])
def test_a_generation_that_broke_within_five_seconds_hardly_began(
    lived_s: float, quick: int
) -> None:
    state = RunState("r", progress=Progress(began_boot_s=100.0))
    progress.broken_off(step_of(100.0 + lived_s), state, Cause("rank_exited", 1, "x"), False)
    assert state.progress.quick == quick


# -------------------------------------------------------------------------- what no step may do


def test_a_broken_state_is_named_and_a_whole_one_is_not() -> None:
    whole = RunState("r", launcher=LauncherSeen(generation=2, top=3))
    assert stage.check_invariants(whole, whole) == ()
    cause = Cause("rank_killed", 1, "x")
    for wrong, said in (
        (RunState("r", ending=Ending(left=True)), "the launcher left before the end"),
        (RunState("r", recovery=Recovery(cause, stop_boot_s=0.5)),
         "ranks were stopped without a grant"),
        (RunState("r", launcher=LauncherSeen(generation=2, top=1)),
         "a launcher showed more than the top"),
        (RunState("r", document=DocumentSeen(meant=1)), "a generation is meant that no plan has"),
    ):
        assert stage.check_invariants(wrong) == (said,)
    assert stage.check_invariants(RunState("r", ending=Ending(0, left=True))) == ()
    for top, fell in ((2, True), (3, False), (4, False)):
        now = RunState("r", launcher=LauncherSeen(generation=2, top=top))
        assert ("the top generation fell" in stage.check_invariants(now, whole)) is fell


# ----------------------------------------------------------------------------------- the ledger


def test_the_books_hold_sixty_four_runs_and_those_that_are_here() -> None:
    book = ledger.Ledger()
    for number in range(70):
        book.settle(float(number), "b", {f"r{number:02d}": "training"})
    book.settle(70.0, "b", {"r00": "idle"})
    assert len(book.runs) == 64 and "r69" in book.runs and "r05" not in book.runs


def test_a_wait_is_held_back_however_its_word_came_here() -> None:
    book = ledger.Ledger()
    book.settle(0.0, "b", {"r": "".join(["wait", "ing"])})
    book.settle(2.0, "b", {"r": "training"})
    assert book.runs["r"] == {"training": 2.0}


def test_of_whom_nothing_is_known_nothing_is_over_or_slow() -> None:
    assert ledger.Doing() == ledger.Doing(
        connected=True, over=False, known=False, live=False, still_s=0.0, step_s=0.0)
    doing = ledger.Doing(live=True, phases=("forward_backward",), step=9, still_s=1.1)
    assert ledger.category(doing) != ledger.category(ledger.Doing(
        live=True, phases=("forward_backward",), step=9, still_s=1.1, step_s=1.0))
