"""Runs journalctl where /dev/kmsg may not be read, and runs it again whenever it ends.

Owns that process: its start, its end, and the pauses between.  Its output goes on in pieces to the
kernel's watch; nothing here understands a line.  A process that cannot be ended is left and named,
as for any other probe.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from holdfast.collectors.contract import NoData
from holdfast.collectors.sources.journald import JournalLog

from ..system import die_with_parent
from ..system.child_probe import Prober, StuckChild

NAME = "journalctl"
DIE_WITH_PARENT = Path(die_with_parent.__file__)
PIECE_BYTES = 65536  # about a hundred lines: the event loop has its turn after each
FIRST_S = 10.0  # a readable journal has its first entry within this
PAUSE_S, PAUSE_MAX_S = 1.0, 60.0  # before it is started again, doubled each time without a word
REFUSED_MAX = 3  # ends without a word after which the cursor is given up


class JournalReader:
    """The process and its supervision; `follow` is a task's whole life."""

    def __init__(
        self, tool: str, log: JournalLog, feed: Callable[[bytes], None],
        on_error: Callable[[str, BaseException | str], None],
    ) -> None:
        self._tool, self._log, self._feed, self._on_error = tool, log, feed, on_error
        self._prober = Prober()
        self.pid = 0  # 0 while none runs
        self.starts = 0

    @property
    def up(self) -> bool:
        """Whether it runs, and has shown a journal that may be read."""
        return bool(self.pid and (self._log.heard or self._log.cursor))

    def stuck_children(self) -> tuple[StuckChild, ...]:
        return self._prober.stuck_children()

    async def follow(self) -> None:
        """Never returns; NoData when there is no journalctl, or no journal that may be read."""
        if not os.access(self._tool, os.X_OK):
            raise NoData(f"{self._tool or NAME}: not on this machine")
        silent, pause_s = 0, PAUSE_S
        while True:
            before = self._log.next
            why = await self._run()
            if self._log.next > before:
                silent, pause_s = 0, PAUSE_S
            else:
                silent, pause_s = silent + 1, min(PAUSE_MAX_S, 2 * pause_s)
            if not self._log.heard and not self._log.cursor:
                raise NoData(f"{why}: no kernel line in a journal that this user may read "
                             "(group systemd-journal)")
            self._on_error("kernel log", why)
            if silent == REFUSED_MAX and self._log.cursor:
                self._log.forget_cursor(time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000)
                self._on_error("kernel log", f"{NAME} does not go on from the last line: it begins "
                              "at the journal's end, what came between is lost")
            await asyncio.sleep(pause_s)

    async def _run(self) -> str:
        """One life of the process; returns why it ended."""
        begin_s = time.monotonic()
        command = self._log.command(self._tool)
        self._log.restarted()
        refused = self._prober.refusal(NAME)
        if refused is not None:
            return refused.error
        try:
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", str(DIE_WITH_PARENT), str(os.getpid()), *command,
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL, start_new_session=True, limit=PIECE_BYTES,
                env={"LC_ALL": "C.UTF-8", "SYSTEMD_COLORS": "0", "PATH": os.defpath},
            )
        except OSError as error:
            return f"{NAME}: {error.strerror}"
        self.pid = child.pid
        self.starts += 1
        assert child.stdout is not None
        try:
            why = await self._read(child.stdout)
        finally:
            self.pid = 0
            await self._prober.end(NAME, child, 0.0, begin_s)
        return f"{why} (status {child.returncode})"

    async def _read(self, stream: asyncio.StreamReader) -> str:
        expected = not self._log.heard and not self._log.cursor
        while True:
            try:
                async with asyncio.timeout(FIRST_S if expected else None):
                    piece = await stream.read(PIECE_BYTES)
            except TimeoutError:
                return f"{NAME} said nothing for {FIRST_S:g} s"
            if not piece:
                return f"{NAME} ended"
            self._feed(piece)
            expected = not self._log.heard and not self._log.cursor
