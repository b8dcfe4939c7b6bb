"""Reads the kernel's log as it is written, from /dev/kmsg or else by way of journald.

Owns the event loop's side of it, and that events reach journal and metrics together.  A machine
that lets us read neither is no fault.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from holdfast.collectors.contract import NoData

from ...actions.performer import Performer
from ...catalog.load import load as load_catalogue
from ...core.parse.kernel_line import Catalogue
from ...history.journal import Count, Journal, Mark
from ...telemetry.journalctl import JournalReader
from ..state import AgentState


class KernelLogPart:
    name = "kernel log"

    def __init__(
        self, state: AgentState, journal: Journal, performer: Performer, wake: Callable[[str], None]
    ) -> None:
        self._state, self._journal, self._performer = state, journal, performer
        self._wake = wake
        self._watch, self._counters = state.kernel, performer.counters

    async def run(self) -> None:
        loop, failed = asyncio.get_running_loop(), asyncio.Event()
        catalogue = await asyncio.to_thread(load_catalogue)
        try:
            fd = self._watch.open(catalogue, self._counters)
        except NoData:
            return await self._follow_journald(catalogue)
        self._show_zeros(catalogue)

        def readable() -> None:
            try:
                if self._watch.read(time.clock_gettime(time.CLOCK_BOOTTIME), self._record):
                    self._wake("kernel line")
            except OSError as error:
                loop.remove_reader(fd)
                self._state.errors(self.name, error)
                failed.set()

        try:
            loop.add_reader(fd, readable)
        except OSError:  # a recorded log is a plain file: read once
            readable()
        try:
            await failed.wait()
        finally:
            loop.remove_reader(fd)
            self._watch.close()
        await self._follow_journald(catalogue)

    async def _follow_journald(self, catalogue: Catalogue) -> None:
        now_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        log = self._watch.fall_back(self._counters, now_us)

        def feed(piece: bytes) -> None:
            if not log.heard:
                self._show_zeros(catalogue)
            boot_s = time.clock_gettime(time.CLOCK_BOOTTIME)
            if self._watch.feed(piece, boot_s, self._record):
                self._wake("kernel line")

        tool = self._state.config.collectors.journalctl
        self._watch.journal = reader = JournalReader(tool, log, feed, self._state.errors)
        try:
            await reader.follow()
        except NoData:
            return

    def _record(self, counts: tuple[Count, ...], mark: Mark) -> None:
        self._journal.append(*counts, mark)
        self._performer.count(*counts)

    def _show_zeros(self, catalogue: Catalogue) -> None:
        """From now on the absence of an event means that none was seen."""
        for labels in catalogue.alerted():
            self._counters.setdefault(("events", labels), 0.0)
