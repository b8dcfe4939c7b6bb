"""The kernel's log at the edge: records, gaps, junk, floods, and counts that survive a kill."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.agent import catalogue
from holdfast.agent.journal import Journal
from holdfast.agent.kernel_watch import KINDS_MAX, OF_A_KIND_MAX, KernelWatch
from holdfast.collectors import kmsg
from holdfast.collectors.kmsg import KernelLog, parse

CATALOGUE = catalogue.load()
XID = b"NVRM: Xid (PCI:0000:4e:00): 79, pid=1, name=x, GPU has fallen off the bus."
LABELS = ("xid", "79", "hardware", "reboot_node")
ROOT = Path(__file__).resolve().parents[3]


class Kernel:
    """A log whose records the test makes; stands in for the device's read()."""

    def __init__(self, monkeypatch, log: KernelLog) -> None:
        self.records: list[bytes | OSError] = []
        self.sequence = 0
        log._fd = 10_000  # no descriptor: every read comes here
        monkeypatch.setattr(kmsg.os, "read", self._read)

    def say(self, text: bytes, level: int = 3, skip: int = 0) -> None:
        self.sequence += skip
        self.records.append(b"%d,%d,5,-;%s\n KEY=x\n" % (level, self.sequence, text))
        self.sequence += 1

    def _read(self, fd: int, size: int) -> bytes:
        if not self.records:
            raise BlockingIOError
        record = self.records.pop(0)
        if isinstance(record, OSError):
            raise record
        return record


def test_gaps_overruns_junk_and_programs_lines_are_counted(monkeypatch):
    log = KernelLog("x")
    kernel = Kernel(monkeypatch, log)
    kernel.say(b"one")
    kernel.say(b"two", skip=5)
    kernel.records += [OSError(errno.EPIPE, "overrun"), OSError(errno.EINVAL, "too long")]
    kernel.records += [b"\xff\xfe\x00", b";;;", b"x,y,z;t", b"9" * 400 + b",1,1,-;t"]
    kernel.say(b"\xff\x00 binary \x1b[31m" + b"y" * 5000)
    kernel.say(b"from a program", level=8 + 3)
    lines = log.read(1.0)
    assert [line.cursor for line in lines] == [0, 6, 7] and len(lines[2].text) == 1000
    assert (log.missed, log.overruns, log.broken, log.foreign) == (5, 1, 5, 1)
    assert log.next == 9 and not log.read(1.0)


def test_a_piece_of_a_line_is_no_line(monkeypatch):
    log = KernelLog("x")
    kernel = Kernel(monkeypatch, log)
    kernel.say(b"oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=")
    flags = (b"c", b"+", b"c,caller=T7", b"-,caller=T7", b"")
    kernel.records += [b"3,%d,6,%s;%s\n" % (at, one, XID) for at, one in enumerate(flags, 1)]
    assert [line.cursor for line in log.read(1.0)] == [0, 4, 5]
    assert (log.broken, log.missed) == (3, 0)


def test_programs_lines_are_believed_only_with_the_switch(monkeypatch):
    log = KernelLog("x", users=True)
    kernel = Kernel(monkeypatch, log)
    kernel.say(b"program", level=8 + 3)
    kernel.say(b"a daemon", level=24 + 3)
    assert [line.text for line in log.read(1.0)] == ["program"] and log.foreign == 1


def test_a_dead_log_says_so(monkeypatch):
    log = KernelLog("x")
    Kernel(monkeypatch, log).records = [OSError(errno.EIO, "gone")]
    with pytest.raises(OSError, match="gone"):
        log.read(1.0)


def test_an_endless_overrun_ends(monkeypatch):
    log = KernelLog("x")
    Kernel(monkeypatch, log).records = [OSError(errno.EPIPE, "overrun") for _ in range(5000)]
    assert log.read(1.0) == () and log.overruns == kmsg.LINES_PER_READ


def test_a_recorded_log_is_read_once(tmp_path):
    path = tmp_path / "kmsg"
    path.write_bytes(b"3,5,1,-;" + XID + b"\n SUBSYSTEM=pci\njunk\n6,6,2,-;hello\n")
    log = KernelLog(str(path))
    log.open()
    assert [line.cursor for line in log.read(1.0)] == [5, 6] and log.broken == 2
    log.close()


@given(st.binary(max_size=300))
def test_no_record_breaks_the_reader(record):
    line = parse(record, 1.0)
    assert line is None or (line.cursor >= 0 and len(line.text) <= 1000)


def watched(monkeypatch, records: list) -> tuple[KernelWatch, Kernel]:
    watch = KernelWatch("x", "b1")
    monkeypatch.setattr(watch.log, "open", lambda after: 0)
    watch.open(CATALOGUE, {})
    return watch, Kernel(monkeypatch, watch.log)


