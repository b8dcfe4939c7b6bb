"""The pure leaves, by value: validity, budgets, layout, effects, windows, breaker, ledger."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.agent.core import ledger
from holdfast.agent.core.detect.ranks.ended import Cause
from holdfast.agent.core.effects import in_flight
from holdfast.agent.core.model import (
    Commit,
    Effect,
    EffectOutcome,
    Finish,
    Resume,
    Settings,
    node_subject,
    rank_subject,
    subject_of,
)
from holdfast.agent.core.nodes import breaker
from holdfast.agent.core.run import plan, policy, reconcile, validity
from holdfast.agent.core.run.layout import World
from holdfast.agent.core.series.wait_history import History, Seen, percentile

from .driver import Lab, replace


def commits(*pairs: tuple[int, int]) -> tuple[Commit, ...]:
    return tuple(Commit(g, s, f"step-{s}.gen-{g}") for g, s in pairs)


def keys(found: tuple[Commit, ...]) -> list[tuple[int, int]]:
    return [(c.generation, c.step) for c in found]


def test_a_commit_above_where_a_later_plan_resumed_is_void() -> None:
    history = ((1, 0), (2, 10), (3, 12))
    found = validity.valid_commits(commits((1, 15), (1, 10), (2, 12), (2, 15), (3, 15)), history)
    assert keys(found) == [(1, 10), (2, 12), (3, 15)]


def test_bad_commits_are_not_valid_and_quarantined_ones_not_used() -> None:
    listed = (*commits((1, 5), (1, 10)), Commit(1, 15, "x", bad="digest"))
    assert keys(validity.valid_commits(listed, ())) == [(1, 5), (1, 10)]
    newest = validity.newest_valid(listed, (), ("step-10.gen-1",))
    assert newest is not None and newest.step == 5


@pytest.mark.parametrize(("listed", "step"), [
    ({"m": (10, 15), "n": (10,)}, 15),  # one folder, and n has not heard of the newest yet
    ({"m": (10, 15), "n": (15,)}, 15),
    ({"m": (10, 15), "n": (10, 20)}, 20),
    ({"m": (10, 20), "n": (15,)}, 20),  # two folders: what only one can read may still be sent
    ({"m": (5, 10, 15), "n": (5, 20)}, 20),
])
def test_a_newest_checkpoint_counts_where_a_node_has_only_not_heard_of_it(
    listed: dict[str, tuple[int, ...]], step: int
) -> None:
    known = commits(*sorted({(1, one) for steps in listed.values() for one in steps}))
    paths = {one.step: one.path for one in known}
    view = plan.PlanView(
        "r", "trainer", True, 1, 1, "x", (plan.Member("m", fresh=True), plan.Member("n", True)),
        World(least=2, most=2), commits=known, checkpoint_dir="/a",
        listed=tuple((node, frozenset(paths[one] for one in steps))
                     for node, steps in listed.items()))
    made, why = plan.plan_run(view)
    assert made is not None and made.resume.step == step, why


def test_one_name_with_two_folders_keeps_two_histories() -> None:
    """a, then b, then a again: plans for b void nothing in a, and a's own void commits stay so."""
    members, current = (plan.Member("n", fresh=True),), None

    def planned(folder: str, listed: tuple[Commit, ...]) -> plan.Plan:
        nonlocal current
        highest = current.generation if current else 0
        view = plan.PlanView("r", "trainer", True, highest, 1, "x", members, current=current,
                             commits=listed, checkpoint_dir=folder)
        current, why = plan.plan_run(view)
        assert current is not None, why
        return current

    assert planned("/a", ()).resume.step == 0
    assert planned("/a", commits((1, 10))).resume.step == 10
    assert planned("/b", ()).resume.step == 0
    in_b = planned("/b", commits((3, 40), (1, 50)))  # (1, 50): copied there from another run
    assert (in_b.resume.step, in_b.history) == (40, ((3, 0), (4, 40)))
    back = planned("/a", commits((1, 10), (1, 15), (2, 30)))
    assert (back.resume.step, back.history) == (30, ((1, 0), (2, 10), (5, 30)))
    assert planned("/b", commits((3, 40), (3, 45))).resume.step == 40  # 45 is void since plan 4


def test_histories_of_other_folders_are_bounded() -> None:
    current = None
    for number in range(2 * validity.OTHERS_MAX):
        current = plan.Plan("r", number, (), (), Resume("fresh"), "x", history=((number, 0),),
                            checkpoint_dir=f"/{number}",
                            other_histories=validity.other_histories(current, f"/{number}"))
    assert current is not None and len(current.other_histories) == validity.OTHERS_MAX
    assert current.other_histories[-1] == (f"/{number - 1}", ((number - 1, 0),))


