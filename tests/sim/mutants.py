"""Each guard of core and performer taken out of the real code, one at a time: does a storm notice?

A mutant replaces one function of the core or of the performer, or one check of the store, by one
that does not care.
A guard without which every storm stays calm is either of no use, or the storms are too weak.

    python tests/sim/mutants.py [NAME ...]      # all of them, from seed 0 on; `make mutants-sim`

Owns the table and the search.  `seed` is where the last search found it; only a hint.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from guards import lasting_as_any_other, runs_alone
from msgspec.structs import replace

from holdfast.agent.actions import performer
from holdfast.agent.actions.performer import Performer
from holdfast.agent.core import node
from holdfast.agent.core.detect.ranks import broken, ended, hang, known_causes, limits
from holdfast.agent.core.effects import drafts, in_flight
from holdfast.agent.core.incidents import book
from holdfast.agent.core.model import Observed, StoreWrite, run_subject
from holdfast.agent.core.nodes import breaker, device_holders, exclusions
from holdfast.agent.core.run import (
    case,
    causes,
    ending,
    fences,
    heard,
    members,
    operator,
    plan,
    plan_document,
    policy,
    progress,
    reconcile,
    recovery,
    state,
    takeover,
    validity,
)
from holdfast.agent.core.run.state import Context
from holdfast.agent.daemon.parts.permits import Permits
from holdfast.agent.peers.failure_detector import FailureDetector
from holdfast.agent.simulate import run_storm, store
from holdfast.agent.simulate.cluster import Cluster, Shape
from holdfast.agent.simulate.edge import Edge
from holdfast.agent.simulate.storms import Storm
from holdfast.agent.store.base import Conflict
from holdfast.worker.permit import Permit

SEEDS = 100

Patch = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Mutant:
    """One rule taken out, the storm that needs it, and the invariants that may notice."""

    name: str
    storm: str | Storm
    notices: tuple[str, ...]
    patch: Patch = lambda _: None
    hook: Callable[[Cluster], None] | None = None
    seed: int = 0


def put(target: object, name: str, to: object) -> Patch:
    """A mutant that sets one name."""
    return lambda patch: patch.setattr(target, name, to)


# ---------------------------------------------------------------- the store


def robbed(self, ctx, lease, *_):  # type: ignore[no-untyped-def]
    """Whoever two nodes do not hear is followed at once, whatever the store shows."""
    return takeover.Takeover(lease.holder if lease.holder in self._lost_s else "")


def fresh_nodes_have_stopped(patch: pytest.MonkeyPatch) -> None:
    """What a node is told that was heard of just now, it has done."""
    real = fences.Fences.waits
    patch.setattr(fences.Fences, "waits", lambda self, ctx, plan, made, nodes: real(
        self, ctx, plan, made, tuple(one for one in nodes if not one.fresh)))


def no_compare(cluster: Cluster) -> None:
    """The store sets without comparing versions."""
    cluster.store.compare = False


def no_lease_check(cluster: Cluster) -> None:
    """The store takes a plan from anybody, whoever holds the lease."""
    cluster.store.check_lease = False


# ---------------------------------------------------------------- nodes


def fatal_ignored(cluster: Cluster) -> None:
    """No core ever hears of a fatal fault."""

    def deaf(_: Edge, observed: Observed) -> Observed:
        beats = tuple(replace(one, fatal="") for one in observed.beats)
        return replace(observed, beats=beats, events=())

    for edge in cluster.edges.values():
        edge.filter = deaf


def stale_is_live(patch: pytest.MonkeyPatch) -> None:
    """However old a beat is, its node counts as heard of."""
    patch.setattr(members, "is_fresh", lambda *_: True)
    patch.setattr(members, "is_lost", lambda *_: False)


def shrinks_at_once(patch: pytest.MonkeyPatch) -> None:
    """A lost node is never replaced by a spare while the least is there."""
    real = plan.arranged

    def smaller(world, nodes, before):  # type: ignore[no-untyped-def]
        stay = [node for node in nodes if node.node in before and node.is_fit]
        few = before and len(stay) >= world.least
        return real(world, stay if few else nodes, before)

    patch.setattr(plan, "arranged", smaller)


def breaker_ends(patch: pytest.MonkeyPatch) -> None:
    """While the breaker is open the run is ended for what many nodes have."""
    patch.setattr(policy, "unexcluded", lambda granted, why: replace(
        granted, action=policy.FINISH, code=76, rung="", reason=why))


def spare_twice(patch: pytest.MonkeyPatch) -> None:
    """A spare takes the lost node's place, and that of another one besides."""
    real = plan.arranged

    def doubled(world, nodes, before):  # type: ignore[no-untyped-def]
        slots, why = real(world, nodes, before)
        new = [node for node in slots if before and node not in before]
        return (tuple(new[:1] * len(slots)) if new else slots), why

    patch.setattr(plan, "arranged", doubled)


