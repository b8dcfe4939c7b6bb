"""Probes: questions to hardware, mounts and tools that may never be answered.

Owns the children that ask them.  A child has a deadline; one that cannot even be killed (state D)
is left behind, counted and named, and the agent goes on.  Nothing here blocks the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import NamedTuple

from . import procfs

OUTPUT_MAX_BYTES = 1 << 20
KILL_WAIT_S = 0.5  # a killed child that is still there after this is stuck in the kernel
LEFT_MAX = 16  # children left behind; beyond that no further probe is started


class Answer(NamedTuple):
    """What came of one probe."""

    ok: bool
    output: bytes
    error: str  # "" when ok
    duration_s: float
    stuck: bool = False  # left in state D: a fault of what was asked


class Left(NamedTuple):
    """A child that could not be ended."""

    name: str
    pid: int
    since_s: float  # CLOCK_MONOTONIC
    wchan: str


class Prober:
    """Starts probes, one at a time for each name, and keeps account of those left behind."""

    def __init__(self) -> None:
        self._left: dict[int, Left] = {}
        self._running: set[str] = set()

    def left_behind(self) -> tuple[Left, ...]:
        """Children in the kernel's hands; those that ended meanwhile are forgotten."""
        for pid in list(self._left):
            if not procfs.process_alive(pid):
                del self._left[pid]
        return tuple(self._left.values())

    async def ask(self, name: str, command: Sequence[str], timeout_s: float) -> Answer:
        """Runs one command without a shell and returns its output.  Never raises for what the
        command does; an answer says what was wrong."""
        begin_s = time.monotonic()
        if name in self._running:
            return Answer(False, b"", f"{name} is still being asked", 0.0)
        left = [one for one in self.left_behind() if one.name == name]
        if left:
            error = f"{name}: an earlier probe (pid {left[0].pid}) hangs in {left[0].wchan}"
            return Answer(False, b"", error, 0.0, stuck=True)
        if len(self._left) >= LEFT_MAX:
            return Answer(False, b"", f"{LEFT_MAX} probes hang already: none is started", 0.0)
        self._running.add(name)
        try:
            return await self._ask(name, command, timeout_s, begin_s)
        finally:
            self._running.discard(name)

    async def _ask(
        self, name: str, command: Sequence[str], timeout_s: float, begin_s: float
    ) -> Answer:
        try:
            child = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                start_new_session=True,
                limit=OUTPUT_MAX_BYTES,
            )
        except OSError as error:
            return Answer(False, b"", f"{command[0]}: {error.strerror}", 0.0)
        assert child.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                output = await _read_bounded(child.stdout)
                code = await child.wait()
        except TimeoutError:
            return await self._end(name, child, timeout_s, begin_s)
        except ValueError as error:
            await self._end(name, child, timeout_s, begin_s)
            return Answer(False, b"", f"{name}: {error}", time.monotonic() - begin_s)
        error_text = "" if code == 0 else f"{name}: exit status {code}"
        return Answer(code == 0, output, error_text, time.monotonic() - begin_s)

    async def _end(
        self, name: str, child: asyncio.subprocess.Process, timeout_s: float, begin_s: float
    ) -> Answer:
        """Kills a late child; one that stays is left and named."""
        try:
            child.kill()
        except ProcessLookupError:
            pass
        error = f"{name}: no answer within {timeout_s:g} s"
        try:
            async with asyncio.timeout(KILL_WAIT_S):
                await child.wait()
        except TimeoutError:
            stat = procfs.parse_stat(procfs.read_small(f"/proc/{child.pid}/stat"))
            wchan = procfs.read_small(f"/proc/{child.pid}/wchan").decode("ascii", "replace")
            self._left[child.pid] = Left(name, child.pid, begin_s, wchan or "the kernel")
            state = stat.state if stat else "?"
            error += f"; its process {child.pid} cannot be killed (state {state})"
            return Answer(False, b"", error, time.monotonic() - begin_s, stuck=True)
        return Answer(False, b"", error, time.monotonic() - begin_s)


async def _read_bounded(stream: asyncio.StreamReader) -> bytes:
    """All output; ValueError when there is more than a probe may say."""
    parts: list[bytes] = []
    size = 0
    while part := await stream.read(65536):
        size += len(part)
        if size > OUTPUT_MAX_BYTES:
            raise ValueError(f"output longer than {OUTPUT_MAX_BYTES} bytes")
        parts.append(part)
    return b"".join(parts)
