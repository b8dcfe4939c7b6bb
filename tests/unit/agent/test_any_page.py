"""Any bytes in a rank's page: launcher and agent go on, and it is said."""

from __future__ import annotations

import contextlib
import io
import math
import os
import random
import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.agent.launchers.protocol import RankLevel
from holdfast.agent.launchers.rank_monitor import RankMonitor
from holdfast.worker import page as pages
from holdfast.worker.launcher import launcher, terminal
from holdfast.worker.launcher.forking import Child
from holdfast.worker.launcher.process import RankProcess
from holdfast.worker.launcher.rank_processes import RankProcesses

FIELDS = pages.SIZE // 8
WORDS = st.one_of(st.integers(0, 9), st.integers(0, 2**64 - 1),
                  st.sampled_from((2**53, 2**63 - 1, 2**63, 2**64 - 1)),
                  st.floats().map(pages.bits))


def written(words: dict[int, int]) -> bytes:
    """A page as the launcher made it, and then what a stray pointer wrote."""
    fd = pages.create()
    try:
        fields = pages.map_fields(fd)
        for number, word in words.items():
            fields[number] = word
        return bytes(fields)
    finally:
        os.close(fd)


PAGES = st.one_of(
    st.integers(0, 2**32).map(lambda seed: random.Random(seed).randbytes(pages.SIZE)),
    st.dictionaries(st.integers(3, pages.FIELDS - 1), WORDS, max_size=30).map(written),
)
HUGE = written({pages.F_STEP: 2**64 - 1, pages.F_TOTAL: 1})
NO_MAGIC = written({pages.F_MAGIC: 0})
LOSS = written({pages.F_STEP: 5, pages.F_TOTAL: 2, pages.F_LOSS: pages.bits(1e308),
                pages.F_RATE: pages.bits(math.inf)})


class Quiet:
    """A channel to nobody."""

    def send(self, *_: object) -> None: ...

    def close(self) -> None: ...


def rank_process(page: bytes) -> RankProcess:
    fd = pages.create()
    process = RankProcess(0, "/nonexistent", fd, Quiet())
    process.rank, process.assigned, process.generation = 0, True, 1
    process.child = Child(os.getpid(), -1)
    for number, word in enumerate(struct.unpack(f"={FIELDS}Q", page)):
        process.fields[number] = word
    return process


@given(PAGES, st.booleans())
@example(HUGE, True)
@example(NO_MAGIC, True)
@example(LOSS, True)
@example(LOSS, False)
def test_the_launcher(page: bytes, tty: bool) -> None:
    """Its bar, the stop at a common step, the record of the end."""
    process = rank_process(page)
    ranks = object.__new__(RankProcesses)
    ranks.processes, ranks.started = [process], None
    one = object.__new__(launcher.Launcher)
    one.ranks, one.terminal = ranks, terminal.Terminal(False)
    one.terminal.tty, one.folders = tty, list
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            one.show()
            ranks.moving()
            ranks.stop_at_step()
            ranks.note_end(process, 1, 0)
        assert len(out.getvalue()) < 1000
        assert process.ended is not None and 0 <= process.ended["code"] <= 255
        assert process.fields[pages.F_STOP_AFTER]
    finally:
        process.close()


@given(PAGES)
@example(HUGE)
@example(NO_MAGIC)
@example(LOSS)
def test_the_agent(page: bytes) -> None:
    """What it takes over is bounded; else the rank is unwatched, and never called still."""
    monitor = RankMonitor(0, os.getpid(), 1)
    try:
        monitor._map = page  # as bytes: only read
        generation = struct.unpack_from("=Q", page, 8 * pages.F_GENERATION)[0]
        for now_s in (100.0, 101.0, 160.0):
            monitor.look_at_page(now_s)
        level = monitor.level(RankLevel(rank=0, pid=os.getpid(), generation=generation), "n", 160.0)
        assert bool(monitor.error) == (monitor.view is None)
        if monitor.error:
            assert level.step == 0 and level.still_s == 0.0
        numbers = [level.step, level.still_s, level.beat_age_s, level.step_time_s]
        numbers += [n for pair in level.step_seq for n in pair]
        numbers += [s for _, s in level.phase_s] + [n for _, n in level.seq]
        assert all(0 <= n <= 2**53 and math.isfinite(n) for n in numbers)
    finally:
        monitor._map = None
        monitor.close()


@given(PAGES)
def test_reading(page: bytes) -> None:
    """A page that is taken is bounded in every number; the rest says which field."""
    with contextlib.suppress(ValueError):
        view = pages.read_page(page)
        assert 0 <= view.step <= pages.COUNT_MAX and 0 <= view.pid <= pages.PID_MAX
        assert 0.0 <= view.rate < pages.RATE_MAX
        return
    with pytest.raises(ValueError, match=r"page.*(magic|version|damaged: )"):
        pages.read_page(page)
