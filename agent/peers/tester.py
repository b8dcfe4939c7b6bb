"""The process beside torch that makes one node's tests: started once, asked many times.

Owns its start in a Python that has torch, its pipes and its end.  What it does is
agent/checks/peer_tests.py's; whether it is late is said there, and here once more for a test that
cannot say it.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

ENTRY = Path(__file__).parent.with_name("checks") / "torch_entry.py"
START_S = 120.0  # until torch is imported: a cold one reads 2 GB over a network
GRACE_S = 5.0  # beyond a test's deadline, and the kill after it
LINE_MAX = 4 << 20


class Tester:
    """`here` is what it found: torch, kind, models; or `problem`."""

    def __init__(self, pythons: Sequence[tuple[str, str]]) -> None:
        self._pythons = [list(one) for one in pythons]
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.StreamReader | None = None
        self._number = 0
        self.here: dict[str, Any] = {}
        self.problem = ""

    async def start(self) -> None:
        tried: list[list[str]] = []
        for place, (python, origin) in enumerate(self._pythons):
            try:
                await self._start(self._pythons[place:], tried)
                break
            except OSError as error:
                tried.append([python, origin, str(error.strerror)])
        try:
            async with asyncio.timeout(START_S):
                line = await self._line() if self._process else {"no_torch": tried}
        except (TimeoutError, EOFError) as error:
            line = {"ended": f"torch was not imported: {str(error) or 'too late'}"}
        if "torch" in line:
            self.here = line
        else:
            tried = line.get("no_torch", [])
            self.problem = str(line.get("ended") or "no Python has torch; tried " + "; ".join(
                f"{python} ({origin}): {why}" for python, origin, why in tried))

    async def _start(self, pythons: list[list[str]], tried: list[list[str]]) -> None:
        reads, writes = os.pipe()
        spec = {"pythons": pythons, "tried": tried, "serve": True, "calls": [], "options": {}}
        # In whichever Python this ends, the current folder must not be on its path.
        environ = {**os.environ, "PYTHONSAFEPATH": "1"}
        try:
            self._process = await asyncio.create_subprocess_exec(
                pythons[0][0], str(ENTRY), str(writes), json.dumps(spec), pass_fds=(writes,),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL, env=environ, start_new_session=True)
        except OSError:
            os.close(reads)
            raise
        finally:
            os.close(writes)
        self._reader = asyncio.StreamReader(limit=LINE_MAX)
        protocol = asyncio.StreamReaderProtocol(self._reader)
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: protocol, os.fdopen(reads, "rb", 0))

    async def _line(self) -> dict[str, Any]:
        assert self._reader is not None
        line = await self._reader.readline()
        if not line:
            raise EOFError("the process beside torch ended")
        value = json.loads(line)
        return value if isinstance(value, dict) else {}

    async def run(self, command: dict[str, Any],
                  told: Callable[[dict[str, Any]], Awaitable[None]]) -> dict[str, Any]:
        """Its answer, `problem` among it; `told` gets what it says before."""
        if self._process is None or self._process.stdin is None or self.problem:
            return {"problem": self.problem or "there is nothing beside torch"}
        self._number += 1
        words = json.dumps({**command, "id": self._number}).encode() + b"\n"
        try:
            self._process.stdin.write(words)
            await self._process.stdin.drain()
            async with asyncio.timeout(command["deadline_s"] + GRACE_S):
                while True:
                    line = await self._line()
                    if line.pop("id", None) != self._number:
                        continue  # of a test that was given up
                    if "problem" in line:
                        return line
                    await told(line)
        except (OSError, EOFError, TimeoutError) as error:
            self.problem = f"no test can be made here: {str(error) or 'it hangs'}"
            return {"problem": self.problem}

    async def close(self) -> None:
        """What it started is ended by the end of its standard input, or with it."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
