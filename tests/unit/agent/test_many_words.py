"""How often an agent speaks to each of many others, and what a word costs it to take."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.agent.core.model import Beat
from holdfast.agent.core.run.members import STALE_LEASES
from holdfast.agent.daemon.parts.permits import RENEW_LEASES, SOON_LEASES, WORD_LEASES
from holdfast.agent.launchers.admission import CONNECTIONS_MAX
from holdfast.agent.peers.beats import packed, unpacked
from holdfast.agent.peers.choice import ALL_NEAR, LINES_MAX, NEAR
from holdfast.agent.peers.conversation import (
    BEATS_MAX,
    EVERY_MAX,
    PING_S,
    SLOW_LEASES,
    Conversation,
    Told,
    Way,
    Word,
)
from holdfast.agent.peers.failure_detector import SILENT_TICKS
from holdfast.agent.peers.transport import STILL_S

LEASE_S = 10.0


class Line(Way):
    def __init__(self) -> None:
        super().__init__()
        self.urged = 0

    def urge(self) -> None:
        self.urged += 1


class Talk(Conversation[Line]):
    """An agent, n0000, among so many others, on a clock of its own."""

    def __init__(self, others: int, lease_s: float = LEASE_S) -> None:
        self.now_s = 100.0
        super().__init__("n0000", "life", self, lambda: lease_s, lambda: self.now_s)
        self.lines = {f"n{number:04}": Line() for number in range(1, others + 1)}
        self.watch()
        self.asked_kernels: list[str] = []

    def ask_kernel(self, name: str) -> None:
        self.asked_kernels.append(name)

    def beats_came(self, told: Told, is_news: bool) -> None: ...
    def nodes_lost(self, nodes: frozenset[str]) -> None: ...

    async def asked(self, node: str, question: Any) -> dict[str, Any]:
        return {}

    def urged(self) -> int:
        return sum(line.urged for line in self.lines.values())


@pytest.mark.parametrize("others", [1, ALL_NEAR])
def test_among_few_each_is_spoken_to_in_each_tick(others: int) -> None:
    talk = Talk(others)
    assert {talk.every(name) for name in talk.lines} == {1}


@pytest.mark.parametrize("others", [ALL_NEAR + 1, 100, 300, 1000, LINES_MAX])
@pytest.mark.parametrize("lease_s", [1.0, 3.0, 10.0, 60.0])
def test_among_many_the_near_hear_as_often_as_of_few_and_the_others_often_enough(
    others: int, lease_s: float
) -> None:
    talk = Talk(others, lease_s)
    gaps = [talk.every(name) for name in talk.lines]
    assert gaps.count(1) >= NEAR
    far_s = max(gaps) * PING_S
    # A beat comes with each word that is due one, or with the next.
    assert SLOW_LEASES * lease_s + far_s < STALE_LEASES * lease_s
    assert 4 * far_s < STILL_S  # its connection is not given up


@pytest.mark.parametrize("others", [8, 160, LINES_MAX])
def test_permits_by_the_others_word_have_time_left(others: int) -> None:
    """A ping is answered by the other's next word; a permit lasts a lease from that ping on."""
    talk = Talk(others)
    far_leases = max(map(talk.every, talk.lines)) * PING_S / LEASE_S
    assert 2 * far_leases < WORD_LEASES
    assert 1.0 - 2 * far_leases - (RENEW_LEASES + SOON_LEASES) >= 0.25


@pytest.mark.parametrize("others", [8, 100, 2000])
def test_a_beat_comes_each_fifth_of_a_lease_or_with_the_word_behind_it(others: int) -> None:
    talk = Talk(others)
    name = f"n{others // 2:04}"
    gap_s, told_s = PING_S * talk.every(name), []
    for turn in range(1 + round(4 * LEASE_S / gap_s)):
        now_s = 1.001 * turn * gap_s
        if talk.word_for(name, now_s).told is not None:
            told_s.append(now_s)
    gaps = [b - a for a, b in zip(told_s, told_s[1:], strict=False)]
    assert told_s[0] == 0.0 and len(gaps) >= 10
    assert min(gaps) > SLOW_LEASES * LEASE_S
    assert max(gaps) < SLOW_LEASES * LEASE_S + 1.01 * gap_s