steps = st.lists(st.integers(0, 40), min_size=1, max_size=60)


@settings(max_examples=200, deadline=None)
@given(steps, st.integers(1, 60), st.integers(0, 40))
def test_a_shortened_history_voids_exactly_what_the_full_one_does(
    resumed: list[int], generation: int, step: int
) -> None:
    full = tuple(enumerate(resumed, start=1))
    short: validity.History = ()
    for g, s in full:
        short = validity.extend_history(short, g, s)
    assert validity.is_valid(generation, step, short) == validity.is_valid(generation, step, full)


def test_a_very_long_history_is_bounded_and_never_revives_a_void_commit() -> None:
    history: validity.History = ()
    for generation in range(1, 1000):
        history = validity.extend_history(history, generation, generation * 10)
    assert len(history) == validity.HISTORY_MAX
    for generation in (1, 400, 700, 998):
        assert not validity.is_valid(generation, generation * 10 + 11, history)
    assert validity.is_valid(999, 10_000, history)


def test_keep_n_counts_valid_ones_and_spares_what_lies_above() -> None:
    listed = [replace(each, verified=True)
              for each in commits((1, 5), (1, 10), (1, 20), (2, 15), (2, 20))]
    gone = reconcile.deletable(listed, ((1, 0), (2, 10)), 2, ())
    assert gone == ("step-10.gen-1", "step-5.gen-1")
    assert reconcile.deletable(listed[:1], (), 2, ()) == ()


def test_the_newest_that_is_proven_stays_however_few_are_to_be_kept() -> None:
    listed = commits((1, 5), (1, 10))
    assert reconcile.deletable(listed, (), 0, ()) == ()
    proven = [replace(each, verified=True) for each in listed]
    assert reconcile.deletable(proven, (), 0, ()) == ("step-5.gen-1",)


def test_what_was_not_read_back_does_not_count_for_keep_n() -> None:
    """Two newer ones may both be damaged: the last one that is proven stays."""
    listed = commits((1, 5), (1, 10), (1, 15), (1, 20))
    proven = [replace(listed[0], verified=True), *listed[1:]]
    assert reconcile.deletable(proven, ((1, 0),), 2, ()) == ()
    proven[1] = replace(listed[1], verified=True)
    assert reconcile.deletable(proven, ((1, 0),), 1, ()) == ("step-5.gen-1",)
    assert reconcile.deletable(proven, ((1, 0),), 2, ()) == ()


def test_codes_say_whose_fault_it_was() -> None:
    user = Cause("rank_exited", 1, "x", user=True, code=9)
    infra = Cause("rank_killed", 1, "x", code=137)
    account = policy.Account("r", 0)
    assert policy.grant(user, account, {}, Settings()).code == 9
    assert policy.grant(infra, account, {}, Settings()).code == 76


def test_an_expired_window_forgets_what_was_spent() -> None:
    cause = Cause("rank_killed", 1, "x", rank=1)
    key = "rank_killed/restart_ranks/run/r/rank/1"
    spent = ((key, 3),)
    over = policy.grant(cause, policy.Account("r", 9, spent), {}, Settings())
    again = policy.grant(cause, policy.Account("r", 9, spent, expired=(key,)), {}, Settings())
    assert (over.action, again.action) == ("finish", "restart")
    assert dict(again.spent)[key] == 1


def test_signatures_are_bounded() -> None:
    many = {f"signature/f/{n}/e": 1 for n in range(100)} | {"restarts": 2}
    kept = dict(policy.bounded(many))
    assert len(kept) == policy.SIGNATURES_MAX + 1 and kept["restarts"] == 2


def test_layout_keeps_places_and_moves_only_what_must_move() -> None:
    old = plan.Plan("r", 1, ("a", "b"), ((0, "a"), (1, "b")), Resume("fresh"), "x")
    members = (plan.Member("a", False, lost=True), plan.Member("b", True), plan.Member("c", True))
    view = plan.PlanView("r", "trainer", True, 1, 1, "x", members, plan.World(2, 2), old)
    assert plan.layout(view)[0] == ("c", "b")
    unknown = (plan.Member("a", False), *members[1:])
    stuck = replace(view, members=unknown, ranks=_ranks())
    assert plan.layout(stuck) == ((), "waiting until a is heard of again or lost")


def _ranks():  # type: ignore[no-untyped-def]
    lab = Lab()
    lab.begin()
    return lab.view.ranks