def excluded_is_fit(patch: pytest.MonkeyPatch) -> None:
    """A node's exclusion is read and shown, and its ranks are planned there again."""
    real = members.members
    patch.setattr(members, "members", lambda *rest: tuple(
        replace(one, excluded=False) for one in real(*rest)))


def heard_alone(patch: pytest.MonkeyPatch) -> None:
    """The breaker counts the nodes that are heard of, and none that went down with the fault."""
    real = exclusions.faults_of
    patch.setattr(exclusions, "faults_of", lambda ctx: real(SimpleNamespace(
        now=ctx.now, settings=ctx.settings, observed=replace(ctx.observed, beats=tuple(
            one for one in ctx.observed.beats
            if members.is_fresh(one, ctx.now, ctx.settings))))))


async def sent_unasked(self, flight, _):  # type: ignore[no-untyped-def]
    """Whoever believes to lead deletes."""
    self._send(flight)


# ---------------------------------------------------------------- leases


def leads_on(patch: pytest.MonkeyPatch) -> None:
    """A lease that has run out on its holder's clock counts until the store says otherwise."""
    patch.setattr(plan, "is_leader", lambda run, node, leases, _: any(
        (lease.run, lease.holder) == (run, node) for lease in leases))


def lease_unsaid(patch: pytest.MonkeyPatch) -> None:
    """A plan does not name the lease that the store is to compare."""
    real = drafts.put

    def silent(key, version, body, reason, lease="", over=""):  # type: ignore[no-untyped-def]
        return real(key, version, body, reason, lease if key.startswith("lease/") else "", over)

    patch.setattr(drafts, "put", silent)


# ---------------------------------------------------------------- recovery


def ends_at_the_first_fault(patch: pytest.MonkeyPatch) -> None:
    """Whatever happens, the run is over."""
    patch.setattr(policy, "grant", lambda cause, *_: policy.Grant(
        policy.FINISH, "all 3 restarts are used up", code=policy.finish_code(cause)))


def believes_the_store(patch: pytest.MonkeyPatch) -> None:
    """What was restored counts, and not what is known."""
    take = plan_document.Document._take

    def taken(self: plan_document.Document, ctx: Context) -> None:
        doc, known = ctx.observed.store.docs.get(run_subject(ctx.view.run)), self.state.document
        if doc.version < known.version and ctx.observed.store.up:
            self.state.document = replace(known, version=0, plan=None)
        take(self, ctx)

    patch.setattr(plan_document.Document, "_take", taken)


def torn_is_whole(patch: pytest.MonkeyPatch) -> None:
    """A survivor's word that its state is torn is not listened to."""
    real = plan.survivor_resume

    def deaf(view: plan.PlanView, places: dict[int, str]) -> object:
        ranks = tuple(replace(r, parked=replace(r.parked, torn=False)) if r.parked else r
                      for r in view.ranks)
        return real(replace(view, ranks=ranks), places)

    patch.setattr(plan, "survivor_resume", deaf)


def deaf_to_pauses(patch: pytest.MonkeyPatch) -> None:
    """A pause is shown and not kept."""
    patch.setattr(operator.Operator, "pause", lambda *_: None)


# ---------------------------------------------------------------- budgets


def charged_twice(patch: pytest.MonkeyPatch) -> None:
    """A restart costs two."""
    real = policy.grant

    def dear(*rest, **more):  # type: ignore[no-untyped-def]
        made = real(*rest, **more)
        again = {key: n + (key in made.charged) for key, n in made.spent}
        return replace(made, spent=tuple(again.items()))

    patch.setattr(policy, "grant", dear)


