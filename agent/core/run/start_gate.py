"""The gate before a run's first start on this node: what is known first, then what is checked.

Owns RunState.gate.  A start is refused for an open fatal incident of the node or of a device that
the run may use, for a check that failed twice in a row, and for drivers unlike those of the run's
other nodes; what is unknown, or only a warning, refuses nothing.  A restart in place is refused by
what is known alone.  Among several nodes each judges itself and says so in its beats: who leads
gives ranks to those that passed, and names the others.  Checks are effects (run_check), and their
verdicts come back as levels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from ..actions import RUN_CHECK
from ..checks import node_tests
from ..checks.common_cause import NOT_A_ROUND, OF_SCOPE, is_common
from ..checks.unlike import DRIFT, SOURCE, unlike, unlike_nodes
from ..checks.verdict import CRITICAL, OK, UNKNOWN, CheckVerdict
from ..detect.devices import accelerator
from ..detect.ranks.ended import Cause
from ..detect.ranks.slow_collectives import SlowCollectives
from ..effects import drafts
from ..effects.in_flight import EffectResult
from ..model import (
    FATAL,
    UNREADABLE,
    WARN,
    Plan,
    RunCheck,
    RunView,
    Verdict,
    labels_of,
    node_subject,
    subject_of,
)
from ..nodes import check_reports, device_holders, exclusions, identity, kernel_incidents
from ..parse.kernel_line import pci_of
from . import members, policy
from .ending import Endings
from .incidents import RunIncidents
from .state import Context, GateSeen, RunState

# Checks that are no child's of the agent.
EXCLUDED, INCIDENTS, NETWORK, PATHS = "excluded", "incidents", "network", "paths"
EXCLUSIVE = "exclusive"  # a GPU is one run's at a time
UNLISTED = (EXCLUDED, EXCLUSIVE)  # that `holdfast check` does not make, and --ignore-check may name
FULL = "full"  # --check
OWN_SCOPES = ("node", "gpu", "neuron")  # faults that concern every run of a node
START_HOLD_S = 600.0  # a run waits this long for a node whose fault may be over by itself
RECHECK_S, RECHECK_LEAST_S = 5.0, 1.0  # before a restart in place
AGAIN_S = 10.0  # a check that failed is made again this often, while a start waits for it
VERSIONS_S = 5.0  # for a node that has not said what it is made of; an old agent never does
LOOK_S = 0.2
AHEAD_S = 60.0  # that two nodes' clocks may be apart, and their words still be ordered
# A link may be mended while a run goes on without one of its ends, and nobody says so: then it is
# tried again, which costs a link that is not mended one fault an hour.
LINK_S = 3600.0
TOLD_S = 2.0  # a refused node stays so long, for who leads to hear of it and write it down
REFUSED, IGNORED, DETECTOR = "start_refused", "check_ignored", "gate"
FAILED = "check_failed"
LEFT_OUT_MAX = 64  # nodes of one run that are written down
DRIFT_TODO = "bring this node to what the others have: `holdfast drift`"
DEVICES_TODO = ("wait for its end, or take others: CUDA_VISIBLE_DEVICES says which, and an empty "
                "one that the job takes none")
PATHS_TODO = "mount it, or repair the storage: a job would train and keep nothing"


class Refusal(NamedTuple):
    """One reason why no run starts here now."""

    check: str
    text: str
    remedy: str
    wait_s: float  # how long the start waits for it to be over


class StartGate:
    """The gate of one run."""

    def __init__(self, state: RunState, incidents: RunIncidents, ending: Endings) -> None:
        self.state, self.incidents, self.ending = state, incidents, ending

    def holds(self, ctx: Context, joins: bool = False) -> bool:
        """Whether the run may not start in this step; asks for what must be known first.
        `joins`: it goes on elsewhere already.  Who fails then leaves by himself, but for a spare
        that had passed: it is warm, and takes ranks once the check passes again."""
        registered_s = ctx.view.registered_boot_s
        if self.state.gate.launcher_boot_s != registered_s:
            self.state.gate = GateSeen(registered_s)
        names = self._names(ctx)
        if (self._asks(ctx, names) or self._awaits_versions(ctx, names, joins)
                or self._awaits_launchers(ctx)):
            self._says(members.ASKING)
            return True
        found = (*self._of_person(ctx), *self._of_devices(ctx), *self._refusals(ctx, names, joins))
        ignored = ctx.view.ignored_checks
        kept = [one for one in found if one.check not in ignored]
        self._says(_words(kept))
        if kept and joins and self.state.gate.passed:
            ctx.reason = f"{ctx.view.node} takes no ranks: {_words(kept)}"
        elif kept:
            self._hold(ctx, kept, alone=joins)
        else:
            self._pass(ctx, [one for one in found if one.check in ignored], joins)
        return bool(kept) or not joins and self._awaits_refusal(ctx, names)

    def stands(self, ctx: Context) -> None:
        """While the run goes on here: what is known says whether this node takes ranks again."""
        failing = any(one.proven for one in ctx.observed.checks)
        found = (*self._of_devices(ctx),
                 *(self._of_checks(ctx, self._names(ctx)) if failing else ()))
        self._says(_words([one for one in found if one.check not in ctx.view.ignored_checks]))

    def held(self, view: RunView) -> str:
        """What other nodes are told of this one's gate."""
        gate = self.state.gate
        fresh = view.generation == 0 and gate.launcher_boot_s != view.registered_boot_s
        return members.ASKING if fresh else gate.held

    def leaves_out(self, ctx: Context, known: Mapping[str, str]) -> None:
        """Who leads writes down which nodes take no part, and why, but for what is `known`."""
        gate = self.state.gate
        for beat in ctx.observed.beats:
            other = beat.run == ctx.view.run and beat.node != ctx.view.node
            if not other or not members.is_refused(beat.held) or beat.node in gate.left_out:
                continue
            if beat.held == known.get(beat.node):
                continue
            if len(gate.left_out) < LEFT_OUT_MAX:
                gate = replace(gate, left_out=(*gate.left_out, beat.node))
                self.incidents.open_note(ctx, Cause(
                    fault=FAILED, generation=ctx.view.generation, severity=WARN, node=beat.node,
                    detector=DETECTOR, reason=f"{beat.node} takes no ranks of it: {beat.held}"))
        self.state.gate = gate

    def holds_restart(self, ctx: Context, cause: Cause) -> bool:
        """Whether no generation follows on this node.  What is known decides, and nothing is run;
        but what a hardware fault puts under suspicion is checked first, for no longer than the
        restart itself takes that it may save."""
        names = self._names(ctx)
        since_s, now_s = self.state.progress.broken_boot_s, ctx.now.boot_s
        book = ctx.runbooks.get(cause.fault)
        if not ctx.settings.single_node:
            return False  # its beat says the same, and the plan is made without it
        scope = OF_SCOPE.get(book.scope if book else "", ())
        gate = ctx.settings.gate
        suspects = tuple(one for one in scope if one in names and one not in gate.disturbing)
        limit_s = min(RECHECK_S, max(RECHECK_LEAST_S, ctx.view.startup_s))
        slow = bool(self.incidents.notes_of(SlowCollectives.name))
        if (scope or slow) and gate.between:
            # No rank computes now, so that these may take the devices.
            suspects = tuple(dict.fromkeys((*suspects, *gate.between)))
            limit_s = max(RECHECK_LEAST_S, ctx.view.startup_s)
        node = node_subject(ctx.view.node, "checks")
        if suspects and now_s - since_s <= limit_s:
            if self.state.gate.rechecked_boot_s != since_s:
                ctx.emit(int(ctx.now.wall_s), drafts.check_node(
                    ctx.view.node, suspects, 0.0, f"after {cause.fault}", limit_s, cause.fault))
                self.state.gate = replace(self.state.gate, rechecked_boot_s=since_s)
            if ctx.in_flight.busy(node):
                ctx.reason = f"checking {', '.join(suspects)} before the next start"
                ctx.wake(LOOK_S)
                return True
        found = [one for one in self._of_checks(ctx, names)
                 if one.check not in ctx.view.ignored_checks]
        if found:
            self._hold(ctx, found)
        return bool(found)

    def settled(self, done: EffectResult) -> None:
        """The launcher's word on the run's own paths."""
        body = done.effect.body
        if isinstance(body, RunCheck) and body.run:
            self.state.gate = replace(self.state.gate, paths=paths_verdict(done))

    def shown(self, ctx: Context) -> None:
        """What was refused or ignored, for as long as it stands."""
        for item in self.incidents.book.entries():
            one = item.incident
            if item.is_note:
                ctx.verdicts.append(Verdict(
                    fault=one.fault, subject=one.subject, severity=one.severity, confidence=1.0,
                    reason=one.reason, detector=item.detector or DETECTOR, run=one.run,
                    generation=one.generation))

    # ------------------------------------------------------------ asking

    def _names(self, ctx: Context) -> tuple[str, ...]:
        full = ctx.view.wants_checks == FULL
        return ctx.settings.gate.full if full else ctx.settings.gate.names

    def _asks(self, ctx: Context, names: tuple[str, ...]) -> bool:
        """Whether something is still being found out, for no longer than it may take."""
        gate, view, now_s = self.state.gate, ctx.view, ctx.now.boot_s
        settings = ctx.settings.gate
        limit_s = settings.full_limit_s if view.wants_checks == FULL else settings.limit_s
        again = gate.held_boot_s > 0 and now_s - max(
            gate.asked_boot_s, gate.asked_paths_boot_s) >= AGAIN_S
        if again:
            gate = replace(gate, since_boot_s=now_s, asked_boot_s=0.0, asked_paths_boot_s=0.0)
        stale = tuple(self._stale(ctx, names, again or not gate.asked_boot_s))
        node, run = node_subject(view.node, "checks"), drafts.checks_subject(view.run)
        gate = replace(gate, since_boot_s=gate.since_boot_s or now_s)
        if stale and not gate.asked_boot_s and not ctx.in_flight.busy(node):
            failed = any(one.proven and one.check in stale for one in ctx.observed.checks)
            max_age_s = 0.0 if failed or again else settings.max_age_s
            ctx.emit(int(ctx.now.wall_s), drafts.check_node(
                view.node, stale, max_age_s, f"before run {view.run} starts", limit_s))
            gate = replace(gate, asked_boot_s=now_s)
        paths = tuple(dict.fromkeys(one for one in (view.checkpoint_dir, *ctx.settings.gate.paths)
                                    if one))
        if paths and PATHS in names and not gate.asked_paths_boot_s:
            ctx.emit(int(ctx.now.wall_s), drafts.check_paths(view, paths))
            gate = replace(gate, asked_paths_boot_s=now_s)
        self.state.gate = gate
        node_waits = (stale or gate.asked_boot_s) and ctx.in_flight.busy(node)
        waits = node_waits or ctx.in_flight.busy(run, RUN_CHECK)
        if not waits or gate.held_boot_s or now_s - gate.since_boot_s > limit_s:
            return False
        ctx.reason = "this node is checked before the start"
        ctx.wake(LOOK_S)
        return True

    def _stale(self, ctx: Context, names: tuple[str, ...], first: bool) -> Iterator[str]:
        """What the agent's child has to make anew: what is old, and at first what failed, for the
        hurt may be gone since."""
        known = {one.check: one for one in ctx.observed.checks}
        for name in names:
            if name not in NOT_A_ROUND:
                one = known.get(name)
                if one is None or not _is_young(one, ctx) or first and one.proven:
                    yield name

    # ------------------------------------------------------------ judging

    def _refusals(self, ctx: Context, names: tuple[str, ...], joins: bool) -> Iterator[Refusal]:
        if INCIDENTS in names:
            yield from self._of_incidents(ctx)
        paths = self.state.gate.paths
        if PATHS in names and paths is not None and paths.status == CRITICAL:
            yield _refusal(paths, ctx)
        tested = tests_peers(ctx) and not joins
        yield from (one for one in self._of_checks(ctx, names)
                    if not (tested and one.check == node_tests.PEERS))  # which is made anew
        if DRIFT in names:
            yield from self._of_versions(ctx, joins)
        if tests_peers(ctx):
            yield from self._of_peers(ctx, joins)

    def _told(self, ctx: Context, joins: bool) -> dict[str, identity.Identity | None]:
        """What the nodes that have a launcher of the run are made of, None where one has not said
        it.  {} for fewer than three: of two that differ neither is the usual one."""
        view, docs, plan = ctx.view, ctx.observed.store.docs, self.state.document.plan
        nodes = {view.node} | {beat.node for beat in ctx.observed.beats if beat.run == view.run
                               and members.is_fresh(beat, ctx.now, ctx.settings)}
        if joins and plan is not None:
            nodes.update(plan.members)  # an agent that just began has heard of none of them
        if view.nnodes_max == 1 or len(nodes) < 3:
            return {}
        found = {one: docs.decoded(identity.PREFIX + one, identity.read) for one in nodes}
        # What this node's document says may be of before its mending.
        found[view.node] = identity.Identity(identity.of(tuple(
            row for name in identity.SOURCES for row in ctx.observed.samples.of(name))))
        return {one: doc if doc and SOURCE in doc.sources else None for one, doc in found.items()}

    def _awaits_versions(self, ctx: Context, names: tuple[str, ...], joins: bool) -> bool:
        """Whether a node is still to say what it is made of.  Agents that begin with the run do so
        within a second of their launchers, and ranks would be given out in between."""
        gate, now_s = self.state.gate, ctx.now.boot_s
        wanted = DRIFT in names and DRIFT not in ctx.view.ignored_checks
        told = self._told(ctx, joins) if wanted else {}
        silent = [name for name, doc in told.items() if doc is None]
        since_s = (gate.silent_boot_s or now_s) if silent else 0.0
        if gate.silent_boot_s != since_s:
            self.state.gate = replace(gate, silent_boot_s=since_s)
        if not silent or now_s - since_s > VERSIONS_S:
            return False
        ctx.reason = f"what {', '.join(sorted(silent)[:LEFT_OUT_MAX])} is made of is not known yet"
        ctx.wake(LOOK_S)
        return True

    def _awaits_refusal(self, ctx: Context, names: tuple[str, ...]) -> bool:
        """Whether who leads waits for a node with other drivers to refuse the run: its agent may
        not have heard of enough others yet to know.  One that was told to ignore it never does."""
        gate, now_s = self.state.gate, ctx.now.boot_s
        wanted = ctx.leader and DRIFT in names and DRIFT not in ctx.view.ignored_checks
        told = self._told(ctx, joins=False) if wanted else {}
        refused = {beat.node for beat in ctx.observed.beats
                   if beat.run == ctx.view.run and members.is_refused(beat.held)}
        owing = unlike_nodes({name: doc for name, doc in told.items() if doc is not None},
                             ctx.settings) - refused
        known = owing <= set(gate.owing)  # with each that comes the time begins anew
        since_s = 0.0 if not owing else gate.owing_boot_s if known else now_s
        if gate.owing_boot_s != since_s:
            self.state.gate = replace(
                gate, owing_boot_s=since_s, owing=tuple(sorted(owing)))
        if not owing or now_s - since_s > VERSIONS_S:
            return False
        ctx.reason = (f"other drivers than most on {', '.join(sorted(owing)[:LEFT_OUT_MAX])}: "
                      "waiting for the word of the gate there")
        ctx.wake(LOOK_S)
        return True

    def _of_versions(self, ctx: Context, joins: bool) -> Iterator[Refusal]:
        """This node's drivers beside those of the nodes that have a launcher of the run."""
        told = {name: doc for name, doc in self._told(ctx, joins).items() if doc is not None}
        found = unlike(ctx.view.node, told, ctx.settings)
        if found.common:
            self._common(ctx, f"{DRIFT}: {found.common}")
        if found.why:
            yield Refusal(DRIFT, f"check {DRIFT}: {found.why}", DRIFT_TODO,
                          ctx.settings.gate.wait_s)

    def _of_peers(self, ctx: Context, joins: bool) -> Iterator[Refusal]:
        """What the run's nodes found of this one, when they were tested with each other."""
        own = [one for one in tests_in_force(ctx, joins) if ctx.view.node in one.nodes]
        out, common = node_tests.left_out(own, ctx.settings)
        if common:
            self._common(ctx, common)
        hurt = out.get(ctx.view.node)
        if hurt is not None:
            yield Refusal(node_tests.PEERS, node_tests.words(hurt), hurt.todo,
                          ctx.settings.gate.wait_s)

    def _of_checks(self, ctx: Context, names: tuple[str, ...]) -> Iterator[Refusal]:
        """What the node's checks say, as they are known."""
        failing = check_reports.failing(ctx, ctx.view.node) if names else {}
        fleet = len(exclusions.fleet_nodes(ctx.view.node, ctx))
        for one in ctx.observed.checks:
            lasts = one.check in ctx.settings.gate.disturbing  # nobody makes it again by himself
            asked = one.check in names and _is_young(one, ctx) or bool(names) and lasts
            if not asked or not one.proven or not uses_any(ctx, one.devices):
                continue
            if one.check == NETWORK and ctx.view.nnodes_max == 1:
                continue  # nothing of the run goes over a card
            common, why = is_common(failing, one.check, fleet, ctx.now.wall_s, ctx.settings)
            if common:
                self._common(ctx, why)
                continue
            yield _refusal(one, ctx)

    def _of_person(self, ctx: Context) -> Iterator[Refusal]:
        """A single node that somebody excluded; among many, others take its ranks."""
        docs = ctx.observed.store.docs
        doc = docs.decoded(node_subject(ctx.view.node), members.read_node)
        if ctx.settings.single_node and doc.excluded:
            by = f" by {doc.by}" if doc.by else ""
            yield Refusal(EXCLUDED, f"the node was excluded from runs{by}: {doc.reason}",
                          f"start it elsewhere, or `holdfast release {ctx.view.node}`", 0.0)

    def _of_devices(self, ctx: Context) -> Iterator[Refusal]:
        """A GPU that another run of this node has: it may end at any time."""
        other = device_holders.holder(ctx)
        if other is not None:
            yield Refusal(EXCLUSIVE, other.words, DEVICES_TODO,
                          ctx.view.gang_limit_s or ctx.settings.gang_limit_s)

    def _awaits_launchers(self, ctx: Context) -> bool:
        other = device_holders.awaited(ctx)
        if other:
            ctx.reason = f"which GPUs run {other} has is not known until its launcher is back"
        return bool(other)

    def leads_on(self, ctx: Context) -> bool:
        """Whether this node plans for the others though it gets no ranks: another run may have its
        devices for long, and nobody else may be there who leads."""
        return (not ctx.settings.single_node and self.state.finish_code < 0
                and members.is_refused(self.state.gate.held)
                and EXCLUSIVE not in ctx.view.ignored_checks
                and device_holders.holder(ctx) is not None)

    def taken(self, ctx: Context, plan: Plan) -> str:
        """Why ranks that are new here may not begin, though they are planned: in the same moment
        another run was given their devices; "" = they may.  A restart in place always may."""
        other = device_holders.holder(ctx)
        restarts = 0 < ctx.view.generation >= plan.generation - 1
        if other is None or EXCLUSIVE in ctx.view.ignored_checks or restarts:
            return ""
        return f"{ctx.view.node} starts no run: {other.words}. Do: {DEVICES_TODO}"

    def _of_incidents(self, ctx: Context) -> Iterator[Refusal]:
        """The open incidents with which no run starts here.  What is over by itself is waited for;
        a boot or a person is not.  Among many nodes they are in the node's beat, and others take
        its ranks; there this one only writes down that a person ignores them."""
        told = ctx.settings.single_node or INCIDENTS in ctx.view.ignored_checks
        if not told or kernel_incidents.DETECTOR not in ctx.settings.act:
            return
        for one in ctx.opened:
            book = ctx.runbooks.get(one.fault)
            if one.severity != FATAL or (book is not None and book.scope not in OWN_SCOPES):
                continue
            if not uses(ctx.view, subject_of(one.subject).part, names_of_devices(ctx)):
                continue
            waits = book is not None and book.clears == "check"
            remedy = "" if waits else ("start it elsewhere, or repair this node and reboot it, or "
                                       "say `holdfast close`")
            yield Refusal(INCIDENTS, f"{one.reason} ({one.id})", remedy,
                          START_HOLD_S if waits else 0.0)

    # ------------------------------------------------------------ answering

    def _says(self, held: str) -> None:
        if self.state.gate.held != held:
            self.state.gate = replace(self.state.gate, held=held)

    def _common(self, ctx: Context, why: str) -> None:
        """A person is told once a launcher, by who leads."""
        ctx.reason = f"the breaker is open, no node is refused: {why}"
        if ctx.leader and not self.state.gate.common:
            self.state.gate = replace(self.state.gate, common=why)
            self.incidents.open_note(ctx, Cause(
                fault=FAILED, generation=ctx.view.generation, severity=WARN, detector=DETECTOR,
                reason=ctx.reason))

    def _hold(self, ctx: Context, found: list[Refusal], alone: bool = False) -> None:
        """Wait for what may be over by itself, else leave, for elsewhere; `alone`: the run goes on
        without this node, and no document says that it ends."""
        view, gate, now_s = ctx.view, self.state.gate, ctx.now.boot_s
        why = f"{view.node} starts no run: " + "; ".join(one.text for one in found)
        if not gate.held_boot_s:
            since_s = now_s if gate.asked_boot_s or gate.asked_paths_boot_s else max(
                view.registered_boot_s, ctx.since_boot_s)
            cause = Cause(fault=REFUSED, generation=view.generation, reason=why, node=view.node,
                          detector=DETECTOR)
            gate = replace(gate, held_boot_s=since_s or now_s,
                           incident=self.incidents.open_note(ctx, cause))
            self.state.gate = gate
        told_s = 0.0 if ctx.settings.single_node or view.nnodes_max == 1 else TOLD_S
        wait_s = max(told_s, min(one.wait_s for one in found))
        document = self.ending.document
        led = document.is_led_elsewhere(ctx)
        ctx.reason = why
        if document.stands_back(ctx) and not led:
            ctx.reason += "; waits until a node that passes leads the run"
            return
        if now_s - gate.held_boot_s < wait_s:
            ctx.reason += f"; waits until it is over, {wait_s:g} s at most"
            return
        remedies = dict.fromkeys(one.remedy for one in found if one.remedy)
        flags = " ".join(f"--ignore-check {one}" for one in dict.fromkeys(x.check for x in found))
        self.ending.decide(
            policy.INFRASTRUCTURE,
            f"{why}. Do: {'; '.join((*remedies, ''))}`{flags} --reason TEXT` starts all the same",
            REFUSED, alone or led)

    def _pass(self, ctx: Context, ignored: list[Refusal], joins: bool) -> None:
        # What was judged before there was a plan may have been judged before others were heard of.
        self.state.gate = replace(self.state.gate, passed=joins)
        gate, view = self.state.gate, ctx.view
        if gate.held_boot_s:
            self.incidents.close_note(ctx, gate.incident, "what refused the start is over")
            self.state.gate = gate = replace(gate, held_boot_s=0.0, incident="")
        if ignored and not gate.ignored:
            self.state.gate = replace(gate, ignored=True)
            who = f"uid {view.uid}" if view.uid >= 0 else "its user"
            said = "; ".join(one.text for one in ignored)
            self.incidents.open_note(ctx, Cause(
                fault=IGNORED, generation=view.generation, severity=WARN, node=view.node,
                detector=DETECTOR, evidence=(("reason given", view.ignore_reason),),
                reason=f"{view.node} starts it though {said}; {who} asked for that: "
                       f"{view.ignore_reason}"))


