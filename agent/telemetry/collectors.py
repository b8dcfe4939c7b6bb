"""Runs the collectors: when, with which deadline, and their last samples.

Owns their schedule, their threads and children, and their self-metrics.  A collector that raises,
hangs or finds nothing costs its own samples and nothing else.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import NamedTuple

import msgspec

from holdfast.collectors import ALL
from holdfast.collectors.contract import (
    Collector,
    Metric,
    NoData,
    Probed,
    Roots,
    Sample,
    legible,
    sound,
)

from ..config.settings import Config
from ..core.model import Named, Readings, by_name
from ..system.child_probe import Helper, Prober, StuckChild
from ..system.side_thread import take_error

SAMPLES_MAX = 10_000  # of one collector and reading
FIRST_FACTOR = 10.0  # a child's first answer: a driver without persistence takes seconds to wake
TOGETHER_S = 0.02  # collectors due so soon are read now: each waking of the loop costs
ALONE_S = 0.05  # a collector has this long for itself
ABSENT_S = 300.0  # a source that is not here is looked for this often
RESTS = "not read while others need its devices"
REST_S = 5.0  # for a running reading to end, once its child was killed


class Reply(msgspec.Struct):
    """One answer of a collector's child (collectors/__main__.py)."""

    samples: tuple[Sample, ...] = ()
    dropped: int = 0
    absent: str = ""
    error: str = ""
    took_s: float = 0.0  # in the child


class Health(NamedTuple):
    """How a collector's last reading went."""

    name: str
    up: bool
    absent: bool  # its source is not on this machine: no fault
    error: str
    duration_s: float
    read_s: float  # CLOCK_MONOTONIC


class _Entry:
    """What is kept about one collector."""

    def __init__(self, collector: Collector) -> None:
        self.collector = collector
        self.named: Named = {}
        self.known: Named = {}  # the same, or the last samples before it fell silent
        self.health = Health(collector.name, False, False, "not read yet", 0.0, 0.0)
        self.due_s = 0.0
        self.thread: ThreadPoolExecutor | None = None
        self.stuck: asyncio.Future[tuple[list[Sample], float]] | None = None
        self.helper: Helper | None = None
        self.asking = False
        self.rests = False  # it may have no child for now
        self.last: tuple[Sample, ...] = ()  # of the last good reading, however old

    def keep(self, samples: tuple[Sample, ...], health: Health) -> None:
        """Keeps the samples of a reading; none when it failed."""
        self.named = by_name(samples)
        self.health = health
        self.known = self.known if self.silent else self.named
        self.last = samples or self.last

    @property
    def silent(self) -> bool:
        """Whether its source seems to be here and does not answer."""
        return not self.health.up and not self.health.absent


