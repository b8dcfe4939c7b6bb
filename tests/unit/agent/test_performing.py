"""The performer by itself, with a real journal: each effect ends once, whatever its store says."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest
from fakes import until
from msgspec.structs import replace

from holdfast.agent.actions import performer as performing
from holdfast.agent.core.model import (
    Delete,
    Doc,
    Effect,
    EffectOutcome,
    NodeOrder,
    NodeTests,
    Plan,
    Resume,
    Start,
    Stop,
    StoreView,
    StoreWrite,
    TakeEvidence,
)
from holdfast.agent.history.journal import Intent, Journal, intent_of
from holdfast.agent.launchers import protocol
from holdfast.agent.store.base import Conflict, StoreError


class OneAnswer:
    """A store that gives one answer."""

    def __init__(self, answer):
        self.answer = answer

    def view(self):
        return StoreView()

    async def put(self, write):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def read(self, key):
        return await self.put(key)


def made(folder, store=None, orders=None):
    async def nobody(effect, body):
        raise AssertionError("not asked for")

    def order(run, fields):
        (orders if orders is not None else []).append(fields["id"])
        return ""

    said = []
    one = performing.Performer(
        Journal(folder), store or OneAnswer(1), order, lambda why: None,
        lambda part, error: said.append((part, error)), lambda run: (1, 1.0), nobody, nobody)
    return one, said


DELETE = Effect("3/run/r/checkpoints/delete/1", "delete", "run/r/checkpoints", "x", 5.0,
                Delete("r", 3, ("/c/step-1",)), outlives_node=True)


def document(generation):
    plan = Plan("r", generation, ("a", "b"), ((0, "a"), (1, "b")), Resume("fresh"), "test")
    return Doc("run/r", 7, msgspec.json.encode(plan))


@pytest.mark.parametrize(("answer", "says"), [
    (document(3), ""), (document(4), "generation 3 deletes nothing: 4 stood in the store"),
    (StoreError("away"), "store: away: nothing is deleted"),
    (TimeoutError(), "store: no answer: nothing is deleted")])
def test_of_many_nodes_one_deletes_after_the_store_said_that_its_generation_stands(
        answer, says, tmp_path):
    async def scenario():
        orders = []
        one, _ = made(tmp_path, OneAnswer(answer), orders)
        one.many_nodes = True
        one.perform(one.fresh([DELETE]), None)
        if says:
            (outcome,) = await until(lambda: one.outcomes([DELETE.id], 0.0))
            assert (outcome.ok, outcome.error) == (False, says)
        else:
            await until(lambda: orders)
        assert orders == ([] if says else [DELETE.id])
        await one.close()

    asyncio.run(scenario())


PUT = Effect("1/run/r/put/1", "put", "run/r", "x", 5.0, StoreWrite("run/r", 0, b"{}"))


@pytest.mark.parametrize(("answer", "ok", "says"), [
    (7, True, ""), (Conflict("run/r is at version 2"), False, "conflict: run/r is at version 2"),
    (StoreError("no space"), False, "store: no space"),
    (TimeoutError(), False, "store: no answer")])
def test_whatever_the_store_answers_is_an_outcome(answer, ok, says, tmp_path):
    async def scenario():
        one, said = made(tmp_path, OneAnswer(answer))
        one.perform(one.fresh([PUT]), None)
        (outcome,) = await until(lambda: one.outcomes([PUT.id], 0.0))
        assert (outcome.ok, outcome.error, outcome.detail) == (ok, says, "7" if ok else "")
        assert one.fresh([PUT]) == [] and not one.in_flight and said == []
        await one.close()

    asyncio.run(scenario())


def test_what_an_earlier_life_left_is_told_as_failed_when_nobody_answers(tmp_path, monkeypatch):
    monkeypatch.setattr(performing, "GRACE_FOR_RESEND_S", 0.0)

    async def scenario():
        journal = Journal(tmp_path)
        left = Intent("2/run/r/start/1", "start", "run/r", "rank_killed", "", "x", 1.0)
        await journal.append(left, wait=True)
        journal.close()
        one, _ = made(tmp_path)
        (outcome,) = await until(lambda: one.outcomes([left.id], 0.0))
        assert not outcome.ok and "before it learned the outcome" in outcome.error
        body = Start("r", 2, (0,), (), 1, Resume("own"), "x")
        assert one.fresh([Effect(left.id, "start", "run/r", "x", 5.0, body)]) == []
        # The launcher's word comes late: the restart counts, and once.
        for _ in range(2):
            one.launcher_outcome("r", protocol.Outcome(id=left.id, ok=True))
        assert one.counters["restarts", ("r", "rank_killed")] == 1.0
        await one.close()

    asyncio.run(scenario())


def test_what_an_earlier_life_left_is_never_done_again(tmp_path):
    """Neither when the core asks for it under the same id, nor when its launcher is there again."""
    body = Start("r", 2, (0,), (), 1, Resume("own"), "x")
    left = Effect("2/run/r/start/1", "start", "run/r", "x", 5.0, body)

    async def scenario():
        journal, orders = Journal(tmp_path), []
        await journal.append(intent_of(left, 1.0), wait=True)
        journal.close()
        one, said = made(tmp_path, orders=orders)
        one.launcher_came("r")
        fresh = one.fresh([left, PUT])
        one.perform(fresh, None)
        outcomes = await until(lambda: len(one.outcomes([], 0.0)) == 2 and one.outcomes([], 0.0))
        assert {each.id: each.ok for each in outcomes} == {left.id: False, PUT.id: True}
        assert (fresh, orders, said) == ([PUT], [], [])
        await one.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("repeated", [True, False])
def test_what_another_node_asks_for_again_is_what_an_earlier_life_has_begun(
    repeated, tmp_path, monkeypatch
):
    """Else it would be carried out twice, and its outcome would be the earlier one's end."""
    monkeypatch.setattr(performing, "GRACE_FOR_RESEND_S", 60.0 if repeated else 0.5)
    stop = Effect("1/run/r/stop/1@a", "stop", "run/r", "x", 5.0, Stop("r", 1, (0,), 1.0, "x"))

    async def scenario():
        journal = Journal(tmp_path)
        await journal.append(intent_of(stop, 1.0), wait=True)
        journal.close()
        orders = []
        one, _ = made(tmp_path, orders=orders)
        asked = asyncio.ensure_future(one.obey(stop))
        later = replace(stop, id="1/run/r/stop/2@a")
        one.perform([later], None)
        await until(lambda: later.id in orders)
        if repeated:
            one.launcher_outcome("r", protocol.Outcome(stop.id, True, "", "done"))
        outcome = await asked
        assert (outcome.ok, outcome.detail) == ((True, "done") if repeated else (False, ""))
        assert (await one.obey(stop)) == outcome
        assert orders == [later.id] and one.in_flight == 1
        assert one.counters["actions", ("stop", "", "ok" if repeated else "failed")] == 1
        await one.close()

    asyncio.run(scenario())