def tests_peers(ctx: Context) -> bool:
    """Whether the nodes of this run are tested with each other before it starts."""
    return (bool(ctx.settings.gate.peers) and not ctx.settings.single_node
            and ctx.view.nnodes_max > 1)


def tests_in_force(ctx: Context, goes_on: bool) -> list[node_tests.Found]:
    """What was found since this launcher came; of a run that goes on also what is young: nobody is
    tested while ranks compute.  What bears a time that is still to come was written by a clock that
    is wrong, or was: it would outlast all that is found later."""
    now_s = ctx.now.wall_s
    came_s = now_s - (ctx.now.boot_s - ctx.view.registered_boot_s)
    max_age_s = ctx.settings.gate.max_age_s
    found = (one for one in node_tests.reports(ctx.observed.store.docs)
             if one.wall_s <= now_s + AHEAD_S and (
                 one.wall_s >= came_s or goes_on and node_tests.is_fresh(one, now_s, max_age_s)))
    return [replace(
        one, hurt=tuple(hurt for hurt in one.hurt if not _is_released(ctx, hurt)),
        links=() if goes_on and now_s - one.wall_s > LINK_S else one.links) for one in found]


def _is_released(ctx: Context, hurt: node_tests.Hurt) -> bool:
    """Whether somebody who had excluded a node took that back since it was found to be hurt; by the
    order of the store's writes, for two nodes' clocks may be an hour apart."""
    docs, subject = ctx.observed.store.docs, node_subject(hurt.node)
    doc = docs.decoded(subject, members.read_node)
    later = docs.get(subject).version > hurt.version >= 0
    return later and not doc.excluded and not doc.draining and bool(doc.strikes)


