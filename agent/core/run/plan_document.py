"""The run's document: which plan is in force, and how the next one is written.

Owns compare-and-set against the version that was read, and what a lost or late acknowledgement
means.  What a plan contains is agent/core/run/plan.py's.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from ..detect.ranks.ended import Cause
from ..effects import drafts
from ..effects.in_flight import EffectResult
from ..model import TRAINER, Doc, Effect, Lease, Plan, RankView, RunView
from ..model.subject import LEASE, Subject, run_subject
from . import members
from . import plan as planning
from .fences import Fences
from .incidents import RunIncidents
from .layout import Member, World, arranged
from .policy import CHARGED, times
from .state import Context, DocumentSeen, LauncherSeen, RunState
from .takeover import Signs, Takeover, unheard, words

QUARANTINE_MAX = 64
RESTORE_FAILED = "restore_failed"  # how a reason begins when what was read did not prove
NOBODY: Mapping[str, str] = {}
GONE_S = 1.0  # for so long the store must show less than is known before it is written again
REFUSED_S = 10.0  # a refused write is not repeated against the same version before this


def world_of(view: RunView) -> World:
    """What the launcher asks of nodes; one that asks for fewer than its least asks for those."""
    least = max(1, view.nnodes_min)
    return World(least, max(least, view.nnodes_max), max(1, view.unit), view.mixed)


class Document:
    """The document of one run, as this node reads and writes it."""

    def __init__(self, state: RunState, incidents: RunIncidents) -> None:
        self.state, self.incidents = state, incidents
        self._signs, self._fences = Signs(), Fences()
        self._gone_boot_s = -1.0  # since when the store shows less than is in force; -1 = not so
        self._behind = -1, 0.0  # an older version than is known, and since when it is shown
        self._free_boot_s = -1.0  # since when nobody is seen to lead; -1 = somebody is, or unknown
        self._less_boot_s = -1.0  # since when another runs a generation that is unknown here
        self.answered = False  # the store, once in this life

    def read(self, ctx: Context) -> bool:
        """Takes the launcher's levels and the store's document.  True where another launcher came
        under the same name: no order to its predecessor holds for it."""
        state, view = self.state, ctx.view
        before = state.launcher
        changed = before.registered_boot_s != view.registered_boot_s or before.generation > 0
        anew = changed and view.generation == 0
        first = anew or before.registered_boot_s < 0
        state.launcher = LauncherSeen(
            view.registered_boot_s if first else before.registered_boot_s, view.generation,
            max(before.top, view.generation))
        if anew:
            state.document = replace(state.document, wrote=0, meant=0)
        self._take(ctx)
        self._fences.see(ctx, self.state.document.plan, self.state.document.version)
        return anew

    def _take(self, ctx: Context) -> None:
        """The store's document, where it is newer than what is known."""
        view = ctx.view
        docs, subject = ctx.observed.store.docs, run_subject(view.run)
        doc = docs.get(subject)
        known = self._of_this_cluster(ctx, doc)
        plan, read = known.plan, docs.decoded(subject, members.read_plan)
        if doc.version == known.version and plan is not None and not (
                read is not None and read.generation > plan.generation):
            return  # a store that was restored may count to the same version with another plan
        if doc.version < known.version and plan is not None and not self._lost(
                ctx, doc.version, read, plan):
            return
        known = self.state.document = replace(known, version=doc.version)
        if read is None or (plan is not None and read.generation < plan.generation):
            return
        ended = plan is not None and plan.finished < 0 <= read.finished
        # On one node a launcher that has started nothing was submitted anew: where the run had
        # ended before, it now goes on from its checkpoints.
        ended = ended and not (ctx.settings.single_node and view.generation == 0)
        mine = view.node in (*read.members, *read.spares)
        own = read.generation in (view.generation, known.wrote)
        # A run that ends while this launcher is registered ends for it too, spare or not.
        meant = own or ended or (mine and not ctx.settings.single_node)
        self.state.document = replace(
            known, plan=read, meant=read.generation if meant else known.meant)

    def _of_this_cluster(self, ctx: Context, doc: Doc) -> DocumentSeen:
        """What is known, once it is of the store that is here now.  A node that a person has moved
        remembers a plan of the cluster that it left, and may find a run of that name in the one
        that it joins, with a document of the same version: that one holds."""
        store, known = ctx.observed.store, self.state.document
        self.answered = self.answered or store.up
        if store.up and store.cluster and store.cluster != known.cluster:
            if known.cluster:
                known = replace(known, version=0) if not doc.version else DocumentSeen()
            self.state.document = known = replace(known, cluster=store.cluster)
        return known

    def _lost(self, ctx: Context, version: int, read: Plan | None, plan: Plan) -> bool:
        """Whether an older version is no late view of the store: it lost what it held, or is
        another than in this run's last life.  What it holds is compared with from then on, and what
        is known of the plan stays."""
        known, now_s = self.state.document, ctx.now.boot_s
        if known.refused_version == known.version and ctx.observed.store.up:
            return True
        if read is not None and read.generation > plan.generation:
            return True
        # The plan that is known, written again by who leads: no late view stands for a lease.
        if version != self._behind[0]:
            self._behind = version, now_s
        return read == plan and now_s - self._behind[1] > ctx.settings.lease_s

    @property
    def top(self) -> int:
        """The highest generation of this name that is known here: no launcher takes a lower one."""
        plan = self.state.document.plan
        return max(self.state.launcher.top, plan.generation if plan is not None else 0)

    def restore(self, ctx: Context) -> None:
        """Writes the plan in force again where a store of this cluster has lost it: it was restored
        from a backup, or seeded.  Until it is there no script's permit is renewed.  What is seen
        for a moment may be a late view of the store, and a write against it is refused."""
        store, known = ctx.observed.store, self.state.document
        doc = store.docs.get(run_subject(self.state.run))
        plan, read = known.plan, store.docs.decoded(doc.key, members.read_plan)
        is_there = plan is not None and read is not None and (
            read.generation >= plan.generation and doc.version >= known.version or read == plan)
        if plan is None or plan.finished >= 0 or is_there or not store.up or not any(
                beat.run == plan.run and beat.generation == plan.generation
                and members.is_fresh(beat, ctx.now, ctx.settings) for beat in ctx.observed.beats):
            self._gone_boot_s = -1.0
        elif self._gone_boot_s < 0.0:
            self._gone_boot_s = ctx.now.boot_s
            ctx.wake(GONE_S)
        elif ctx.now.boot_s - self._gone_boot_s >= GONE_S and ctx.emit(
                plan.generation, drafts.put(
                    doc.key, doc.version, msgspec.json.encode(plan),
                    "the store came back without the plan in force", plan.run)):
            self._gone_boot_s = ctx.now.boot_s

    def lead(self, ctx: Context) -> None:
        """Ask for the run's lease while nobody heard of holds it; renew it well before its end.

        That of a node that two others know to be lost, and that gives no sign of life, is not
        waited for: what is written below a lease is compared with it, so that its old holder,
        should he live, writes nothing any more.  A node that its own gate refuses lets its lease
        run out for one that passes.
        """
        view, settings, known = ctx.view, ctx.settings, self.state.document.plan
        if settings.single_node or not view.connected:
            return
        if known and known.finished < 0 and members.is_anothers(known.owner, view.uid):
            return
        over = known is not None and known.finished >= 0 and view.generation > 0
        lease = self._lease(ctx)
        self._signs.see(ctx, lease, self.state.document.version)
        if lease is not None or not ctx.observed.store.up:
            self._free_boot_s = -1.0
        elif self._free_boot_s < 0.0:
            self._free_boot_s = ctx.now.boot_s
        others = lease is not None and lease.holder != view.node
        left_s = lease.until_boot_s - ctx.now.boot_s if lease is not None and not others else 0.0
        if over or self.stands_back(ctx) or self._knows_less(ctx):
            return
        if not self._may_lead(view.node) and not self._may_take_over(ctx, lease):
            return
        found = self._takeover(ctx, lease) if lease is not None and others else Takeover()
        ctx.reason = found.reason or ctx.reason
        if (others and not found.over) or left_s > settings.lease_s * 2 / 3:
            return
        subject = str(Subject(LEASE, view.run))
        why = f"lead the run in the place of {found.over}" if found.over else "lead the run"
        draft = drafts.put(subject, 0, view.node.encode(), why, view.run, found.over)
        ctx.emit(view.generation, replace(draft, deadline_s=settings.lease_s / 3))

    def _takeover(self, ctx: Context, lease: Lease) -> Takeover:
        plan = self.state.document.plan
        # This node's own gate is asked behind this, and a refusal of it has stood back before.
        nodes = tuple(replace(one, held="") if one.node == ctx.view.node else one
                      for one in ctx.nodes(plan))
        return self._signs.of(ctx, lease, plan, world_of(ctx.view), nodes)

    def tell_unheard(self, ctx: Context) -> None:
        """Who leads writes down whom it misses: by that they know in the store that it lives."""
        plan = self.state.document.plan
        if plan is None or plan.finished >= 0 or not ctx.leader:
            return
        missed = self._missed(ctx, plan)
        if missed != plan.unheard:
            self.put(ctx, replace(plan, unheard=missed), words(missed))

    def _missed(self, ctx: Context, plan: Plan) -> tuple[str, ...]:
        """Who is to read that the leader hears nothing of it, or has no ranks for it.  A script's
        node only where the others can go on without: its ranks end by that."""
        missed = self._fences.missed(ctx, plan)
        if missed:
            nodes, slots = ctx.nodes(plan), planning.slots_of(plan)
            missed = missed if arranged(world_of(ctx.view), nodes, slots)[0] else set()
        return tuple(sorted({*unheard(ctx, plan), *missed}))

    def nodes(self, ctx: Context, plan: Plan | None) -> tuple[Member, ...]:
        """With what this node's own gate has just said: its beat is of a step ago."""
        return tuple(replace(one, held=self.state.gate.held) if one.node == ctx.view.node else one
                     for one in ctx.nodes(plan))

    def world(self, ctx: Context, first: bool) -> World:
        """How many nodes the next generation takes; the first one waits a while for the most."""
        found = world_of(ctx.view)
        return replace(found, least=found.most) if first and self._gathers(ctx) else found

    def is_led_elsewhere(self, ctx: Context) -> bool:
        """Whether another node that is heard of leads the run."""
        lease = self._lease(ctx)
        return lease is not None and lease.holder != ctx.view.node and any(
            beat.node == lease.holder and beat.run == ctx.view.run
            and members.is_fresh(beat, ctx.now, ctx.settings) for beat in ctx.observed.beats)

    def stands_back(self, ctx: Context) -> bool:
        """Whether this node is refused by its own gate and another may lead.  What a refused leader
        decides is the end of the run for all; who takes its place names it and goes on.  It waits
        for that no longer than for a lost node: who passes may not reach the store."""
        gate, view = self.state.gate, ctx.view
        refused = (view.generation == 0 and gate.launcher_boot_s == view.registered_boot_s
                   and gate.held_boot_s > 0.0 and members.is_refused(gate.held))
        if not refused or members.is_lost(gate.held_boot_s, ctx.now, ctx.settings):
            return False
        return any(
            beat.run == view.run and beat.node != view.node and self._may_lead(beat.node)
            and members.is_fresh(beat, ctx.now, ctx.settings)
            and not members.is_anothers(beat.uid, view.uid)
            and not (beat.generation == 0 and members.is_refused(beat.held))
            for beat in ctx.observed.beats)

    def _knows_less(self, ctx: Context) -> bool:
        """Whether another node runs a generation that neither this one nor the store knows: the
        store lost that plan before it was read here.  Who has it is let lead, and writes it again;
        he is waited for no longer than a lost node, from when the store takes anything."""
        view, plan = ctx.view, self.state.document.plan
        read = ctx.observed.store.docs.decoded(run_subject(view.run), members.read_plan)
        known = max((one.generation for one in (plan, read) if one is not None), default=0)
        if not known or not any(
                beat.generation > known and beat.run == view.run and beat.node != view.node
                and members.is_fresh(beat, ctx.now, ctx.settings)
                and not members.is_anothers(beat.uid, view.uid) for beat in ctx.observed.beats):
            self._less_boot_s = -1.0
            return False
        if self._less_boot_s < 0.0 or not ctx.observed.store.up:
            self._less_boot_s = ctx.now.boot_s
        return not members.is_lost(self._less_boot_s, ctx.now, ctx.settings)

    def _may_lead(self, node: str) -> bool:
        known = self.state.document.plan
        return known is None or known.finished >= 0 or (
            node in (*known.members, *known.spares) or not known.members)

    def _may_take_over(self, ctx: Context, lease: Lease | None) -> bool:
        """Whether a node that the plan does not name may lead, as after all of its nodes lost power
        and the run was queued again elsewhere.

        A named one that reaches the store has the lease long before.  Never of a script: its old
        ranks may go on, cut off, while each node of the plan lets the others' train.
        """
        if lease is not None and lease.holder == ctx.view.node:
            return True
        if self._free_boot_s < 0.0 or ctx.view.grade != TRAINER:
            return False
        return members.is_lost(self._free_boot_s, ctx.now, ctx.settings) and self.is_deserted(ctx)

    def is_deserted(self, ctx: Context) -> bool:
        """Whether this node is no part of the plan in force, and nobody of it is heard of."""
        plan = self.state.document.plan
        if plan is None or self._may_lead(ctx.view.node):
            return False
        named = (*plan.members, *plan.spares)
        return all(one.lost for one in ctx.nodes(plan) if one.node in named)

    def _lease(self, ctx: Context) -> Lease | None:
        return next((one for one in ctx.observed.store.leases if one.run == ctx.view.run), None)

    def current(self, ctx: Context) -> Plan | None:
        """The newest plan; what the launcher runs, where the store knows nothing newer."""
        plan = self.state.document.plan
        known = plan.generation if plan else 0
        foreign = (
            ctx.settings.single_node
            and known != self.state.document.meant
            and 0 < ctx.view.generation < known)
        if ctx.view.generation > known or foreign:
            made_up = members.plan_of_launcher(ctx.view)
            if plan is None:
                return made_up
            return replace(
                made_up, history=plan.history, checkpoint_dir=plan.checkpoint_dir,
                other_histories=plan.other_histories, spent=plan.spent, peak=plan.peak,
                quarantined=plan.quarantined, attempt=plan.attempt)
        return plan

    def settled(self, ctx: Context, done: EffectResult) -> None:
        body = done.effect.body
        version = getattr(body, "expect_version", 0)
        if not done.ok:
            self.state.document = replace(
                self.state.document, refused_version=version, refused_boot_s=ctx.now.boot_s)
            return
        plan = members.read_plan(Doc("", 1, getattr(body, "body", b"")))
        if plan is not None and version + 1 >= self.state.document.version:
            self._adopt(plan, version + 1)

    def new_boot(self) -> None:
        """Another boot's seconds mean nothing here."""
        document, self._fences = self.state.document, Fences()
        self.state.document = replace(document, refused_version=-1, refused_boot_s=0.0)

    def _adopt(self, plan: Plan, version: int) -> None:
        """The document is ours: from here on the plan is in force."""
        document = self.state.document
        self.state.document = replace(
            document, plan=plan, version=max(version, document.version), meant=plan.generation)

    def came_true(self, ctx: Context) -> None:
        """The store's view shows our write: its acknowledgement is not waited for."""
        plan, version = self.state.document.plan, self.state.document.version
        for effect in ctx.in_flight.of("put", drafts.document_subject(self.state.run)):
            body = effect.body
            ours = plan is not None and getattr(body, "body", b"") == msgspec.json.encode(plan)
            if ours and plan is not None and version > getattr(body, "expect_version", 0):
                ctx.in_flight.came_true(effect.id)
                self._adopt(plan, version)

    def put(self, ctx: Context, plan: Plan, reason: str) -> Effect | None:
        """Write the document against the version that was read, never twice the same way."""
        run, document = self.state.run, self.state.document
        recent = ctx.now.boot_s - document.refused_boot_s < REFUSED_S
        if not ctx.leader or (document.refused_version == document.version and recent):
            ctx.reason = "the last write was refused: waiting to read the document again"
            return None
        lease = "" if ctx.settings.single_node else run
        body = msgspec.json.encode(plan)
        draft = drafts.put(run_subject(run), document.version, body, reason, lease)
        effect = ctx.emit(plan.generation, draft)
        known = document.plan
        again = known is not None and known.generation == plan.generation
        if effect is not None and plan.finished < 0 and not again:
            self.state.document = replace(document, wrote=plan.generation)
            self.incidents.planned(ctx, plan, effect.id)
        return effect

    def propose(
        self, ctx: Context, plan: Plan | None, ranks: tuple[RankView, ...], reason: str,
        cause: Cause | None = None, left_out: Mapping[str, str] = NOBODY,
    ) -> None:
        """Plan the next generation, from the state that `ranks` hold, and write it.  With a cause
        it goes on with the budgets of `plan`, also where nothing is seen of its ranks any more;
        without one it is another submission.  `left_out`: node -> why it gets no ranks now."""
        state, view = self.state, ctx.view
        nodes = tuple(replace(one, held=one.held or left_out.get(one.node, ""))
                      for one in self.nodes(ctx, plan))
        # A source that was read and did not prove is not read again: the next one follows.
        distrust = bool(cause and cause.error.startswith(RESTORE_FAILED))
        sources = tuple(replace(r, parked=None) for r in ranks) if distrust else ranks
        grant = state.grant if cause else None
        highest = members.highest_generation(view, state.document.plan, ctx.observed.beats)
        known = members.known(
            view, ctx.observed.beats, ctx.now, ctx.settings, state.heard.by_folder)
        world = self.world(ctx, first=cause is None)
        made, ctx.reason = planning.plan_run(planning.PlanView(
            run=state.run, node=view.node, grade=view.grade, leader=ctx.leader, reason=reason,
            members=nodes,
            highest=max(highest, state.launcher.top), world=world,
            nproc=view.nproc, current=plan, ranks=sources, owner=view.uid,
            commits=known.commits, checkpoint_dir=known.checkpoint_dir, listed=known.listed,
            snapshots=known.snapshots if ranks and not distrust else (),
            bad_from=cause.bad_from if cause else 0,
            quarantined=self._quarantined(ctx, plan, cause), unread=self._unread(plan, cause),
            spent=grant.spent if grant else (),
            granted=(*(f"{CHARGED}{key}" for key in grant.charged),
                     *((cause.request,) if cause and cause.request else ())) if grant else (),
            paused=state.held.rests and cause is not None,
            peak=max(state.progress.peak_step, plan.peak if plan and cause else 0),
            attempt=plan.attempt if plan and cause else 0,
        ))
        if made is None:
            if ctx.reason.startswith(planning.NOTHING_LEFT):  # the end is written with what is bad
                bad = self._quarantined(ctx, plan, cause)
                self.state.document = replace(self.state.document, bad_paths=bad)
            return
        waits = self._fences.waits(ctx, state.document.plan, made, nodes)
        ctx.reason = waits or ctx.reason
        if not waits:
            missed = self._missed(ctx, replace(made, unheard=plan.unheard if plan else ()))
            self.put(ctx, replace(made, unheard=missed), ctx.reason)

    def _gathers(self, ctx: Context) -> bool:
        """Whether more nodes than the least may still come before the first start."""
        since_s = max(ctx.view.registered_boot_s, ctx.since_boot_s)
        return ctx.now.boot_s - since_s < ctx.settings.gather_s

    def _quarantined(
        self, ctx: Context, plan: Plan | None, cause: Cause | None
    ) -> tuple[str, ...]:
        """Paths that must not be used: known before, found bad since, or just refused."""
        document = self.state.document
        paths = [*(plan.quarantined if plan else ()), *document.bad_paths]
        known = members.known(
            ctx.view, ctx.observed.beats, ctx.now, ctx.settings, self.state.heard.by_folder)
        paths += [c.path for c in known.commits if c.bad]
        path = plan.resume.path if plan else ""
        # What a rank could not read was not put aside: it may be read when its node is mended.
        unread = cause is not None and cause.error.startswith(RESTORE_FAILED)
        if cause and cause.fault == "checkpoint_bad" and path and not unread:
            paths.append(path)
            if path not in document.bad_paths:  # also for who starts the run before this is written
                self.state.document = replace(
                    document, bad_paths=(*document.bad_paths, path)[-QUARANTINE_MAX:])
        return tuple(dict.fromkeys(paths))[-QUARANTINE_MAX:]

    def _unread(self, plan: Plan | None, cause: Cause | None) -> str:
        """The checkpoint that failed twice to be read: an older one is tried, where there is one.
        Not at once, for by its plan the newer steps are void."""
        grant = self.state.grant
        if plan is None or cause is None or grant is None \
                or not cause.error.startswith(RESTORE_FAILED):
            return ""
        return plan.resume.path if times(cause, grant.spent) > 1 else ""
