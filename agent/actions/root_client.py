"""The agent's side of an order that concerns the whole node: evidence first, then one verb.

Owns the connection to the root unit and the words of its failures.  Holds no right itself: what may
be done, and that it is done once, is decided by agent/actions/root_helper.py as well.
"""

from __future__ import annotations

import asyncio
import json
import time

import msgspec

from ..core.model import UNREADABLE, Effect, NodeOrder
from ..core.nodes.repair import RAN, REFUSED
from ..daemon.state import AgentState
from .evidence_store import EvidenceStore

ANSWER_MAX_BYTES = 4096
EVIDENCE_S = 5.0  # for the incident to be written where it outlives this node
ANSWER_S = 22.0  # the unit gives a verb's program 20 s; the core waits for 30
RESET_S = 66.0  # for a reset 60, and its start on a node in trouble takes a while; the core: 80
HOLDS = "nvidia"  # the collector whose child has each GPU open


class Unreached(Exception):
    """Nobody takes connections: nothing of the order has left."""


class Answer(msgspec.Struct):
    """What the unit says."""

    ok: bool
    error: str = ""
    ran: bool = False  # the verb's program: not ok is then its own failure


async def perform(
    state: AgentState, evidence: EvidenceStore, effect: Effect, order: NodeOrder
) -> str:
    """Sends one order; "" when the unit took it, else why it did not.  Never raises for what is
    at the other end."""
    refused = await _keep_evidence(state, evidence, order)
    if refused:
        return f"{REFUSED} {refused}"
    fields = {"verb": order.verb, "id": effect.id, "node": order.node, "boot_id": state.boot_id,
              "wall_s": time.time(), "fault": effect.fault}
    if not order.device:
        return await _send(state.config.actions.socket, fields, ANSWER_S)
    fields["device"] = order.device
    if state.runner is None:
        return await _send(state.config.actions.socket, fields, RESET_S)
    async with state.runner.without(HOLDS):  # no driver resets what somebody has open
        return await _send(state.config.actions.socket, fields, RESET_S)


async def _send(path: str, fields: dict[str, object], timeout_s: float) -> str:
    try:
        async with asyncio.timeout(timeout_s):
            return await _ask(path, json.dumps(fields).encode() + b"\n", "device" in fields)
    except TimeoutError:
        return f"{path}: no answer within {timeout_s:g} s"
    except Unreached as error:
        return f"{REFUSED} {path}: {error}: is holdfast-node.socket enabled?"
    except OSError as error:
        return f"{path}: {error.strerror or error}: see journalctl -u 'holdfast-node@*'"


async def _keep_evidence(state: AgentState, evidence: EvidenceStore, order: NodeOrder) -> str:
    """The incident must lie where it is found when the node does not come back."""
    folder = evidence.folder
    incident = state.incident_log.incidents.get(order.incident)
    if not folder or incident is None:
        return "evidence.store is not set" if not folder else "its incident is not known any more"
    writing = evidence.write(incident, whole=True)
    try:
        async with asyncio.timeout(EVIDENCE_S):
            await asyncio.shield(writing)
    except TimeoutError:
        return f"evidence.store: {folder} takes longer than {EVIDENCE_S:g} s"
    except (OSError, ValueError, RuntimeError) as error:
        return f"evidence.store: {error}"
    except asyncio.CancelledError:
        if not writing.cancelled():
            raise
        return "evidence.store: too much waits to be written there"
    return ""


async def _ask(path: str, line: bytes, of_device: bool) -> str:
    """What came of it.  Of a reset that is told apart which failed from one that was refused: the
    first has a next action."""
    try:
        reader, writer = await asyncio.open_unix_connection(path, limit=ANSWER_MAX_BYTES)
    except OSError as error:
        raise Unreached(error.strerror or str(error)) from error
    try:
        writer.write(line)
        await writer.drain()
        text = await reader.readline()
    except ValueError as error:
        return f"{path}: {error}"
    finally:
        writer.close()
    try:
        answer = msgspec.json.decode(text, type=Answer)
    except UNREADABLE:
        return f"{path}: the unit ended without an answer: see journalctl -u 'holdfast-node@*'"
    why = answer.error or "refused without a reason"
    return "" if answer.ok else f"{RAN} {why}" if answer.ran and of_device else why
