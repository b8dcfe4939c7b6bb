"""The invariants: what must hold after every event, whatever the storm does.

Owns the judgement.  It sees the truth (store, disk, lineage, launchers), which the core does not,
and must not change anything.  Each property has a name; a broken one raises InvariantBroken.
"""

from __future__ import annotations

import re

import msgspec

from ..actions.performer import STANDS_S
from ..core import model
from ..core.model import TRAINER, Decision, Doc, Effect, Now, Observed, Plan, StoreWrite
from ..core.model.subject import LEASE, NODE, RUN, run_subject, subject_of
from ..core.run import validity
from ..core.run.stage import OLDER_VERSION, check_invariants
from ..core.run.start_gate import FAILED
from ..core.run.state import RunState
from . import account
from .account import RunTruth
from .disk import Origin, void_by
from .edge import Edge
from .job import END, PARK, Gang, Job
from .launcher import Launcher
from .loop import InvariantBroken, Loop
from .outgoing import Network
from .store import OWN_ID, VirtualStore

decode_plan = msgspec.json.Decoder(Plan).decode
CALM_S = 20.0  # after a disturbance, until every false step that it excuses is taken
LEDGER_SLACK_S = 1.5  # the ledger may settle one tick late
TESTS_OLD_S = 30.0  # what is written of tests was so no longer ago
NOTICED_S = 2.0  # a node that is reached again was heard of by then
LATE_S = 20.0  # a plan may arrive this long after it was made
LATE_CLOCK_S = 0.1  # a clock may count less
HEARD_S = 3.0  # until an agent that is there has heard what an operator asks
NAMED = re.compile(r"rank (\d+) \(pid (\d+)\)")
BY_HAND = "by hand"
IDEMPOTENT_EVERY = 19  # every 19th step is made twice: enough to catch, cheap enough to keep


