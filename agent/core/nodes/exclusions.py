"""Excludes nodes from every run and releases them, behind the breaker.

Owns the node documents that this node writes.  A fatal fault elsewhere is only answered by who
leads a run there; an operator's request by any member that was asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from ..actions import EXCLUDE_NODE, RUN_CHECK
from ..checks.common_cause import OF_SCOPE, TOGETHER
from ..checks.verdict import CRITICAL, OK
from ..detect.cloud.ec2 import SPOT_FAULT
from ..effects import drafts
from ..incidents.book import Entry, IncidentBook
from ..ladder import first
from ..model import FATAL, WARN, Beat, Incident, Now, RunView, Verdict, node_subject, run_subject
from ..model.subject import ADDRESS, NODE
from ..run import members
from ..run.state import Context
from . import breaker

STRIKES_KEPT = 16
CHECK_EVERY_S = 600.0  # an excluded node is checked anew this often, until its checks pass
CHECKS_S = 120.0
RACE_S = 10.0  # two leaders that write at once have read each other by then
AGAIN = "written again by the node itself: the store had lost it"


class OwnDoc(msgspec.Struct):
    """This node's own document as the store held it last, over a restart of the agent too."""

    doc: members.NodeDoc = members.NodeDoc()
    cluster: str = ""  # whose store that was
    version: int = 0
    since_boot_s: float = 0.0  # this version stands, by the clock that nobody sets ...
    boot_id: str = ""  # ... of this boot


