"""A silent node's kernel is asked: a stopped agent's queue stays as it was, firewalls prove nothing

On loopback, with real queues: who listens and takes nothing is a stopped agent, and a listener
whose queue is full drops what comes as a firewall does.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import socket
import time
from collections.abc import Iterator

import pytest
from waiting import until

from holdfast.agent.peers import kernel_questions
from holdfast.agent.peers.beats import Address, Peers
from holdfast.agent.peers.kernel_questions import (
    PROBE_GAP_S,
    PROBE_MOST_S,
    PROBE_S,
    PROBES,
    ROUND_S,
    ROUND_TRIPS,
    Answer,
    KernelQuestions,
    patience_s,
)

HOST = "127.0.0.1"
BACKLOG = 8


@contextlib.contextmanager
def listening(backlog: int) -> Iterator[tuple[socket.socket, int]]:
    """One who listens and takes nothing."""
    with socket.create_server((HOST, 0), backlog=backlog) as server:
        yield server, server.getsockname()[1]


@contextlib.contextmanager
def swallowing() -> Iterator[int]:
    """A port whose every question is dropped."""
    with listening(0) as (_, port), contextlib.ExitStack() as held:
        for _ in range(8):
            one = held.enter_context(socket.socket())
            one.settimeout(0.05)
            try:
                one.connect((HOST, port))
            except OSError:  # full
                yield port
                return
        raise AssertionError("its queue never fills")


def waiting(server: socket.socket) -> int:
    """How many connections nobody has taken."""
    server.settimeout(0.2)
    count = 0
    with contextlib.suppress(TimeoutError):
        while True:
            server.accept()[0].close()
            count += 1
    return count


def asked(questions: KernelQuestions, port: int, times: int) -> list[bool | None]:
    async def rounds() -> list[bool | None]:
        return [await questions.ask("c", HOST, port) for _ in range(times)]

    return asyncio.run(rounds())


@contextlib.contextmanager
def descriptors(spare: int) -> Iterator[None]:
    """At most so many more for this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + spare, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_however_often_a_stopped_agents_kernel_is_asked_it_answers() -> None:
    with listening(BACKLOG) as (server, port):
        assert asked(KernelQuestions(), port, 10) == [True] * 10
        assert waiting(server) == PROBES  # of the first time, when nothing was known


def test_where_a_firewall_swallows_the_closed_port_nothing_is_told_from_its_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with swallowing() as closed, listening(BACKLOG) as (server, port):
        monkeypatch.setattr(kernel_questions, "CLOSED_PORT", closed)
        questions = KernelQuestions()
        assert asked(questions, port, 6) == [True, None, None, None, None, None]
        assert waiting(server) == PROBES
        questions.heard("c")  # and then silent again
        assert asked(questions, port, 2) == [True, None]


def test_a_refusal_by_the_agents_own_port_costs_nothing_and_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An agent that ended, behind such a firewall."""
    with swallowing() as closed:
        monkeypatch.setattr(kernel_questions, "CLOSED_PORT", closed)
        with listening(1) as (_, port):
            pass
        assert asked(KernelQuestions(), port, 3) == [True, True, True]


def test_who_answers_nowhere_is_told_of_as_fast_as_by_one_port_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with swallowing() as closed, swallowing() as port:
        monkeypatch.setattr(kernel_questions, "CLOSED_PORT", closed)
        took_s = []
        for _ in range(3):  # a busy machine is only ever slower
            begun_s = time.monotonic()
            assert asked(KernelQuestions(), port, 1) == [False]
            took_s.append(time.monotonic() - begun_s)
        assert min(took_s) < (PROBES - 1) * PROBE_GAP_S + 2 * PROBE_MOST_S, took_s
        assert asked(KernelQuestions(), port, 2) == [False, False]


def test_a_node_that_dies_behind_its_stopped_agent_is_told_of_by_the_next_question(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with swallowing() as silent:
        questions = KernelQuestions()
        assert asked(questions, silent, 1) == [True]  # refused at the closed port
        monkeypatch.setattr(kernel_questions, "CLOSED_PORT", silent)
        assert asked(questions, silent, 3) == [None, False, False]


def test_a_node_is_not_missed_for_questions_that_nobody_could_ask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An observer without a descriptor left: it has heard nothing because it has asked nothing."""

    async def hindered(questions: KernelQuestions, spare: int) -> bool | None:
        with descriptors(spare):
            return await questions.ask("c", HOST, port)

    with swallowing() as closed, swallowing() as port:
        monkeypatch.setattr(kernel_questions, "CLOSED_PORT", closed)
        for spare in (0, 4):
            questions = KernelQuestions()
            assert asyncio.run(hindered(questions, spare)) is None
            assert questions.unasked, "the agent has to say so"
            assert asked(questions, port, 1) == [False]
            assert not questions.unasked