def free_restarts(patch: pytest.MonkeyPatch) -> None:
    """Nothing is ever used up."""
    real = policy.grant

    def free(cause, account, *rest, **more):  # type: ignore[no-untyped-def]
        return real(cause, replace(account, max_restarts=99, spent=()), *rest, **more)

    patch.setattr(policy, "grant", free)


def leaders_memory(patch: pytest.MonkeyPatch) -> None:
    """What a generation earned is counted from what its leader remembers, not from the plan."""
    real = plan.plan_run
    patch.setattr(plan, "plan_run", lambda view: real(replace(view, peak=0)))


def any_checkpoint(patch: pytest.MonkeyPatch) -> None:
    """An old checkpoint gives all restarts back."""
    patch.setattr(policy, "made_progress",
                  lambda _plan, new, commit: new >= policy.PROGRESS_STEPS or commit is not None)


# ---------------------------------------------------------------- effects and requests


def stall_ignored(patch: pytest.MonkeyPatch) -> None:
    """What outlives the node is done though the journal takes no writes."""
    real = state.Context.emit
    patch.setattr(state.Context, "emit", lambda self, generation, draft: real(
        self, generation, replace(draft, outlives_node=False)))


def unverified_count(patch: pytest.MonkeyPatch) -> None:
    """Checkpoints that nobody read back count among those that are kept."""
    real = reconcile.deletable
    patch.setattr(reconcile, "deletable", lambda commits, *rest: real(
        tuple(replace(one, verified=True) for one in commits), *rest))


# ---------------------------------------------------------------- the performer


def effect_before_intent(patch: pytest.MonkeyPatch) -> None:
    """Orders leave at once, and the journal hears of it."""
    real = Performer._begin

    async def begin(self, effects, memory):  # type: ignore[no-untyped-def]
        for effect in effects:
            if not isinstance(effect.body, StoreWrite):
                self._send(self._flights[effect.id])
        await real(self, effects, memory)

    patch.setattr(Performer, "_begin", begin)


def written_before_intent(patch: pytest.MonkeyPatch) -> None:
    """So do writes."""
    async def begin(self, effects, memory):  # type: ignore[no-untyped-def]
        for effect in effects:
            if isinstance(effect.body, StoreWrite):
                self._start(self._put(effect, effect.body))
            else:
                self._send(self._flights[effect.id])

    patch.setattr(Performer, "_begin", begin)


def performed_twice(patch: pytest.MonkeyPatch) -> None:
    """A write whose answer is lost is written again, by the performer itself."""
    real = Performer._put

    async def put(self, effect, write):  # type: ignore[no-untyped-def]
        try:
            await self._store.put(write)
        except TimeoutError:
            await real(self, effect, write)
        except Conflict as error:
            self._end(effect, False, f"conflict: {error}")
        else:
            self._end(effect, True)

    patch.setattr(Performer, "_put", put)


def sent_twice(patch: pytest.MonkeyPatch) -> None:
    """To be on the safe side."""
    real = Performer._send

    def send(self, flight):  # type: ignore[no-untyped-def]
        real(self, flight)
        real(self, flight)

    patch.setattr(Performer, "_send", send)


def born_without(patch: pytest.MonkeyPatch, what: str) -> None:
    """A life begins without this part of what its journal holds."""
    real = Performer.__init__

    def begin(self, journal, *rest):  # type: ignore[no-untyped-def]
        journal.seed = journal.seed._replace(**{what: type(getattr(journal.seed, what))()})
        real(self, journal, *rest)

    patch.setattr(Performer, "__init__", begin)


def uncounted_mark(patch: pytest.MonkeyPatch) -> None:
    """Each outcome of a start is another restart, also one that is said again."""
    real = Performer._restarted

    def restarted(self, of):  # type: ignore[no-untyped-def]
        self.counters.pop(("restarted_to", (of.subject.split("/")[1],)), None)
        return real(self, of)

    patch.setattr(Performer, "_restarted", restarted)