def test_a_permit_counts_from_the_decision_however_late_its_order_leaves(tmp_path, monkeypatch):
    async def scenario():
        packets, loop = [], asyncio.get_running_loop()
        one, _ = made(tmp_path)
        one._order = lambda run, fields: packets.append(fields) or ""
        body = Start("r", 2, (0,), (), 1, Resume("own"), "x", permit_s=10.0)
        effect = Effect("2/run/r/start/1", "start", "run/r", "x", 5.0, body)
        one.perform(one.fresh([effect]), None)
        decided_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        time_of, late_s = loop.time, 4.0
        loop.time = lambda: time_of() + late_s  # the agent stood still
        await until(lambda: packets)
        loop.time = time_of
        until_s = packets[0]["body"]["permit_until_boot_s"]
        assert until_s < decided_s + 10.0 - late_s + 1.0
        await one.close()

    asyncio.run(scenario())


def test_only_evidence_says_where_a_rank_stands(tmp_path):
    async def scenario():
        orders = []
        one, _ = made(tmp_path, orders=orders)
        body = TakeEvidence("r", 3, 1, 9, "x")
        for kind in ("evidence", "finish", "stop"):
            effect = Effect(f"3/run/r/{kind}/1", kind, "run/r", "x", 5.0, body)
            one.perform(one.fresh([effect]), None)
            await until(lambda id=effect.id: id in orders)
            one.launcher_outcome("r", protocol.Outcome(
                id=effect.id, ok=True, detail='{"where": "%s.py:5"}' % kind))
        assert one.where == {("r", 3, 1): "evidence.py:5"}
        await one.close()

    asyncio.run(scenario())


def test_an_agent_that_ends_while_its_journal_writes_begins_nothing_more(tmp_path, monkeypatch):
    async def scenario():
        orders = []
        one, said = made(tmp_path, OneAnswer(1), orders)
        never = asyncio.get_running_loop().create_future()
        monkeypatch.setattr(one._journal, "append", lambda *_, **__: never)
        one.perform(one.fresh([PUT, replace(PUT, id="s", body=Stop("r", 1, (), 1.0, "x"))]), None)
        await until(lambda: never._callbacks)
        await one.close()
        assert (orders, said, one.in_flight, one._tasks) == ([], [], 2, set())

    asyncio.run(scenario())


def ends(one, effect, run="r", **said):
    one.launcher_outcome(run, protocol.Outcome(**{"id": effect.id, "ok": True, **said}))


STOP = Effect("1/run/r/stop/1", "stop", "run/r", "x", 5.0, Stop("r", 1, (0,), 1.0, "x"))