def draft(kind: str = "finish", subject: str = "run/r") -> Effect:
    return Effect("", kind, subject, "x", 5.0, Finish("r", 0, "x"))


def test_one_effect_in_flight_a_subject_and_only_stop_overtakes() -> None:
    box = in_flight.InFlight()
    first = box.add(1, draft("start"), 0.0)
    assert first is not None and first.id == "1/run/r/start/1"
    assert box.add(1, draft("finish"), 0.0) is None
    assert box.add(1, draft("stop"), 0.0) is not None
    assert box.add(1, draft("stop"), 0.0) is None


def test_a_deadline_is_a_failure_and_failures_wait_longer_each_time() -> None:
    box = in_flight.InFlight()
    box.add(1, draft(), 0.0)
    assert box.settle((), 5.0) == []
    assert [s.error for s in box.settle((), 5.1)] == ["no outcome in time"]
    assert box.add(1, draft(), 6.0) is None
    second = box.add(1, draft(), 6.2)
    assert second is not None and second.id.endswith("/2")
    box.settle((EffectOutcome(second.id, False, "no"),), 6.3)
    assert box.add(1, draft(), 8.2) is None and box.add(1, draft(), 8.4) is not None


def test_failures_are_counted_until_it_succeeds_and_what_was_never_asked_has_none() -> None:
    box, counts = in_flight.InFlight(), []
    assert box.failures(1, "run/r", "finish") == 0
    for at_s, ok in ((0.0, False), (50.0, False), (100.0, True)):
        effect = box.add(1, draft(), at_s)
        assert effect is not None
        box.settle((EffectOutcome(effect.id, ok, ""),), at_s)
        counts.append(box.failures(1, "run/r", "finish"))
    assert counts == [1, 2, 0] and box.failures(2, "run/r", "finish") == 0


def test_an_id_is_given_once_over_boots_and_however_much_was_asked_for_since() -> None:
    """What is over under its id would be taken for the new one: it would never be performed."""
    box = in_flight.InFlight()
    ids: list[str] = []

    def ask(generation: int) -> None:
        effect = box.add(generation, draft("start"), 0.0)
        assert effect is not None
        ids.append(effect.id)
        box.settle((EffectOutcome(effect.id, True),), 0.0)

    ask(2)
    ask(2)
    box.new_boot()
    ask(2)
    for generation in range(3, 3 + in_flight.ATTEMPTS_MAX):
        ask(generation)
    ask(2)
    assert len(ids) == len(set(ids))


def test_an_outcome_of_something_not_asked_for_is_ignored() -> None:
    box = in_flight.InFlight()
    assert box.settle((EffectOutcome("9/x/y/1", True),), 0.0) == []


def test_a_wait_counts_when_it_ended_well_and_only_what_was_seen_of_it() -> None:
    lab = Lab()
    lab.begin()
    waits = replace(lab.rank(0), generation=1, step=5, phase="data", still_s=3.0)
    history, seen = History(), {0: (waits, 10.0)}
    rank = replace(waits, still_s=0.25)
    history.look((rank,), seen, 11.0)
    assert history.longest_s("data") == pytest.approx(3.75)
    history, seen = History(), {0: (waits, 10.0)}
    history.look((replace(rank, step=9),), seen, 11.0)
    assert history.longest_s("data") == 3.0


def test_a_rank_that_stands_still_teaches_nothing_by_two_clocks() -> None:
    """They are never read at once.  Else each look is a wait of its own: the phase counts as known,
    and its first long wait, an evaluation say, is taken for a hang."""
    lab = Lab()
    lab.begin()
    history, seen, late_s = History(), dict[int, Seen](), (0.0, 0.004, 0.001, 0.007)
    for look in range(100):
        rank = replace(lab.rank(0), phase="eval", still_s=1.0 + look + late_s[look % 4])
        history.look((rank,), seen, 500.0 + look)
    assert history.waits == {}
    history.look((replace(lab.rank(0), phase="train", still_s=0.2),), seen, 600.0)
    assert history.waits["eval"].recent_s == [pytest.approx(100.8, abs=0.02)]


