"""READY=1 when what `After=holdfast.service` promises is so: both sockets answer.

Owns the longest wait for that: a web part that never gets there does not keep the agent from its
work.
"""

from __future__ import annotations

import asyncio
import contextlib

from ...system.systemd import notify

READY_MAX_S = 15.0  # after which systemd is told without api.sock; its own patience is 30 s


class Readiness:
    name = "ready"

    def __init__(self, answers: asyncio.Event) -> None:
        self._answers = answers

    async def run(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(READY_MAX_S):
                await self._answers.wait()
        notify("READY=1")
