"""Routes of runs that are started on other nodes, and of those who accept them here.

Owns that they are open on the agent's socket alone, where the kernel says who asks: everybody may
start what is his own, where he accepts it himself.
"""

from __future__ import annotations

import msgspec
from aiohttp import web

from ..daemon.attempts import Still
from ..daemon.starts import END, LOOK, START, Asked, Refusal, Starts, Waiting
from .auth import peer_of, refuse
from .body import BAD_BODY

BODY_MAX_BYTES = 1 << 20  # of arguments and environment, written as JSON
NEXT = "next"
STILL = "still"
VERBS = (NEXT, STILL, START, END, LOOK)


async def answer(request: web.Request, starts: Starts) -> web.Response:
    """POST /api/v1/starts/VERB."""
    verb, peer = request.match_info["verb"], peer_of(request)
    if verb not in VERBS:
        return refuse(404, f"{verb!r} is no verb", f"one of {', '.join(VERBS)}")
    if peer is None:
        return refuse(403, "over the agent's socket alone, where the kernel says who asks",
                      "`holdfast run --on NODE,...` on a node")
    uid = peer[1]

    def gone() -> bool:
        return request.transport is None or request.transport.is_closing()

    try:
        raw = await request.clone(client_max_size=BODY_MAX_BYTES).read()
        if verb == NEXT:
            said = msgspec.json.decode(raw, type=Waiting)
            return web.json_response({"orders": await starts.orders(uid, said, gone)})
        if verb == STILL:
            still = msgspec.json.decode(raw, type=Still)
            return web.json_response(await starts.still(uid, still))
        asked = msgspec.json.decode(raw, type=Asked)
        if (verb == START) != (asked.order is not None):
            return refuse(400, "body: an order belongs to start, and to nothing else", '"order"')
        if asked.order is not None and asked.order.run != asked.run:
            return refuse(400, "body: the order is of another run", '"run": the same in both')
        return web.json_response({"nodes": await starts.everywhere(verb, uid, asked)})
    except web.HTTPException:
        raise
    except BAD_BODY as error:
        return refuse(400, f"body: {error}", '{"nodes": ["node-b"], "run": "m5"}')
    except Refusal as refusal:
        return refuse(409, str(refusal), "")
