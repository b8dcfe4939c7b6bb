"""One node's side of a pre-flight: comes to the coordinator, makes what it asks, hears the report.

Owns whom a node turns to, and how long it tries.  The first of the list coordinates; when that one
cannot be reached within the wait the second does, so that a first node which is cut off costs the
others nothing but time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ..core.checks.preflight import REACH, Member, Report
from . import transport
from .coordinator import Coordinator, Plan
from .tester import Tester
from .transport import Channel

RETRY_S = 0.1
MODULES = ("nvidia", "neuron", "amdgpu", "efa", "mlx5_core")


class Heard(NamedTuple):
    """What this node knows at the end: a report, or why there is none."""

    report: Report | None
    coordinator: str
    took_s: float = 0.0
    problem: str = ""
    torch: str = ""
    model: str = ""  # of this node


async def attend(plan: Plan, own: int, itself: Member, pythons: Sequence[tuple[str, str]],
                 tell: Callable[[str], None]) -> Heard:
    """The whole pre-flight as this node sees it.  Raises Refused for another token, and OSError
    where the coordinator cannot listen."""
    tester = Tester(pythons)
    starting = asyncio.create_task(tester.start())
    tried: list[str] = []
    name = plan.peers[own].name
    try:
        for at, candidate in enumerate(plan.peers[:plan.candidates]):
            if at == own:
                return await _coordinate(plan, own, itself, tester, starting, tell)
            try:
                channel = await _reached(plan, at, name)
            except (OSError, TimeoutError) as error:
                tried.append(f"{candidate.name} ({candidate.address}:{plan.port}): "
                             f"{str(error) or 'no answer'}")
                continue
            return await _serve(channel, candidate.name, itself, tester, starting)
        return Heard(None, "", problem=f"who coordinates was not reached within {plan.join_s:g} s: "
                     + "; ".join(tried))
    finally:
        starting.cancel()
        await tester.close()


async def _coordinate(plan: Plan, own: int, itself: Member, tester: Tester,
                      starting: asyncio.Task[None], tell: Callable[[str], None]) -> Heard:
    """For all of them, itself among them like any other."""
    peer = plan.peers[own]
    coordinator = Coordinator(plan, peer.address, tell)
    running = asyncio.create_task(coordinator.run())
    joining = asyncio.create_task(_reached(plan, own, peer.name))
    try:
        await asyncio.wait({running, joining}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            await running  # it cannot listen
        heard = await _serve(await joining, peer.name, itself, tester, starting)
        await running
        return heard
    finally:
        running.cancel()
        joining.cancel()


async def _reached(plan: Plan, at: int, name: str) -> Channel:
    """The coordinator's channel, tried until the wait is over."""
    limit_s = time.monotonic() + plan.join_s
    while True:
        rest_s = limit_s - time.monotonic()
        try:
            async with asyncio.timeout(max(rest_s, RETRY_S)):
                return await transport.connect(plan.peers[at].address, plan.port, plan.token, name)
        except (OSError, TimeoutError):
            if time.monotonic() + RETRY_S > limit_s:
                raise
        await asyncio.sleep(RETRY_S)


async def _serve(channel: Channel, coordinator: str, itself: Member, tester: Tester,
                 starting: asyncio.Task[None]) -> Heard:
    """Makes test after test until the report comes."""
    beating = asyncio.create_task(channel.beat())
    try:
        return await _served(channel, coordinator, itself, tester, starting)
    finally:
        beating.cancel()
        channel.close()


async def _served(channel: Channel, coordinator: str, itself: Member, tester: Tester,
                  starting: asyncio.Task[None]) -> Heard:
    await starting
    models = [str(one) for one in tester.here.get("models", ())]
    torch = f"torch {tester.here['torch']} of {tester.here['python']}" if tester.here else ""
    on_devices = tester.here.get("kind") == "cuda"
    ready = msgspec.structs.replace(
        itself, devices=min(itself.devices or len(models), len(models)) if on_devices else max(
            1, itself.devices), model=f"{len(models)} x {models[0]}" if models else "",
        error=itself.error or tester.problem, versions=versions(tester.here))
    try:
        await channel.send({"member": msgspec.to_builtins(ready)})
        while True:
            message = await channel.take()
            if "report" in message:
                return Heard(msgspec.convert(message["report"], Report), coordinator,
                             message["took_s"], torch=torch, model=ready.model)
            if "refused" in message:
                return Heard(None, coordinator, problem=f"{coordinator}: {message['refused']}",
                             torch=torch)
            await _make(message, channel, tester)
    except (EOFError, OSError, ValueError, msgspec.ValidationError) as error:
        return Heard(None, coordinator, torch=torch, problem=f"{coordinator}, which coordinates, "
                     f"went away in the middle: {error}")


def versions(here: Mapping[str, Any], sys: str = "/sys") -> tuple[tuple[str, str], ...]:
    """What peers must have alike: a roll-out that reached some of them alone."""
    found = {"kernel": os.uname().release}
    for module in MODULES:
        with contextlib.suppress(OSError):  # not here, or without a version
            found[module] = Path(sys, "module", module, "version").read_text().strip()[:100]
    if here:
        found["torch"] = str(here["torch"])
    found |= {str(what): str(which) for what, which in here.get("versions", {}).items()}
    return tuple(sorted(found.items()))


async def _make(message: dict[str, Any], channel: Channel, tester: Tester) -> None:
    number = message["test"]
    if message["do"] == REACH:
        reached = await _answers(message["address"], message["port"], message["deadline_s"])
        await channel.send({"test": number, "reached": reached})
        return

    async def told(line: dict[str, Any]) -> None:
        await channel.send({"test": number, **line})

    answer = await tester.run({key: value for key, value in message.items() if key != "test"}, told)
    await channel.send({"test": number, **answer})


async def _answers(address: str, port: int, wait_s: float) -> bool:
    """Whether the machine answers at all: a port where nobody listens is an answer as well."""
    try:
        async with asyncio.timeout(wait_s):
            _, writer = await asyncio.open_connection(address, port)
            writer.close()
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    return True

