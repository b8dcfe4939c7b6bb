"""What ends a generation: a member, somebody's wish, an end of ranks, or hardware under them.

Owns these detectors of a run: how long to wait for the root of which only consequences are seen,
and when a node may not or cannot carry its ranks any more.  Which alerts still ask is decided in
run/alerts.py.  Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from msgspec.structs import replace

from ...model import (
    DEGRADED,
    OPERATOR_REQUEST,
    UNKNOWN,
    WORLD_GROWS,
    Beat,
    RankView,
    Verdict,
    node_subject,
)
from ...nodes import kernel_incidents
from ...run import members
from ...run import plan as planning
from ...run.layout import Member, World, arranged, without_drained
from ...run.plan_document import RESTORE_FAILED, world_of
from ..detector import Look, RanksView, RunDetector
from . import ended as ends
from . import growth
from .collective import proofs
from .ended import Cause

LONELY_S = 0.5  # only consequences ended: the root may be a moment late on one node
LONELY_FAR_S = 3.0  # ... and a few beats late on another
NAMED_MAX = 4  # nodes that a reason names
BAD_CHECKPOINT = "bad_checkpoint"  # how a trainer's reason begins when it refused one
PEER_LOST = "peer_lost"  # ... and when the group broke before it was told to leave
PORT = re.compile(r"(?<=[\]\d]):\d+")  # of an address: another one in each generation


class Members(RunDetector):
    """A node that may not or cannot carry its ranks any more."""

    name = "members"

    def look(self, view: RanksView) -> Look:
        plan, run, reason = view.plan, view.run, ""
        nodes = view.nodes
        slots = planning.slots_of(plan)
        placed = set(slots)
        heard = {b.node: b for b in view.observed.beats if b.run == plan.run}
        unknown: list[Verdict] = []
        for member in nodes:
            if member.node not in placed:
                continue
            if not member.fresh and not member.lost:
                unknown.append(self._unknown(member.node, view))
            fault, why = self._fault(view, member, heard)
            if not fault:
                continue
            if member.draining and not without_drained(world_of(run), nodes, slots)[0]:
                reason = f"{member.node} is to be drained, and no node can take its ranks"
                continue
            if member.lost and not arranged(world_of(run), nodes, slots)[0]:
                reason = f"{member.node} is lost and no spare can take its ranks"
                last = heard.get(member.node)
                limit_s = run.gang_limit_s or view.settings.gang_limit_s
                # Whoever waits for others waits since it came, however long they are gone.
                silent_s = view.now.boot_s - max(
                    run.registered_boot_s, last.boot_s if last else view.since_boot_s)
                if silent_s > limit_s:
                    return Look(ends=f"{reason}: nobody came within {limit_s:g} s")
                continue
            # Queued again, it came when all were silent, and lost nothing: a start is no restart.
            anew = all(one.lost and (one.node not in heard or heard[one.node].boot_s <
                                     run.registered_boot_s) for one in nodes if one.node in placed)
            cause = Cause(
                fault=fault, generation=plan.generation, reason=f"{member.node}: {why}",
                node=member.node, boot_s=view.now.boot_s, charged=not (
                    member.excluded or member.draining or anew),
                parks=member.excluded or member.draining, saves=member.draining)
            return Look(cause, verdicts=tuple(unknown), reason=reason)
        return Look(verdicts=tuple(unknown), reason=reason)

    def _fault(
        self, view: RanksView, member: Member, heard: dict[str, Beat]
    ) -> tuple[str, str]:
        plan = view.plan
        if member.fatal:
            return member.fatal, f"fatal fault {member.fatal}"
        if view.settings.single_node:
            return "", ""
        if member.excluded or member.draining:
            return OPERATOR_REQUEST, "drained" if member.draining else "excluded from runs"
        if member.lost:
            beat = heard.get(member.node)
            return "node_lost", (
                "other nodes reach neither its agent nor its kernel" if beat and beat.lost
                else "not heard of for longer than the lease and its margin")
        if member.node == view.run.node:
            absent = view.run.generation < plan.generation <= view.state.launcher.top
        else:
            beat = heard.get(member.node)
            generation = beat.generation if beat else plan.generation
            since_s = view.now.boot_s - view.plan_boot_s
            late = since_s > members.LOST_LEASES * view.settings.lease_s
            absent = member.fresh and generation < plan.generation and late
        return ("launcher_lost", "its launcher runs no rank of the plan") if absent else ("", "")

    def _unknown(self, node: str, view: RanksView) -> Verdict:
        return Verdict(
            fault="host_unknown", subject=node_subject(node), severity=UNKNOWN, confidence=0.5,
            reason=f"{node} was not heard of lately", run=view.plan.run, detector=self.name,
            generation=view.plan.generation)


class Growing(RunDetector):
    """A world that is smaller than it may be, and nodes that are back: nothing is broken, and its
    ranks leave at the end of a step, once for all that come (growth.py).  So do those that a leader
    before this one had asked to."""

    name = "growing"

    def look(self, view: RanksView) -> Look:
        plan, world, nobody = view.plan, world_of(view.run), Look(growth=growth.NONE)
        if view.settings.single_node or plan.paused or view.state.held.fleet:
            return nobody
        base = Cause(fault=WORLD_GROWS, generation=plan.generation, reason=plan.park,
                     severity="warn", saves=plan.saves,
                     boot_s=view.now.boot_s, charged=False, parks=True, detector=self.name)
        if plan.park:
            return Look(base)
        slots = planning.slots_of(plan)
        settled = view.now.boot_s - view.plan_boot_s > view.settings.lease_s
        running = len(view.ranks) == len(plan.ranks) and all(
            r.state == "running" and r.ended is None for r in view.ranks)
        if len(slots) >= world.most or not settled or view.state.recovery:
            return nobody
        if not running:
            return Look()  # a rank that is not seen for a moment lets no wait begin anew
        nodes = [one for one in view.nodes if one.node not in view.state.peers.left]
        larger = arranged(world, nodes, slots)[0]
        if len(larger) <= len(slots):
            return nobody
        new = sorted(set(larger) - set(slots))
        text = f"{', '.join(new[:NAMED_MAX])} can take ranks: {len(larger)} nodes instead of " \
               f"{len(slots)}"
        found = growth.seen(view.state.suspects.growth, new, view.now.boot_s)
        wait_s = self._wait_s(view, nodes, world, len(larger), found)
        if wait_s > 0.0:
            return Look(growth=found, wake_s=wait_s, reason=f"{text}; waits for one more that may "
                        f"come, for no longer than {growth.LIMIT_S:g} s: one growth takes all")
        return Look(replace(base, reason=text), growth=found)

    def _wait_s(
        self, view: RanksView, nodes: list[Member], world: World, size: int, found: growth.Growth
    ) -> float:
        """How long it waits for another node; a world without room for one does not."""
        if size + world.unit > world.most:
            return 0.0
        passed = [replace(one, held="") if one.held == members.ASKING else one for one in nodes]
        more = arranged(world, passed, planning.slots_of(view.plan))[0]
        return growth.wait_s(found, len(more) > size, view.now.boot_s)


class Requested(RunDetector):
    """An operator wants the ranks restarted: it is a cause now, or never."""

    name = "operator"

    def look(self, view: RanksView) -> Look:
        request = view.request
        if request is None or not view.ranks:
            return Look(heard=True)
        rank = next((r for r in view.ranks if r.rank == request.rank), None)
        cause = Cause(
            fault=OPERATOR_REQUEST, generation=view.plan.generation, charged=False,
            reason=f"an operator asked for a restart: {request.reason}",
            rank=rank.rank if rank else -1, node=rank.node if rank else "",
            pid=rank.pid if rank else 0, severity="warn", detector=self.name, request=request.id)
        return Look(cause, heard=True)


class Ended(RunDetector):
    """Ranks ended badly, or nobody ended and the generation cannot go on all the same."""

    name = ends.DETECTOR

    def look(self, view: RanksView) -> Look:
        ranks, oom_pids = view.ranks, view.state.progress.oom_pids
        failed = ends.failed_ranks(ranks)
        rank, is_root = ends.first_root(failed)
        if rank is None:
            return Look(self._leftovers(view))
        if is_root:
            return Look(ends.cause_of(rank, len(failed) - 1, oom_pids))
        proven = self._proven(view)
        if proven is not None:
            return Look(proven)
        settle_s = LONELY_S if view.settings.single_node else LONELY_FAR_S
        since_s = view.state.suspects.lonely_boot_s or view.now.boot_s
        left_s = since_s + settle_s - view.now.boot_s
        # All have ended: nobody is left whose end could still explain it.
        if left_s > 0 and any(r.ended is None for r in ranks):
            return Look(lonely=True, wake_s=left_s)
        own = ends.own_connection(failed)
        if own is not None:
            return Look(replace(ends.cause_of(own, len(failed) - 1, oom_pids), confidence=0.8))
        return Look(replace(ends.victims_only(rank, len(failed) - 1, oom_pids),
                            among=_nodes(failed)))

    def _leftovers(self, view: RanksView) -> Cause | None:
        """Nobody ended badly by itself, yet the generation cannot go on."""
        ranks = view.ranks
        rank = next((r for r in ranks if r.ended and r.ended.by_us), None)
        if rank is not None:
            reason = f"rank {rank.rank} was ended on an order whose reason is not known any more"
            base = ends.cause_of(rank, 0, ())
            return replace(base, fault="rank_killed", user=False, reason=reason)
        parked = [r for r in ranks if r.parked and r.ended is None]
        if not parked or any(r.state in ("starting", "running") for r in ranks):
            return None
        if self._unheard(view):
            return None  # what they left for is most likely a node: it is lost soon, or heard of
        proven = self._proven(view)
        if proven is not None:
            return proven
        reasons = [(r, r.parked.reason) for r in parked if r.parked]
        for rank, reason in reasons:
            if reason.startswith((BAD_CHECKPOINT, RESTORE_FAILED)):  # read, and not believed
                return Cause(
                    fault="checkpoint_bad", generation=rank.generation, step=rank.step,
                    severity=DEGRADED, reason=f"state did not prove: {reason}",
                    boot_s=view.now.boot_s, error=reason)
        # Who was told to leave says nothing of why.
        told = sorted((reason for _, reason in reasons if reason),
                      key=lambda reason: not reason.startswith(PEER_LOST))
        said = told[0] if told else "no reason"
        return Cause(
            fault="rank_hung", generation=parked[0].generation, step=parked[0].step,
            reason=f"culprit unknown: every rank left a broken collective ({said})",
            boot_s=view.now.boot_s, confidence=0.5, error=PORT.sub("", said),
            among=_nodes(parked))

    def _unheard(self, view: RanksView) -> bool:
        """Whether a node of the plan is neither heard of nor known to be lost."""
        seen = {rank.node for rank in view.ranks}
        missing = {node for _, node in view.plan.ranks} - seen - {view.run.node}
        if view.settings.single_node or not missing:
            return False
        return any(not (m.fresh or m.lost) for m in view.nodes if m.node in missing)

    def _proven(self, view: RanksView) -> Cause | None:
        document = view.state.document.plan
        resumed = document.resume.step if document is not None else 0
        return proofs(view.ranks, resumed, view.now.boot_s, view.state.progress.bases)


def _nodes(ranks: Iterable[RankView]) -> tuple[str, ...]:
    return tuple(sorted({rank.node for rank in ranks}))


class UnderRanks(RunDetector):
    """Hardware under a rank of ours broke, and the rank does not know it yet."""

    name = kernel_incidents.DETECTOR

    def look(self, view: RanksView) -> Look:
        if self.name not in view.settings.act:
            return Look()
        ranks, generation = view.run.ranks, view.plan.generation
        return Look(kernel_incidents.cause_of(view.of_kernel, ranks, generation))


class Alerted(RunDetector):
    """The first alert that nothing has answered yet: one restart answers all of them."""

    name = "alerts"

    def look(self, view: RanksView) -> Look:
        return Look(view.alerts[0]) if view.alerts and view.ranks else Look()