def _words(found: list[Refusal]) -> str:
    return "; ".join(one.text for one in found)


def _is_young(verdict: CheckVerdict, ctx: Context) -> bool:
    # One of the future is of a clock that was set back: it is made anew.
    return 0.0 <= ctx.now.wall_s - verdict.wall_s <= ctx.settings.gate.max_age_s


def _refusal(verdict: CheckVerdict, ctx: Context) -> Refusal:
    return Refusal(verdict.check, f"check {verdict.check}: {verdict.reason}", verdict.todo,
                   ctx.settings.gate.wait_s)


def paths_verdict(done: EffectResult) -> CheckVerdict:
    """Of what the launcher's child wrote and read back; without an answer it is unknown."""
    try:
        rows = msgspec.json.decode(done.detail, type=list[tuple[str, str]]) if done.ok else []
    except UNREADABLE:
        rows = []
    if not rows:
        return CheckVerdict(PATHS, UNKNOWN, done.error or "no answer")
    broken = [f"{path}: {why}" for path, why in rows if why]
    if not broken:
        return CheckVerdict(PATHS, OK, "written and read back")
    return CheckVerdict(PATHS, CRITICAL, "; ".join(broken), todo=PATHS_TODO, confirmed=True)


# ------------------------------------------------------------ which devices a run may use

