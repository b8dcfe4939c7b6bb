"""Tests between the nodes of a run before its first start: when they are made, whom they leave out.

Owns RunState.peers.  Who leads has the nodes that ask for ranks tested with each other, once for a
start, and writes what was found into the store, where each node's own gate reads it.  A young word
about all of them that is good spares the tests; before a restart between.py alone asks for some.
A hurt node gets no ranks where enough others remain; else the start waits, and the tests are made
again.  What is unknown holds up nobody, and neither do tests that come to no end.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from ..checks import node_tests
from ..checks.judge import SLOW
from ..checks.node_tests import PEERS, PREFIX, Found
from ..detect.ranks.ended import Cause
from ..effects import drafts
from ..effects.in_flight import EffectResult
from ..model import GROUPS, WARN, NodeTests, Plan
from ..nodes import exclusions
from . import plan as planning
from .incidents import RunIncidents
from .layout import Member, arranged
from .plan_document import Document
from .start_gate import AGAIN_S, FAILED, IGNORED, LOOK_S, tests_in_force, tests_peers
from .state import Context, PeersSeen, RunState


class PeerGate:
    """The tests between the nodes of one run."""

    def __init__(self, state: RunState, incidents: RunIncidents, document: Document) -> None:
        self.state, self.incidents, self.document = state, incidents, document

    def holds(self, ctx: Context, plan: Plan | None) -> bool:
        """Whether the run may not start in this step; asks for the tests, and says why."""
        if not tests_peers(ctx) or not ctx.leader:
            return False
        registered_s = ctx.view.registered_boot_s
        if self.state.peers.launcher_boot_s != registered_s:
            self._close(ctx)
            self.state.peers = PeersSeen(registered_s)
        if PEERS in ctx.view.ignored_checks:
            self._ignored(ctx)
            return False
        if ctx.in_flight.busy(drafts.peers_subject(ctx.view.run)):
            ctx.reason = "its nodes are tested with each other before the start"
        elif self.is_unwritten(ctx):
            ctx.reason = "what the tests between its nodes found is being written down"
        elif not self._asks(ctx, plan):
            return False
        ctx.wake(LOOK_S)
        return True

    def left_out(
        self, ctx: Context, plan: Plan | None, planned: bool = False
    ) -> dict[str, str]:
        """Node -> why it takes no ranks now: what it was found to be, and of a broken link one end
        where there are enough without it."""
        if not self.counts(ctx):
            return {}
        known = tests_in_force(ctx, ctx.view.generation > 0)
        if not any(one.hurt or one.links for one in known):
            return {}
        found = self.hurt_of(ctx, plan, known, planned)
        return found | self._ends(ctx, plan, known, found)

    def hurt_of(
        self, ctx: Context, plan: Plan | None, known: list[Found], planned: bool = False
    ) -> dict[str, str]:
        """Who takes no ranks for what it was found to be, in which words.  A run that goes on keeps
        who is slow where none is to spare, for it would stand still instead, and whom the breaker
        keeps from being excluded.  `planned`: as the next plan will have it, though none is asked
        for yet."""
        hurt, _ = node_tests.left_out(known, ctx.settings)
        found = {node: node_tests.words(one) for node, one in hurt.items()}
        if self.state.recovery is None and not planned:
            return found
        found = {node: why for node, why in found.items()
                 if not exclusions.held_back(ctx, FAILED, node, {})[0]}
        if self._enough(ctx, plan, self._fit(ctx, plan, found), found):
            return found
        return {node: why for node, why in found.items() if hurt[node].state != SLOW}

    def look(self, ctx: Context, plan: Plan | None) -> None:
        """Before anything is judged: no world grows for who would be left out of it.  Who is in
        it and would be kept, counts."""
        out = set(self.left_out(ctx, plan)) if ctx.leader else set[str]()
        if out and plan is not None:
            placed = {node for _, node in plan.ranks}
            out -= placed - set(self.left_out(ctx, plan, planned=True))
        left = tuple(sorted(out))
        if left != self.state.peers.left:
            self.state.peers = replace(self.state.peers, left=left)

    def fit(self, ctx: Context, plan: Plan) -> list[Member]:
        """Who may take ranks of the next generation, and so part in tests before it."""
        out = self.left_out(ctx, plan)
        return [one for one in self._fit(ctx, plan, {}) if one.node not in out]

    def names_hurt(self, ctx: Context) -> dict[str, str]:
        """Who leads writes down who is hurt, once each, and what else was found; node -> why."""
        known = tests_in_force(ctx, ctx.view.generation > 0) if self.counts(ctx) else []
        if not known and not self.state.peers.named:
            return {}
        found, _ = node_tests.left_out(known, ctx.settings)
        plan = self.document.current(ctx)
        own = {one.node for one in self.document.nodes(ctx, plan)}
        goes_on = plan is not None and plan.finished < 0 < plan.generation
        placed = {node for _, node in plan.ranks} if plan and goes_on else set[str]()
        hurt = {node: one for node, one in found.items() if node in own}  # of this run
        named = dict(self.state.peers.named)
        for node in named.keys() - hurt.keys():
            self.incidents.close_note(ctx, named.pop(node), "it is not known to be hurt any more")
        for node in hurt.keys() - named.keys() if self.state.cause is None else ():
            one = hurt[node]
            part = "takes part all the same" if node in placed else "takes no ranks of it"
            named[node] = self._note(
                ctx, f"{node} {part}: {node_tests.words(one)}", node, one.evidence)
        if tuple(named.items()) != self.state.peers.named:
            self.state.peers = replace(self.state.peers, named=tuple(named.items()))
        return {node: node_tests.words(one) for node, one in hurt.items()}

    def settled(self, ctx: Context, done: EffectResult) -> None:
        """The end of the tests, whatever came of them."""
        body = done.effect.body
        if not isinstance(body, NodeTests):
            return
        found = node_tests.read_found(done.detail) if done.ok else None
        if found is None:
            found = Found(problem=done.error or "their report cannot be read")
        found = replace(node_tests.with_versions(found, ctx.observed.store.docs),
                        wall_s=ctx.now.wall_s, nodes=body.nodes, suspects=body.suspects)
        self.incidents.close_note(ctx, self.state.peers.said, "tested again")
        self.state.peers = replace(self.state.peers, ended_boot_s=ctx.now.boot_s, found=found)
        plan = self.document.current(ctx)
        ends = self._ends(ctx, plan, [found], self.hurt_of(ctx, plan, [found]))
        text = node_tests.sentence(found, ends)
        said = self._note(ctx, text) if text else ""
        self.state.peers = replace(self.state.peers, said=said)

    # ------------------------------------------------------------ within

    def counts(self, ctx: Context) -> bool:
        """Whether tests between the nodes of this run are asked for, and believed."""
        return tests_peers(ctx) and PEERS not in ctx.view.ignored_checks

    def _asks(self, ctx: Context, plan: Plan | None) -> bool:
        """Whether tests begin now: of all who could take ranks, once there are enough of them."""
        own = tests_in_force(ctx, goes_on=False)
        words = _refused(ctx, own)
        nodes = self._fit(ctx, plan, words)
        names = sorted((one.node for one in nodes), key=lambda name: name != ctx.view.node)
        if len(names) < 2 or not self._enough(ctx, plan, nodes, {}):
            return False  # it is said elsewhere for whom the start waits
        wall_s, max_age_s = ctx.now.wall_s, ctx.settings.gate.max_age_s
        young = [one for one in node_tests.reports(ctx.observed.store.docs)
                 if node_tests.is_fresh(one, wall_s, max_age_s)]
        if any(node_tests.answers(one, names) for one in young):
            return False
        covered = any(set(names) <= set(one.nodes) for one in own)
        if covered and self._enough(ctx, plan, nodes, words):
            return False  # the others start, and what is unknown holds up nobody
        ended_s = self.state.peers.ended_boot_s
        if ended_s and ctx.now.boot_s - ended_s < AGAIN_S:
            return False
        ctx.emit(int(wall_s), drafts.test_nodes(
            ctx.view, tuple(names), GROUPS in ctx.settings.gate.peers,
            ctx.settings.gate.peers_limit_s,
            f"tests between {len(names)} nodes before run {ctx.view.run} starts"))
        ctx.reason = f"{len(names)} nodes are tested with each other before the start"
        return True

    def _fit(self, ctx: Context, plan: Plan | None, words: dict[str, str]) -> list[Member]:
        """Those that nothing but these words keeps from taking ranks."""
        nodes = (replace(one, held="") if one.held and one.held == words.get(one.node) else one
                 for one in self.document.nodes(ctx, plan))
        return [one for one in nodes if one.is_fit and not one.draining]

    def _ends(self, ctx: Context, plan: Plan | None, known: list[Found],
              hurt: dict[str, str]) -> dict[str, str]:
        """The ends of broken links that take no ranks; none where the run needs them."""
        nodes = self._fit(ctx, plan, hurt)
        ends = node_tests.ends(known, [one.node for one in nodes if one.node not in hurt])
        return ends if ends and self._enough(ctx, plan, nodes, hurt | ends) else {}

    def _enough(self, ctx: Context, plan: Plan | None, nodes: Iterable[Member],
                without: dict[str, str]) -> bool:
        """Whether these can carry the run, without some."""
        first = ctx.view.generation == 0
        able = [one for one in nodes if one.node not in without]
        world = self.document.world(ctx, first)
        return bool(arranged(world, able, planning.slots_of(plan) if plan else [])[0])

    def is_unwritten(self, ctx: Context) -> bool:
        """Whether the store is still to be told what was found; nodes judge themselves by it."""
        found = self.state.peers.found
        if found is None or found.problem:
            return False
        docs, key = ctx.observed.store.docs, f"{PREFIX}{ctx.view.node}"
        known = docs.decoded(key, node_tests.read)
        if found in known:
            return False
        version = docs.get(key).version
        ctx.emit(version, drafts.put(
            key, version, node_tests.written(known, found), "what tests between nodes found"))
        return True

    def _ignored(self, ctx: Context) -> None:
        if self.state.peers.ignored:
            return
        view = ctx.view
        who = f"uid {view.uid}" if view.uid >= 0 else "its user"
        self.state.peers = replace(self.state.peers, ignored=True)
        self.incidents.open_note(ctx, Cause(
            fault=IGNORED, generation=view.generation, severity=WARN, node=view.node,
            detector=PEERS, evidence=(("reason given", view.ignore_reason),),
            reason=f"it starts without tests between its nodes; {who} asked for that: "
                   f"{view.ignore_reason}"))

    def _note(self, ctx: Context, text: str, node: str = "",
              evidence: tuple[tuple[str, str], ...] = ()) -> str:
        return self.incidents.open_note(ctx, Cause(
            fault=FAILED, generation=ctx.view.generation, severity=WARN, node=node or ctx.view.node,
            detector=PEERS, reason=text, evidence=evidence))

    def _close(self, ctx: Context) -> None:
        """What was said to an earlier launcher."""
        seen = self.state.peers
        for incident in (seen.said, *(one for _, one in seen.named)):
            self.incidents.close_note(ctx, incident, "another launcher came")


def _refused(ctx: Context, known: list[Found]) -> dict[str, str]:
    """Node -> in which words it takes no ranks."""
    hurt, _ = node_tests.left_out(known, ctx.settings)
    return {node: node_tests.words(one) for node, one in hurt.items()}
