"""Tests of the nodes under suspicion between two generations: whether they pay, and what they mean.

Owns RunState.between.  A fault that names a node, or that a collective between nodes died of, puts
nodes under suspicion; what it has cost this run so far is kept for each.  Who leads has them tested
with nodes that are known to be good once that is more than the tests are expected to take: so they
never take more than the fault has taken already, and no restart waits for them beyond a limit.  Who
is hurt is excluded; who passes is under suspicion no more; what is unknown excludes nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from .. import ladder
from ..actions import EXCLUDE_NODE, RUN_CHECK
from ..checks import node_tests
from ..checks.judge import BROKEN
from ..checks.node_tests import PEERS, Found
from ..detect.ranks.ended import Cause
from ..detect.ranks.known_causes import CARD
from ..effects import drafts
from ..effects.in_flight import EffectResult
from ..model import GROUPS, WARN, Plan, Runbook, node_subject
from ..nodes import exclusions
from . import members
from .incidents import RunIncidents
from .peer_gate import PeerGate
from .plan_document import Document
from .start_gate import FAILED, LOOK_S, tests_in_force
from .state import BetweenSeen, Context, Loss, RunState

FIRST_S = 15.0  # what such tests take, until some were made; docs/checks.md has measurements
WITNESSES_LEAST = 3  # with so many a slow node's pairs are not the usual ones
ENOUGH = 3  # nodes: of two that fail with each other neither can be named
CUT_SHARE = 0.5  # of the limit: what ended without a result after that was cut off
LOSSES_MAX = 64  # nodes of which is kept what they cost


class BetweenTests:
    """The tests between two generations of one run."""

    def __init__(
        self, state: RunState, incidents: RunIncidents, document: Document, gate: PeerGate
    ) -> None:
        self.state, self.incidents, self.document, self.gate = state, incidents, document, gate

    def holds(self, ctx: Context, plan: Plan, cause: Cause) -> bool:
        """Whether the next generation waits for tests of nodes that are under suspicion; asks for
        them, once for a cause."""
        limit_s, since_s = ctx.settings.gate.suspects_limit_s, self.state.progress.broken_boot_s
        if not self.gate.counts(ctx) or limit_s <= 0.0 or self.state.held.rests or plan.paused:
            return False
        if self.state.between.broken_boot_s != since_s:
            self.state.between = replace(
                self.state.between, broken_boot_s=since_s, suspects=(), held_s=0.0, judged=(),
                excluding=())
            self._weigh(ctx, plan, cause)
        self._exclude(ctx, plan)
        seen = self.state.between
        waited_s = ctx.now.boot_s - seen.asked_boot_s
        if not seen.suspects or waited_s > limit_s:
            return False
        unwritten = [node for node in seen.excluding if not self._is_excluded(ctx, node)]
        if unwritten:
            # Else who is kept by the breaker, because these count, would be left out with them.
            ctx.reason = f"that {_list(tuple(unwritten))} is excluded is being written down"
        elif ctx.in_flight.busy(drafts.peers_subject(ctx.view.run)):
            ctx.reason = (f"{_list(seen.suspects)}, under suspicion, is tested with other nodes "
                          f"before the next start, for {limit_s:g} s at most")
        elif self.gate.is_unwritten(ctx):
            ctx.reason = "what the tests between its nodes found is being written down"
        else:
            return False
        self.state.between = replace(seen, held_s=waited_s)
        ctx.wake(LOOK_S)
        return True

    def settled(self, ctx: Context, done: EffectResult) -> None:
        """What became of the tests, once the gate knows it: each suspect begins anew."""
        seen = self.state.between
        found = self.state.peers.found
        if done.effect.id != seen.effect or found is None:
            return
        limit_s = ctx.settings.gate.suspects_limit_s
        took_s = min(ctx.now.boot_s - seen.asked_boot_s, limit_s)
        self.state.between = seen = replace(seen, effect="", held_s=took_s)
        if found.problem:
            # Nobody was tested: what each cost counts on.  An agent ends its child some seconds
            # before the limit, so that it can still say so.
            if took_s >= CUT_SHARE * limit_s:
                self.state.between = replace(seen, cut_s=limit_s)
            self._note(ctx, f"the tests came to no result, and it goes on: {found.problem}")
            return
        self.state.between = replace(
            seen, took_s=took_s, cut_s=0.0,
            losses=tuple(one for one in seen.losses if one.node not in seen.suspects))
        _, common = node_tests.left_out([found], ctx.settings)
        if common:
            self._note(ctx, f"nobody is left out, the breaker is open: {common}")
        hurt = {one.node for one in found.hurt}
        cut = {node for link in found.links if link.state == BROKEN for node in link.nodes}
        for node in seen.suspects:
            if node not in node_tests.proven(found):
                self._note(ctx, f"the tests leave {node} unknown: it takes part")
            elif node in cut - hurt:
                self._note(ctx, f"{node} is well, and a link of it is broken")
            elif node not in hurt:
                self._note(ctx, f"{node} passed its tests: it is under suspicion no more")

    def new_boot(self) -> None:
        """Another boot's seconds mean nothing here; what was weighed is not weighed again."""
        seen, now = self.state.between, self.state.progress
        weighed = self.state.recovery is not None and seen.broken_boot_s >= 0.0
        self.state.between = BetweenSeen(
            losses=seen.losses, took_s=seen.took_s, cut_s=seen.cut_s,
            broken_boot_s=now.broken_boot_s if weighed else -1.0)

    # ------------------------------------------------------------ within

    def _weigh(self, ctx: Context, plan: Plan, cause: Cause) -> None:
        """Counts what the cause cost, and has tested whom it cost enough."""
        suspects = suspects_of(cause, ctx.runbooks, [
            one.node for one in ctx.conditions if one.fault in CARD])
        if not suspects:
            return
        if len(suspects) > LOSSES_MAX:
            self._note(ctx, f"{_list(suspects)}, under suspicion, is not tested: more than "
                            f"{LOSSES_MAX} nodes")
            return
        losses = added(self.state.between.losses, suspects, self._lost_s(ctx))
        self.state.between = seen = replace(self.state.between, losses=losses)
        cost_s, limit_s = seen.took_s or FIRST_S, ctx.settings.gate.suspects_limit_s
        own = [one for one in losses if one.node in suspects]
        dear = tuple(one.node for one in own if one.lost_s > cost_s)
        most = max(own, key=lambda one: one.lost_s)
        said = (f"{cause.fault} cost {most.lost_s:.1f} s in {most.times} "
                f"time{'s' * (most.times > 1)}, tests take {cost_s:.1f} s")
        cut = 0.0 < limit_s <= seen.cut_s
        if cut:
            said = f"tests were cut off at {seen.cut_s:g} s, and may take no more"
        if not dear or cut or cost_s > limit_s:
            over = f" and may take {limit_s:g} s" * (not cut and cost_s > limit_s)
            self._note(ctx, f"{_list(suspects)}, under suspicion, is not tested: {said}{over}")
            return
        names = self._with_witnesses(ctx, plan, dear)
        if len(names) < ENOUGH or not set(dear) & set(names):
            self._note(ctx, f"{_list(suspects)}, under suspicion, is not tested: fewer than "
                            f"{ENOUGH} nodes could take part")
            return
        dear = tuple(one for one in dear if one in names)
        rest = tuple(one for one in names if one not in dear)
        effect = ctx.emit(int(ctx.now.wall_s), drafts.test_nodes(
            ctx.view, names, GROUPS in ctx.settings.gate.peers, limit_s,
            f"tests of {_list(dear)}, under suspicion", dear))
        if effect is not None:
            self.state.between = replace(
                seen, suspects=dear, asked_boot_s=ctx.now.boot_s, effect=effect.id)
            beside = f" with {_list(rest)}" if rest else ""
            self._note(ctx, f"{_list(dear)}, under suspicion, is tested{beside}: {said}")

    def _lost_s(self, ctx: Context) -> float:
        """What one more fault like this takes: from the last step until it was found, and then a
        restart."""
        now, history = self.state.progress, self.state.history
        since_s = max(now.last_step_boot_s, now.began_boot_s)  # what was before is counted already
        found_s = now.broken_boot_s - since_s if now.last_step_boot_s > 0.0 else 0.0
        return max(0.0, found_s) + history.restart_cost_s(ctx.view.startup_s)

    def _with_witnesses(self, ctx: Context, plan: Plan, dear: tuple[str, ...]) -> tuple[str, ...]:
        """This node, which arranges the tests, then the suspects and those who are to vouch for
        them; () where it may not take part itself.  Spares have nothing else to do."""
        fit = [one.node for one in self.gate.fit(ctx, plan)]
        if ctx.view.node not in fit:
            return ()
        known = node_tests.reports(ctx.observed.store.docs)
        struck = {one.node for one in self.state.between.losses}
        good = sorted((node for node in fit if node not in dear), key=lambda node: (
            node != ctx.view.node, node in struck, not _is_well(known, node)))
        chosen = {*dear, *good[: max(WITNESSES_LEAST, 2 * len(dear))]}
        return tuple(sorted(chosen & set(fit), key=lambda node: (node != ctx.view.node, node)))

    def _exclude(self, ctx: Context, plan: Plan) -> None:
        """Whom such tests found to be hurt, as for any other fault of a node: whoever places ranks
        reads it in the node's document.  By what is written, so that the next leader does it where
        this one ended before."""
        max_age_s = ctx.settings.gate.max_age_s  # what is older may be mended, and is tested anew
        known = [one for one in tests_in_force(ctx, goes_on=True)
                 if node_tests.is_fresh(one, ctx.now.wall_s, max_age_s)]
        of_suspects = {one.node for found in known if found.suspects for one in found.hurt}
        hurt, _ = node_tests.left_out(known, ctx.settings)
        left, judged = self.gate.hurt_of(ctx, plan, known), self.state.between.judged
        wanted: dict[str, members.NodeDoc] = {}
        own = {one.node for one in ctx.nodes(plan)}  # reports are the cluster's
        for node in sorted(hurt.keys() & of_suspects & own - set(judged)):
            if self._is_excluded(ctx, node):
                continue
            why = f"{node}: {node_tests.words(hurt[node])}"
            is_open, open_why = exclusions.held_back(ctx, FAILED, node, wanted)
            if is_open:
                self._note(ctx, f"{why}; not excluded, the breaker is open: {open_why}")
            elif node not in left:
                self._note(ctx, f"{why}; it takes part, for none is to spare")
            else:
                wanted[node] = exclusions.struck(ctx, node, FAILED, why, ctx.view.node)
                self._note(ctx, f"{why}; it is excluded")
                ctx.climbed.append((Cause(
                    fault=FAILED, generation=ctx.view.generation, severity=WARN, node=node,
                    detector=PEERS, reason=why, evidence=hurt[node].evidence), EXCLUDE_NODE, why))
            judged = (*judged, node)
        if judged != self.state.between.judged:
            self.state.between = replace(
                self.state.between, judged=judged,
                excluding=(*self.state.between.excluding, *wanted))

    def _is_excluded(self, ctx: Context, node: str) -> bool:
        docs = ctx.observed.store.docs
        return docs.decoded(node_subject(node), members.read_node).excluded

    def _note(self, ctx: Context, text: str) -> None:
        if self.state.recovery is not None:
            self.incidents.note(ctx, self.state.recovery.incident, text)


