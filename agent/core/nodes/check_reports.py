"""Which checks fail on this node, kept where its peers can read it, and which fail on them.

Owns the document checks/NODE.  A single node has nobody to tell.  What many nodes failing at once
means is said by agent/core/checks/common_cause.py.
"""

from __future__ import annotations

import msgspec

from ..effects import drafts
from ..model import UNREADABLE, Doc
from ..run import members
from ..run.state import Context

KIND = "checks"
PREFIX = f"{KIND}/"
CHECKS_MAX = 64
Report = dict[str, float]  # check -> wall_s since when it fails


def read(doc: Doc) -> Report:
    """Nothing for an absent or unreadable body: content of the store is input from outside."""
    try:
        found = msgspec.json.decode(doc.body, type=Report) if doc.body else {}
    except UNREADABLE:
        return {}
    return dict(list(found.items())[:CHECKS_MAX])


def failing(ctx: Context, node: str) -> dict[str, dict[str, float]]:
    """Check -> node -> since when, by the store's documents and this node's own checks."""
    found: dict[str, dict[str, float]] = {}
    docs = ctx.observed.store.docs
    for other, doc in docs.of(KIND):
        if other != node:
            for check, since_s in docs.decoded(doc.key, read).items():
                found.setdefault(check, {})[other] = since_s
    for check, since_s in _own(ctx, node).items():
        found.setdefault(check, {})[node] = since_s
    return found


def step(ctx: Context, node: str) -> None:
    """Writes this node's document when it says otherwise than its checks."""
    if ctx.settings.single_node or not ctx.observed.store.up:
        return
    doc = members.doc_of(ctx.observed.store, PREFIX + node)
    own = _own(ctx, node)
    if own.keys() != read(doc).keys():
        body = msgspec.json.encode(own)
        ctx.emit(doc.version, drafts.put(doc.key, doc.version, body, "which checks fail here"))


def _own(ctx: Context, node: str) -> Report:
    """Since when a check fails is what its document said first."""
    known = read(members.doc_of(ctx.observed.store, PREFIX + node))
    return {one.check: known.get(one.check, one.wall_s)
            for one in ctx.observed.checks if one.proven}
