"""The body of what people ask for: its fields, which verb reads which of them, and who asks.

Owns the table of the fields that a verb reads.  Whatever else is set in a body is refused: nothing
is accepted that is not done.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from aiohttp import web
from aiohttp.http import HttpProcessingError
from msgspec import Meta

from holdfast.worker.redact import redacted

from ..core import actions
from .auth import peer_of, refuse

INJECT, LABEL, ACK, BUNDLE = "inject", "label", "ack", "bundle"
REVIEWS = (LABEL, ACK)  # they may come without a reason
PAUSE_MAX_S = 30 * 86400.0
BY_MAX = 64
# Packed wrongly, cut short, no UTF-8, no JSON, too deep.
BAD_BODY = (web.RequestPayloadError, HttpProcessingError, ValueError, RecursionError)
ALWAYS_READ = ("reason", "by")
READS = {  # beside these; of `args` key by key
    actions.PAUSE: ("for_s",),
    actions.RESTART_RANKS: ("rank",),
    actions.RUN_CHECK: ("args.checks",),
    INJECT: ("fault", "rank", "args.seconds"),
    LABEL: ("args.label",),
}
LASTING = ("stall", "hold-gil")  # the injected faults that have a length


class ActionBody(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a POST."""

    reason: str = ""
    fault: str = ""
    rank: int = -1  # -1: none in particular
    args: dict[str, Any] = {}
    by: str = ""
    for_s: Annotated[float, Meta(ge=0, le=PAUSE_MAX_S)] = 0.0  # 0: until a person resumes


async def read_body(request: web.Request, action: str) -> ActionBody | web.Response:
    """The body, checked; an answer of 400 that names what to set when it is bad, or what to leave
    out where `action` does not read it."""
    try:
        raw = await request.read()
        body = msgspec.json.decode(raw or b"{}", type=ActionBody)
    except web.HTTPException:
        raise
    except BAD_BODY as error:
        return refuse(400, f"body: {error}", 'JSON: {"reason": "...", "fault": "", "rank": 0}')
    field = unread(body, action)
    if field:
        return refuse(400, f"{field} is not read here, and would change nothing",
                      f"only what is read: {', '.join(reads(action))}")
    if action not in REVIEWS and not body.reason.strip():
        return refuse(400, "no reason given", '"reason": why, for the journal')
    body.reason, body.by = redacted(body.reason), redacted(body.by)
    return body


def reads(action: str) -> tuple[str, ...]:
    """The fields of a body that have an effect, by the table's name of the action."""
    return (*ALWAYS_READ, *READS.get(action, ()))


def unread(body: ActionBody, action: str) -> str:
    """The first field that is set and that nothing follows from, "" where there is none."""
    given = [name for name in body.__struct_fields__
             if name != "args" and getattr(body, name) != getattr(ActionBody(), name)]
    given += [f"args.{key}" for key in body.args]
    known = set(reads(action))
    if action == INJECT and body.fault not in LASTING:
        known.discard("args.seconds")
    return next((name[:80] for name in given if name not in known), "")


def by(request: web.Request, body: ActionBody) -> str:
    """Who asks: the name that was claimed, never without what the kernel or the token proves.

    A name alone could be any person's, or a node's: nodes sign their own documents by name.
    """
    peer = peer_of(request)
    proof = f"uid {peer[1]}" if peer is not None else "token"
    claimed = "".join(one for one in body.by[:BY_MAX] if one.isprintable()).strip()
    return f"{claimed} ({proof})" if claimed else proof
