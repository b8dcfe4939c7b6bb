"""Excludes nodes from every run and releases them, behind the breaker.

Owns the node documents that this node writes.  A fatal fault elsewhere is only answered by who
leads a run there; an operator's request by any member that was asked.
"""

from __future__ import annotations

import msgspec

from ..actions import EXCLUDE_NODE
from ..effects import drafts
from ..incidents.book import Entry, IncidentBook
from ..ladder import first
from ..model import WARN, Beat, Incident, Now, Verdict, node_subject
from ..model.subject import NODE
from ..run import members
from ..run.state import Context
from . import breaker


class Exclusions:
    """Node documents, as one node writes them."""

    def __init__(self, name: str) -> None:
        self.name = name

    def step(
        self, wanted: dict[str, members.NodeDoc], incidents: IncidentBook[Entry],
        led: list[Context], ctx: Context,
    ) -> None:
        if not ctx.settings.single_node:
            self._fatal_nodes(wanted, incidents, led, ctx)
        for node in sorted(wanted):
            self._write(wanted, node, ctx)

    def _fatal_nodes(
        self, wanted: dict[str, members.NodeDoc], incidents: IncidentBook[Entry],
        led: list[Context], ctx: Context,
    ) -> None:
        if ctx.now.boot_s - ctx.since_boot_s < members.STALE_LEASES * ctx.settings.lease_s:
            return  # who just began has not heard how many have the fault
        runs = {c.view.run for c in led}
        faults = faults_of(ctx)
        fleet = len(fleet_nodes(self.name, ctx))
        tripped: dict[str, str] = {}
        for beat in sorted(ctx.observed.beats, key=lambda b: (b.node, b.run)):
            if beat.run not in runs or not self._should_exclude(beat, ctx):
                continue
            is_open, why = breaker.is_open(faults, beat.fatal, fleet, ctx.settings)
            if is_open:
                tripped[beat.fatal] = why
                continue
            wanted.setdefault(
                beat.node,
                members.NodeDoc(excluded=True, reason=why, by=self.name, fault=beat.fatal))
        for fault in sorted(tripped):
            # What was wanted before the breaker opened is not written any more.
            mine = [n for n, d in wanted.items() if (d.fault, d.by) == (fault, self.name)]
            for node in mine:
                del wanted[node]
            self._tell_once(fault, tripped[fault], incidents, ctx)
        for fault in [f for f in incidents.open if f not in tripped and f not in faults]:
            incidents.close(ctx, fault, "the fault is gone")

    def _should_exclude(self, beat: Beat, ctx: Context) -> bool:
        if not beat.fatal or not members.is_fresh(beat, ctx.now, ctx.settings):
            return False
        doc = ctx.observed.store.docs.decoded(node_subject(beat.node), members.read_node)
        book = ctx.runbooks.get(beat.fatal)
        return not doc.excluded and (book is None or bool(first(book, (EXCLUDE_NODE,))))

    def _tell_once(
        self, fault: str, why: str, incidents: IncidentBook[Entry], ctx: Context
    ) -> None:
        ctx.verdicts.append(
            Verdict(
                fault=fault, subject="fleet", severity=WARN, confidence=1.0,
                reason=f"the breaker is open: {why}", detector="breaker"))
        if fault not in incidents.open:
            incidents.add(ctx, fault, Entry(fleet_incident(fault, why, ctx.now, self.name)))

    def _write(self, wanted: dict[str, members.NodeDoc], node: str, ctx: Context) -> None:
        key = node_subject(node)
        doc = members.doc_of(ctx.observed.store, key)
        if doc.body and members.read_node(doc) == wanted[node]:
            del wanted[node]
            return
        body = msgspec.json.encode(wanted[node])
        draft = drafts.put(key, doc.version, body, wanted[node].reason)
        ctx.emit(doc.version, msgspec.structs.replace(draft, outlives_node=True))


def faults_of(ctx: Context) -> dict[str, tuple[str, ...]]:
    """Fault -> nodes that have it now, or were excluded for it."""
    found: dict[str, set[str]] = {}
    for beat in ctx.observed.beats:
        if beat.fatal and members.is_fresh(beat, ctx.now, ctx.settings):
            found.setdefault(beat.fatal, set()).add(beat.node)
    docs = ctx.observed.store.docs
    for node, doc in docs.of(NODE):
        read = docs.decoded(doc.key, members.read_node)
        if read.excluded and read.fault:
            found.setdefault(read.fault, set()).add(node)
    return {fault: tuple(sorted(nodes)) for fault, nodes in sorted(found.items())}


def fleet_nodes(name: str, ctx: Context) -> tuple[str, ...]:
    nodes = {name, *(b.node for b in ctx.observed.beats)}
    nodes |= {node for node, _ in ctx.observed.store.docs.of(NODE)}
    return tuple(sorted(nodes))


def fleet_incident(fault: str, why: str, now: Now, node: str) -> Incident:
    text = f"the breaker is open, no node is excluded for it: {why}"
    return Incident(
        id=f"fleet-{fault}-breaker-{node}", fault=fault, subject="fleet", severity=WARN, run="",
        generation=0, opened_wall_s=now.wall_s, opened_boot_s=now.boot_s, reason=text,
        culprit="a common cause, no single node", timeline=((now.wall_s, text),))