Names = dict[tuple[str, str], tuple[str, str]]  # (vendor, number) -> (address on PCI, uuid)


def names_of_devices(ctx: Context) -> Names:
    found: Names = {}
    for _, subject, _, _ in ctx.observed.samples.of(f"{accelerator.PREFIX}info"):
        labels = labels_of(subject)
        key = labels.get("vendor", ""), labels.get("device", "")
        found[key] = pci_of(labels.get("pci", "")), labels.get("uuid", "")
    return found


def uses_any(ctx: Context, devices: tuple[str, ...]) -> bool:
    """True for the node itself."""
    names = names_of_devices(ctx)
    return not devices or any(uses(ctx.view, one, names) for one in devices)


def uses(view: RunView, device: str, known: Names) -> bool:
    """Whether a run may use the device of an incident: `gpu/3` or `gpu/0000:4e:00`.  Without a list
    in its environment it may use all of them, and so it may where the list cannot be read."""
    kind, _, name = device.partition("/")
    if kind != "gpu" or not name:
        return True
    for vendor, text in view.visible:
        mine = [(key, value) for key, value in known.items() if key[0] == vendor]
        same = {number: (number, uuid) for (_, number), (address, uuid) in mine
                if name in (number, address)}
        if not same and not (name.isdecimal() and vendor == "nvidia"):
            continue  # of another vendor, or not known: the next list may say it
        names = {name, *(word for pair in same.values() for word in pair if word)}
        listed = [word.strip() for word in text.split(",") if word.strip()]
        if "-1" in listed:
            listed = listed[: listed.index("-1")]
        # A name that is no number may be short for a uuid, or a part of a GPU.
        vague = [word for word in listed if not word.isdecimal()
                 and not any(word == uuid for _, (_, uuid) in mine)]
        return bool(vague) or any(word in names for word in listed)
    return True
