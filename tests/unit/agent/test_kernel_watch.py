"""The kernel's log at the edge: records, gaps, junk, floods, and counts that survive a kill."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.agent.catalog import load
from holdfast.agent.core.parse import kernel_continuation
from holdfast.agent.history.journal import Journal
from holdfast.agent.telemetry.kernel_log import KINDS_MAX, OF_A_KIND_MAX, KernelWatch
from holdfast.collectors.sources import kmsg
from holdfast.collectors.sources.kmsg import KernelLog, parse

CATALOGUE = load.load()
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
    sequence = [line.cursor for line in log.read(1.0)]
    log.close()
    assert sequence and sequence == sorted(set(sequence))


def test_the_list_of_kernel_events_is_current():
    path = ROOT / "docs/kernel-events.md"
    text = load.render_docs()
    assert path.read_text() == text, "write it anew: python -m holdfast.agent.catalog.load"


def test_a_line_from_before_is_dated_by_the_kernel_and_a_new_one_by_its_reading(monkeypatch):
    monkeypatch.setattr(kmsg, "slept_s", lambda: 10.0)
    log = KernelLog("x")
    kernel = Kernel(monkeypatch, log)
    log._behind = True  # as behind open(after=...)
    kernel.records += [b"3,0,%s,-;%s\n" % (at, XID) for at in (b"5000000", b"junk", b"9" * 30)]
    assert [line.boot_s for line in log.read(7200.0)] == [15.0, 7200.0, 7200.0]
    kernel.records.append(b"3,3,5000000,-;%s\n" % XID)  # its clock may have drifted
    assert [line.boot_s for line in log.read(7300.0)] == [7300.0]


def test_what_was_said_before_a_stop_of_the_agent_still_reaches_the_core(monkeypatch):
    watch, kernel = watched(monkeypatch, [])
    watch.log._behind = True
    kernel.say(XID)
    watch.read(36_000.0, lambda counts, mark: None)
    (event,) = watch.events(36_030.0)
    assert event.boot_s < 3600.0 and watch.events(36_061.0) == ()


# -------------------------------------------------------- errors that are printed as several lines

SXID = b"nvidia-nvswitch%d: SXid (PCI:0000:%02x:00.0): %d, %s"
HEAD = b"Fatal, Link %d sourcetrack timeout error (First)"
SEVERITY = b"Severity 1 Engine instance %d Sub-engine instance 00"
DATA = b"Data {0x50610002, 0x10100030, 0x%08x, 0x00000000}"


def counted(watch: KernelWatch, at_s: float = 1.0) -> dict[tuple[str, ...], int]:
    found: dict[tuple[str, ...], int] = {}

    def record(counts, mark) -> None:
        for one in counts:
            found[one.labels] = found.get(one.labels, 0) + int(one.more)

    watch.read(at_s, record)
    return found


def test_the_lines_of_two_switches_fold_into_their_two_events(monkeypatch):
    watch, kernel = watched(monkeypatch, [])
    for text in (HEAD, SEVERITY, DATA):
        for switch in (0, 1):
            number = 36 + switch
            kernel.say(SXID % (switch, 0xC3 + switch, 24007, text % number))
    assert list(counted(watch).values()) == [2]
    first, second = watch.events(1.0)
    for event, number in ((first, 36), (second, 37)):
        assert f"Link {number} " in event.text
        assert event.more == ((SEVERITY % number).decode(), (DATA % number).decode())
    assert (first.cursor, second.cursor) == (0, 1)


def test_every_line_of_one_error_is_kept_once_and_only_the_first_counts(monkeypatch):
    """As ls10's driver prints a halted processor: a line, and one for each place it was at."""
    watch, kernel = watched(monkeypatch, [])
    kernel.say(SXID % (0, 4, 26006, b"SOE HALTED"))
    for number in range(40):
        kernel.say(SXID % (0, 4, 26006, b"SOE HALT data[%d] = 0x%16x" % (number, number)))
    assert counted(watch) == {("sxid", "other", "nvswitch", "contact_support"): 1}
    (event,) = watch.events(1.0)
    assert len(event.more) == kernel_continuation.MORE_MAX
    assert event.more[1].startswith("SOE HALT data[1]")


def test_a_line_that_goes_on_with_nothing_is_nothing_and_none_is_waited_for(monkeypatch):
    watch, kernel = watched(monkeypatch, [])
    kernel.say(SXID % (0, 4, 24007, SEVERITY % 1))  # its error was said before this agent was
    assert counted(watch) == {} and watch.events(1.0) == ()
    kernel.say(SXID % (0, 4, 24007, HEAD % 1))
    assert sum(counted(watch).values()) == 1 and len(watch.events(1.0)) == 1  # told at once
    kernel.say(SXID % (0, 4, 24005, DATA % 1))  # another number's
    kernel.say(SXID % (0, 5, 24007, DATA % 1))  # another switch's
    assert counted(watch, 2.0) == {} and watch.events(2.0)[0].more == ()
    kernel.say(SXID % (0, 4, 24007, DATA % 1))  # a minute later: of an error that was not seen
    assert counted(watch, 60.0) == {} and watch.events(60.0)[0].more == ()


def test_of_two_equal_errors_each_has_its_own_lines(monkeypatch):
    watch, kernel = watched(monkeypatch, [])
    for link in (28, 29):
        for text in (HEAD, SEVERITY, DATA):
            kernel.say(SXID % (0, 4, 24007, text % link))
    assert list(counted(watch).values()) == [2]
    for event, link in zip(watch.events(1.0), (28, 29), strict=True):
        assert event.more == ((SEVERITY % link).decode(), (DATA % link).decode())


def test_errors_that_may_go_on_are_bounded(monkeypatch):
    watch, kernel = watched(monkeypatch, [])
    for switch in range(kernel_continuation.OPEN_MAX + 1):
        kernel.say(SXID % (switch, switch, 24007, HEAD % 1))
    for switch in (0, 1):
        kernel.say(SXID % (switch, switch, 24007, DATA % 1))
    watch.read(1.0, lambda counts, mark: None)
    assert [bool(event.more) for event in watch.events(1.0)][:3] == [False, True, False]