class Runner:
    """All enabled collectors of this node."""

    def __init__(
        self, config: Config, on_error: Callable[[str, BaseException | str], None],
        job_caches: Callable[[], tuple[str, ...]] = tuple,
    ) -> None:
        self._config = config
        self._job_caches = job_caches
        self._on_error = on_error
        roots = config.collectors
        self._roots = Roots(roots.proc, roots.sys, roots.kmsg, roots.nvml, roots.neuron,
                            roots.compile_cache, tools=roots.tools, rocm=roots.rocm,
                            dns_names=roots.dns_names, root=roots.root, shm=roots.shm,
                            systemd=roots.systemd, systemctl=roots.systemctl,
                            ec2=roots.ec2_metadata)
        self._prober = Prober()
        disabled = set(config.collectors.disable)
        self._entries = [_Entry(make()) for make in ALL if make.name not in disabled]
        self._gather()

    def samples(self) -> Readings:
        """The latest reading of every collector."""
        return self._samples

    def known(self) -> Readings:
        """The same for those who conclude: what a silent collector said last stands, until it
        answers or finds that its source is not here."""
        return self._known

    def health(self) -> tuple[Health, ...]:
        return tuple(entry.health for entry in self._entries)

    def metrics(self) -> tuple[Metric, ...]:
        """What the enabled collectors declare, each once: vendors share the accelerators'."""
        declared = (metric for entry in self._entries for metric in entry.collector.metrics)
        return tuple({metric.name: metric for metric in declared}.values())

    def last(self, name: str) -> tuple[Sample, ...]:
        """The last samples of a collector, however old; each carries its time."""
        return next((one.last for one in self._entries if one.collector.name == name), ())

    def children(self) -> dict[str, int]:
        """Process id of each collector's child that lives."""
        return {
            entry.collector.name: entry.helper.pid
            for entry in self._entries if entry.helper is not None and entry.helper.pid}

    @asynccontextmanager
    async def without(self, name: str) -> AsyncIterator[None]:
        """While this goes on, the child of that collector is gone and no other begins: it has the
        devices open that it reads.  What it read is old meanwhile, and shown by nobody as of now.
        Never raises: one that cannot be ended stays."""
        entries = [one for one in self._entries if one.collector.name == name]
        try:
            for entry in entries:
                entry.rests = True
                try:
                    async with asyncio.timeout(REST_S):
                        await _ended(entry)
                except TimeoutError:
                    self._on_error(f"collector {name}", "its reading does not end")
                if entry.health.up:
                    entry.keep((), entry.health._replace(up=False, error=RESTS))
            self._gather()
            yield
        finally:
            for entry in entries:
                entry.rests = False

    def stuck_children(self) -> tuple[StuckChild, ...]:
        """Children that cannot be ended, because the kernel holds them."""
        return self._prober.stuck_children()

    async def run(self) -> None:
        """Reads for ever, each collector at its interval.  Threads are waited for together;
        children each by itself, for the first answer of one may take long."""
        threads = [one for one in self._entries if not isinstance(one.collector, Probed)]
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._run_threads(threads))
                for entry in self._entries:
                    if isinstance(entry.collector, Probed):
                        group.create_task(self._run_child(entry, entry.collector))
        finally:
            for entry in self._entries:
                if entry.helper is not None:
                    await entry.helper.close()

    async def _run_threads(self, entries: list[_Entry]) -> None:
        while True:
            begin_s = time.monotonic()
            due = [entry for entry in entries if entry.due_s <= begin_s + TOGETHER_S]
            for entry in due:
                entry.due_s = begin_s + self._interval_s(entry)
            if due:
                await self._read_all(due)
                self._gather()
            next_s = min((entry.due_s for entry in entries), default=begin_s + 60.0)
            await asyncio.sleep(max(0.05, next_s - time.monotonic()))

    async def _read_all(self, entries: list[_Entry]) -> None:
        """Reads one collector after the other: threads that all read small files at once wrest the
        interpreter's lock from each other at every file.  The next collector does not wait for a
        slow one."""
        async with asyncio.TaskGroup() as group:
            for entry in entries:
                reading = group.create_task(self._read(entry))
                await asyncio.wait((reading,), timeout=ALONE_S)

    async def _run_child(self, entry: _Entry, collector: Probed) -> None:
        while True:
            begin_s = time.monotonic()
            if not entry.rests:
                await self._ask(entry, collector)
            self._gather()
            rare = entry.health.absent and not collector.follows_jobs
            pause_s = ABSENT_S if rare else self._interval_s(entry)
            await asyncio.sleep(max(0.05, begin_s + pause_s - time.monotonic()))

    def _interval_s(self, entry: _Entry) -> float:
        agent, pace = self._config.agent, entry.collector.pace
        return max(pace.every * (agent.fast_s if pace.fast else agent.slow_s), pace.least_s)

    def _gather(self) -> None:
        self._samples = self._known = Readings(entry.named for entry in self._entries)
        silent = [entry for entry in self._entries if entry.silent]
        if silent:
            names = {metric.name for one in silent for metric in one.collector.metrics}
            names |= {name for one in silent for name in one.known}  # with undeclared samples
            self._known = Readings((entry.known for entry in self._entries), frozenset(names))

    async def _ask(self, entry: _Entry, collector: Probed) -> None:
        """One reading in the collector's child.  A late child is killed, and the next reading
        starts another; a child that reports an error is ended as well, to load drivers anew."""
        name, begin_s = entry.collector.name, time.monotonic()
        if collector.follows_jobs and self._roots.job_caches != self._job_caches():
            self._roots = self._roots._replace(job_caches=self._job_caches())
            if entry.helper is not None:  # it was told where to look when it began
                await entry.helper.close()
                entry.helper = None
        reply = Reply(absent=collector.here(self._roots))
        if not reply.absent:
            entry.asking = True
            try:
                reply = await self._reply(entry, name, collector)
            finally:
                entry.asking = False
        if entry.rests:
            return  # the child was ended on purpose: no fault of its source
        if entry.helper is not None and (reply.absent or reply.error):
            await entry.helper.close()
        if reply.error:
            self._on_error(f"collector {name}", reply.error)
        self._say_dropped(name, reply.dropped)
        now_s = time.monotonic()
        took_s = reply.took_s or now_s - begin_s
        error = reply.error or reply.absent
        entry.keep(reply.samples[:SAMPLES_MAX],
                   Health(name, not error, bool(reply.absent), error, took_s, now_s))

    def _say_dropped(self, name: str, dropped: int) -> None:
        if dropped:
            self._on_error(f"collector {name}", f"{dropped} readings were no numbers >= 0")

    async def _reply(self, entry: _Entry, name: str, collector: Probed) -> Reply:
        if entry.helper is None:
            # -P: a run's own agent stands in the user's directory, whose json.py is not ours
            command = (sys.executable, "-P", "-m", "holdfast.collectors", name,
                       json.dumps(self._roots))
            environ = collector.environ(self._roots)
            entry.helper = Helper(self._prober, name, command, environ)
        deadline_s = self._config.collectors.deadline_s
        if not entry.helper.pid:
            deadline_s *= FIRST_FACTOR
        boot_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        answer = await entry.helper.ask(b"%f" % boot_s, deadline_s)
        if not answer.ok:
            return Reply(error=answer.error)
        try:
            return msgspec.json.decode(answer.output, type=Reply)
        except (msgspec.MsgspecError, RecursionError) as error:
            return Reply(error=f"{name}: {error}")

    async def _read(self, entry: _Entry) -> None:
        """One reading in the collector's own thread.  A reading that still hangs is not joined by a
        second: the collector is down until it returns."""
        name = entry.collector.name
        begin_s = time.monotonic()
        if entry.stuck is not None:
            if not entry.stuck.done():
                entry.health = entry.health._replace(up=False, error="still hanging")
                self._on_error(f"collector {name}", "still hanging")
                return
            entry.stuck = None
        if entry.thread is None:
            entry.thread = ThreadPoolExecutor(1, thread_name_prefix=f"collect-{name}")
        boot_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        deadline_s = self._config.collectors.deadline_s
        error, absent, took_s = "", False, -1.0
        samples: tuple[Sample, ...] = ()
        try:
            reading = asyncio.get_running_loop().run_in_executor(  # there may be no thread left
                entry.thread, _timed, entry.collector.collect, self._roots, boot_s
            )
            async with asyncio.timeout(deadline_s):
                read, took_s = await asyncio.shield(reading)
            samples = tuple(sound(read, entry.collector.metrics)[:SAMPLES_MAX])
            self._say_dropped(name, max(0, min(len(read), SAMPLES_MAX) - len(samples)))
        except TimeoutError:
            error, entry.stuck = f"no answer within {deadline_s:g} s", reading
            reading.add_done_callback(take_error)
        except NoData as reason:
            error, absent = legible(str(reason)) or "not on this machine", True
        except Exception as failure:  # border of a collector: promise 1
            error = legible(f"{type(failure).__name__}: {failure}")
            self._on_error(f"collector {name}", failure)
        if entry.stuck is not None:
            self._on_error(f"collector {name}", error)
        now_s = time.monotonic()
        took_s = took_s if took_s >= 0.0 else now_s - begin_s
        entry.keep(samples, Health(name, not error, absent, error, took_s, now_s))

    def close(self) -> None:
        """Lets go of the threads; a thread that hangs dies with the process."""
        for entry in self._entries:
            if entry.thread is not None:
                entry.thread.shutdown(wait=False, cancel_futures=True)


async def _ended(entry: _Entry) -> None:
    """Once its child is gone: one that was just starting is there only later."""
    while True:
        if entry.helper is not None:
            await entry.helper.close()
        if not entry.asking:
            return
        await asyncio.sleep(0.02)


def _timed(
    collect: Callable[[Roots, float], list[Sample]], roots: Roots, boot_s: float
) -> tuple[list[Sample], float]:
    """In the collector's thread: the loop sees the whole set's time, and its own."""
    begin_s = time.monotonic()
    return collect(roots, boot_s), time.monotonic() - begin_s
