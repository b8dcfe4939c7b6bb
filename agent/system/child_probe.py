"""Probes: questions to hardware, mounts and tools that may never be answered.

Owns the children that ask them.  A child has a deadline; one that cannot even be killed (state D)
is left behind, counted and named, and the agent goes on.  Nothing here blocks the event loop.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from . import procfs

OUTPUT_MAX_BYTES = 1 << 20
LINE_MAX_BYTES = 8 << 20  # one answer of a child that stays: 10,000 samples are 1 MB
KILL_WAIT_S = 0.5  # a killed child that is still there after this is stuck in the kernel
STUCK_MAX = 16  # children left behind; beyond that no further probe is started


class Answer(NamedTuple):
    """What came of one probe."""

    ok: bool
    output: bytes
    error: str  # "" when ok
    duration_s: float
    stuck: bool = False  # left in state D: a fault of what was asked


class StuckChild(NamedTuple):
    """A child that could not be ended."""

    name: str
    pid: int
    since_s: float  # CLOCK_MONOTONIC
    wchan: str


class Prober:
    """Starts probes, one at a time for each name, and keeps account of those left behind."""

    def __init__(self) -> None:
        self._stuck: dict[int, StuckChild] = {}
        self._running: set[str] = set()

    def stuck_children(self) -> tuple[StuckChild, ...]:
        """Children in the kernel's hands; those that ended meanwhile are forgotten."""
        for pid in list(self._stuck):
            if not procfs.process_alive(pid):
                del self._stuck[pid]
        return tuple(self._stuck.values())

    async def ask(self, name: str, command: Sequence[str], timeout_s: float,
                  environ: Mapping[str, str] | None = None) -> Answer:
        """Runs one command without a shell and returns its output.  Never raises for what the
        command does; an answer says what was wrong.  `environ`: beside this process's own."""
        begin_s = time.monotonic()
        if name in self._running:
            return Answer(False, b"", f"{name} is still being asked", 0.0)
        refused = self.refusal(name)
        if refused is not None:
            return refused
        self._running.add(name)
        try:
            return await self._ask(name, command, timeout_s, begin_s, environ or {})
        finally:
            self._running.discard(name)

    def refusal(self, name: str) -> Answer | None:
        """Why no child is started under this name now; None when one may be."""
        stuck = [child for child in self.stuck_children() if child.name == name]
        if stuck:
            error = f"{name}: an earlier probe (pid {stuck[0].pid}) hangs in {stuck[0].wchan}"
            return Answer(False, b"", error, 0.0, stuck=True)
        if len(self._stuck) >= STUCK_MAX:
            return Answer(False, b"", f"{STUCK_MAX} probes hang already: none is started", 0.0)
        return None

    async def _ask(
        self, name: str, command: Sequence[str], timeout_s: float, begin_s: float,
        environ: Mapping[str, str],
    ) -> Answer:
        try:
            child = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL, start_new_session=True, limit=OUTPUT_MAX_BYTES,
                env={**os.environ, **environ})
        except OSError as error:
            return Answer(False, b"", f"{command[0]}: {error.strerror}", 0.0)
        assert child.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                output = await _read_bounded(child.stdout)
                code = await child.wait()
        except TimeoutError:
            return await self.end(name, child, timeout_s, begin_s)
        except asyncio.CancelledError:  # nobody waits for it any more: it is not left behind
            await self.end(name, child, timeout_s, begin_s)
            raise
        except ValueError as error:
            await self.end(name, child, timeout_s, begin_s)
            return Answer(False, b"", f"{name}: {error}", time.monotonic() - begin_s)
        error_text = "" if code == 0 else f"{name}: exit status {code}"
        return Answer(code == 0, output, error_text, time.monotonic() - begin_s)

    async def end(
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
            self._stuck[child.pid] = StuckChild(name, child.pid, begin_s, wchan or "the kernel")
            state = stat.state if stat else "?"
            error += f"; its process {child.pid} cannot be killed (state {state})"
            return Answer(False, b"", error, time.monotonic() - begin_s, stuck=True)
        return Answer(False, b"", error, time.monotonic() - begin_s)


class Helper:
    """A child that stays: asked line by line over its standard input, killed when it is late.

    One question at a time.  What the child does is never raised: an answer says what was wrong,
    and the next question starts a new child.
    """

    def __init__(
        self, prober: Prober, name: str, command: Sequence[str], environ: Mapping[str, str]
    ) -> None:
        self._prober = prober
        self._name = name
        self._command = tuple(command)
        self._environ = {**os.environ, **environ}
        self._child: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """0 while there is no child."""
        return self._child.pid if self._child is not None else 0

    async def ask(self, line: bytes, timeout_s: float) -> Answer:
        """The child's next line.  A cancelled question ends the child: its answer would be taken
        for that of the next."""
        begin_s = time.monotonic()
        if self._child is None:
            answer = self._prober.refusal(self._name) or await self._start()
            if answer is not None:
                return answer
        child = self._child
        assert child is not None and child.stdin is not None and child.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                child.stdin.write(line + b"\n")
                await child.stdin.drain()
                text = await child.stdout.readline()
        except TimeoutError:
            self._child = None
            _kill(child)
            return await self._prober.end(self._name, child, timeout_s, begin_s)
        except (OSError, ValueError) as error:  # a closed pipe, a line beyond the limit
            await self.close()
            return Answer(False, b"", f"{self._name}: {error}", time.monotonic() - begin_s)
        except asyncio.CancelledError:
            _kill(child)
            raise
        took_s = time.monotonic() - begin_s
        if not text.endswith(b"\n"):
            await self.close()
            said = f"{self._name}: its process ended with {child.returncode}"
            return Answer(False, b"", said, took_s)
        return Answer(True, text, "", took_s)

    async def _start(self) -> Answer | None:
        try:
            self._child = await asyncio.create_subprocess_exec(
                *self._command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL, start_new_session=True, limit=LINE_MAX_BYTES,
                env=self._environ)
        except OSError as error:
            return Answer(False, b"", f"{self._command[0]}: {error.strerror}", 0.0)
        return None

    async def close(self) -> None:
        """Ends the child; one that stays is left and named."""
        child, self._child = self._child, None
        if child is not None:
            _kill(child)
            await self._prober.end(self._name, child, 0.0, time.monotonic())


def _kill(child: asyncio.subprocess.Process) -> None:
    """The child and the tools that it started itself."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


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