class Exclusions:
    """Node documents, as one node writes them."""

    def __init__(self, name: str, kept: OwnDoc) -> None:
        self.name, self.kept = name, kept
        # Version of this node's own document, and since when it stands, or this agent runs, by this
        # node's own clock: who wrote it may have another.
        self.own: tuple[int, float] = (0, 0.0)  # version, wall_s
        self.fit_wall_s = 0.0  # since when nothing fatal is open here
        self.made: dict[str, float] = {}  # node -> when this one excluded it for a fault, lately

    def step(
        self, wanted: dict[str, members.NodeDoc], incidents: IncidentBook[Entry],
        led: list[Context], ctx: Context, sick: bool, paused: bool = False,
    ) -> None:
        """`sick`: this node has an open fault with which it may carry no ranks.  `paused`: the
        fleet is, so that nobody is excluded for a fault."""
        if not ctx.settings.single_node and not paused:
            self._fatal_nodes(wanted, incidents, led, ctx)
        wall_s = ctx.now.wall_s
        version = ctx.observed.store.docs.get(node_subject(self.name)).version
        if self.own[0] != version:
            self.own = (version, wall_s)
        kept, is_up = self.kept, ctx.observed.store.up
        if is_up and (kept.version, kept.boot_id) != (version, ctx.now.boot_id):
            kept.version, kept.since_boot_s, kept.boot_id = (
                version, ctx.now.boot_s, ctx.now.boot_id)
        doc = ctx.observed.store.docs.decoded(node_subject(self.name), members.read_node)
        sick = sick or doc.request in ctx.observed.firing  # the alert that asked for it is not over
        if sick or not self.fit_wall_s:
            self.fit_wall_s = wall_s
        for node in [one for one in wanted if self._stands(wanted, one, ctx)]:
            del wanted[node]
        self._own(wanted, ctx, sick)
        for node in sorted(wanted):
            self._write(wanted, node, ctx)
        self._keep(wanted, ctx)

    def leave(
        self, wanted: dict[str, members.NodeDoc], ctx: Context, why: str, left_for: str
    ) -> str:
        """Drains this node, as a person would, because its end is announced: `why`, "" = it is not.
        Returns for which announcement it did so last: once for each, for a person may release it.
        In another boot, and without another announcement, it is released."""
        doc = ctx.observed.store.docs.decoded(node_subject(self.name), members.read_node)
        booted_wall_s = ctx.now.wall_s - ctx.now.boot_s
        if why and why != left_for:
            if not doc.excluded:
                wanted[self.name] = members.NodeDoc(
                    excluded=True, draining=True, reason=why, by=self.name, fault=SPOT_FAULT,
                    strikes=doc.strikes, since_wall_s=ctx.now.wall_s)
            return why
        if not why and doc.excluded and _left(doc) and doc.since_wall_s < booted_wall_s:
            wanted.setdefault(self.name, members.NodeDoc(
                reason="its end was announced, and it is back", by=self.name, strikes=doc.strikes,
                since_wall_s=ctx.now.wall_s))
        return left_for

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
        sick = [beat for beat in ctx.observed.beats if beat.fatal]
        for beat in sorted(sick, key=lambda b: (b.node, b.run)):
            if beat.run not in runs or not self._should_exclude(beat, ctx):
                continue
            is_open, why = breaker.is_open(faults, beat.fatal, fleet, ctx.settings)
            if is_open:
                tripped[beat.fatal] = why
                continue
            many, why_many = too_many(ctx, wanted, beat.node)
            if many:
                self._tell_once(beat.fatal, why_many, incidents, ctx)
                continue
            wanted.setdefault(beat.node, struck(ctx, beat.node, beat.fatal, why, self.name))
            self.made[beat.node] = ctx.now.boot_s
        self._take_back(wanted, incidents, ctx)
        for fault in sorted(tripped):
            # What was wanted before the breaker opened is not written any more.
            mine = [n for n, d in wanted.items() if (d.fault, d.by) == (fault, self.name)]
            for node in mine:
                del wanted[node]
            self._tell_once(fault, tripped[fault], incidents, ctx)
        for fault in [f for f in incidents.open if f not in tripped and f not in faults]:
            incidents.close(ctx, fault, "the fault is gone")

    def _take_back(
        self, wanted: dict[str, members.NodeDoc], incidents: IncidentBook[Entry], ctx: Context
    ) -> None:
        """Leaders of two runs that exclude in one moment may each take the last place that is left:
        of them all whose exclusion is behind in the documents' order takes it back, once it reads
        the others'."""
        self.made = {node: at_s for node, at_s in self.made.items()
                     if ctx.now.boot_s - at_s < RACE_S}
        for node in sorted(self.made):
            doc = ctx.observed.store.docs.decoded(node_subject(node), members.read_node)
            mine = doc.excluded and doc.by == self.name and bool(doc.fault)
            if not mine or node in wanted:  # a person's word, say, that is on its way
                continue
            if why := surplus(ctx, node):
                back = members.NodeDoc(
                    reason=f"taken back, another was excluded in the same moment: {why}",
                    by=self.name, strikes=doc.strikes[:-1], since_wall_s=ctx.now.wall_s)
                # Against the very document that was judged, and never a wish that waits: somebody
                # else may exclude the node meanwhile.
                self._write({node: back}, node, ctx)
                self._tell_once(doc.fault, why, incidents, ctx)

    def _own(self, wanted: dict[str, members.NodeDoc], ctx: Context, sick: bool) -> None:
        """This node's own document: a drain comes to its end, an exclusion for a fault is over when
        checks say so.  A person's word is taken back by a person alone."""
        docs = ctx.observed.store.docs
        doc = docs.decoded(node_subject(self.name), members.read_node)
        if not doc.excluded or self.name in wanted or not ctx.observed.store.up:
            return
        replace, wall_s = msgspec.structs.replace, ctx.now.wall_s
        if doc.draining:
            works = [view.run for view in ctx.observed.runs if works_on(self.name, view, ctx)]
            if not works:
                wanted[self.name] = replace(doc, draining=False, since_wall_s=wall_s)
            elif ctx.now.boot_s - self.kept.since_boot_s > ctx.settings.drain_limit_s:
                why = (f"the drain was given up after {ctx.settings.drain_limit_s:g} s: nobody "
                       f"took the ranks of {', '.join(sorted(works))}")
                wanted[self.name] = replace(
                    doc, excluded=False, draining=False, reason=why, since_wall_s=wall_s)
        elif doc.fault and not sick and not _left(doc):
            passed = self._passed(doc, ctx)
            if passed:
                wanted[self.name] = members.NodeDoc(
                    reason=f"checks passed after the exclusion: {passed}", by=self.name,
                    strikes=doc.strikes, since_wall_s=wall_s)

    def _keep(self, wanted: dict[str, members.NodeDoc], ctx: Context) -> None:
        """Remembers this node's own document, and writes an exclusion again that the store has
        lost: it came back empty and was seeded, or from a backup of before.  A release leaves a
        document that says so, and nobody deletes one: where there is none at all, nobody released
        the node.  Another cluster's store never had it, and one that is a single node's own is not
        seeded.  Where somebody is quicker (a release that waited), the store refuses this write."""
        store = ctx.observed.store
        is_of_it = store.cluster == self.kept.cluster
        if ctx.settings.single_node or not store.up or not (store.cluster or is_of_it):
            return
        key = node_subject(self.name)
        if store.docs.get(key).version or not is_of_it:
            self.kept.doc = store.docs.decoded(key, members.read_node)
            self.kept.cluster = store.cluster
        elif self.kept.doc.excluded and self.name not in wanted:
            before = self.kept.doc.reason
            reason = before if AGAIN in before else f"{before} ({AGAIN})"
            again = msgspec.structs.replace(self.kept.doc, reason=reason)
            self._write({self.name: again}, self.name, ctx)

    def _passed(self, doc: members.NodeDoc, ctx: Context) -> str:
        """Which checks of what was broken passed since it was excluded and its fault was over; asks
        for them now, and again every ten minutes while one fails."""
        book = ctx.runbooks.get(doc.fault)
        names = book.checks or OF_SCOPE.get(book.scope, ()) if book is not None else ()
        recent = strikes_of(doc, ctx)
        if not names or book is None or book.clears == "operator":
            return ""
        if len(recent) >= ctx.settings.strikes_most:
            return ""
        since_s = max(self.own[1], self.fit_wall_s)
        made = [one for one in ctx.observed.checks
                if one.check in names and one.wall_s > since_s]
        good = sorted(one.check for one in made if one.status == OK)
        if good and not any(one.status == CRITICAL for one in made):
            return ", ".join(good)
        rounds = (ctx.now.wall_s - since_s) // CHECK_EVERY_S
        generation = int(since_s + rounds * CHECK_EVERY_S)
        own = tuple(one for one in names if one not in TOGETHER)
        if own and not ctx.in_flight.asked(
                generation, node_subject(self.name, "checks"), RUN_CHECK):
            ctx.emit(generation, drafts.check_node(
                self.name, own, 0.0, f"excluded for {doc.fault}", CHECKS_S, doc.fault))
        return ""

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
            number = incidents.number(fault)
            incidents.add(ctx, fault, Entry(fleet_incident(fault, why, ctx.now, self.name, number)))

    def _stands(self, wanted: dict[str, members.NodeDoc], node: str, ctx: Context) -> bool:
        doc = members.doc_of(ctx.observed.store, node_subject(node))
        return bool(doc.body) and members.read_node(doc) == wanted[node]

    def _write(self, wanted: dict[str, members.NodeDoc], node: str, ctx: Context) -> None:
        key = node_subject(node)
        doc = members.doc_of(ctx.observed.store, key)
        body = msgspec.json.encode(wanted[node])
        draft = drafts.put(key, doc.version, body, wanted[node].reason)
        ctx.emit(doc.version, msgspec.structs.replace(
            draft, outlives_node=True, request=wanted[node].request))


