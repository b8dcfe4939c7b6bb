"""The run's document: which plan is in force, and how the next one is written.

Owns compare-and-set against the version that was read, and what a lost or late acknowledgement
means.  What a plan contains is agent/core/run/plan.py's.
"""

from __future__ import annotations

import msgspec

from ..effects.in_flight import Settled
from ..model import Doc, Effect, Plan
from . import members, reconcile
from .incidents import Casebook
from .state import Context, RunMemory

REFUSED_S = 10.0  # a refused write is not repeated against the same version before this


class Document:
    """The document of one run, as this node reads and writes it."""

    def __init__(self, memory: RunMemory, book: Casebook) -> None:
        self.memory = memory
        self.book = book

    def read(self, ctx: Context) -> None:
        m, view = self.memory, ctx.view
        changed = m.registered_boot_s != view.registered_boot_s or m.shown > 0
        m.shown = view.generation
        if changed and view.generation == 0:
            # Another launcher under the same name: what the last one was told does not hold.
            m.registered_boot_s = view.registered_boot_s
            m.wrote, m.planned, m.finish_code, m.shutdown_boot_s = 0, 0, -1, 0.0
            m.cause = m.grant = None
            m.recovering, m.drain, m.left = False, "", False
        elif m.registered_boot_s < 0:
            m.registered_boot_s = view.registered_boot_s
        m.top = max(m.top, view.generation)
        doc = members.doc_of(ctx.observed.store, f"run/{view.run}")
        if doc.version <= m.version and m.plan is not None:
            return
        read = members.read_plan(doc)
        m.version = doc.version
        if read is None:
            return
        if m.plan is None or read.generation >= m.plan.generation:
            ended = m.plan is not None and m.plan.finished < 0 <= read.finished
            # On one node a launcher that has started nothing is a new submission of a run whose
            # last one ended: it goes on from there.
            ended = ended and not (ctx.settings.single_node and view.generation == 0)
            m.plan = read
            mine = view.node in (*read.members, *read.spares)
            own = read.generation in (view.generation, m.wrote)
            # A run that ends while this launcher is registered ends for it too, spare or not.
            if own or ended or (mine and not ctx.settings.single_node):
                m.planned = read.generation

    def current(self, ctx: Context) -> Plan | None:
        """The newest plan; what the launcher runs, where the store knows nothing newer."""
        plan = self.memory.plan
        known = plan.generation if plan else 0
        foreign = (
            ctx.settings.single_node
            and known != self.memory.planned
            and 0 < ctx.view.generation < known
        )
        if ctx.view.generation > known or foreign:
            made_up = members.plan_of_launcher(ctx.view)
            if plan is None:
                return made_up
            return msgspec.structs.replace(
                made_up, history=plan.history, checkpoint_dir=plan.checkpoint_dir,
                other_histories=plan.other_histories, spent=plan.spent,
            )
        return plan

    def settled(self, ctx: Context, done: Settled) -> None:
        m = self.memory
        body = done.effect.body
        version = getattr(body, "expect_version", 0)
        if not done.ok:
            m.refused_version, m.refused_boot_s = version, ctx.now.boot_s
            return
        plan = members.read_plan(Doc("", 1, getattr(body, "body", b"")))
        if plan is not None and version + 1 >= m.version:
            self._adopt(ctx, plan, version + 1)

    def _adopt(self, ctx: Context, plan: Plan, version: int) -> None:
        """The document is ours: from here on the plan is in force."""
        m = self.memory
        m.plan, m.version, m.planned = plan, max(version, m.version), plan.generation

    def came_true(self, ctx: Context) -> None:
        """The store's view shows our write: its acknowledgement is not waited for."""
        m = self.memory
        plan = m.plan
        for effect in ctx.outbox.in_flight("put", f"store/run/{m.run}"):
            body = effect.body
            ours = plan is not None and getattr(body, "body", b"") == msgspec.json.encode(plan)
            if ours and plan is not None and m.version > getattr(body, "expect_version", 0):
                ctx.outbox.came_true(effect.id)
                self._adopt(ctx, plan, m.version)

    def put(self, ctx: Context, plan: Plan, reason: str) -> Effect | None:
        """Write the document against the version that was read, never twice the same way."""
        m = self.memory
        recent = ctx.now.boot_s - m.refused_boot_s < REFUSED_S
        if not ctx.leader or (m.refused_version == m.version and recent):
            ctx.reason = "the last write was refused: waiting to read the document again"
            return None
        lease = "" if ctx.settings.single_node else m.run
        body = msgspec.json.encode(plan)
        draft = reconcile.put_draft(f"run/{m.run}", m.version, body, reason, lease)
        effect = ctx.emit(plan.generation, draft)
        again = m.plan is not None and m.plan.generation == plan.generation
        if effect is not None and plan.finished < 0 and not again:
            m.wrote = plan.generation
            self.book.planned(ctx, plan, effect.id)
        return effect
