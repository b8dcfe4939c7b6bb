"""Mounts and names that do not answer: real children, real deadlines.

No server is at hand, so what stands in front of statvfs in the child (statvfs.c) does not return
for the paths that a file names.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time

import pytest
from detectors import judged
from waiting import until

from holdfast.agent.config.load import load
from holdfast.agent.core.detect.detector import NodeView
from holdfast.agent.core.detect.host import reach
from holdfast.agent.core.model import Observed
from holdfast.agent.telemetry.collectors import Runner
from holdfast.collectors import ALL, dns, mounts
from holdfast.collectors.contract import Roots
from holdfast.collectors.sources import questions
from holdfast.collectors.sources.questions import WAITING_MAX, Questions

# Of a reading, of which `mounts` itself waits half a second for an answer.
DEADLINE_S = 2.5
NFS = "{n} 1 0:{n} / {path} ro,noatime shared:1 - nfs4 10.0.0.5:/x rw,vers=4.2\n"


class Node:
    """A node with two network mounts, one of which may hang, and the runner that reads it."""

    def __init__(self, folder) -> None:
        self.good, self.bad, self.hangs = folder / "good", folder / "bad", folder / "hangs"
        self.good.mkdir()
        self.bad.mkdir()
        (folder / "self").mkdir()
        table = "".join(NFS.format(n=n, path=path) for n, path in ((7, self.good), (8, self.bad)))
        (folder / "self/mountinfo").write_text(table)
        others = tuple(one.name for one in ALL if one.name != "mounts")
        config = load(None, {
            "collectors.proc": (str(folder), "t"), "collectors.disable": (others, "t"),
            "collectors.deadline_s": (DEADLINE_S, "t"), "agent.slow_s": (DEADLINE_S, "t"),
            "agent.fast_s": (0.5, "t"), "agent.tick_s": (0.5, "t"),
        }).config
        self.troubles: list[str] = []
        self.runner = Runner(config, lambda part, error: self.troubles.append(str(error)))

    def value(self, name, path):
        """The newest reading of a metric of one mount; -1 without one."""
        wanted = f"mount={path}"
        return next((
            one.value for one in self.runner.samples()
            if one.name == name and one.subject.split(",")[0] == wanted
        ), -1.0)

    def waiting_s(self, path):
        return self.value("host_mount_waiting_seconds", path)


@pytest.fixture
def node(tmp_path, preload, monkeypatch):
    made = Node(tmp_path)
    monkeypatch.setenv("LD_PRELOAD", str(preload))
    monkeypatch.setenv("HOLDFAST_HANGS", str(made.hangs))
    return made


async def running(node, scenario):
    task = asyncio.create_task(node.runner.run())
    try:
        await scenario()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        node.runner.close()


def test_a_mount_that_hangs_is_named_while_others_answer_and_is_asked_again(node, monkeypatch):
    monkeypatch.setattr(reach, "HUNG_S", 0.6)
    node.hangs.write_text(f"{node.bad}\n")

    async def scenario():
        await until(lambda: node.waiting_s(node.bad) > 0.6)
        (verdict,) = judged(reach.Reach("n"), tuple(node.runner.samples()))
        assert (verdict.fault, verdict.subject) == ("mount_hung", f"node/n/mount{node.bad}")
        assert node.value("host_mount_response_seconds", node.bad) == -1.0
        assert node.value("host_filesystem_size_bytes", node.bad) == -1.0
        space = os.statvfs(node.good)
        size = space.f_blocks * space.f_frsize
        assert node.value("host_filesystem_size_bytes", node.good) == size
        assert node.value("host_mount_response_seconds", node.good) >= 0.0
        assert node.waiting_s(node.good) == 0.0
        (health,) = node.runner.health()
        assert health.up and not node.troubles  # the child itself is never late
        first = node.runner.children()["mounts"]
        node.hangs.write_text("")
        await until(lambda: node.waiting_s(node.bad) == 0.0)
        # The question that hung is answered first, and tells how long it took.
        assert node.value("host_mount_response_seconds", node.bad) > 0.6
        assert node.runner.children()["mounts"] == first
        await until(lambda: 0.0 <= node.value("host_mount_response_seconds", node.bad) < 0.5)
        assert node.value("host_filesystem_size_bytes", node.bad) == size
        node.hangs.write_text(f"{node.bad}\n")
        await until(lambda: node.waiting_s(node.bad) > 0.0)  # what it said before is not so now
        assert node.value("host_filesystem_size_bytes", node.bad) == -1.0

    asyncio.run(running(node, scenario))


def test_a_child_that_is_stopped_is_killed_and_the_next_one_answers(node):
    async def scenario():
        await until(lambda: node.waiting_s(node.good) == 0.0)
        first = node.runner.children()["mounts"]
        os.kill(first, signal.SIGSTOP)
        await until(lambda: not node.runner.health()[0].up)
        assert f"no answer within {DEADLINE_S} s" in node.runner.health()[0].error
        assert not node.runner.samples() and not node.runner.stuck_children()
        await until(lambda: node.waiting_s(node.good) == 0.0)
        assert node.runner.children()["mounts"] not in (0, first)

    asyncio.run(running(node, scenario))
    assert any("no answer within" in one for one in node.troubles)


def test_errors_of_a_mount_and_what_is_none(node, monkeypatch):
    roots = Roots(proc=str(node.good.parent))
    for number, wanted in ((107, "ENOTCONN"), (116, "ESTALE"), (13, ""), (2, "")):
        def fails(path, number=number):
            raise OSError(number, os.strerror(number), path)

        monkeypatch.setattr(mounts.os, "statvfs", fails)
        found = mounts.MountsCollector().collect(roots, 1.0)
        failed = [one for one in found if one.name == "host_mount_failed"]
        assert {one.subject.rpartition("=")[2] for one in failed} == ({wanted} if wanted else set())
        assert len(failed) == (2 if wanted else 0)


# ------------------------------------------------------------- questions


def test_a_question_is_asked_once_while_it_is_open():
    questions, release, asked = Questions(), threading.Event(), []

    def slow():
        asked.append(1)
        assert release.wait(20.0)
        return 7

    questions.ask("a", slow, 1.0)
    questions.ask("a", slow, 2.0)
    questions.settle(0.05)
    assert questions.waited_s("a") >= 0.05 and questions.answer("a") is None
    release.set()
    questions.settle(20.0)
    answer = questions.answer("a")
    assert (answer.value, answer.boot_s, len(asked)) == (7, 1.0, 1) and answer.took_s >= 0.05
    assert questions.waited_s("a") == 0.0
    questions.keep(())
    assert questions.answer("a") is None


def test_open_questions_are_bounded():
    questions, release = Questions(), threading.Event()
    for number in range(WAITING_MAX + 5):
        questions.ask(str(number), lambda: release.wait(20.0), 1.0)
    questions.settle(0.05)
    open_ = sum(questions.waited_s(str(number)) > 0.0 for number in range(WAITING_MAX + 5))
    release.set()
    questions.settle(20.0)
    assert open_ == WAITING_MAX


def test_a_question_for_which_there_is_no_thread_does_not_hang(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    questions = Questions()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(OSError, match="a cannot be asked"):
            questions.ask("a", lambda: 1, 1.0)
    assert questions.waited_s("a") == 0.0
    questions.ask("a", lambda: 1, 2.0)
    questions.settle(20.0)
    assert questions.answer("a").value == 1


# ------------------------------------------------------------- names


def test_names_of_the_configuration_are_asked_in_a_child():
    others = tuple(one.name for one in ALL if one.name != "dns")
    config = load(None, {
        "collectors.disable": (others, "t"), "collectors.dns_names": (("localhost",), "t"),
        "collectors.deadline_s": (DEADLINE_S, "t"), "agent.slow_s": (DEADLINE_S, "t"),
        "agent.fast_s": (0.5, "t"), "agent.tick_s": (0.5, "t"),
    }).config
    troubles = []
    runner = Runner(config, lambda part, error: troubles.append(error))

    async def scenario():
        task = asyncio.create_task(runner.run())
        try:
            await until(lambda: len(runner.samples()) == 2)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            runner.close()

    asyncio.run(scenario())
    assert not troubles
    assert {one.name: one.subject for one in runner.samples()} == {
        "host_dns_waiting_seconds": "name=localhost", "host_dns_lookup_seconds": "name=localhost",
    }


def test_names_that_resolve_do_not_and_hang(monkeypatch):
    release = threading.Event()

    def resolver(name, port, type):
        if name == "hangs.example":
            assert release.wait(20.0)
        if name == "gone.example":
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        return [1, 2]

    monkeypatch.setattr(dns.socket, "getaddrinfo", resolver)
    monkeypatch.setattr(questions, "SETTLE_S", 0.05)
    collector = dns.DnsCollector()
    names = ("good.example", "gone.example", "hangs.example")
    roots = Roots(dns_names=names)
    assert collector.here(roots) == "" and "dns_names" in collector.here(Roots())
    detector, faults = reach.Reach("n"), []
    monkeypatch.setattr(reach, "HUNG_S", 0.01)
    deadline_s = time.monotonic() + 20.0
    for boot_s in range(1, 1000):
        found = tuple(collector.collect(roots, float(boot_s)))
        faults = detector.look(NodeView(found, Observed()))
        if len(faults) >= 2 or time.monotonic() > deadline_s:
            break
    release.set()
    assert {one.subject: one.reason.partition(" (")[0] for one in faults} == {
        "node/n/name/gone.example": "gone.example does not resolve: there is no such name",
        "node/n/name/hangs.example": faults[-1].reason,
    }
    assert "takes" in faults[-1].reason and {one.fault for one in faults} == {"dns_failed"}


def test_a_real_resolver_knows_localhost_and_no_such_name():
    assert dns._resolve("localhost") >= 1
    with pytest.raises(OSError):
        dns._resolve("a..b")
