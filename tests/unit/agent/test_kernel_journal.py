"""The kernel's log by way of journald: its stream cut anywhere, its tool absent, dying, mute."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fakes import until
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import LIMIT_S, wait_for

from holdfast.agent.catalog import load
from holdfast.agent.core.parse.kernel_line import parse
from holdfast.agent.system import die_with_parent
from holdfast.agent.telemetry import journalctl
from holdfast.agent.telemetry.kernel_log import KernelWatch
from holdfast.collectors.sources import journald, kmsg
from holdfast.collectors.sources.journald import JournalLog

CATALOGUE = load.load()
XID = "NVRM: Xid (PCI:0000:4e:00): 79, pid=1, name=x, GPU has fallen off the bus."
LABELS = ("xid", "79", "hardware", "reboot_node")


def entry(number: int, text: object = XID, facility: str = "0", at_us: int = 5) -> bytes:
    return json.dumps({
        "__CURSOR": f"s=1;i={number:x}", "__MONOTONIC_TIMESTAMP": str(at_us),
        "SYSLOG_FACILITY": facility, "MESSAGE": text,
    }).encode() + b"\n"


def test_entries_are_lines_and_junk_is_counted():
    log = JournalLog("x", number=40)
    lines = log.feed(entry(1, "one\ntwo") + entry(2, list(b"by\xfftes")) + entry(3, ["a", "b"]), 1)
    assert [line.text for line in lines] == [r"one\x0atwo", "by\ufffdtes", "a"]
    assert [line.cursor for line in lines] == [40, 41, 42] and log.cursor == "s=1;i=3"
    junk = [b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"MESSAGE": "no cursor"}',
            entry(4, None)[:-1], entry(5, [1, 999])[:-1], entry(6, 3.5)[:-1], b"9" * 5000,
            entry(7).replace(b"s=1", b"--x y")[:-1]]
    assert not log.feed(b"\n".join(junk) + b"\n\n", 1) and log.broken == len(junk)
    assert log.cursor == "s=1;i=3"  # nothing broken moves the place
    assert not log.feed(entry(8, "a program", facility="1"), 1) and log.foreign == 1
    assert JournalLog("x", users=True).feed(entry(1, "a program", facility="1"), 1)
    assert [line.cursor for line in log.feed(entry(9), 1)] == [44]  # the program's was number 43


def test_an_endless_line_is_skipped_once_and_the_next_one_counts():
    log = JournalLog("x")
    for _ in range(40):
        assert log.feed(b"x" * 65536, 1) == ()
        assert len(log._piece) <= journald.ENTRY_MAX_BYTES
    assert [line.text for line in log.feed(b"\n" + entry(1), 1)] == [XID] and log.broken == 1


def test_what_was_there_before_the_agent_is_not_news_without_a_mark():
    log = JournalLog("x", since_us=100)
    assert "--lines=1" in log.command("t")
    assert not log.feed(entry(1, at_us=99), 1) and log.feed(entry(2, at_us=100), 1)
    assert "--after-cursor=s=1;i=2" in log.command("t")
    whole = JournalLog("x", whole=True, since_us=100)
    assert whole.command("t")[-1] == "--no-tail" and whole.feed(entry(1, at_us=1), 1)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(
    st.integers(0, 99).map(entry), st.binary(max_size=40), st.text(max_size=9).map(str.encode),
), max_size=8).map(b"\n".join), st.lists(st.integers(1, 50), max_size=40))
def test_it_does_not_matter_where_the_stream_is_cut(stream, cuts):
    whole, pieces, at = JournalLog("x"), JournalLog("x"), 0
    found = []
    for cut in cuts:
        found += pieces.feed(stream[at : at + cut], 1.0)
        at += cut
    found += pieces.feed(stream[at:], 1.0)
    assert tuple(found) == whole.feed(stream, 1.0)
    assert (pieces.broken, pieces.foreign, pieces.cursor) == (
        whole.broken, whole.foreign, whole.cursor)


def test_ten_thousand_lines_at_once_are_counted_and_few_are_kept():
    watch, counted = KernelWatch("x", "b1"), []
    watch._catalogue = CATALOGUE
    watch.fall_back({}, 0)
    stream = b"".join(entry(number) for number in range(10_000))
    for at in range(0, len(stream), journalctl.PIECE_BYTES):
        watch.feed(stream[at : at + journalctl.PIECE_BYTES], 1.0,
                   lambda counts, mark: counted.append((counts, mark)))
    assert sum(one.more for counts, _ in counted for one in counts) == 10_000
    assert counted[-1][1].labels == ("b1", "s=1;i=270f") and len(watch.events(1.0)) == 4


def test_the_real_tool_knows_what_it_is_asked_for():
    path = shutil.which("journalctl")
    if path is None:
        pytest.skip("journalctl is missing (Debian package systemd)")

    def said(log: JournalLog, *more: str) -> str:
        command = [one for one in log.command(path) if one != "--follow"]
        done = subprocess.run([*command, *more], capture_output=True, text=True, timeout=60,
                              check=False)
        return done.stderr

    place = f"s={'a' * 32};i=1;b={'b' * 32};m=1;t=1;x=1"
    for log in (JournalLog("x"), JournalLog("x", whole=True), JournalLog("x", cursor=place)):
        assert "option" not in said(log) and "Invalid" not in said(log)
    assert "option" in said(JournalLog("x"), "--no-such-thing")


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """A journalctl whose n-th life says what `lives[n]` holds, and notes how it was called."""
    monkeypatch.setattr(journalctl, "PAUSE_S", 0.02)
    monkeypatch.setattr(journalctl, "PAUSE_MAX_S", 0.02)
    folder = tmp_path / "journal"
    folder.mkdir()

    class Tool:
        path = folder / "journalctl"

        def live(self, *lives: bytes, last: str = "exec sleep 600") -> None:
            """One more life each; the last one stays."""
            for life in lives:
                (folder / f"said.{len(list(folder.glob('said.*')))}").write_bytes(life)
            self.path.write_text(
                f'#!/bin/sh\ncd {folder}\nn=$(ls | grep -c called)\necho "$*" > called.$n\n'
                f'[ -e said.$n ] && cat said.$n\n[ -e said.$((n + 1)) ] && exit 1\n{last}\n'
            )
            self.path.chmod(0o755)

        def calls(self) -> list[str]:
            found = sorted(folder.glob("called.*"), key=lambda one: int(one.suffix[1:]))
            return [one.read_text().strip() for one in found]

    return Tool()


def journal_agent(agent, tool, tmp_path):
    return agent(collectors__kmsg=str(tmp_path / "none"), collectors__journalctl=str(tool.path))


def events(daemon) -> float:
    return daemon.performer.counters.get(("events", LABELS), -1.0)


def test_a_tool_that_dies_in_the_middle_of_a_line_goes_on_behind_the_last(agent, tool, tmp_path):
    late = 10**15  # microseconds: after the agent's start
    tool.live(entry(1, at_us=late) + entry(2, at_us=late)[:30], b"",
              entry(2, at_us=late) + b"junk\n")

    async def scenario():
        async with journal_agent(agent, tool, tmp_path) as (daemon, node):
            await until(lambda: events(daemon) == 2.0)
            await until(lambda: daemon.state.kernel.log.broken == 2)  # the half line, the junk
            await until(lambda: len(node.seen[-1].events) == 2)
            kernel = daemon.state.kernel
            assert kernel.source == "journald" and kernel.journal.starts == 3
            assert all("after-cursor=s=1;i=1" in call for call in tool.calls()[1:])
            pid = daemon.state.kernel.journal.pid
        assert not os.path.exists(f"/proc/{pid}")

    asyncio.run(scenario())
    assert "--lines=1" in tool.calls()[0] and "--after-cursor=s=1;i=1" in tool.calls()[1]


def test_a_log_that_can_no_longer_be_read_is_followed_by_way_of_journald(
    agent, tool, tmp_path, monkeypatch
):
    def broken(self, boot_s):
        raise OSError(5, "gone")

    (tmp_path / "kmsg").touch()
    monkeypatch.setattr("holdfast.collectors.sources.kmsg.KernelLog.read", broken)
    tool.live(entry(1, at_us=10**15))
    paths = {"collectors__kmsg": str(tmp_path / "kmsg"),
             "collectors__journalctl": str(tool.path)}

    async def scenario():
        async with agent(**paths) as (daemon, _):
            await until(lambda: events(daemon) == 1.0)
            assert daemon.state.kernel.source == "journald"
            assert "gone" in daemon.state.errors.latest[
                "kernel log"]

    asyncio.run(scenario())


def test_an_agent_that_starts_again_goes_on_behind_what_it_counted(agent, tool, tmp_path):
    late = 10**15

    async def life(wanted: float):
        async with journal_agent(agent, tool, tmp_path) as (daemon, _):
            await until(lambda: events(daemon) == wanted)
            return daemon.state.kernel.log.next

    tool.live(entry(1, at_us=late))
    first = asyncio.run(life(1.0))
    tool.live(entry(2, at_us=late))
    assert asyncio.run(life(2.0)) == first + 1
    assert "--after-cursor=s=1;i=1" in tool.calls()[-1]


def test_a_cursor_that_the_journal_refuses_is_given_up(agent, tool, tmp_path):
    late = 10**15
    tool.live(entry(1, at_us=late), b"", b"", b"", entry(9, at_us=late))

    async def scenario():
        async with journal_agent(agent, tool, tmp_path) as (daemon, _):
            await until(lambda: events(daemon) == 2.0)
            assert "lost" in daemon.state.errors.latest["kernel log"]

    asyncio.run(scenario())
    assert "--lines=1" in tool.calls()[4]


@pytest.mark.parametrize("kind", ["absent", "refused", "mute"])
def test_without_a_journal_nothing_is_read_and_nothing_else_suffers(
    agent, tool, tmp_path, monkeypatch, kind
):
    if kind != "absent":
        tool.live(b"", last="exit 1" if kind == "refused" else "exec sleep 600")
    monkeypatch.setattr(journalctl, "FIRST_S", 0.2)

    async def scenario():
        async with journal_agent(agent, tool, tmp_path) as (daemon, node):
            await until(lambda: daemon.state.kernel.journal is not None)
            await until(lambda: kind == "absent" or daemon.state.kernel.journal.starts == 1)
            await until(lambda: daemon.state.kernel.journal.pid == 0)
            steps = node.steps
            daemon.wake("test")
            await until(lambda: node.steps > steps)
            assert daemon.state.kernel.source == "" and events(daemon) == -1.0
            assert "kernel log" not in daemon.state.errors.counts

    asyncio.run(scenario())


def test_the_tool_dies_with_an_agent_that_was_killed():
    code = ("import subprocess, sys, os, time\n"
            f"child = subprocess.Popen([sys.executable, '-I', '-S', {die_with_parent.__file__!r}, "
            "str(os.getpid()), '/bin/sleep', '600'])\n"
            "print(child.pid, flush=True)\ntime.sleep(600)\n")
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        pid = int(parent.stdout.readline())
        tool = os.pidfd_open(pid)
        try:
            wait_for(lambda: Path(f"/proc/{pid}/comm").read_text() == "sleep\n")
            parent.kill()
            assert select.select([tool], [], [], LIMIT_S)[0], "the tool outlived the agent"
        finally:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(tool, signal.SIGKILL)
            os.close(tool)
    finally:
        parent.kill()
        parent.communicate()
    late = subprocess.run([sys.executable, "-I", "-S", die_with_parent.__file__, "1", "/bin/true"],
                          timeout=30, check=False)
    assert late.returncode == 1  # started for a parent that is gone already


def test_one_record_of_three_lines_is_understood_as_kmsg_gives_it():
    said = ("NVRM: The NVIDIA GPU 0000:b3:00.0\nNVRM: (PCI ID: 10de:2330) installed in this system "
            "has\nNVRM: fallen off the bus and is not responding to commands.\n")
    (line,) = JournalLog("x").feed(entry(1, said), 1)
    event = parse(CATALOGUE, line.text)
    assert event is not None and event.subject == "gpu/0000:b3:00"


def test_an_entry_is_dated_by_when_it_was_said(monkeypatch):
    monkeypatch.setattr(kmsg, "slept_s", lambda: 10.0)
    log = JournalLog("x")
    early, late = log.feed(entry(1, at_us=5_000_000) + entry(2, at_us=90_000_000), 50.0)
    assert (early.boot_s, late.boot_s) == (15.0, 50.0)