ROT = Storm("rot", {"commit_spoilt": 1.0}, faults=(25, 35))
STALLED = Storm("stalled", {"journal_stall": 2.0, "node_fatal": 2.0}, faults=(8, 12),
                single_share=0.0, shapes=(Shape(2, 2, 1, 1),))
BUGS = Storm("bugs", {"user_bug": 1.0, "agent_killed": 0.5}, faults=(1, 3))
PAUSES = Storm("pauses", {"paused": 2.0, "rank_killed": 3.0}, faults=(4, 8), single_share=1.0)

MUTANTS = (
    Mutant("no compare-and-set", "writes", ("compare_and_set", "one_plan_per_generation",
                                            "generations_grow"), hook=no_compare,
           seed=4),
    Mutant("no lease check", "leases", ("only_the_leader_plans",), hook=no_lease_check),
    Mutant("leads behind its lease's end", "leases", ("plans_below_a_lease",), leads_on,
           seed=26),
    Mutant("orders without a lease", "leases", ("plans_below_a_lease",),
           put(plan, "is_leader", lambda *_: True)),
    Mutant("a plan names no lease", "leases", ("plans_below_a_lease",), lease_unsaid),
    Mutant("fatal verdict ignored", "nodes", ("no_rank_on_unfit",), hook=fatal_ignored,
           seed=30),
    Mutant("stale beat ignored", "nodes", ("all_goes_on",), stale_is_live,
           seed=16),
    Mutant("exclusion forgotten", "nodes", ("no_rank_on_unfit", "stepping_twice", "effect_once"),
           put(members, "read_node", lambda _: members.NodeDoc()),
           seed=18),
    Mutant("an excluded node planned again", "nodes", ("no_rank_on_unfit",), excluded_is_fit,
           seed=18),
    Mutant("a spare promoted twice", "nodes", ("one_place_a_node",), spare_twice),
    Mutant("spares never named", "fences", ("all_goes_on",),
           put(case.RunCase, "_name_spares", lambda *_: None),
           seed=3),
    Mutant("worlds never grow back", "sizes", ("all_goes_on",),
           put(broken.Growing, "look", lambda *_: broken.Look()),
           seed=1),
    Mutant("worlds shrink beside a spare", "sizes", ("no_needless_shrink", "all_goes_on"),
           shrinks_at_once),
    Mutant("breaker blind", "fleet", ("breaker_holds",),
           put(breaker, "is_open", lambda *_: (False, "mutant"))),
    Mutant("a common cause ends runs", "fleet", ("ends_deserved",), breaker_ends,
           seed=1),
    Mutant("validity rule off", "commits", ("void_never_resumed", "one_chain", "good_one_kept"),
           put(validity, "is_valid", lambda *_: True)),
    Mutant("delete by an old generation", "commits", ("newest_deletes",),
           put(reconcile, "may_delete", lambda *_: True)),
    Mutant("only what a leader's own launcher heard is tidied", "nodes", ("folder_tidied",),
           put(members, "kept_commits", lambda view, *_: view.commits),
           seed=8),
    Mutant("checkpoints forgotten with the node that told of them", "commits", ("budgets_true",),
           put(heard, "look", lambda *_: None),
           seed=4),
    Mutant("damaged checkpoints kept for good ones", ROT, ("good_one_kept",), unverified_count),
    Mutant("bad checkpoints forgotten", "folders", ("bad_never_resumed",),
           put(plan_document.Document, "_quarantined", lambda *_: ()),
           seed=65),
    Mutant("a restored store is believed", "restored", ("state_holds",), believes_the_store),
    Mutant("histories of all folders are one", "folders", ("nothing_thrown_away",),
           put(validity, "history_of", lambda plan, _: plan.history if plan else ())),
    Mutant("state behind a left-out collective", "folders", ("wrong_never_resumed",),
           put(plan, "within", lambda *_: True)),
    Mutant("left-out collectives unseen", "folders", ("wrong_found",),
           lambda patch: [patch.setattr(module, "proofs", lambda *_: None)
                          for module in (hang, broken)],
           seed=7),
    Mutant("torn state taken", "default", ("torn_never_used",), torn_is_whole,
           seed=10),
    Mutant("never restarts", "ranks", ("all_goes_on",),
           put(recovery.Recoveries, "answer", lambda *_: None)),
    Mutant("ends at the first fault", "ranks", ("ends_deserved",), ends_at_the_first_fault),
    Mutant("starts before the survivors parked", "ranks", ("nothing_thrown_away",),
           put(recovery.Recoveries, "gathered", lambda *_: True)),
    Mutant("scripts without a permit", "fences", ("one_generation_computes",),
           lambda patch: patch.setattr(case.reconcile, "start", without_permit),
           seed=5),
    Mutant("a node that is missed renews its permits", "fences", ("one_generation_computes",),
           put(fences, "may_renew", lambda *_: True),
           seed=5),
    Mutant("permits of a silent node are not waited for", "fences", ("one_generation_computes",),
           put(fences.Fences, "waits", lambda *_: ""),
           seed=29),
    Mutant("a node that is unfit is taken to have stopped", "fences", ("one_generation_computes",),
           fresh_nodes_have_stopped,
           seed=11),
    Mutant("no permit check", "fences", ("one_generation_computes",),
           put(Permit, "is_over", lambda *_: False),
           seed=5),
    Mutant("permits without anybody's word", "fences", ("one_generation_computes",),
           put(Permits, "failsafe_s", lambda self, *_: self._boot_s()),
           seed=12),
    Mutant("no second observer", "flapping", ("lost_by_two",),
           put(FailureDetector, "lost", lambda self: frozenset(self.unreachable()))),
    Mutant("no cluster id", "flapping", ("own_store",),
           put(store, "refusal", lambda *_: ""),
           seed=4),
    Mutant("a leader who was followed deletes", "devices", ("newest_deletes",),
           put(Performer, "_delete", sent_unasked)),
    Mutant("breaker blind to idle nodes", "fleet", ("breaker_holds",), runs_alone,
           seed=3),
    Mutant("breaker blind to nodes that fell silent", "nodes", ("breaker_holds",), heard_alone,
           seed=38),
    Mutant("a GPU for two runs", "devices", ("device_once",),
           put(device_holders, "holder", lambda *_: None)),
    Mutant("a leader who lives is robbed", "cuts", ("leader_left_alone",),
           put(takeover.Signs, "of", robbed)),
    Mutant("hangs unseen", "ranks", ("all_goes_on",),
           put(hang.Hang, "look", lambda *_: broken.Look()),
           seed=2),
    Mutant("acts at the first stillness", "ranks", ("acts_have_cause", "ends_deserved"),
           lambda patch: [patch.setattr(limits, name, lambda *_: 0.0)
                          for name in ("act_s", "suspect_s")]),
    Mutant("a consequence is the culprit", "ranks", ("culprit_true",),
           put(ended, "is_consequence", lambda _: False),
           seed=1),
    Mutant("suspended is a fault", "outside", ("acts_have_cause", "culprit_true"),
           put(known_causes, "suspended", lambda *_: "")),
    Mutant("restarts against a known cause", "outside", ("acts_have_cause", "culprit_true"),
           put(causes.known_causes, "explains", lambda *_: None)),
    Mutant("an old checkpoint gives restarts back", "ranks", ("budgets_true",), any_checkpoint,
           seed=3),
    Mutant("any generation gives restarts back", "ranks", ("budgets_true",),
           put(policy, "made_progress", lambda *_: True),
           seed=1),
    Mutant("nothing gives restarts back", "ranks", ("budgets_true",),
           put(policy, "give_back", lambda spent, *_: spent)),
    Mutant("progress counts from a leader's memory", "ranks", ("budgets_true",),
           leaders_memory,
           seed=1),
    Mutant("windows are over at once", "ranks", ("budgets_true",),
           put(recovery.Recoveries, "_window_over", lambda *_: True),
           seed=1),
    Mutant("charged twice", "ranks", ("budgets_true",), charged_twice),
    Mutant("restarts without end", "ranks", ("budgets_true", "budgets_hold"), free_restarts,
           seed=1),
    Mutant("crash loops unseen", BUGS, ("loop_seen",), put(policy, "signature", lambda *_: ""),
           seed=3),
    Mutant("pauses unheard", PAUSES, ("pause_holds",), deaf_to_pauses,
           seed=1),
    Mutant("requests never settled", "writes", ("requests_settled",),
           put(node.Node, "_answers", lambda *_: ())),
    Mutant("asked to end, and trains on", "default", ("asked_to_end", "all_goes_on"),
           put(ending.Endings, "shut_down", lambda *_: None),
           seed=55),
    Mutant("ends are not recorded", "default", ("all_goes_on", "ends_deserved"),
           put(ending.Endings, "record", lambda *_: False),
           seed=45),
    Mutant("effect outcome ignored", "agents", ("outcomes_told", "all_goes_on"),
           put(in_flight.InFlight, "settle", lambda *_: [])),
    Mutant("a subject is never busy", "default", ("stepping_twice", "effect_once"),
           put(in_flight.InFlight, "busy", lambda *_, **__: False)),
    Mutant("lasting effects beside a stalled journal", STALLED, ("stalled_journal",),
           stall_ignored,
           seed=7),
    Mutant("an incident twice", "fleet", ("incident_once",),
           put(book.IncidentBook, "incidents", lambda self: {
               f"{one.incident.id}/": one.incident for one in self.entries()})),
    # Of another cause's moment: a wait for nodes is over at once, and no hang is worth a restart.
    Mutant("a new cause keeps the old progress", "fleet",
           ("ends_deserved", "stepping_twice", "all_goes_on"),
           put(progress, "broken_off", lambda *_: None)),
    Mutant("an order before its intent", "agents", ("intent_first",), effect_before_intent),
    Mutant("no intents", "agents", ("intent_first",), written_before_intent),
    Mutant("an order twice", "agents", ("effect_twice",), sent_twice),
    Mutant("a write twice", "writes", ("effect_twice",), performed_twice),
    Mutant("outcomes forgotten after a restart", "agents", ("outcomes_kept",),
           lambda patch: born_without(patch, "finished")),
    Mutant("intents forgotten after a restart", "agents", ("outcomes_kept",),
           lambda patch: born_without(patch, "unfinished")),
    Mutant("counters forgotten after a restart", "agents", ("restarts_counted",),
           lambda patch: born_without(patch, "counters")),
    Mutant("a restart counted again", "agents", ("restarts_counted",), uncounted_mark),
    Mutant("outcomes are told to nobody", "agents", ("outcomes_kept",),
           put(Performer, "outcomes", lambda *_: ())),
    Mutant("leases behind other writes", "leases", ("leases_first",),
           put(performer, "_is_lease", lambda _: False)),
    Mutant("lasting effects without an intent", STALLED, ("intent_first",), lasting_as_any_other,
           seed=8),
)


