"""The ledger: every node-second in exactly one category, whatever the levels show."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.agent.core import ledger
from holdfast.agent.core.ledger import CATEGORIES, Doing, Ledger, Shown, category
from holdfast.agent.core.model import Ended, Now, Observed, Settings
from holdfast.agent.core.node import Node

from .driver import Cluster, Lab, replace

SECONDS = st.floats(0.0, 1e6, allow_nan=False)
ODD = st.floats(allow_nan=True, allow_infinity=True)
PHASES = st.dictionaries(st.sampled_from([*ledger.OF_PHASE, "forward_backward", "data"]), ODD)
ACCOUNTS = st.builds(Shown, st.integers(0, 2), st.sampled_from([(), (0,), (0, 1)]), PHASES,
                     st.sampled_from([0.0, 101.0, 150.0, 300.0]), st.booleans())
DOING = st.dictionaries(st.sampled_from(["a", "b"]), st.sampled_from(
    [*CATEGORIES, ledger.WAITING]))
STEP = st.tuples(
    st.floats(0.0, 30.0), DOING, st.dictionaries(st.sampled_from(["a", "b"]), ACCOUNTS),
    st.sampled_from(["idle", "health_check"]))


@given(st.lists(STEP, max_size=30))
def test_the_categories_sum_to_the_wall_time_whatever_pages_say(
    steps: list[tuple[float, dict[str, str], dict[str, Shown], str]],
) -> None:
    book, now_s, before = Ledger(), 100.0, dict.fromkeys(CATEGORIES, 0.0)
    book.settle(now_s, "b", {})
    for elapsed_s, doing, phases, resting in steps:
        now_s += elapsed_s
        book.settle(now_s, "b", doing, resting, phases)
        rows, settled = dict(book.node_rows()), dict(book.settled_rows())
        assert all(settled[name] >= before[name] for name in rows), "a counter went back"
        assert set(book.runs) <= {"a", "b"} and set(book.seen_boot_s) <= set(book.open)
        assert all(set(parts) <= set(CATEGORIES) for parts in book.runs.values())
        before = settled
        assert set(rows) == set(CATEGORIES) and all(s >= 0.0 for s in rows.values())
        assert math.isclose(sum(rows.values()), now_s - 100.0, rel_tol=1e-9, abs_tol=1e-9)
        again = msgspec.json.decode(msgspec.json.encode(book.node), type=dict[str, float])
        assert again == book.node, "a number that JSON cannot keep"


def test_what_ranks_account_for_divides_a_second_of_training() -> None:
    book = Ledger()
    book.settle(0.0, "b", {"r": "training"}, shown={"r": Shown(1, (0, 1), {})})
    account = {"forward_backward": 1.2, "collective": 0.6, "checkpoint": 0.2}
    book.settle(1.0, "b", {"r": "training"}, shown={"r": Shown(1, (0, 1), account)})
    assert {name: s for name, s in book.node_rows() if s} == pytest.approx(
        {"training": 0.6, "collective_wait": 0.3, "checkpoint_stall": 0.1})
    # Another generation's account says nothing about the time before it began.
    book.settle(2.0, "b", {"r": "training"}, shown={"r": Shown(2, (0, 1), {"collective": 9.0})})
    assert book.node["training"] == pytest.approx(1.6)


def test_steps_that_are_done_again_are_recomputing_in_all_their_phases() -> None:
    book = Ledger()
    book.settle(0.0, "b", {"r": "recomputing"}, shown={"r": Shown(1, (0,), {})})
    book.settle(1.0, "b", {}, shown={"r": Shown(1, (0,), {"collective": 1.0})})
    assert book.node == {"recomputing": 1.0}


def spent(*looks: tuple[float, str, float], broken: bool = False) -> Ledger:
    """What a run of one rank comes to: (when, what it does from then on, its last step)."""
    book = Ledger()
    for boot_s, doing, last_step_s in looks:
        shown = Shown(1, (0,), {}, last_step_s, broken and doing.startswith("idle"))
        book.settle(boot_s, "b", {"r": doing} if doing else {}, shown={"r": shown} if doing else {})
    return book


def not_settled(book: Ledger) -> dict[str, float]:
    settled = dict(book.settled_rows())
    return {name: s - settled[name] for name, s in book.node_rows() if s > settled[name]}


def rows(book: Ledger) -> dict[str, float]:
    of_run = {name: s for _, name, s in book.run_rows() if s}
    assert of_run == {
        name: s for name, s in book.node_rows() if s and name != "idle"}
    return of_run


@pytest.mark.parametrize(("then", "booked"), [
    ("recovery", {"training": 1.75, "detection": 3.25}),
    ("detection", {"training": 1.75, "detection": 3.25}),
    ("paused", {"training": 1.75, "detection": 3.25}),
    ("health_check", {"training": 1.75, "detection": 3.25}),
    ("startup", {"training": 1.75, "detection": 3.25}),
    ("idle_no_spare", {"training": 5.0}), ("training", {"training": 5.0}),
    ("idle", {"training": 5.0}), ("unknown", {"training": 5.0}),
    ("evaluation", {"training": 5.0}),
])
def test_a_stillness_is_booked_from_the_last_step_on(then: str, booked: dict[str, float]) -> None:
    looks = [(100.0, "training", 99.0), (101.0, "training", 100.9), (102.0, "training", 101.75),
             (103.0, "training", 101.75), (103.5, ledger.WAITING, 101.75)]
    book = spent(*looks)
    assert rows(book) == pytest.approx({"training": 1.75, "detection": 1.75})
    assert not_settled(book) == pytest.approx({"detection": 1.75})
    book = spent(*looks, (105.0, then, 101.75))
    assert rows(book) == pytest.approx(booked)


def test_a_run_that_fails_ends_in_detection_and_one_that_is_done_does_not() -> None:
    looks = [(100.0, "training", 99.0), (104.0, "training", 101.0), (107.0, "idle", 101.0)]
    assert rows(spent(*looks, broken=True)) == {"training": 1.0, "detection": 6.0}
    assert rows(spent(*looks)) == {"training": 7.0}


def test_too_few_nodes_cut_a_step_where_something_is_broken_and_else_leave_it_open() -> None:
    looks = [(100.0, "training", 99.0), (104.0, "idle_no_spare", 101.0)]
    assert rows(spent(*looks, broken=True)) == {"training": 1.0, "detection": 3.0}
    looks += [(105.0, "training", 101.0), (106.0, "training", 105.5)]
    assert rows(spent(*looks)) == {"training": 5.0, "idle_no_spare": 1.0}


def test_of_steps_that_are_heard_of_late_the_newest_seconds_alone_are_open() -> None:
    """The first to finish each step is on another node: its word comes an interval later."""
    book = spent(*((100.0 + at / 2, "training", 100.0 + at / 2 - 0.6) for at in range(2000)))
    assert not_settled(book) == pytest.approx({"training": 0.6})
    missed = [(100.0, "training", 99.9), (104.0, "unknown", 99.9), (105.0, "", 0.0),
              (106.0, "training", 103.0), (107.0, "recovery", 103.0)]
    assert rows(spent(*missed))["detection"] == pytest.approx(2.0)


def test_a_slow_step_that_was_finished_is_training_whatever_the_next_one_comes_to() -> None:
    book = spent((100.0, "training", 99.0), (104.0, ledger.WAITING, 99.0),
                 (108.0, "training", 107.5), (109.0, "recovery", 107.5))
    assert rows(book) == pytest.approx({"training": 7.5, "detection": 1.5})


def test_a_lost_launcher_or_agent_leaves_open_what_was_open() -> None:
    looks = [(100.0, "training", 99.0), (105.0, "training", 100.5), (106.0, "unknown", 100.5),
             (107.0, "", 0.0), (108.0, "training", 100.5)]
    assert not_settled(spent(*looks)) == pytest.approx({"training": 5.5})
    assert rows(spent(*looks, (109.0, "recovery", 100.5)))["detection"] == pytest.approx(6.5)
    away = [(107.0 + at, "", 0.0) for at in range(8)]  # no look of these ten seconds is a step
    book = spent(*looks[:2], *away, (115.0, "training", 100.5), (116.0, "recovery", 100.5))
    assert rows(book)["training"] == pytest.approx(0.5)
    # Of one that does not come back, what was open is what it was.
    ticks = [(107.0 + at, "", 0.0) for at in range(70)]
    assert not_settled(spent(*looks[:-1], *ticks)) == {}
    assert rows(spent(*looks[:-1], *ticks))["training"] == pytest.approx(6.0)


def test_another_boot_cuts_the_step_short() -> None:
    book = spent((100.0, "training", 99.0), (105.0, "training", 100.5))
    book.settle(3.0, "c", {}, shown={})
    assert dict(book.settled_rows())["detection"] == pytest.approx(4.5)


@pytest.mark.parametrize("up_s", [3.0, 100.5, 109.0, 5000.0])
def test_no_second_of_another_boot_is_counted_however_long_it_lasts_already(up_s: float) -> None:
    book = spent((100.0, "training", 99.0), (101.0, "training", 100.9))
    book.settle(up_s, "c", {}, shown={})
    assert sum(seconds for _, seconds in book.settled_rows()) == pytest.approx(1.0)
    book.settle(up_s + 1.0, "c", {}, shown={})
    assert book.node["idle"] == pytest.approx(1.0)


def test_what_is_trained_behind_the_last_step_is_open_until_the_next() -> None:
    looks = [(100.0, "training", 99.0), (108.0, "training", 106.0)]
    book = spent(*looks)
    assert not_settled(book) == pytest.approx({"training": 2.0})
    book = spent(*looks, (109.0, "checkpoint_stall", 106.0), (113.0, "training", 106.0))
    assert not_settled(book) == pytest.approx({"training": 3.0})
    assert rows(book) == pytest.approx({"training": 9.0, "checkpoint_stall": 4.0})
    assert not_settled(spent(*looks, (109.0, "training", 109.0))) == {}


def test_a_slow_step_that_is_done_again_stays_one() -> None:
    book = spent((100.0, "recomputing", 99.0), (104.0, ledger.WAITING, 99.0),
                 (108.0, "recomputing", 99.0), (109.0, "recomputing", 109.0))
    assert rows(book) == {"recomputing": 9.0}
    assert not_settled(book) == {}


def test_before_a_first_step_nothing_is_open_but_a_stillness() -> None:
    assert not_settled(spent((0.0, "training", 0.0), (9.0, "training", 0.0))) == {}
    looks = [(0.0, "training", 0.0), (4.0, ledger.WAITING, 0.0)]
    assert rows(spent(*looks, (9.0, "recovery", 0.0))) == {"training": 4.0, "detection": 5.0}
    assert rows(spent(*looks, (9.0, "training", 0.0))) == {"training": 9.0}


@pytest.mark.parametrize(("stood_s", "moves"), [(0.5, False), (2.5, False), (2.5, True),
                                                 (30.0, True)])
@pytest.mark.parametrize("grade", ["trainer", "script"])
@pytest.mark.parametrize("nproc", [1, 2])
def test_a_fault_costs_the_ledger_what_its_incident_says_phase_by_phase(
    stood_s: float, nproc: int, grade: str, moves: bool
) -> None:
    """`moves`: the ranks go from phase to phase in the step that is never finished."""
    lab = Lab(grade=grade, nproc=nproc)
    lab.begin()
    lab.train(20)
    before = {name: seconds for _, name, seconds in lab.decision.run_ledger}
    for _ in range(round(stood_s / 0.25)):
        lab.all(still_s=0.1 if moves else lab.rank(0).still_s + 0.25)
        lab.step(0.25)
    lab.kill(nproc - 1)
    lab.step()
    lab.boot_s += 0.25
    if nproc > 1:
        lab.park(0, 20) if grade == "trainer" else lab.kill(0, 15)
    lab.settle()
    lab.all(step=21 if grade == "trainer" else 1, phase="data", still_s=0.0)
    lab.step(2.0)
    (one,) = [one for one in lab.incidents.values() if one.fault == "rank_killed"]
    after = {name: seconds for _, name, seconds in lab.decision.run_ledger}
    assert one.detection_s == pytest.approx(stood_s)
    assert after["detection"] == pytest.approx(one.detection_s)
    assert after["recovery"] == pytest.approx(one.decision_s + one.restart_s)
    assert after["training"] == pytest.approx(before["training"])


@pytest.mark.parametrize("parks", [False, True])
def test_every_node_of_a_run_books_a_step_that_one_of_them_lost(parks: bool) -> None:
    cluster = Cluster("ab")
    for _ in range(20):
        cluster.step(0.25)
    steps(cluster, 20)
    before = {name: dict(rows_of(lab)) for name, lab in cluster.labs.items()}
    for _ in range(10):  # of the 21st step
        for lab in cluster.labs.values():
            lab.all(still_s=0.1)
        cluster.step(0.25)
    killed, other = (cluster.labs[name] for name in sorted(
        cluster.labs, key=lambda name: name == cluster.leader()))
    killed.kill(killed.view.ranks[0].rank)
    if parks:
        other.park(other.view.ranks[0].rank, 20)
    for _ in range(20):
        cluster.step(0.25)
    assert cluster.plan().generation == 2
    steps(cluster, 22)
    for name, lab in cluster.labs.items():
        spent_s = {what: s - before[name].get(what, 0.0) for what, s in rows_of(lab).items()}
        assert spent_s["training"] <= 0.5, (name, spent_s)  # of the steps behind the fault
        assert spent_s["detection"] + spent_s["recovery"] > 6.0, (name, spent_s)


def steps(cluster: Cluster, to: int) -> None:
    """Every rank finishes steps up to `to`."""
    done = max(rank.step for lab in cluster.labs.values() for rank in lab.view.ranks)
    for step in range(done + 1, to + 1):
        for lab in cluster.labs.values():
            lab.all(step=step, phase="forward_backward", still_s=0.0, step_time_s=0.25,
                    state="running", parked=None)
        cluster.step(0.25)


def test_a_spare_waits_in_startup_all_the_while() -> None:
    cluster = Cluster("abc", nnodes=2)
    for _ in range(20):
        cluster.step(0.25)
    steps(cluster, 20)
    members = cluster.plan().members
    for name, lab in cluster.labs.items():
        spent_s = rows_of(lab)
        assert "recovery" not in spent_s and "detection" not in spent_s, (name, spent_s)
        assert ("training" in spent_s) is (name in members), (name, spent_s)


@pytest.mark.parametrize("grade", ["trainer", "script"])
def test_what_comes_behind_the_last_step_of_a_run_that_is_done_is_no_fault(grade: str) -> None:
    lab = Lab(grade=grade)
    lab.begin()
    lab.train(20)
    for _ in range(30):
        lab.all(still_s=0.1)
        lab.step(1.0)
    lab.end(1, Ended(0, 0))
    lab.step(0.3)
    lab.end(0, Ended(0, 0))
    lab.settle()
    lab.step(1.0)
    assert lab.finishes() == [0]
    assert rows_of(lab).get("detection", 0.0) < 0.5, rows_of(lab)
    assert rows_of(lab)["training"] > 32.0, rows_of(lab)


def test_who_is_asked_to_leave_has_no_fault() -> None:
    lab = Lab(grade="script", nproc=1)
    lab.begin()
    lab.train(20)
    lab.all(still_s=0.1)
    lab.step(10.0)
    lab.view = replace(lab.view, shutdown="preempted")
    lab.step(1.0)
    lab.end(0, Ended(143, 15))
    lab.settle()
    lab.step(1.0)
    assert "detection" not in rows_of(lab) and "recovery" not in rows_of(lab), rows_of(lab)


@pytest.mark.parametrize("still_s", [0.1, 30.0])
def test_an_agent_that_is_started_anew_in_a_step_knows_what_a_fault_cut_short(
    still_s: float,
) -> None:
    lab = Lab(grade="script", nproc=1)
    lab.begin()
    lab.train(20)
    trained_s = rows_of(lab)["training"]
    for _ in range(9):
        lab.all(still_s=0.1)
        lab.step(1.0)
    lab.restart_agent()
    lab.view = replace(lab.view, registered_boot_s=lab.boot_s)  # it greets the new one
    for _ in range(5):
        lab.all(still_s=still_s)
        lab.step(1.0)
    lab.kill(0)
    lab.settle()
    lab.all(step=1, phase="data", still_s=0.0)
    lab.step(1.0)
    (one,) = [one for one in lab.incidents.values() if one.fault == "rank_killed"]
    assert one.detection_s == pytest.approx(14.0)
    assert rows_of(lab)["detection"] == pytest.approx(14.0)
    assert rows_of(lab)["training"] == pytest.approx(trained_s)


def stands_still(seconds: int) -> tuple[Lab, float]:
    """A script that does so for that long, and what it had trained before."""
    lab = Lab(grade="script", nproc=1)
    lab.begin()
    lab.train(20)
    trained_s = rows_of(lab)["training"]
    for still_s in range(1, seconds + 1):
        lab.all(still_s=float(still_s))
        lab.step(1.0)
    return lab, trained_s


def test_a_hang_that_a_new_launcher_ends_was_no_training() -> None:
    lab, trained_s = stands_still(11)
    lab.view = replace(lab.view, connected=False)
    for _ in range(5):
        lab.step(1.0)
    lab.view = replace(lab.view, connected=True, registered_boot_s=lab.boot_s, generation=0,
                       ranks=(), state="")
    lab.step(1.0)
    lab.step(1.0)
    assert rows_of(lab)["training"] == pytest.approx(trained_s), rows_of(lab)
    assert rows_of(lab)["detection"] == pytest.approx(12.0), rows_of(lab)


def test_a_hang_that_its_user_interrupts_was_no_training() -> None:
    lab, trained_s = stands_still(5)
    lab.view = replace(lab.view, shutdown="interrupted")
    lab.end(0, Ended(130, 2))
    lab.step(1.0)
    assert rows_of(lab)["detection"] == pytest.approx(6.0), rows_of(lab)
    assert rows_of(lab)["training"] == pytest.approx(trained_s), rows_of(lab)


def submitted_again(lab: Lab) -> None:
    """The launcher is gone with its ranks, and another of the same name comes."""
    lab.view = replace(lab.view, connected=False)
    lab.step(2.0)
    lab.view = replace(lab.view, connected=True, registered_boot_s=lab.boot_s, generation=0,
                       ranks=(), state="idle")
    lab.step(1.0)
    lab.begin()


def test_what_a_trainer_does_again_under_a_new_launcher_is_recomputing() -> None:
    lab = Lab()
    lab.begin()
    lab.train(50)
    lab.commit(20)
    submitted_again(lab)
    before = rows_of(lab)["training"]
    assert lab.plan().resume.step == 20
    lab.all(step=20)
    lab.train(60)
    spent_s = rows_of(lab)
    assert spent_s["recomputing"] == pytest.approx(30 * 0.15, abs=0.2), spent_s
    assert spent_s["training"] - before == pytest.approx(10 * 0.15, abs=0.2), spent_s


def test_a_script_that_is_submitted_again_does_nothing_again() -> None:
    lab = Lab(grade="script", nproc=1)
    lab.begin()
    lab.train(50)
    lab.kill(0)
    lab.settle()
    lab.train(60)
    lab.end(0, Ended(0, 0))
    lab.settle()
    lab.step(1.0)
    before = dict(rows_of(lab))
    submitted_again(lab)
    lab.train(30)
    spent_s = {name: s - before.get(name, 0.0) for name, s in rows_of(lab).items()}
    assert spent_s["training"] == pytest.approx(30 * 0.15, abs=0.3), spent_s
    assert spent_s.get("maybe_recomputing", 0.0) == 0.0, spent_s


@pytest.mark.parametrize("grade", ["trainer", "script"])
def test_a_launcher_that_one_of_many_nodes_lost_costs_what_its_incident_says(grade: str) -> None:
    cluster = Cluster("ab", grade=grade)
    for _ in range(20):
        cluster.step(0.25)
    steps(cluster, 20)
    before = {name: dict(rows_of(lab)) for name, lab in cluster.labs.items()}
    for _ in range(10):
        for lab in cluster.labs.values():
            lab.all(still_s=0.1)
        cluster.step(0.25)
    lead = cluster.labs[cluster.leader()]
    lead.view = replace(lead.view, connected=False, ranks=())
    cluster.step(1.0)
    lead.view = replace(lead.view, connected=True, registered_boot_s=lead.boot_s, generation=0,
                        ranks=(), state="")
    for _ in range(40):
        cluster.step(0.25)
    steps(cluster, 22)
    (one,) = [one for lab in cluster.labs.values() for one in lab.incidents.values()
              if one.fault == "launcher_lost"]
    assert one.detection_s > 2.5
    (other,) = [lab for lab in cluster.labs.values() if lab is not lead]
    spent_s = rows_of(other)["detection"] - before[other.name].get("detection", 0.0)
    assert spent_s == pytest.approx(one.detection_s, abs=1.0), (one, rows_of(other))


def rows_of(lab: Lab) -> dict[str, float]:
    return {name: seconds for _, name, seconds in lab.decision.run_ledger}


@pytest.mark.parametrize(("doing", "name"), [
    (Doing(live=True, phases=("forward_backward",), step=5, step_s=0.1), "training"),
    (Doing(live=True, phases=("forward_backward",)), "training"),  # its first step
    (Doing(checked=True), "health_check"), (Doing(no_spare=True), "idle_no_spare"),
    (Doing(no_spare=True, broken=True, known=True), "idle_no_spare"),
    (Doing(live=True, phases=("forward_backward",), checked=True, step=1), "training"),
    (Doing(live=True, phases=("checkpoint",), step=5), "checkpoint_stall"),
    (Doing(live=True, phases=("forward_backward",), redoes=True, step=5, base_step=9),
     "recomputing"),
    (Doing(live=True, phases=("forward_backward",), step=5, base_step=9), "maybe_recomputing"),
    (Doing(fault_paused=True, broken=True), "paused"),
    (Doing(over=True, no_spare=True), "idle"),
])
def test_what_a_run_does_has_one_name(doing: Doing, name: str) -> None:
    assert category(doing) == name


def test_memory_of_an_older_release_keeps_its_seconds() -> None:
    old = (b'{"node": {"checkpoint": 2.0, "redone": 1.0, "idle": 4.0}, '
           b'"runs": {"r": {"redone": 1.0}}, "doing": {"r": "redone"}}')
    book = msgspec.json.decode(old, type=Ledger)
    assert book.node == {"checkpoint_stall": 2.0, "recomputing": 1.0, "idle": 4.0}
    assert sum(seconds for _, seconds in book.node_rows()) == 7.0
    assert book.runs == {"r": {"recomputing": 1.0}} and book.doing == {"r": "recomputing"}


def test_a_stillness_that_an_older_release_held_is_detection() -> None:
    old = b'{"node": {"training": 2.0}, "runs": {"r": {"training": 2.0}}, "held": {"r": 3.0}}'
    book = msgspec.json.decode(old, type=Ledger)
    assert book.node == {"training": 2.0, "detection": 3.0} == book.runs["r"]
    assert msgspec.json.decode(msgspec.json.encode(book), type=Ledger) == book


def test_a_launcher_that_imports_is_startup_of_its_node() -> None:
    node = Node("a", Settings(), {})
    for boot_s, coming in ((100.0, True), (102.0, True), (103.0, False), (104.0, False)):
        decision = node.step(Now(boot_s=boot_s, wall_s=boot_s, boot_id="b"),
                             Observed(coming=coming))
    assert {name: s for name, s in decision.ledger if s} == {"startup": 3.0, "idle": 1.0}


def test_a_run_that_too_few_nodes_can_take_is_idle_without_a_spare() -> None:
    cluster = Cluster("ab")
    cluster.run(20)
    cluster.dead.add("b")
    cluster.run(60)
    assert idle_s(cluster, "a") > 30.0
    spared = Cluster("abc")
    spared.run(20)
    member = next(n for n in spared.plan().members if n != spared.leader())
    spared.dead.add(member)
    spared.run(60)
    # While nodes have not heard of each other, none can say that there are enough.
    assert all(idle_s(spared, name) < 10.0 for name in spared.labs if name != member), [
        (name, idle_s(spared, name)) for name in spared.labs]


def idle_s(cluster: Cluster, node: str) -> float:
    return cluster.labs[node].node.kept.ledger.node.get("idle_no_spare", 0.0)


def test_ranks_that_compile_before_they_have_a_place_are_no_startup() -> None:
    assert category(Doing(compiling=True)) == "compile"
    assert category(Doing()) == "startup"
    assert category(Doing(compiling=True, broken=True, known=True)) == "recovery"


# A run of one trainer that takes steps of 1 s, and what makes a second something else.
STEPS = Doing(live=True, phases=("forward_backward",), step=9, step_s=1.0, redoes=True)


@pytest.mark.parametrize(("change", "booked"), [
    ({}, "training"), ({"connected": False, "over": True}, "unknown"), ({"over": True}, "idle"),
    ({"fault_paused": True, "broken": True}, "paused"),
    ({"live": False, "checked": True}, "health_check"), ({"checked": True}, "training"),
    ({"live": False}, "startup"), ({"live": False, "compiling": True}, "compile"),
    ({"live": False, "again": True}, "recovery"), ({"again": True}, "recovery"),
    ({"phases": ("startup",)}, "startup"),
    ({"phases": ("startup", "data")}, "training"),
    ({"phases": ("compile", "data")}, "compile"), ({"phases": ("eval",)}, "evaluation"),
    ({"phases": ("checkpoint", "data")}, "checkpoint_stall"),
    ({"broken": True}, "detection"), ({"broken": True, "known": True}, "recovery"),
    ({"broken": True, "base_step": 12}, "recomputing"),  # it trains, behind where it was
    ({"broken": True, "base_step": 9}, "detection"),
    ({"broken": True, "base_step": 12, "resumed_step": 9}, "detection"),  # no step is done yet
    ({"broken": True, "base_step": 12, "phases": ("startup", "data")}, "detection"),
    ({"base_step": 9}, "training"), ({"base_step": 10}, "recomputing"),
    ({"base_step": 10, "redoes": False}, "maybe_recomputing"),
    ({"still_s": 2.9}, "training"), ({"still_s": 3.1}, ledger.WAITING),
    ({"step_s": 0.0, "still_s": ledger.STILL_S}, "training"),
    ({"step_s": 0.0, "still_s": ledger.STILL_S + 0.1}, ledger.WAITING),
    ({"no_spare": True}, "training"), ({"no_spare": True, "broken": True}, "idle_no_spare"),
    ({"no_spare": True, "still_s": 3.1}, "idle_no_spare"),
    ({"no_spare": True, "live": False}, "idle_no_spare"),
])
def test_what_a_second_of_a_run_is_booked_as(change: dict[str, object], booked: str) -> None:
    assert category(replace(STEPS, **change)) == booked


def test_what_ranks_account_for_is_summed_over_those_that_live() -> None:
    lab = Lab(nproc=3)
    lab.begin()
    lab.train(3)
    lab.change(0, phase_s=(("data", 1.0), ("forward_backward", 2.0)))
    lab.change(1, phase_s=(("data", 0.5),))
    lab.change(2, phase_s=(("data", 99.0),))
    lab.kill(2)
    lab.step(0.01)
    told = lab.node.cases["r"].shown
    assert told == Shown(1, (0, 1), {"data": 1.5, "forward_backward": 2.0},
                         pytest.approx(100.45), broken=True)
    lab.kill(0)
    lab.kill(1)
    lab.step(0.01)
    assert lab.node.cases["r"].shown == Shown(
        last_step_boot_s=pytest.approx(100.45), broken=True)
