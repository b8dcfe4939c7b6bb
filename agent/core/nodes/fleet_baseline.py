"""What nodes measured when they passed, kept where their peers can read it: the fleet's baseline.

Owns the document baseline/NODE and what several of them say together.  A node that has never
measured anything has a limit by them, and one that was always slow is told so.  Of each machine and
measure a few nodes are enough: more of them say nothing new, and every agent holds what all write.
A single node has nobody to tell.  Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from ..effects import drafts
from ..model import UNREADABLE, Doc, Documents
from ..run import members
from ..run.state import Context

KIND = "baseline"
PREFIX = f"{KIND}/"
NODES_MAX = 32  # that tell of one machine and measure
KEYS_MAX = 96  # of one node: 20 measures at a few sizes each
KEY_MAX, SAMPLES_MAX = 256, 16
Passes = dict[str, tuple[float, ...]]  # "machine|measure|subject" -> quantiles of what passed


def read(doc: Doc) -> Passes:
    """Nothing for an absent or unreadable body: content of the store is input from outside."""
    try:
        found = msgspec.json.decode(doc.body, type=Passes) if doc.body else {}
    except UNREADABLE:
        return {}
    return {key: values[:SAMPLES_MAX] for key, values in list(found.items())[:KEYS_MAX]
            if len(key) <= KEY_MAX and values and min(values) >= 0.0}


def of_others(docs: Documents, node: str) -> dict[str, list[tuple[float, ...]]]:
    """Key -> what each of the other nodes measured, by their names."""
    found: dict[str, list[tuple[float, ...]]] = {}
    for other, doc in sorted(docs.of(KIND)):
        if other != node:
            for key, values in docs.decoded(doc.key, read).items():
                row = found.setdefault(key, [])
                if len(row) < NODES_MAX:
                    row.append(values)
    return found


def step(ctx: Context, node: str) -> None:
    """Writes this node's document when it measured something else, as long as it is wanted."""
    passes = dict(ctx.observed.passes[:KEYS_MAX])
    if ctx.settings.single_node or not passes or not ctx.observed.store.up:
        return
    doc = members.doc_of(ctx.observed.store, PREFIX + node)
    known = read(doc)
    if known == passes or not doc.version and not _wanted(passes, ctx.observed.store.docs, node):
        return
    body = msgspec.json.encode(passes)
    ctx.emit(doc.version, drafts.put(doc.key, doc.version, body, "what this node measured"))


def _wanted(passes: Iterable[str], docs: Documents, node: str) -> bool:
    """Whether too few tell of something that this node has measured."""
    found: Mapping[str, list[tuple[float, ...]]] = of_others(docs, node)
    return any(len(found.get(key, ())) < NODES_MAX for key in passes)