def without_permit(made, view, _permit_s):  # type: ignore[no-untyped-def]
    """A start whose ranks may run for ever."""
    return REAL_START(made, view, 0.0)


REAL_START = reconcile.start


def first_caught(mutant: Mutant, begin: int = 0) -> tuple[int, str]:
    """(seed, invariant) of the first seed that notices, `begin` before all others; (-1, "") when
    none of SEEDS does."""
    with pytest.MonkeyPatch.context() as patch:
        mutant.patch(patch)
        for seed in dict.fromkeys((begin, *range(SEEDS))):
            try:
                report = run_storm(seed, mutant.storm, hook=mutant.hook)
            except Exception as error:  # a mutant may as well crash what it is part of
                return seed, f"crash: {type(error).__name__}: {error}"
            if not report.ok:
                return seed, report.invariant
    return -1, ""


def main(names: list[str]) -> int:
    chosen = [one for one in MUTANTS if not names or one.name in names]
    missed = 0
    with ProcessPoolExecutor(2) as pool:
        for mutant, (seed, invariant) in zip(chosen, pool.map(_searched, range(len(chosen)),
                                                              [names] * len(chosen)), strict=True):
            good = invariant in mutant.notices
            missed += not good
            print(f"{seed:4d}  {mutant.name}: {invariant or 'NOT NOTICED'}"
                  f"{'' if good or not invariant else ' (not by what should notice)'}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} noticed")
    return 1 if missed else 0


def _searched(number: int, names: list[str]) -> tuple[int, str]:
    return first_caught([one for one in MUTANTS if not names or one.name in names][number])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