@pytest.mark.parametrize("other", ["a", "q", "s"])
def test_no_word_of_another_runs_launcher_ends_an_effect(other, tmp_path):
    async def scenario():
        orders = []
        one, _ = made(tmp_path, orders=orders)
        one.perform(one.fresh([STOP]), None)
        await until(lambda: orders)
        ends(one, STOP, other, ok=False)
        assert one.in_flight == 1 and one.outcomes([STOP.id], 0.0) == ()
        ends(one, STOP)
        assert [outcome.ok for outcome in one.outcomes([STOP.id], 0.0)] == [True]
        await one.close()

    asyncio.run(scenario())


def test_an_order_to_a_launcher_waits_a_moment_for_the_journal_and_no_longer(
    tmp_path, monkeypatch
):
    async def scenario():
        orders = []
        one, said = made(tmp_path, orders=orders)
        never = asyncio.get_running_loop().create_future()
        monkeypatch.setattr(one._journal, "append", lambda *_, **__: never)
        one.perform(one.fresh([STOP]), None)
        await until(lambda: orders)
        assert said == [("journal", "no commit within 0.25 s")]
        await one.close()

    asyncio.run(scenario())


def test_an_order_to_a_launcher_waits_for_no_order_to_the_node(tmp_path):
    """Whose program may take minutes."""
    reboot = Effect("9/node/a/reboot_node/1", "reboot_node", "node/a", "x", 5.0,
                    NodeOrder("reboot", "a", "i", "x"), outlives_node=True)

    async def scenario():
        orders, go = [], asyncio.Event()
        one, _ = made(tmp_path, orders=orders)

        async def node(effect, body):
            await go.wait()
            return ""

        one._node = node
        one.perform(one.fresh([reboot, STOP, PUT]), None)
        await until(lambda: orders and one.outcomes([PUT.id], 0.0))
        go.set()
        await until(lambda: len(one.outcomes([], 0.0)) == 2)
        assert one.in_flight == 1
        await one.close()

    asyncio.run(scenario())


def test_a_report_of_tests_over_many_nodes_is_kept_whole_and_other_words_are_cut(tmp_path):
    tests = Effect("1/run/r/tests/1", "tests", "run/r", "x", 5.0, NodeTests("r", ("a", "b")))
    far = replace(STOP, body=replace(STOP.body, node="b"))

    async def scenario():
        one, _ = made(tmp_path)

        async def says(effect, body=None):
            return EffectOutcome(effect.id, True, "", "x" * 100_000)

        one.tests = one.elsewhere = says
        one.perform(one.fresh([tests, far]), None)
        await until(lambda: len(one.outcomes([], 0.0)) == 2)
        found = {outcome.id: len(outcome.detail) for outcome in one.outcomes([], 0.0)}
        assert found == {tests.id: 100_000, far.id: performing.DETAIL_MAX}
        await one.close()

    asyncio.run(scenario())


def test_the_ids_that_ended_last_are_known_as_many_as_there_is_room_for(tmp_path, monkeypatch):
    monkeypatch.setattr(performing, "FINISHED_MAX", 3)
    puts = [replace(PUT, id=f"1/run/r/put/{number}") for number in range(4)]

    async def scenario():
        one, _ = made(tmp_path)
        for count, known in ((3, puts[:3]), (4, puts[1:])):
            one.perform(one.fresh(puts[count - 1:count] if count > 3 else puts[:count]), None)
            await until(lambda: not one.in_flight)
            assert [put for put in puts[:count] if put not in one.fresh([put])] == known
        await one.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(("left", "counted"), [(4, 4), (5, 4)])
def test_late_words_count_for_as_many_starts_as_there_is_room_for(
    left, counted, tmp_path, monkeypatch
):
    monkeypatch.setattr(performing, "GRACE_FOR_RESEND_S", 0.0)
    monkeypatch.setattr(performing, "OUTCOMES_MAX", 4)
    intents = [Intent(f"2/run/r{number}/start/1", "start", f"run/r{number}", "rank_killed", "", "x",
                      1.0) for number in range(left)]

    async def scenario():
        journal = Journal(tmp_path)
        await journal.append(*intents, wait=True)
        journal.close()
        one, _ = made(tmp_path)
        await until(lambda: not one._orphans)
        for number, intent in enumerate(intents):
            ends(one, intent, f"r{number}")
        restarts = [key[1][0] for key in one.counters if key[0] == "restarts"]
        assert restarts == [f"r{number}" for number in range(left)][-counted:]
        await one.close()

    asyncio.run(scenario())


def test_launchers_have_five_seconds_to_say_again_what_an_earlier_life_did_not_hear(tmp_path):
    async def scenario():
        journal, waits, loop = Journal(tmp_path), [], asyncio.get_running_loop()
        await journal.append(intent_of(STOP, 1.0), wait=True)
        journal.close()
        loop.call_later = lambda delay_s, *rest: waits.append(delay_s)
        one, _ = made(tmp_path)
        del loop.call_later
        assert waits == [5.0]
        await one.close()

    asyncio.run(scenario())