@pytest.mark.parametrize(("error", "told"), [
    (OSError(errno.EADDRNOTAVAIL, "no port left"), Answer.UNASKED),
    (socket.gaierror(socket.EAI_SYSTEM, "no descriptor left"), Answer.UNASKED),
    (OSError(errno.EHOSTUNREACH, "no answer to ARP"), Answer.NONE),
])
def test_what_never_left_this_machine_is_no_silence_of_another(
    error: OSError, told: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> Answer:
        async def fails(*_: object) -> None:
            raise error

        monkeypatch.setattr(asyncio.get_running_loop(), "sock_connect", fails)
        return await kernel_questions.answer(HOST, 1, 0.0, PROBE_S, 0.0)

    assert asyncio.run(body()) is told


def test_an_answer_is_waited_for_as_long_as_the_way_is() -> None:
    assert patience_s(None) == PROBE_MOST_S  # nothing is known of it
    assert patience_s(0.0001) == PROBE_S
    assert patience_s(0.06) == pytest.approx(ROUND_TRIPS * 0.06)
    assert patience_s(2.0) == PROBE_MOST_S


def test_an_answer_to_an_early_question_counts_until_the_round_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A kernel that takes longer than the last question waits, and not longer than the round."""
    slow_s = (PROBE_S + ROUND_S) / 2

    async def body() -> bool | None:
        loop = asyncio.get_running_loop()

        async def slow(*_: object) -> None:
            await asyncio.sleep(slow_s)
            raise ConnectionRefusedError

        monkeypatch.setattr(loop, "sock_connect", slow)
        return await KernelQuestions().ask("c", HOST, 1, 0.0)

    assert asyncio.run(body()) is True


def test_an_observer_that_stood_still_takes_no_answer_for_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its time is over when it goes on; by then its own kernel has long held what came."""

    async def asked_by_one_that_stands_still(port: int) -> Answer:
        loop, never = asyncio.get_running_loop(), asyncio.Event()

        async def stands_still(sock: socket.socket, address: tuple[str, int]) -> None:
            sock.connect_ex(address)
            await never.wait()

        monkeypatch.setattr(loop, "sock_connect", stands_still)
        return await kernel_questions.answer(HOST, port, 0.0, 0.01, 0.0)

    with listening(1) as (_, taken), swallowing() as swallowed:
        assert asyncio.run(asked_by_one_that_stands_still(taken)) is Answer.TAKEN
        assert asyncio.run(asked_by_one_that_stands_still(swallowed)) is Answer.NONE


def test_a_question_that_is_asked_late_has_its_whole_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The round was over before an observer that stood still had asked anything."""

    async def body() -> Answer:
        loop = asyncio.get_running_loop()

        async def soon(*_: object) -> None:
            await asyncio.sleep(0.01)
            raise ConnectionRefusedError

        monkeypatch.setattr(loop, "sock_connect", soon)
        return await kernel_questions.answer(HOST, 1, 0.0, 5.0, loop.time() - 1.0)

    assert asyncio.run(body()) is Answer.REFUSED


def test_an_agent_that_has_nothing_left_to_ask_with_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[tuple[str, object]] = []

    async def unasked(*_: object) -> Answer:
        return Answer.UNASKED

    async def body(port: int) -> None:
        peers = Peers("a", "life", None, lambda: 10.0,  # type: ignore[arg-type]
                      lambda part, what: said.append((part, what)))
        peers.token = b"t" * 16
        peers.know({"c": Address(HOST, port)})

        def told() -> bool:
            peers.tick()
            return bool(said)

        try:
            await until(told)
        finally:
            await peers.close()

    monkeypatch.setattr(kernel_questions, "answer", unasked)
    with listening(BACKLOG) as (_, port):
        asyncio.run(body(port))
    (part, what), *_ = said
    assert part == "peers" and "no descriptor, port or memory left" in str(what)


def test_an_agent_that_stands_still_is_silent_and_not_lost_for_however_long() -> None:
    """Its observers connect anew, and ask: neither fills its queue so that its kernel is missed."""

    class Deaf:
        lost: frozenset[str] = frozenset()

        def nodes_lost(self, nodes: frozenset[str]) -> None:
            self.lost |= nodes

    async def body(port: int) -> None:
        observer, deaf = "a", Deaf()
        peers = Peers(observer, "life", deaf, lambda: 10.0,  # type: ignore[arg-type]
                      lambda *_: None)
        peers.token = b"t" * 16
        peers.know({"c": Address(HOST, port)})
        answers: list[bool] = []
        probed = peers.detector.probed

        def note(name: str, answer: bool) -> None:
            answers.append(answer)
            probed(name, answer)

        peers.detector.probed = note  # type: ignore[method-assign]

        def enough() -> bool:
            peers.tick()
            return len(answers) >= 8

        try:
            await until(enough)
        finally:
            await peers.close()
        assert answers == [True] * len(answers)

    with listening(BACKLOG) as (_, port):
        asyncio.run(body(port))