def test_what_another_node_said_a_while_ago_is_no_wait_that_ended() -> None:
    """Its words come each two seconds, late by more or less, and are looked at in between."""
    lab = Lab()
    lab.begin()
    history, seen, late_s = History(), dict[int, Seen](), (0.05, 0.3, 0.1)
    for look in range(1, 200):
        at_s = 0.5 * look
        said_s = 2.0 * (at_s // 2.0)
        rank = replace(lab.rank(0), phase="startup", still_s=said_s,
                       told_s=at_s - said_s - late_s[int(said_s) % 3] + 0.5)
        history.look((rank,), seen, 500.0 + at_s)
    assert history.waits == {}
    history.look((replace(rank, phase="train", still_s=0.2, told_s=0.3),), seen, 600.0)
    assert history.waits["startup"].recent_s == [pytest.approx(100.0, abs=0.5)]


def test_percentiles_of_nothing_are_zero() -> None:
    assert percentile([], 0.99) == 0.0 and percentile([1.0, 2.0, 9.0], 0.99) == 9.0


def test_the_breaker_needs_nodes_and_a_share_of_the_fleet() -> None:
    three = {"f": ("a", "b", "c")}
    assert breaker.is_open(three, "f", 20, Settings())[0]
    assert not breaker.is_open(three, "f", 60, Settings())[0]
    assert not breaker.is_open({"f": ("a", "b")}, "f", 4, Settings())[0]


@pytest.mark.parametrize(("then", "booked"), [("training", "training"), ("recovery", "detection")])
def test_a_stillness_is_booked_once_it_is_known_what_it_was(then: str, booked: str) -> None:
    book = ledger.Ledger()
    for boot_s, doing in ((0.0, "training"), (2.0, "waiting"), (7.0, "waiting"), (8.0, then)):
        book.settle(boot_s, "b", {"r": doing})
        if doing == "waiting":
            assert "detection" not in book.node
    assert book.open == {}
    assert book.node[booked] == pytest.approx(8.0 if booked == "training" else 6.0)


STATES = (*ledger.CATEGORIES, ledger.WAITING)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(0.0, 30.0), st.sampled_from(STATES)), max_size=30))
def test_the_ledger_sums_to_the_time_that_went_by(rows: list[tuple[float, str]]) -> None:
    book, now = ledger.Ledger(), 5.0
    book.settle(now, "b", {})
    for seconds, category in rows:
        now += seconds
        book.settle(now, "b", {"x": category, "y": "training"})
    assert sum(s for _, s in book.node_rows()) == pytest.approx(now - 5.0)


def test_a_gap_is_unknown_and_a_reboot_starts_anew() -> None:
    book = ledger.Ledger()
    book.settle(0.0, "b", {"r": "training"})
    book.settle(60.0, "b", {"r": "training"})
    book.settle(3.0, "c", {"r": "training"})
    book.settle(4.0, "c", {"r": "training"})
    assert {c: s for c, s in book.node_rows() if s} == {"unknown": 60.0, "training": 1.0}


def test_redone_steps_are_not_training() -> None:
    lab = Lab()
    lab.begin()
    lab.train(12)
    lab.commit(10)
    for rank in (0, 1):
        lab.kill(rank)
    lab.settle()
    assert lab.starts()[-1].resume.step == 10
    lab.train(15)
    assert lab.node.kept.ledger.node["recomputing"] > 0
    incident_steps = lab.node.kept.runs["r"].progress.peak_step
    assert incident_steps == 15


def test_memory_comes_back_and_junk_is_no_crash() -> None:
    lab = Lab()
    lab.begin()
    lab.train(5)
    memory = lab.node.memory()
    lab.restart_agent()
    assert lab.node.memory() == memory
    node = type(lab.node)("a", lab.settings, {}, b"\x00{junk")
    assert msgspec.json.decode(node.memory())["runs"] == {}


@pytest.mark.parametrize(("text", "run", "node", "rank", "part"), [
    ("run/m5/rank/12", "m5", "", 12, "rank/12"), ("run/m5", "m5", "", -1, ""),
    ("node/a/mount/data/x", "", "a", -1, "mount/data/x"), ("node/a/mount/", "", "a", -1, "mount/"),
    ("store/run/m5", "", "", -1, "m5"), ("store", "", "", -1, ""), ("", "", "", -1, ""),
    ("run/m5/rank/x", "m5", "", -1, "rank/x"),
])
def test_a_subject_is_read_as_it_is_written(
    text: str, run: str, node: str, rank: int, part: str
) -> None:
    subject = subject_of(text)
    assert str(subject) == text
    assert (subject.run, subject.node, subject.rank, subject.part) == (run, node, rank, part)


def test_subjects_are_written_in_one_place() -> None:
    assert rank_subject("m5", 3) == "run/m5/rank/3" and rank_subject("m5", -1) == "run/m5"
    assert node_subject("a", "gpu/0") == "node/a/gpu/0" and node_subject("a") == "node/a"