def is_open_still(name: str, ctx: Context, opened: Iterable[Incident]) -> bool:
    """Whether what this node is excluded for is open on it still, and fatal: no check takes that
    back.  A milder word of the same fault may be of another device, or of a check that passed since
    and is held open for a minute."""
    doc = ctx.observed.store.docs.decoded(node_subject(name), members.read_node)
    return doc.excluded and bool(doc.fault) and any(
        one.fault == doc.fault and one.severity == FATAL for one in opened)


def _left(doc: members.NodeDoc) -> bool:
    """Whether it was taken out because its end was announced, which no check can take back."""
    return doc.fault == SPOT_FAULT


def works_on(node: str, view: RunView, ctx: Context) -> bool:
    """Whether ranks of this run live on this node, or its plan has places for them here."""
    if any(rank.state != "ended" for rank in view.ranks):
        return True
    plan = ctx.observed.store.docs.decoded(run_subject(view.run), members.read_plan)
    goes_on = plan is not None and plan.finished < 0
    return goes_on and plan is not None and any(place == node for _, place in plan.ranks)


def strikes_of(doc: members.NodeDoc, ctx: Context) -> tuple[float, ...]:
    """Exclusions for faults that are not forgotten.  One of the future is a clock that was set
    back: it counts, which is the careful side."""
    since_s = ctx.now.wall_s - ctx.settings.strikes_days * 86400.0
    return tuple(at_s for at_s in doc.strikes if at_s > since_s)[-STRIKES_KEPT:]


def struck(ctx: Context, node: str, fault: str, why: str, by: str) -> members.NodeDoc:
    """The node's document with one exclusion more."""
    doc = ctx.observed.store.docs.decoded(node_subject(node), members.read_node)
    strikes = (*strikes_of(doc, ctx), ctx.now.wall_s)[-STRIKES_KEPT:]
    if len(strikes) >= ctx.settings.strikes_most:
        why += (f"; excluded {len(strikes)} times within {ctx.settings.strikes_days:g} days: a "
                "person releases it")
    return members.NodeDoc(excluded=True, reason=why, by=by, fault=fault, strikes=strikes,
                           since_wall_s=ctx.now.wall_s)


