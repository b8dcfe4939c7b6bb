"""What each node is made of, kept where its peers can read it, and where nodes differ.

Owns which samples make a node's identity, its document `identity/NODE`, and the comparison of
several.  A node writes its own document and no other's.  What a source does not say for a while
(its collector is down) stays as it was last said: unread is not changed.  Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ..effects import drafts
from ..model import UNREADABLE, Doc, Readings, Rows, Selection, Value, labels_of
from ..run import members
from ..run.state import Context

PREFIX = "identity/"
VALUES_MAX = 512
VALUE_MAX = 200  # characters
CHANGES_MAX = 32  # kept, the newest
JOIN = " + "  # between several values of one key: two kinds of GPU, two versions beside each other
# metric -> (source, beginning of its keys).  A source is read whole: a key that it no longer says
# is gone.
SOURCES = {"host_info": ("node", "host"), "software_info": ("node", "software"),
           "firmware_info": ("node", "firmware"), "ec2_instance_info": ("instance", "instance")}
DEVICES = ("accelerator_info", "accelerator_firmware_info")  # the source is their vendor
NAMED = frozenset((*SOURCES, *DEVICES))
OWN = frozenset(("id", "uuid", "pci"))  # labels that differ from node to node by nature
Sources = dict[str, dict[str, str]]  # source -> key -> value


class Change(Value, frozen=True):
    """One value of a node became another; "" is none."""

    key: str
    before: str
    after: str
    wall_s: float


class Identity(Value, frozen=True):
    """Body of identity/NODE."""

    sources: dict[str, dict[str, str]] = {}
    changes: tuple[Change, ...] = ()  # oldest first

    def values(self) -> dict[str, str]:
        return {key: value for found in self.sources.values() for key, value in found.items()}


class Difference(Value, frozen=True, omit_defaults=False):
    """One key that does not have the same value on every node."""

    key: str
    most: str  # what more than half of the nodes say; "" when no value has so many
    agree: int  # how many say it
    of: int  # how many were compared
    nodes: tuple[tuple[str, str], ...]  # (node, value) of the others; of all without a majority


class Comparison(Value, frozen=True, omit_defaults=False):
    """Several nodes beside each other."""

    compared: int  # keys
    differences: tuple[Difference, ...]
    unread: tuple[tuple[str, str], ...]  # (node, source that others have and it has not said)


def of(samples: Rows) -> Sources:
    """What the samples say of this node, by source."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, subject, _, _ in samples:
        labels = labels_of(subject) if name in DEVICES or name in SOURCES else {}
        if name in DEVICES and labels.get("vendor"):
            source = kind = labels.pop("vendor")
            device = labels.pop("device", "")
            if name == "accelerator_info":
                found.setdefault((source, f"{source}.count"), []).append(device)
        elif name in SOURCES:
            source, kind = SOURCES[name]
        else:
            continue
        if "component" in labels:
            labels = {labels["component"]: labels.get("version", "")}
        for key, value in labels.items():
            if value and key not in OWN:
                found.setdefault((source, f"{kind}.{key}"), []).append(value)
    sources: Sources = {}
    for (source, key), values in sorted(found.items())[:VALUES_MAX]:
        is_count = key == f"{source}.count"
        joined = str(len(values)) if is_count else JOIN.join(sorted(set(values)))
        sources.setdefault(source, {})[key] = joined[:VALUE_MAX]
    return sources


def read(doc: Doc) -> Identity | None:
    """None for an absent or unreadable body: content of the store is input from outside."""
    if not doc.body:
        return None
    try:
        return msgspec.json.decode(doc.body, type=Identity)
    except UNREADABLE:
        return None


def renewed(known: Identity | None, sources: Sources, wall_s: float) -> Identity:
    """The identity after a reading.  A source that is seen for the first time is no change."""
    old = known if known is not None else Identity()
    changes = list(old.changes)
    for source, values in sorted(sources.items()):
        before = old.sources.get(source)
        for key in sorted({*values, *before}) if before is not None else ():
            pair = (before.get(key, ""), values.get(key, "")) if before is not None else ("", "")
            if pair[0] != pair[1]:
                changes.append(Change(key, *pair, wall_s))
    merged = {**old.sources, **sources}
    return Identity({one: merged[one] for one in sorted(merged)}, tuple(changes[-CHANGES_MAX:]))


def compare(nodes: Mapping[str, Identity]) -> Comparison:
    """Where the nodes differ, by key.  A node that has not said a whole source is left out of its
    keys and named as unread; a single key that it lacks is a difference."""
    keys: dict[str, str] = {}  # key -> source
    for one in nodes.values():
        for source, values in one.sources.items():
            keys |= dict.fromkeys(values, source)
    sources = sorted(set(keys.values()))
    unread = [(node, source) for node, one in sorted(nodes.items()) for source in sources
              if source not in one.sources]
    differences = []
    for key in sorted(keys):
        said = {node: one.sources[keys[key]].get(key, "")
                for node, one in sorted(nodes.items()) if keys[key] in one.sources}
        most, agree = Counter(said.values()).most_common(1)[0]
        if agree == len(said):
            continue
        if agree * 2 <= len(said):
            most, agree = "", 0
        others = tuple((node, value) for node, value in said.items() if not agree or value != most)
        differences.append(Difference(key, most, agree, len(said), others))
    return Comparison(len(keys), tuple(differences), tuple(unread))


def answer(
    node: str, run: str, nodes: Sequence[str], known: Mapping[str, Identity]
) -> dict[str, Any]:
    """/api/v1/drift and `holdfast drift --json`, as plain JSON values: the nodes, where they
    differ from most, what changed on each, and what each said, so that the answers of several
    agents can be put beside each other (agent/cli/drift_files.py)."""
    compared = {one: known[one] for one in nodes if one in known}
    own = compared.get(node)
    return {
        "node": node,
        "run": run,
        "nodes": list(nodes),
        "unknown": [one for one in nodes if one not in known],
        **msgspec.to_builtins(compare(compared)),
        "changes": [
            {"node": name, **msgspec.to_builtins(change)}
            for name, one in compared.items() for change in one.changes],
        "values": own.values() if own is not None else {},
        "identities": {name: one.sources for name, one in compared.items()},
    }


class Identities:
    """This node's own document, kept up as its samples say.  Steps come up to a hundred times a
    second and samples change every few: equal ones are looked at once."""

    def __init__(self, node: str) -> None:
        self._key = f"{PREFIX}{node}"
        self._seen: tuple[Readings, int] = (Readings(), -1)
        self._selection = Selection(NAMED.__contains__)
        self._own: Rows = ()
        self._sources: Sources = {}

    def step(self, ctx: Context) -> None:
        """Writes the document when it says otherwise than the samples."""
        samples, store = ctx.observed.samples, ctx.observed.store
        if not store.up or not samples:
            return
        doc = members.doc_of(store, self._key)
        if samples is self._seen[0] and doc.version == self._seen[1]:
            return
        if samples is not self._seen[0]:
            own = self._selection.of(samples)
            if own is not self._own:  # most readings say nothing of what a node is
                self._own, self._sources = own, of(own)
        self._seen = (samples, doc.version)
        known = read(doc)
        if not self._sources or known is not None and all(
            known.sources.get(one) == values for one, values in self._sources.items()
        ):
            return
        body = msgspec.json.encode(renewed(known, self._sources, ctx.now.wall_s))
        draft = drafts.put(self._key, doc.version, body, "what this node is made of")
        ctx.emit(doc.version, draft)