def test_a_word_says_when_the_next_one_comes_and_an_older_release_need_not() -> None:
    few, many = Talk(4), Talk(320)
    assert few.word_for("n0001", 1.0).every == 1
    assert many.word_for("n0001", 1.0).every == 1  # the next name
    assert many.word_for("n0160", 1.0).every == 20
    older = Talk(31)
    older.take("n0016", Word(1, 0, "life", "", ()))
    assert older.detector.peers["n0016"].every == 2  # it speaks each 0.19 s
    for every, believed in ((7, 7), (0, 20), (-1, 20), (10**9, EVERY_MAX)):
        many.take("n0160", Word(1, 0, "life", "", (), every=every))
        assert many.detector.peers["n0160"].every == believed
    word = Word(3, 2, "life", "", ["x"], every=7)
    assert unpacked(packed(word)) == word
    old = packed(word)
    del old["every"]
    assert unpacked(old).every == 0


def test_whoever_became_near_is_spoken_to_at_once() -> None:
    talk = Talk(40)
    line = talk.lines["n0010"]
    talk.lines = {name: one for name, one in talk.lines.items() if name >= "n0010"}
    talk.watch()
    assert talk.every("n0010") == 1 and line.urged == 1 and talk.lines["n0025"].urged == 0


def test_a_silent_kernel_is_told_of_once_and_its_answer_once() -> None:
    talk = Talk(4)
    for _ in range(SILENT_TICKS):
        talk.tick()
        for name in ("n0001", "n0002", "n0003"):
            talk.take(name, Word(1, 0, "life", "", ()))
    for answers, urged in ((False, 4), (False, 4), (None, 4), (True, 8), (True, 8)):
        talk.kernel_said("n0004", answers)
        assert talk.urged() == urged, answers


@pytest.mark.parametrize(("accusers", "urged"), [(NEAR - 1, 1), (NEAR, 0)])
def test_what_all_have_heard_from_others_is_not_said_to_all_at_once(
    accusers: int, urged: int
) -> None:
    """Else each of thousands would say it to each in the moment in which the run has to go on."""
    talk = Talk(300)
    talk.tick()
    for number in range(accusers):
        talk.take(f"n{number + 100:04}", Word(1, 0, "life", "", ("n0200",), every=20))
    talk.kernel_said("n0200", False)
    assert talk.urged() == urged * 300 and talk.detector.unreachable() == ["n0200"]


def told_of(node: str, runs: range) -> Told:
    return Told(tuple(Beat(node, f"run-{number}", 1, 0.0) for number in runs))


def test_a_node_may_carry_as_many_runs_as_an_agent_takes() -> None:
    assert CONNECTIONS_MAX + 1 < BEATS_MAX
    talk = Talk(4)
    talk.take("n0001", Word(1, 0, "life", "", (), told_of("n0001", range(CONNECTIONS_MAX + 1))))
    assert len(talk.heard()) == CONNECTIONS_MAX + 1


def test_what_is_kept_of_all_is_bounded_whoever_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.agent.peers.conversation.BEATS_MAX", 10)
    monkeypatch.setattr("holdfast.agent.peers.conversation.NODES_MAX", 4)
    talk = Talk(4)
    talk.take("n0001", Word(1, 0, "life", "", (), told_of("n0001", range(3))))
    for life in range(50):  # another life each time, with runs of its own
        told = told_of("n0002", range(5 * life, 5 * life + 5))
        talk.take("n0002", Word(1, 0, f"life-{life}", "", (), told))
    assert len(talk.heard()) == 10
    for number in range(100):
        talk.take(f"stranger-{number}", Word(1, 0, "life", "", ()))
    assert len(talk.instances) == 4
    talk.take("n0004", Word(1, 0, "life", "", ()))  # it has a connection
    assert "n0004" in talk.instances
    talk.take("n0001", Word(2, 0, "life", "", (), told_of("n0001", range(3))))
    assert [one.run for one in talk.heard() if one.node == "n0001"] == ["run-0", "run-1", "run-2"]
    talk.take("n0002", Word(2, 0, "life-49", "", (), Told()))
    talk.now_s += 601.0
    talk.forget(["n0001"])
    assert {one.node for one in talk.heard()} == {"n0001"} and set(talk.instances) == {"n0001"}
    told = told_of("n0003", range(20))
    talk.take("n0003", Word(1, 0, "life", "", (), told))
    assert len(talk.heard()) == 10


def test_what_was_said_by_nodes_that_are_nowhere_is_forgotten_when_it_is_old() -> None:
    talk = Talk(3)
    for node in ("n0001", "n0002"):
        talk.take(node, Word(1, 0, "life", "", (), Told((Beat(node, "r", 1, 0.0),))))
    talk.forget(["n0001"])
    assert len(talk.heard()) == 2
    talk.now_s += 601.0
    talk.forget(["n0001"])
    assert [one.node for one in talk.heard()] == ["n0001"]