def too_many(
    ctx: Context, wanted: Mapping[str, members.NodeDoc], node: str
) -> tuple[bool, str]:
    """(True = no further node is excluded for a fault now, why): whatever the faults, a fleet that
    loses nodes that fast has one cause, or a detector that errs."""
    since_s = ctx.now.wall_s - ctx.settings.exclude_window_s
    out = {name for at_s, name in _strikes(ctx) if at_s > since_s}
    out |= {name for name, doc in wanted.items() if doc.excluded and doc.fault}
    why = _beyond_share(ctx, len(out - {node}))
    return bool(why), why


def surplus(ctx: Context, node: str) -> str:
    """Why this node, whose exclusion stands in the store, is one too many; "" when it is not.
    Each node finds the same order in the documents, whatever its own clock says."""
    strikes = sorted(_strikes(ctx))
    own = max((one for one in strikes if one[1] == node), default=(0.0, node))
    since_s = own[0] - ctx.settings.exclude_window_s
    before = {one[1] for one in strikes if one[0] > since_s and one < own} - {node}
    return _beyond_share(ctx, len(before))


def _strikes(ctx: Context) -> Iterator[tuple[float, str]]:
    """(wall_s, node) of the exclusions for faults that the store knows of."""
    docs = ctx.observed.store.docs
    for name, _ in docs.of(NODE):
        for at_s in docs.decoded(node_subject(name), members.read_node).strikes:
            yield at_s, name


def _beyond_share(ctx: Context, out: int) -> str:
    """Why none may follow so many nodes that were excluded; "" when one may."""
    settings, fleet = ctx.settings, len(fleet_nodes(ctx.view.node, ctx))
    most = max(settings.breaker_nodes - 1, int(settings.exclude_fraction * fleet))
    if out < most:
        return ""
    return (f"{out} of {fleet} nodes were excluded for faults within "
            f"{settings.exclude_window_s / 60.0:g} min, {most} may be")


def sees_fleet(name: str, ctx: Context) -> bool:
    """Whether so many nodes are seen that the breaker could open."""
    return not ctx.settings.single_node and (
        len(fleet_nodes(name, ctx)) >= ctx.settings.breaker_nodes)


def held_back(
    ctx: Context, fault: str, node: str, wanted: Mapping[str, members.NodeDoc]
) -> tuple[bool, str]:
    """(True = this node is not excluded for this fault now, why): as many have it as no single
    node's fault reaches, or the fleet has lost as many as it may."""
    faults = faults_of(ctx)
    faults[fault] = (*faults.get(fault, ()), node)
    count = len(fleet_nodes(ctx.view.node, ctx))
    is_open, why = breaker.is_open(faults, fault, count, ctx.settings)
    return (is_open, why) if is_open else too_many(ctx, wanted, node)


def faults_of(ctx: Context) -> dict[str, tuple[str, ...]]:
    """Fault -> nodes that have it now, or were excluded for it.  The last word of one that is
    silent since counts: what takes several nodes down is a common cause the more."""
    found: dict[str, set[str]] = {}
    for beat in ctx.observed.beats:
        if beat.fatal:
            found.setdefault(beat.fatal, set()).add(beat.node)
    for node, read in _documents(ctx):
        if read.excluded and read.fault:
            found.setdefault(read.fault, set()).add(node)
    return {fault: tuple(sorted(nodes)) for fault, nodes in sorted(found.items())}


def fleet_nodes(name: str, ctx: Context) -> tuple[str, ...]:
    nodes = {name, *(b.node for b in ctx.observed.beats)}
    nodes |= {node for node, _ in _documents(ctx)}
    return tuple(sorted(nodes))


def _documents(ctx: Context) -> Iterator[tuple[str, members.NodeDoc]]:
    """Of the nodes of the fleet.  One that nobody hears, that has no address any more and of which
    nothing was written since an exclusion would be forgotten has gone for good, replaced by another
    of another name: counted for ever, a few of them would hold the breaker open."""
    docs, heard = ctx.observed.store.docs, {beat.node for beat in ctx.observed.beats}
    since_s = ctx.now.wall_s - ctx.settings.strikes_days * 86400.0
    for node, doc in docs.of(NODE):
        read = docs.decoded(doc.key, members.read_node)
        is_young = not 0.0 < read.since_wall_s < since_s
        if is_young or node in heard or docs.get(f"{ADDRESS}/{node}").version:
            yield node, read


def fleet_incident(fault: str, why: str, now: Now, node: str, number: int) -> Incident:
    """`number`: how often this node has told of the fault, so that the next one is another."""
    text = f"the breaker is open, no node is excluded for it: {why}"
    return Incident(
        id=f"fleet-{fault}-breaker-{node}-{number}", fault=fault, subject="fleet", severity=WARN,
        run="", generation=0, opened_wall_s=now.wall_s, opened_boot_s=now.boot_s, reason=text,
        culprit="a common cause, no single node", timeline=((now.wall_s, text),))