class Monitor:
    """All invariants of one simulated world."""

    def __init__(self, loop: Loop, store: VirtualStore, single: bool) -> None:
        self.loop, self.store, self.single = loop, store, single
        self.jobs: dict[str, Job] = {}
        self.runs: dict[str, RunTruth] = {}
        self.edges: dict[str, Edge] = {}
        self.network: Network | None = None
        self.taken: dict[tuple[str, int], int] = {}  # (run, changes of the network) -> how often
        self.excluded_by: dict[str, list[tuple[float, str]]] = {}  # fault -> (time, node)
        self.restarts: dict[str, int] = {}
        self.paused_s: dict[str, float] = {}  # run -> since when an operator has it paused
        self.disturbed_s = -1e9  # when nodes, network or launchers were last not as they should
        self.states: dict[tuple[str, str], tuple[int, RunState]] = {}  # (node, run) -> life, last
        self._changes, self._changed_s = 0, 0.0  # of who reaches whom: as seen last, and when
        self._first: dict[tuple[str, int, str], float] = {}
        self._base: dict[tuple[str, int, str], float] = {}
        self._settled: dict[tuple[str, int, str], dict[str, float]] = {}
        store.on_accept = self.accepted

    def fail(self, invariant: str, detail: str) -> None:
        """Raise; the runner adds the seed and the trace."""
        raise InvariantBroken(invariant, detail)

    # ------------------------------------------------------------ the store

    def accepted(self, node: str, write: StoreWrite, old: Doc | None) -> None:
        """A write is about to take effect."""
        if self.store.cluster_id != OWN_ID:
            self.fail("own_store", f"{node} writes {write.key} to a store that lost what it held, "
                      "or never was this cluster's")
        if subject_of(write.key).kind == LEASE:
            return self._led_anew(node, write)
        version = old.version if old is not None else 0
        if version != write.expect_version:
            self.fail("compare_and_set", f"{node} overwrote version {version} of {write.key}, "
                      f"having seen {write.expect_version}")
        kind = subject_of(write.key).kind
        if kind == RUN:
            self._plan_accepted(node, write, old)
        elif kind == NODE:
            self.node_accepted(node, write)

    def _led_anew(self, node: str, write: StoreWrite) -> None:
        """Another node leads.  From one that lives, and reaches the store, a run is taken no more
        than once between two changes of who reaches whom: he might be at work."""
        run = subject_of(write.key).name
        holder = self.store.holder(run)
        self.loop.note("store", "%s leads %s%s", node, run, f" over {holder}" if holder else "")
        if not holder or not self._leads_on(holder):
            return
        changes = self.network.changes if self.network is not None else 0
        key = (run, changes)
        self.taken[key] = self.taken.get(key, 0) + 1
        if self.taken[key] > 1:
            self.fail("leader_left_alone", f"{run}: {node} takes it from {holder}, who lives, the "
                      f"{self.taken[key]}. time since who reaches whom has changed")

    def _leads_on(self, node: str) -> bool:
        edge = self.edges.get(node)
        ways = self.network
        return edge is not None and ways is not None and edge.node is not None \
            and edge.machine.up and not edge.machine.frozen \
            and ways.open(node, "store") and ways.open("store", node)

    def _plan_accepted(self, node: str, write: StoreWrite, old: Doc | None) -> None:
        plan = decode_plan(write.body)
        run = subject_of(write.key).run
        self.loop.note("store", "%s v%d by %s: gen %d %s %s@%d keep=%s ranks=%s: %s", write.key,
                       write.expect_version + 1, node, plan.generation,
                       f"finished={plan.finished}" if plan.finished >= 0 else "",
                       plan.resume.kind, plan.resume.step, plan.keep,
                       ",".join(f"{rank}:{where}" for rank, where in plan.ranks), plan.reason)
        holder = self.store.holder(run)
        if not self.single and holder != node:
            self.fail("only_the_leader_plans", f"{node} wrote {write.key}, while "
                      f"{holder or 'nobody'} holds the lease")
        truth = self.runs.setdefault(run, RunTruth())
        highest = max(truth.plans, default=-1)
        if plan.generation < highest:
            self.fail("generations_grow", f"{run}: plan {plan.generation} after {highest}")
        known = truth.plans.get(plan.generation)
        if known is not None:
            same = (known.ranks, known.resume) == (plan.ranks, plan.resume)
            if not same and known.generation > 0:
                self.fail("one_plan_per_generation", f"{run}: two plans of {plan.generation}")
            truth.plans[plan.generation] = plan
            truth.end_heard = plan.finished < 0 or self._heard(node, run, plan.generation)
            return
        self._new_generation(run, truth, plan, node)

    def _new_generation(self, run: str, truth: RunTruth, plan: Plan, node: str) -> None:
        job = self.jobs[run]
        resume = plan.resume
        if resume.kind == "disk":
            commit = job.disk.commits.get(resume.path)
            voided = commit and void_by(commit, truth.resumes.get(plan.checkpoint_dir, []))
            if voided:
                self.fail("void_never_resumed", f"{run}: gen {plan.generation} resumes from gen "
                          f"{resume.generation} step {resume.step}, void since gen {voided[0]} "
                          f"resumed at {voided[1]}")
        self._bad_left_out(job, plan)
        self._thrown_away(job, plan)
        if truth.plans:
            self._paid(job, truth.plans[max(truth.plans)], plan, node)
        truth.plans[plan.generation] = plan
        truth.planned_s[plan.generation] = self.loop.now_s
        if job.grade == TRAINER:
            told = truth.resumes.setdefault(plan.checkpoint_dir, [])
            told.append((plan.generation, resume.step))
        if job.best > truth.best_at_plan:
            truth.fruitless = 0
        truth.best_at_plan = job.best
        truth.fruitless += 1
        self.restarts[run] = self.restarts.get(run, 0) + 1
        self.budget(run, truth, plan)
        self.chain(job, plan)

    def _bad_left_out(self, job: Job, plan: Plan) -> None:
        """Nothing that is known to be bad is resumed from: not a checkpoint that was refused, by
        this run or by a look at its bytes, nor state behind a collective that was left out."""
        known = self.runs[job.name].plans
        path = plan.resume.path
        marked = {one for each in known.values() for one in each.quarantined} | job.refused
        if path and path in marked:
            self.fail("bad_never_resumed", f"{job.name}: gen {plan.generation} takes {path}, which "
                      "was refused or set aside before")
        if path and job.folder_of(path) != plan.checkpoint_dir:
            self.fail("own_folder", f"{job.name}: gen {plan.generation} takes {path} out of "
                      f"another folder than {plan.checkpoint_dir}")
        others = [one for one in plan.quarantined if not job.folder_of(one)]
        if others:
            self.fail("own_folder", f"{job.name} sets aside what is another run's: {others}")
        state = (plan.resume.generation, plan.resume.step)
        skipped = "a collective was left out" in plan.reason
        if skipped and plan.resume.kind != "own" and job.is_wrong(state):
            self.fail("wrong_never_resumed", f"{job.name}: gen {plan.generation} takes {state}: "
                      f"wrong from step {job.wrong} on")

    def _thrown_away(self, job: Job, plan: Plan) -> None:
        """No state that stands is left out for an older one: neither a checkpoint in the run's
        folder nor what a survivor holds."""
        truth, resume, now_s = self.runs[job.name], plan.resume, self.loop.now_s
        if job.grade != TRAINER or "a collective was left out" in plan.reason:
            return
        told = truth.resumes.get(plan.checkpoint_dir, [])
        for commit in job.disk.commits.values() if resume.kind in ("disk", "fresh") else ():
            stands = not commit.bad and commit.path not in (*plan.quarantined, *job.refused) \
                and void_by(commit, told) is None
            if stands and commit.step > resume.step and job.made_s[commit.path] + LATE_S < now_s:
                self.fail("nothing_thrown_away", f"{job.name}: gen {plan.generation} begins at "
                          f"step {resume.step}, and {commit.path} stands")
        gang = job.gangs.get(max(truth.plans, default=0))
        calm = now_s - self.disturbed_s > CALM_S and self.single
        whole = gang is not None and gang.formed and not gang.torn
        if calm and gang is not None and whole and NAMED.match(plan.reason):
            well = [rank.rank for rank in gang.ranks.values()
                    if rank.state in ("running", "parked") and not rank.hung
                    and rank.stopped_at_s < 0 and not rank.waits_for]
            if well and resume.kind != "survivor" and gang.broken:
                self.fail("nothing_thrown_away", f"{job.name}: gen {plan.generation} begins from "
                          f"{resume.kind}, and ranks {well} hold step {gang.step}")

    def _heard(self, node: str, run: str, generation: int) -> bool:
        """Whether who plans can know of a checkpoint of this generation."""
        edge = self.edges[node]
        return self.single or any(
            one.generation == generation for beat in (*edge.raw_beats, *edge.decision.beats)
            if beat.run == run for one in beat.commits)

    def _paid(self, job: Job, before: Plan, plan: Plan, node: str) -> None:
        """Budgets equal acts, and a charged act has a cause."""
        unbroken = all(edge.life <= 1 for edge in self.edges.values())  # no agent was killed
        all_seen = self.single and self.disturbed_s < 0.0 and unbroken
        told_s = self.store.lost_s - self.runs[job.name].planned_s[before.generation]
        heard = self._heard(node, job.name, before.generation)
        wrong = account.wrong(job, before, plan, all_seen, heard)
        if wrong and not 0.0 <= told_s < NOTICED_S:  # else perhaps nobody alive has read it
            self.fail("budgets_true", f"{job.name}: gen {plan.generation}: {wrong}")
        gang = job.gangs.get(before.generation)
        calm = self.loop.now_s - self.disturbed_s > CALM_S
        trains = gang is not None and gang.formed and before.generation not in job.hurt
        since_s = self.paused_s.get(job.name, self.loop.now_s)
        if calm and self.loop.now_s - since_s > HEARD_S and plan.reason != account.ANEW:
            self.fail("pause_holds", f"{job.name}: gen {plan.generation} was planned "
                      f"{self.loop.now_s - since_s:.1f} s into a pause: {plan.reason}")
        again = [one for one in plan.granted if not one.startswith(account.BOUGHT)
                 and any(one in old.granted for old in self.runs[job.name].plans.values())]
        if again:
            self.fail("request_once", f"{job.name}: gen {plan.generation} answers {again} again")
        loops = self.edges and next(iter(self.edges.values())).settings.crash_loop_count or 3
        died = account.looped(job, self.runs[job.name].plans, plan, loops)
        if unbroken and job.grade == TRAINER and died:
            self.fail("loop_seen", f"{job.name}: gens {died} died of one bug at one step, and gen "
                      f"{plan.generation} was planned")
        named = NAMED.match(plan.reason)
        if named and calm and int(named[2]) not in job.culprits:
            self.fail("culprit_true", f"{job.name}: nothing was done to pid {named[2]}: "
                      f"{plan.reason}")
        if calm and trains and account.bought(plan):
            self.fail("acts_have_cause", f"{job.name}: gen {before.generation} was replaced, and "
                      f"nothing held it up: {plan.reason}")

    def budget(self, run: str, truth: RunTruth, plan: Plan) -> None:
        """Generations in a row that made no new step are bounded (crash loop, max_restarts)."""
        limit = self.jobs[run].patience
        if truth.fruitless > limit:
            self.fail("budgets_hold", f"{run}: {truth.fruitless} generations without one new step"
                      f" (limit {limit}), last: {plan.reason}")

    def node_accepted(self, node: str, write: StoreWrite) -> None:
        """A node's document: exclusions are counted for the breaker."""
        self.loop.note("store", "%s v%d by %s: %s", write.key, write.expect_version + 1, node,
                       write.body[:120].decode("utf-8", "replace"))
        fault = excluded(write.body)
        name = subject_of(write.key).node
        if fault in ("", BY_HAND):  # a person may do as he likes
            return
        self._hurt(name, fault)
        held = self.excluded_by.setdefault(fault, [])
        held[:] = [each for each in held if each[1] != name]
        held.append((self.loop.now_s, name))
        edge = self.edges.get(node)
        settings = edge.settings if edge is not None else model.Settings()
        many = len(held) > settings.breaker_nodes - 1
        if many and len(held) > settings.breaker_fraction * len(self.edges) + 1:
            self.fail("breaker_holds", f"{len(held)} nodes excluded for {fault}: "
                      f"{', '.join(each[1] for each in held)}")

    def _hurt(self, node: str, fault: str) -> None:
        """Tests between nodes exclude nobody who is well; a moment's trouble may have been met."""
        machine = self.edges[node].machine
        since_s = self.loop.now_s - TESTS_OLD_S
        well = not (machine.weak or machine.was_fatal) and machine.weak_s < since_s
        if fault == FAILED and well and self.disturbed_s < since_s:
            self.fail("good_node_kept", f"{node} is well, and excluded for {fault}")

    # ------------------------------------------------------------ the disk

    def chain(self, job: Job, plan: Plan | None = None) -> None:
        """The commits that the core calls valid are each a continuation of the one before."""
        truth = self.runs.get(job.name)
        if truth is None or not truth.plans:
            return
        newest = plan or truth.plans[max(truth.plans)]
        history = validity.history_of(newest, job.folder)
        valid = validity.valid_commits(job.disk.listing(), history)
        ordered = sorted(valid, key=lambda each: (each.generation, each.step))
        before: Origin | None = None
        for commit in ordered:
            origin = (commit.generation, commit.step)
            if before is not None and not job.disk.descends(before, origin):
                self.fail("one_chain", f"{job.name}: gen/step {origin} does not continue {before}")
            before = origin

    def resumed(self, job: Job, gang: Gang, origin: Origin) -> None:
        """A generation begins from `origin`."""
        truth = self.runs.get(job.name, RunTruth())
        plan = truth.plans.get(gang.generation)
        if plan is None:
            self.fail("started_by_plan", f"{job.name}: gen {gang.generation} without a plan")
        elif plan.resume != gang.resume:
            self.fail("started_by_plan", f"{job.name}: gen {gang.generation} not as planned")
        for generation, step in truth.resumes.get(job.folder, []):
            if origin[0] < generation < gang.generation and step < origin[1]:
                self.fail("void_never_resumed", f"{job.name}: gen {gang.generation} holds state "
                          f"{origin}, void since gen {generation} resumed at {step}")

    def deleted(self, launcher: Launcher, delete: model.Delete, path: str) -> None:
        """A checkpoint is about to be removed."""
        job = launcher.job
        truth = self.runs.get(job.name, RunTruth())
        told = truth.resumes.get(job.folder, [])
        left = [each for each in job.disk.commits.values()
                if not each.bad and void_by(each, told) is None and each.path != path]
        gone = job.disk.commits.get(path)
        good = [each for each in left if each.path not in job.disk.rotten]
        was = gone is not None and path not in job.disk.rotten and not gone.bad
        if was and gone is not None and void_by(gone, told) is None and not good:
            self.fail("good_one_kept", f"{job.name}: {path} was deleted, the last whole one")
        if gone is not None and not gone.bad and void_by(gone, told) is None:
            newer = [each for each in left if each.step > gone.step]
            if not newer:
                self.fail("newest_deletes", f"{job.name}: the newest valid {path} was deleted")

    def leaves(self, edge: Edge, effect: Effect) -> None:
        """An order leaves for its launcher.  Only the newest generation deletes: whose stands the
        store has said just now.  One that is under way when a newer plan is written can only be
        judged by what it removes.  A guest that was paused with its clock cannot know how old the
        store's word is."""
        body = effect.body
        if not isinstance(body, model.Delete) or edge.machine.was_paused:
            return
        asked_s = self.loop.now_s if self.single else edge.store_said_s.get(
            str(run_subject(body.run)), -1e9)
        newer = [one for one, planned_s in self.runs.get(body.run, RunTruth()).planned_s.items()
                 if one > body.generation and planned_s < asked_s]
        if newer or self.loop.now_s - asked_s > STANDS_S + LATE_CLOCK_S:
            self.fail("newest_deletes", f"{edge.machine.name}: gen {body.generation} of {body.run} "
                      f"deletes {body.paths}, planned is gen {newer}, and the store was asked "
                      f"{self.loop.now_s - asked_s:.1f} s ago")

    # ------------------------------------------------------------ ranks

    def starting(self, launcher: Launcher, start: model.Start) -> None:
        """A launcher obeys a start."""
        job = launcher.job
        truth = self.runs.setdefault(job.name, RunTruth())
        plan = truth.plans.get(start.generation)
        name = launcher.machine.name
        if plan is None:
            self.fail("started_by_plan", f"{job.name}: gen {start.generation} without a plan")
            return
        self._device_once(launcher)
        planned = tuple(sorted(rank for rank, node in plan.ranks if node == name))
        if tuple(sorted(start.ranks)) != planned:
            self.fail("started_by_plan", f"{job.name} on {name}: ranks {start.ranks}, "
                      f"planned {planned}")

    def _device_once(self, launcher: Launcher) -> None:
        """No device is in two live generations of two runs."""
        edge = self.edges[launcher.machine.name]
        for other in edge.launchers.values():
            shared = {*other.devices} & {*launcher.devices}
            if shared and other.job is not launcher.job and any(
                    rank.state != END for rank in other.ranks.values()):
                self.fail("device_once", f"{sorted(shared)} of {edge.machine.name} are in gen "
                          f"{other.generation} of {other.job.name}, and {launcher.job.name} starts")

    def stepped(self, job: Job, gang: Gang) -> None:
        """A generation finished a step."""
        if job.grade == TRAINER:
            return
        for other in job.gangs.values():
            if other.generation > gang.generation and other.formed:
                permits = any(rank.machine.name != each.machine.name
                              for rank in gang.ranks.values() for each in other.ranks.values())
                self.fail("one_generation_computes", f"{job.name}: gen {gang.generation} computes "
                          f"beside gen {other.generation}{' across nodes' if permits else ''}")

    # ------------------------------------------------------------ steps of the core

    def decided(self, edge: Edge, now: Now, observed: Observed, decision: Decision) -> None:
        """The core made a step."""
        if edge.steps % IDEMPOTENT_EVERY == 0 and edge.node is not None:
            again = edge.node.step(now, observed)
            known = {effect.id for effect in decision.effects}
            new = [effect for effect in again.effects if effect.id not in known]
            if new:
                self.fail("stepping_twice", f"{edge.machine.name}: {new[0].kind} {new[0].id}: "
                          f"{new[0].reason}")
            opened = {each.id for each in again.incidents} - {e.id for e in decision.incidents}
            if opened:
                self.fail("stepping_twice", f"{edge.machine.name}: incident {opened}")
        shown = [each.id for each in decision.incidents]
        if len(shown) != len(set(shown)):
            self.fail("incident_once", f"{edge.machine.name}: {sorted(shown)}")
        self._lost_by_two(edge, observed)
        if decision.effects:
            self._effects(edge, now, observed, decision)
        self._ledger(edge, now, decision)
        self._states(edge)

    def _lost_by_two(self, edge: Edge, observed: Observed) -> None:
        """Nobody is held lost whom all the others but one reach."""
        network, now_s = self.network, self.loop.now_s
        if network is None or self.single:
            return
        if network.changes != self._changes:
            self._changes, self._changed_s = network.changes, now_s
        lost = {beat.node for beat in observed.beats if beat.lost}
        if not lost or now_s - self._changed_s < NOTICED_S:
            return
        for name in sorted(lost):
            without = [one for one in self.edges if one != name and not self._reach(one, name)]
            if len(without) < 2:
                self.fail("lost_by_two", f"{edge.machine.name} holds {name} lost, and only "
                          f"{without} cannot reach it")

    def _reach(self, one: str, other: str) -> bool:
        network, ends = self.network, (self.edges[one].machine, self.edges[other].machine)
        return network is not None and all(each.up and not each.frozen for each in ends) \
            and network.open(one, other) and network.open(other, one)

    def _states(self, edge: Edge) -> None:
        """Each run's state by itself, and against the step before in this life of the agent."""
        for run, case in edge.node.cases.items() if edge.node is not None else ():
            before = self.states.get((edge.machine.name, run))
            known = before[1] if before is not None and before[0] == edge.life else None
            broken = check_invariants(case.state, known)
            if self.store.lost_s > 0.0:  # its versions count from the backup on
                broken = tuple(one for one in broken if one != OLDER_VERSION)
            if broken:
                self.fail("state_holds", f"{edge.machine.name}: {run}: {'; '.join(broken)}")
            self.states[edge.machine.name, run] = edge.life, msgspec.structs.replace(case.state)

    def _effects(self, edge: Edge, now: Now, observed: Observed, decision: Decision) -> None:
        seen: set[str] = set()
        for effect in decision.effects:
            if effect.id in seen or effect.id in edge.performed:
                self.fail("effect_once", f"{edge.machine.name}: {effect.id} asked for again")
            seen.add(effect.id)
            write = effect.body if isinstance(effect.body, StoreWrite) else None
            lasts = write is not None and subject_of(write.key).kind == NODE
            if (effect.outlives_node or lasts) and observed.journal_stalled:
                self.fail("stalled_journal", f"{edge.machine.name}: {effect.id}")
            body = effect.body
            leads = self.single or any(
                (one.run, one.holder) == (getattr(body, "run", ""), edge.machine.name)
                and now.boot_s < one.until_boot_s for one in observed.store.leases)
            if isinstance(body, model.Delete) and not leads:
                self.fail("newest_deletes", f"{edge.machine.name} leads no more: {effect.id}")
            if write is not None and lasts:
                self._common(edge, now, observed, write)
            if isinstance(body, StoreWrite) and subject_of(body.key).run:
                plan = decode_plan(body.body)
                self._below_a_lease(edge, now, observed, body)
                self._placed_once(edge, observed, plan)
                self._fit(edge, now, observed, plan)
                self._whole(edge, observed, plan)
                self._as_large(edge, now, observed, plan)

    def _common(self, edge: Edge, now: Now, observed: Observed, write: StoreWrite) -> None:
        """No node is excluded for what so many have, as who excludes it heard just now."""
        fault, settings = excluded(write.body), edge.settings
        if fault in ("", BY_HAND):
            return
        have = {beat.node for beat in observed.beats if beat.fatal == fault
                and now.boot_s - beat.boot_s < settings.lease_s / 2}
        many = len(have) >= settings.breaker_nodes
        if many and len(have) > settings.breaker_fraction * len(self.edges):
            self.fail("breaker_holds", f"{write.key} is excluded for {fault}, and so many have it: "
                      f"{', '.join(sorted(have))}")

    def _below_a_lease(
        self, edge: Edge, now: Now, observed: Observed, write: StoreWrite
    ) -> None:
        """Whoever plans holds the lease by his own clock, and has the store compare it."""
        run, name = subject_of(write.key).run, edge.machine.name
        until_s = max((lease.until_boot_s for lease in observed.store.leases
                       if (lease.run, lease.holder) == (run, name)), default=0.0)
        if not self.single and (now.boot_s >= until_s or write.lease != run):
            self.fail("plans_below_a_lease", f"{name} plans {run} below {write.lease!r} at "
                      f"{now.boot_s:.3f}, and led until {until_s:.3f}")

    def _placed_once(self, edge: Edge, observed: Observed, plan: Plan) -> None:
        """Each node has one place: its nproc ranks, or those of a spare."""
        nproc = next((view.nproc for view in observed.runs if view.run == plan.run), 0)
        nodes = [node for _, node in plan.ranks]
        wrong = {node for node in nodes if nodes.count(node) != nproc or node in plan.spares}
        if plan.finished < 0 and nproc and (wrong or len({*plan.spares}) < len(plan.spares)):
            self.fail("one_place_a_node", f"{edge.machine.name}: gen {plan.generation} of "
                      f"{plan.run}: ranks {plan.ranks}, spares {plan.spares}")

    def _fit(self, edge: Edge, now: Now, observed: Observed, plan: Plan) -> None:
        """No rank on a node that is excluded, or whose fresh beat says that it is sick."""
        if plan.finished >= 0 or any(each.ranks == plan.ranks
                                     for each in self._written(observed, plan)):
            return
        unfit = {node for node, doc in observed.store.docs.of(NODE) if excluded(doc.body)}
        if not self.breaker_open(edge, now):
            unfit |= {beat.node for beat in edge.raw_beats if self._sick(beat.node)
                      and now.boot_s - beat.boot_s < edge.settings.lease_s / 2}
        placed = {node for _, node in plan.ranks}
        if placed & unfit:
            self.fail("no_rank_on_unfit", f"{edge.machine.name} plans gen {plan.generation} of "
                      f"{plan.run} on {sorted(placed & unfit)}: {plan.reason}")

    def _as_large(self, edge: Edge, now: Now, observed: Observed, plan: Plan) -> None:
        """A world is never made smaller than its fit nodes allow, as their leader sees them."""
        views = [view for view in observed.runs if view.run == plan.run]
        known = self._written(observed, plan)
        if plan.finished >= 0 or known or not views or plan.generation < 2:
            return
        out = {node for node, doc in observed.store.docs.of(NODE)
               if excluded(doc.body) or b'"draining":true' in doc.body}
        fresh = {beat.node for beat in edge.raw_beats if beat.run == plan.run
                 and not beat.fatal and now.boot_s - beat.boot_s < edge.settings.lease_s / 2}
        fresh -= out | edge.lost | {name for name, one in self.edges.items() if one.machine.weak}
        placed = {node for _, node in plan.ranks}
        if len(placed) < min(views[0].nnodes_max, len(fresh)):
            self.fail("no_needless_shrink", f"{edge.machine.name}: gen {plan.generation} of "
                      f"{plan.run} uses {sorted(placed)} of {sorted(fresh)}: {plan.reason}")

    def _whole(self, edge: Edge, observed: Observed, plan: Plan) -> None:
        """A plan that takes a survivor's state was told of one that holds that step untorn."""
        known = self._written(observed, plan)
        if plan.resume.kind != "survivor" or plan.finished >= 0 or known:
            return
        kept = {node for number, node in plan.ranks if number in plan.keep}
        told = [rank for view in observed.runs if view.run == plan.run for rank in view.ranks]
        told += [rank for beat in observed.beats if beat.run == plan.run for rank in beat.ranks]
        if not any(rank.parked is not None and not rank.parked.torn and rank.state == PARK
                   and rank.parked.step == plan.resume.step and rank.node in kept
                   for rank in told):
            self.fail("torn_never_used", f"{edge.machine.name}: gen {plan.generation} of "
                      f"{plan.run} takes step {plan.resume.step}, which no untorn survivor holds")

    def _written(self, observed: Observed, plan: Plan) -> list[Plan]:
        """Plans of this one's generation that stand in the store, or that it has lost again."""
        plans = [decode_plan(doc.body) for _, doc in observed.store.docs.of(RUN)]
        found = [each for each in plans if each.generation == plan.generation]
        lost = self.runs[plan.run].plans.get(plan.generation) if plan.run in self.runs else None
        if lost is None or self.store.lost_s < 0.0:
            return found
        return [*found, *([lost] if (lost.ranks, lost.resume) == (plan.ranks, plan.resume) else [])]

    def _sick(self, node: str) -> bool:
        """Its hardware is broken, for so long that whoever hears it has heard that too."""
        machine = self.edges[node].machine
        return bool(machine.fatal) and self.loop.now_s - machine.fatal_s > HEARD_S

    def breaker_open(self, edge: Edge, now: Now) -> bool:
        """Would the same fault on that many nodes be a common cause?"""
        sick: dict[str, int] = {}
        for other in self.edges.values():
            if other.machine.fatal:
                sick[other.machine.fatal] = sick.get(other.machine.fatal, 0) + 1
        return max(sick.values(), default=0) >= edge.settings.breaker_nodes

    def _ledger(self, edge: Edge, now: Now, decision: Decision) -> None:
        if not decision.ledger:
            return
        key = (edge.machine.name, edge.life, now.boot_id)
        total = sum(seconds for _, seconds in decision.ledger)
        if any(seconds < -1e-6 for _, seconds in decision.ledger):
            self.fail("ledger_sums", f"{key}: a negative category {decision.ledger}")
        before, settled = self._settled.get(key, {}), dict(decision.ledger_settled)
        self._settled[key] = settled
        if any(seconds < before.get(name, 0.0) for name, seconds in settled.items()):
            self.fail("ledger_sums", f"{key}: a counter went back from {before} to {settled}")
        if key not in self._first:
            self._first[key], self._base[key] = now.boot_s, total
            return
        elapsed = now.boot_s - self._first[key]
        if abs(total - self._base[key] - elapsed) > LEDGER_SLACK_S:
            self.fail("ledger_sums", f"{key}: {total - self._base[key]:.3f} s in categories, "
                      f"{elapsed:.3f} s went by: {decision.ledger}")


def excluded(body: bytes) -> str:
    """For what a node's document takes it out of service: a fault, or BY_HAND; "" = it does not."""
    try:
        doc = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return ""
    if not isinstance(doc, dict) or not doc.get("excluded") or doc.get("draining"):
        return ""  # one that is to be drained goes on where nobody can follow it
    return str(doc.get("fault") or BY_HAND)