def suspects_of(
    cause: Cause, runbooks: Mapping[str, Runbook], with_card: Iterable[str]
) -> tuple[str, ...]:
    """The nodes that a cause puts under suspicion and tests between nodes could confirm or clear.
    A named one only where its runbook says so; of several those whose network card is known to be
    hurt (`with_card`), where there are such.  A rank that crashed by itself suspects no node."""
    if not cause.charged:
        return ()
    if not cause.node:
        return tuple(node for node in cause.among if node in set(with_card)) or cause.among
    book = runbooks.get(cause.fault)
    asks = book is not None and (PEERS in book.checks or ladder.holds(book, RUN_CHECK))
    return (cause.node,) if asks else ()


def added(
    losses: Iterable[Loss], nodes: Iterable[str], lost_s: float
) -> tuple[Loss, ...]:
    """With one fault more of each of these; the oldest go first where there are too many."""
    found = {one.node: one for one in losses}
    for node in nodes:
        before = found.pop(node, Loss(node))
        found[node] = Loss(node, before.times + 1, before.lost_s + lost_s)
    return tuple(found.values())[-LOSSES_MAX:]


def _is_well(known: Iterable[Found], node: str) -> bool:
    """By the newest tests that it took part in."""
    newest = next((one for one in reversed([*known]) if node in one.nodes), None)
    return newest is not None and node_tests.answers(newest, (node,))


def _list(nodes: tuple[str, ...]) -> str:
    shown = ", ".join(nodes[:8])
    return f"{shown} and {len(nodes) - 8} more" if len(nodes) > 8 else shown
