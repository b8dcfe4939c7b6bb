"""Runs the collectors: when, with which deadline, and what they said last.

Owns their schedule, their threads and their self-metrics.  A collector that raises, hangs or
finds nothing costs its own samples and nothing else.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol

from holdfast.collectors import ALL
from holdfast.collectors.roots import Roots
from holdfast.collectors.sample import Metric, NoData, Sample

from .settings import Config

SAMPLES_MAX = 10_000  # of one collector and reading


class Collector(Protocol):
    """One source: its name, its metrics, and one method that reads."""

    @property
    def name(self) -> str: ...

    @property
    def fast(self) -> bool: ...

    @property
    def metrics(self) -> tuple[Metric, ...]: ...

    def collect(self, roots: Roots, boot_s: float) -> list[Sample]: ...


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
        self.samples: tuple[Sample, ...] = ()
        self.health = Health(collector.name, False, False, "not read yet", 0.0, 0.0)
        self.due_s = 0.0
        self.thread: ThreadPoolExecutor | None = None
        self.stuck: asyncio.Future[list[Sample]] | None = None


class Runner:
    """All enabled collectors of this node."""

    def __init__(
        self, config: Config, trouble: Callable[[str, BaseException | str], None]
    ) -> None:
        self._config = config
        self._trouble = trouble
        self._roots = Roots(config.collectors.proc, config.collectors.sys, config.collectors.kmsg)
        disabled = set(config.collectors.disable)
        self._entries = [_Entry(make()) for make in ALL if make.name not in disabled]
        self._samples: tuple[Sample, ...] = ()

    def samples(self) -> tuple[Sample, ...]:
        """The latest reading of every collector."""
        return self._samples

    def health(self) -> tuple[Health, ...]:
        return tuple(entry.health for entry in self._entries)

    def metrics(self) -> tuple[Metric, ...]:
        """What the enabled collectors declare."""
        return tuple(metric for entry in self._entries for metric in entry.collector.metrics)

    async def run(self) -> None:
        """Reads for ever, each collector at its interval."""
        agent = self._config.agent
        while True:
            begin_s = time.monotonic()
            due = [entry for entry in self._entries if entry.due_s <= begin_s]
            for entry in due:
                entry.due_s = begin_s + (agent.fast_s if entry.collector.fast else agent.slow_s)
            if due:
                await asyncio.gather(*(self._read(entry) for entry in due))
                self._samples = tuple(
                    sample for entry in self._entries for sample in entry.samples
                )
            next_s = min((entry.due_s for entry in self._entries), default=begin_s + 60.0)
            await asyncio.sleep(max(0.05, next_s - time.monotonic()))

    async def _read(self, entry: _Entry) -> None:
        """One reading in the collector's own thread; one that still hangs is not joined by a
        second: it is down until it returns."""
        name = entry.collector.name
        begin_s = time.monotonic()
        if entry.stuck is not None:
            if not entry.stuck.done():
                entry.health = entry.health._replace(up=False, error="still hanging")
                self._trouble(f"collector {name}", "still hanging")
                return
            entry.stuck = None
        if entry.thread is None:
            entry.thread = ThreadPoolExecutor(1, thread_name_prefix=f"collect-{name}")
        boot_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        reading = asyncio.get_running_loop().run_in_executor(
            entry.thread, entry.collector.collect, self._roots, boot_s
        )
        deadline_s = self._config.collectors.deadline_s
        error, absent = "", False
        samples: tuple[Sample, ...] = ()
        try:
            samples = tuple(await asyncio.wait_for(asyncio.shield(reading), deadline_s))
            samples = samples[:SAMPLES_MAX]
        except TimeoutError:
            error, entry.stuck = f"no answer within {deadline_s:g} s", reading
            reading.add_done_callback(_take_exception)
        except NoData as reason:
            error, absent = str(reason) or "not on this machine", True
        except Exception as failure:  # border of a collector: promise 1
            error = f"{type(failure).__name__}: {failure}"
            self._trouble(f"collector {name}", failure)
        if entry.stuck is not None:
            self._trouble(f"collector {name}", error)
        entry.samples = samples
        now_s = time.monotonic()
        entry.health = Health(name, not error, absent, error, now_s - begin_s, now_s)

    def close(self) -> None:
        """Lets go of the threads; one that hangs dies with the process."""
        for entry in self._entries:
            if entry.thread is not None:
                entry.thread.shutdown(wait=False, cancel_futures=True)


def _take_exception(reading: asyncio.Future[list[Sample]]) -> None:
    """Retrieves what a late reading raised, so that nobody warns about it at exit."""
    if not reading.cancelled():
        reading.exception()