def test_ten_thousand_equal_lines_are_counted_kept_few_and_hide_no_other(monkeypatch):
    found: list = []
    watch, kernel = watched(monkeypatch, found)
    for number in range(10_000):
        kernel.say(XID)
        if number == 10:
            kernel.say(XID.replace(b"79", b"48"))
    reads = 0
    while kernel.records:
        assert watch.read(1.0, lambda counts, mark: found.append((counts, mark)))
        reads += 1
    assert reads == 11 and len(found) == 11
    total = sum(one.more for counts, _ in found for one in counts if one.labels == LABELS)
    assert total == 10_000
    kept = watch.events(1.0)
    assert len(kept) == OF_A_KIND_MAX + 1 and {"79", "48"} == {event.code for event in kept}
    assert watch.events(62.0) == ()


def test_kinds_are_bounded(monkeypatch):
    watch, kernel = watched(monkeypatch, [])
    for number in range(3 * KINDS_MAX):
        kernel.say(b"blk_update_request: I/O error, dev sd%d, sector 1" % number)
    watch.read(1.0, lambda counts, mark: None)
    assert len(watch.events(1.0)) == KINDS_MAX


def test_a_kill_and_a_new_start_lose_no_event_and_count_none_twice(tmp_path, monkeypatch):
    """The second of two equal XIDs counts, as does the one that came while nobody listened."""
    history = [b"3,%d,5,-;%s\n" % (number, XID) for number in range(10)]

    class Log(KernelLog):
        def open(self, after=None):
            self._after, self._fd = -1 if after is None else after, 10_000
            self._next = self._after + 1
            self.said = list(history)
            return 0

    def start(boot_id: str, lines: int) -> float:
        """An agent's life: reads `lines` records of the history and is gone."""
        async def life() -> float:
            journal = Journal(tmp_path)
            watch = KernelWatch("x", boot_id)
            watch.log = Log("x")
            watch.open(CATALOGUE, journal.seed.counters)
            watch.log.said = watch.log.said[:lines]
            monkeypatch.setattr(kmsg.os, "read", lambda fd, size: read(watch.log))
            watch.read(1.0, lambda counts, mark: journal.append(*counts, mark) and None)
            journal.close()
            reader = Journal(tmp_path)
            reader.close()
            marks = [key for key in reader.seed.counters if key[0] == "kernel_log_next"]
            assert marks == [("kernel_log_next", (boot_id,))]
            return reader.seed.counters[("events", LABELS)]

        return asyncio.run(life())

    def read(log: Log) -> bytes:
        if not log.said:
            raise BlockingIOError
        return log.said.pop(0)

    assert start("b1", 2) == 2.0
    assert start("b1", 2) == 2.0  # nothing new
    assert start("b1", 5) == 5.0  # three came in between
    assert start("b2", 1) == 6.0  # another boot: its numbers begin anew


def test_the_device_is_read_where_it_is(tmp_path):
    if not os.access("/dev/kmsg", os.R_OK):
        pytest.skip("/dev/kmsg may not be read here")
    log = KernelLog("/dev/kmsg", users=True)
    try:
        log.open(after=-1)
    except kmsg.NoData as reason:
        pytest.skip(str(reason))
    log.read(1.0)
    log.close()


def test_the_list_of_kernel_events_is_current():
    path = ROOT / "docs/kernel-events.md"
    text = catalogue.render_docs()
    assert path.read_text() == text, "write it anew: python -m holdfast.agent.catalogue"


def test_a_line_from_before_is_dated_by_the_kernel_and_a_new_one_by_its_reading(monkeypatch):
    monkeypatch.setattr(kmsg, "slept_s", lambda: 10.0)
    log = KernelLog("x")
    kernel = Kernel(monkeypatch, log)
    log._behind = True  # as behind open(after=...)
    kernel.records += [b"3,0,%s,-;%s\n" % (at, XID) for at in (b"5000000", b"junk", b"9" * 30)]
    assert [line.boot_s for line in log.read(7200.0)] == [15.0, 7200.0, 7200.0]
    kernel.records.append(b"3,3,5000000,-;%s\n" % XID)  # its clock may have drifted
    assert [line.boot_s for line in log.read(7300.0)] == [7300.0]
    assert len(log.lines(7250.0)) == 4 and len(log.lines(7265.0)) == 1  # by their reading


def test_what_was_said_before_a_stop_of_the_agent_still_reaches_the_core(monkeypatch):
    watch, kernel = watched(monkeypatch, [])
    watch.log._behind = True
    kernel.say(XID)
    watch.read(36_000.0, lambda counts, mark: None)
    (event,) = watch.events(36_030.0)
    assert event.boot_s < 3600.0 and watch.events(36_061.0) == ()
