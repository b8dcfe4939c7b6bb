"""The simulator's own honesty: store, disk, machine, launcher and edge, by value.

A simulator that is kinder than the world finds nothing, and one that is harsher finds faults that
cannot be; so what each part does under each fault is fixed here.
"""

from __future__ import annotations

import asyncio
import random

import msgspec
import pytest

from holdfast.agent.core.model import (
    SCRIPT,
    Delete,
    Effect,
    Finish,
    Resume,
    Start,
    Stop,
    StoreWrite,
)
from holdfast.agent.history.journal import Count, Finished, Intent, Memory
from holdfast.agent.peers.beats import RETRY_S
from holdfast.agent.simulate import run_storm
from holdfast.agent.simulate.cluster import Cluster, Shape, build
from holdfast.agent.simulate.disk import Disk, void_by
from holdfast.agent.simulate.edge import decode_plan
from holdfast.agent.simulate.faults import FAULTS, heal
from holdfast.agent.simulate.journal import Kept, VirtualJournal
from holdfast.agent.simulate.links import flapping
from holdfast.agent.simulate.loop import InvariantBroken, Loop, Trace
from holdfast.agent.simulate.machine import Machine, Process
from holdfast.agent.simulate.monitor import Monitor
from holdfast.agent.simulate.outgoing import BEFORE_EFFECT, BEFORE_INTENT, MID_EFFECT
from holdfast.agent.simulate.store import OWN_ID, VirtualStore
from holdfast.agent.simulate.storms import MANY, SINGLE, STORMS, shipped
from holdfast.agent.store.base import Conflict, StoreError


def new_store(rate: float = 1.0) -> tuple[Loop, VirtualStore]:
    loop = Loop(Trace())
    return loop, VirtualStore(loop, 3.0, rate)


def refused(store: VirtualStore, node: str, write: StoreWrite) -> str:
    """Why a write is not performed; "" where it is."""
    try:
        store.put(node, write)
    except (Conflict, StoreError) as error:
        return str(error)
    return ""


def put(key: str, expect: int, body: bytes = b"x", lease: str = "") -> StoreWrite:
    return StoreWrite(key=key, expect_version=expect, body=body, lease=lease)


def lease(run: str, who: str) -> StoreWrite:
    return StoreWrite(key=f"lease/{run}", expect_version=0, body=who.encode())


# ---------------------------------------------------------------- store


def test_a_write_compares_the_version_and_changes_nothing_when_it_differs() -> None:
    _, store = new_store()
    assert not refused(store, "a", put("run/r", 0, b"one"))
    assert store.docs["run/r"].version == 1
    assert refused(store, "b", put("run/r", 0, b"two")) == "conflict: version 1, expected 0"
    assert store.docs["run/r"].body == b"one"
    assert not refused(store, "b", put("run/r", 1, b"two"))
    assert (store.docs["run/r"].version, store.docs["run/r"].body) == (2, b"two")


def test_a_lease_is_granted_when_absent_own_or_expired_on_the_stores_clock() -> None:
    loop, store = new_store(rate=2.0)  # the store's clock runs twice as fast
    assert not refused(store, "a", lease("r", "a"))
    assert refused(store, "b", lease("r", "b"))
    assert store.holder("r") == "a"
    loop.run_until(1.0)  # 2 s of 3 on the store's clock
    assert not refused(store, "a", lease("r", "a"))  # renewed: to 5 s
    loop.run_until(2.4)
    assert store.holder("r") == "a"
    loop.run_until(2.6)
    assert store.holder("r") == ""
    assert not refused(store, "b", lease("r", "b"))
    assert refused(store, "a", lease("r", "a"))


def test_a_lease_is_taken_over_from_its_holder_alone_and_whoever_judges_sees_it() -> None:
    _, store = new_store()
    store.put("a", lease("r", "a"))
    seen: list[tuple[str, str]] = []
    store.on_accept = lambda node, write, _: seen.append((node, store.holder(write.lease)))
    over = msgspec.structs.replace(lease("r", "b"), lease="r", over="c")
    assert refused(store, "b", over)
    assert not refused(store, "b", msgspec.structs.replace(over, over="a"))
    assert (seen, store.holder("r")) == ([("b", "a")], "b")


def test_nobody_takes_a_lease_in_anothers_name() -> None:
    _, store = new_store()
    assert refused(store, "b", lease("r", "a"))


def test_lease_and_version_are_one_transaction() -> None:
    loop, store = new_store()
    store.put("a", lease("r", "a"))
    assert refused(store, "b", put("run/r", 0, lease="r"))
    assert not refused(store, "a", put("run/r", 0, lease="r"))
    loop.run_until(3.5)
    assert refused(store, "a", put("run/r", 1, lease="r")).startswith("lease: nobody")


def test_an_unavailable_store_performs_nothing() -> None:
    _, store = new_store()
    store.available = False
    assert "no member answers" in refused(store, "a", put("run/r", 0))
    assert store.docs == {}


def test_a_stale_read_is_one_whole_older_moment() -> None:
    loop, store = new_store()
    store.put("a", put("run/r", 0, b"one"))
    loop.run_until(1.0)
    store.put("a", put("run/r", 1, b"two"))
    store.put("a", put("run/q", 0, b"q"))
    loop.run_until(2.0)
    assert [doc.body for doc in store.read()[0]] == [b"two", b"q"]
    assert [doc.body for doc in store.read(1.5)[0]] == [b"one"]
    docs, leases = store.read(5.0)
    assert not list(docs) and leases == ()


def test_a_store_that_was_replaced_shows_what_it_held_and_nothing_older() -> None:
    loop, store = new_store()
    store.put("a", put("run/r", 0))
    loop.run_until(5.0)
    store.replace("")
    assert not store.docs and store.refused(OWN_ID) and not store.refused("")
    store.restore()
    assert [[doc.version for doc in store.read(old_s)[0]] for old_s in (0.0, 2.0)] == [[1], [1]]


# ---------------------------------------------------------------- disk and validity


def test_a_marker_is_created_once() -> None:
    disk = Disk("r")
    assert disk.create(1, 10, 2) is not None
    assert disk.create(1, 10, 2) is None
    assert [each.step for each in disk.listing()] == [10]


def test_lineage_follows_what_each_generation_began_from() -> None:
    disk = Disk("r")
    disk.begin(1, (0, 0))
    disk.begin(2, (1, 10))
    disk.begin(4, (2, 15))
    assert disk.descends((1, 10), (4, 20))
    assert disk.descends((2, 15), (4, 16))
    assert not disk.descends((2, 16), (4, 20))  # gen 4 left gen 2 at 15
    assert not disk.descends((1, 11), (2, 12))
    assert not disk.descends((3, 12), (4, 20))  # gen 3 is on nobody's way


@pytest.mark.parametrize(
    ("generation", "step", "voided"), [(1, 20, False), (1, 25, True), (2, 99, False)]
)
def test_the_second_writing_of_the_validity_rule(generation: int, step: int, voided: bool) -> None:
    disk = Disk("r")
    commit = disk.create(generation, step, 1)
    assert commit is not None
    assert (void_by(commit, [(1, 0), (2, 20)]) is not None) is voided


# ---------------------------------------------------------------- machine


def test_a_frozen_machine_does_late_what_was_due_and_a_dead_one_never() -> None:
    loop = Loop(Trace())
    machine = Machine(loop, "a", 0.0, 0.0)
    done: list[str] = []
    machine.after(1.0, lambda: done.append("one"))
    machine.after(2.0, lambda: done.append("two"))
    machine.freeze(clock_stops=False)
    loop.run_until(5.0)
    assert done == []
    machine.thaw()
    assert done == ["one", "two"]
    machine.after(1.0, lambda: done.append("three"))
    machine.crash()
    machine.boot()
    loop.run_until(9.0)
    assert done == ["one", "two"]


def test_clocks_drift_stop_in_a_paused_guest_and_start_anew_at_boot() -> None:
    loop = Loop(Trace())
    machine = Machine(loop, "a", 0.01, 0.0)
    start = machine.boot_s()
    loop.run_until(100.0)
    assert machine.boot_s() - start == pytest.approx(101.0)
    machine.freeze(clock_stops=True)
    loop.run_until(150.0)
    assert machine.boot_s() - start == pytest.approx(101.0)
    machine.thaw()
    loop.run_until(160.0)
    assert machine.boot_s() - start == pytest.approx(111.1)
    before = machine.now().boot_id
    machine.crash()
    machine.boot()
    assert machine.boot_s() == 0.0 and machine.now().boot_id != before


# ---------------------------------------------------------------- launcher


@pytest.fixture
def world() -> Cluster:
    """One machine, one trainer of two ranks; its agent has not started."""
    for seed in range(99):
        cluster = build(seed, Shape(1, 0, 1, 2), SINGLE, shipped())
        if cluster.jobs["run-0"].grade == "trainer":
            cluster.monitor.starting = lambda *_: None
            cluster.loop._heap.clear()
            return _quiet(cluster)
    raise AssertionError("no seed makes a trainer")


def _quiet(cluster: Cluster) -> Cluster:
    job = cluster.jobs["run-0"]
    job.on_resume = lambda *_: None
    for launcher in cluster.launchers("run-0"):
        launcher.on_start = lambda *_: None
        launcher.on_delete = lambda *_: None
    return cluster


def order(number: int, body: Start | Stop | Finish | Delete) -> Effect:
    kind = type(body).__name__.lower()
    return Effect(f"e{number}", kind, "run/run-0", "test", 5.0, body)


def start(generation: int, resume: Resume, keep: tuple[int, ...] = ()) -> Start:
    return Start("run-0", generation, (0, 1), keep, 2, resume, "test")


def test_ranks_train_only_when_the_whole_world_moves(world: Cluster) -> None:
    launcher = world.launchers("run-0")[0]
    launcher.perform(order(1, start(1, Resume("fresh"))), lambda _: None)
    world.loop.run_until(10.0)
    view = launcher.view()
    assert [rank.state for rank in view.ranks] == ["running", "running"]
    reached = view.ranks[0].step
    assert reached > 3
    launcher.ranks[1].hung = True
    world.loop.run_until(20.0)
    assert launcher.view().ranks[0].step <= reached + 1
    assert launcher.view().ranks[0].phase == "collective"
    assert launcher.view().ranks[1].seq < launcher.view().ranks[0].seq


def test_an_old_generation_is_refused_and_a_known_id_gets_its_old_answer(world: Cluster) -> None:
    launcher = world.launchers("run-0")[0]
    said: list[tuple[bool, str]] = []
    reply = lambda outcome: said.append((outcome.ok, outcome.error))  # noqa: E731
    launcher.perform(order(1, start(3, Resume("fresh"))), reply)
    launcher.perform(order(2, start(3, Resume("fresh"))), reply)
    launcher.perform(order(1, start(9, Resume("fresh"))), reply)
    assert said == [(True, ""), (False, "refused: generation 3 is not above 3"), (True, "")]
    assert launcher.generation == 3


def test_survivors_park_and_carry_their_state_into_the_next_generation(world: Cluster) -> None:
    launcher, job = world.launchers("run-0")[0], world.jobs["run-0"]
    launcher.perform(order(1, start(1, Resume("fresh"))), lambda _: None)
    world.loop.run_until(10.0)
    from holdfast.agent.core.model import Ended

    job.end(launcher.ranks[1], Ended(137, 9))
    world.loop.run_until(10.5)
    parked = launcher.view().ranks[0].parked
    assert parked is not None
    resume = Resume("survivor", parked.step, 1)
    kept_pid = launcher.ranks[0].pid
    launcher.perform(order(2, start(2, resume, keep=(0,))), lambda _: None)
    world.loop.run_until(15.0)
    assert job.disk.lineage[2] == (1, parked.step)
    assert launcher.ranks[0].pid == kept_pid and launcher.ranks[1].pid != kept_pid
    assert launcher.ranks[0].step > parked.step


def test_a_generation_cannot_begin_from_what_nobody_holds(world: Cluster) -> None:
    launcher = world.launchers("run-0")[0]
    launcher.perform(order(1, start(1, Resume("disk", 10, 7, "/no"))), lambda _: None)
    world.loop.run_until(3.0)
    ended = [rank.ended for rank in launcher.view().ranks if rank.ended is not None]
    assert "no checkpoint gen 7 step 10" in ended[0].error


def test_a_spoilt_checkpoint_is_found_when_it_is_read(world: Cluster) -> None:
    launcher, job = world.launchers("run-0")[0], world.jobs["run-0"]
    made = job.disk.create(7, 10, 2)
    assert made is not None
    job.disk.rot(made.path)
    assert launcher.view().commits[0].bad == ""
    launcher.perform(order(1, start(8, Resume("disk", 10, 7, made.path))), lambda _: None)
    world.loop.run_until(3.0)
    assert launcher.view().commits[0].bad == "digest mismatch"
    outcomes = [rank.ended.outcome for rank in launcher.view().ranks if rank.ended is not None]
    assert "bad_checkpoint" in outcomes


def test_a_permit_that_runs_out_ends_the_ranks(world: Cluster) -> None:
    launcher = world.launchers("run-0")[0]
    body = msgspec.structs.replace(start(1, Resume("fresh")), permit_s=4.0)
    launcher.perform(order(1, body), lambda _: None)
    world.loop.run_until(3.0)
    launcher.renew_permit(2, int((launcher.machine.boot_s() + 9.0) * 1e9))  # another generation's
    launcher.renew_permit(1, int((launcher.machine.boot_s() + 4.0) * 1e9))
    world.loop.run_until(6.0)
    launcher.check_permit()
    assert all(rank.state != "ended" for rank in launcher.ranks.values())
    world.loop.run_until(8.0)
    launcher.check_permit()
    assert all(rank.state == "ended" for rank in launcher.ranks.values())


# ---------------------------------------------------------------- the whole


def test_the_monitor_raises_by_name() -> None:
    loop, store = new_store()
    Monitor(loop, store, single=True)
    store.compare = False
    store.put("a", put("other", 0))
    with pytest.raises(InvariantBroken, match="compare_and_set"):
        store.put("b", put("other", 0))


def test_the_same_seed_is_the_same_world() -> None:
    for seed in (1, 2, 3):
        first: list[str] = []
        second: list[str] = []
        run_storm(seed, "default", sink=first.append)
        run_storm(seed, "default", sink=second.append)
        assert first == second
        assert first


def test_every_fault_of_every_storm_exists() -> None:
    for storm in STORMS.values():
        assert set(storm.weights) <= set(FAULTS)


def test_worlds_of_many_nodes_have_a_first_document_and_single_ones_none() -> None:
    assert build(1, Shape(1, 0, 1, 2), SINGLE, shipped()).store.docs == {}
    many = build(1, Shape(2, 1, 2, 1), MANY, shipped())
    assert list(many.store.docs) == ["run/run-0", "run/run-1"]


@pytest.mark.parametrize("v", [0.1, 0.5, 0.9])
def test_a_flapping_link_goes_down_and_up_until_the_storm_ends(v: float) -> None:
    world = build(3, Shape(3, 0, 1, 1), MANY, shipped())
    flapping(world, 0.4, v)
    downs, ups, was_up = 0, 0, False
    for tenth in range(100):
        world.loop.run_until(tenth / 10)
        is_up = not world.network.cut
        downs, ups, was_up = downs + (was_up and not is_up), ups + (is_up and not was_up), is_up
    assert downs >= 2 and ups >= 2
    heal(world)
    for tenth in range(100, 400):
        world.loop.run_until(tenth / 10)
        assert not world.network.cut


def cut_in_two() -> Cluster:
    """Four nodes of which two hear nothing of the other two."""
    world = build(3, Shape(4, 0, 1, 1, 2), MANY, shipped())
    world.loop.run_until(8.0)
    names = list(world.machines)
    for a in names[:2]:
        for b in names[2:]:
            world.network.cut |= {(a, b), (b, a)}
    return world


def lost(world: Cluster) -> list[list[str]]:
    """Whom each node holds lost, with the others' word for it."""
    return [sorted(edge.lost) for edge in world.edges.values()]


def test_two_nodes_that_reach_a_third_no_more_hold_it_lost_until_they_do() -> None:
    world = cut_in_two()
    world.loop.run_until(8.2)
    assert lost(world) == [[]] * 4
    world.loop.run_until(11.0)
    names = list(world.machines)
    assert lost(world) == [names[2:]] * 2 + [names[:2]] * 2
    shown = {beat.node: beat.lost for beat in world.edges[names[0]].observe().beats}
    assert shown[names[1]] is False and shown[names[2]] is True
    world.network.heal()
    world.loop.run_until(12.5)
    assert lost(world) == [[]] * 4


def test_nobody_is_lost_on_one_nodes_word_nor_while_his_kernel_answers() -> None:
    world = build(3, Shape(3, 0, 1, 1), MANY, shipped())
    world.loop.run_until(8.0)
    first, second, third = world.machines
    world.network.cut |= {(first, second), (second, first)}
    world.edges[third].kill("test")
    world.loop.run_until(9.5)
    assert lost(world)[:2] == [[], []]


def script_over_nodes(shape: Shape) -> Cluster:
    """A world whose only run is a script's, which computes."""
    for seed in range(99):
        world = build(seed, shape, MANY, shipped())
        job = world.jobs["run-0"]
        if job.grade == SCRIPT:
            job.target, job.rng = 10**6, random.Random(seed)
            world.loop.run_until(20.0)
            assert job.newest() is not None
            return world
    raise AssertionError("no seed makes a script")


def permits(world: Cluster) -> list[bool]:
    """Whether the permit of each node with ranks still holds."""
    return [one.permit.until_ns > 0 and not one.permit.is_over(int(one.machine.boot_s() * 1e9))
            for one in world.launchers("run-0") if one.ranks]


def test_without_the_store_a_script_computes_on_while_all_of_its_plan_answer() -> None:
    world = script_over_nodes(Shape(2, 1, 1, 1))
    job, before = world.jobs["run-0"], world.jobs["run-0"].newest()
    world.store.available = False
    world.loop.run_until(60.0)
    assert job.newest() is before and job.last_progress_s > 57.0
    assert permits(world) == [True, True]


def test_without_the_store_a_permit_ends_when_a_spare_of_the_plan_answers_no_more() -> None:
    world = script_over_nodes(Shape(2, 1, 1, 1))
    plan = decode_plan(world.store.docs["run/run-0"].body)
    assert plan.spares
    world.store.available = False
    world.edges[plan.spares[0]].start = lambda: None  # type: ignore[method-assign]
    world.edges[plan.spares[0]].kill("test")
    world.loop.run_until(20.0 + 2.5 * MANY.lease_s)
    assert permits(world) == [False, False]
    assert all(rank.state == "ended" for one in world.launchers("run-0")
               for rank in one.ranks.values())


def test_a_word_comes_in_order_and_what_a_lost_connection_told_is_told_again() -> None:
    world = build(3, Shape(2, 0, 1, 1), MANY, shipped())
    world.loop.run_until(8.0)
    first, second = world.edges.values()
    line, came = first.words.lines[second.machine.name], list[tuple[int, bool]]()
    real = second.words.take
    second.words.take = lambda name, word: (  # type: ignore[method-assign]
        came.append((word.number, word.told is not None)), real(name, word))[1]
    world.weather.slow_s = 1.0
    world.loop.run_until(14.0)
    numbers = [number for number, _ in came]
    assert len(numbers) > 20 and numbers == sorted(numbers)
    world.weather.slow_s, world.weather.lost_beats = 0.0, 1.0
    world.loop.run_until(16.0)
    came.clear()
    world.loop.run_until(18.0)
    assert not any(told for _, told in came)
    world.weather.lost_beats = 0.0
    came.clear()
    world.loop.run_until(18.0 + 2 * RETRY_S)
    assert came[0][1] and line.acked_boot_s > 0.0


# ---------------------------------------------------------------- the agent's process and journal


@pytest.fixture
def process() -> Process:
    return Process(Machine(Loop(Trace()), "a", 0.0, 0.0))


def test_tasks_and_timers_run_in_virtual_time_wait_in_a_freeze_and_end_with_a_kill(
    process: Process,
) -> None:
    loop, done = process.machine.loop, []

    async def work() -> None:
        for number in range(9):
            done.append((number, loop.now_s))
            await asyncio.sleep(1.0)

    process.start(work())
    loop.run_until(1.5)
    assert done == [(0, 0.0), (1, 1.0)]
    process.machine.freeze(clock_stops=False)
    loop.run_until(3.25)
    process.machine.thaw()
    loop.run_until(3.5)
    assert done[2:] == [(2, 3.25)]
    process.kill()
    loop.run_until(9.0)
    assert len(done) == 3


def test_a_kill_ends_a_process_between_two_callbacks(process: Process) -> None:
    done: list[str] = []

    def begin() -> None:
        for number in "123":
            process.call_soon(done.append, number)
            if number == "2":
                process.call_soon(process.kill)

    process.run(begin)
    assert done == ["1", "2"]


def test_what_a_callback_or_a_cancelled_timer_does_is_not_lost_and_not_done(
    process: Process,
) -> None:
    def fail() -> None:
        raise InvariantBroken("told", "by its name")

    def begin() -> None:
        process.call_later(1.0, fail).cancel()
        process.call_later(2.0, fail)

    process.run(begin)
    process.machine.loop.run_until(1.5)
    with pytest.raises(InvariantBroken, match="told"):
        process.machine.loop.run_until(3.0)


def test_a_record_lasts_from_its_commit_and_never_when_the_agent_dies_before(
    process: Process,
) -> None:
    loop, kept, stuck = process.machine.loop, Kept(), [False]

    def queue() -> VirtualJournal:
        return VirtualJournal(kept, process, lambda: 0.005, lambda: stuck[0], lambda: None)

    journal = queue()
    done = journal.append(Intent("1/run/r/stop/1", "stop", "run/r", "", "", "", 0.0),
                          Memory(b"first"), wait=True)
    loop.run_until(0.004)
    assert done is not None and not done.done() and kept.seed().memory == b""
    loop.run_until(0.006)
    assert done.done() and not journal.stalled
    assert [one.id for one in queue().seed.unfinished] == ["1/run/r/stop/1"]
    stuck[0] = True
    journal.append(Finished("1/run/r/stop/1", True, "", 0.0, (Count("actions", ("stop",)),)))
    loop.run_until(1.5)
    assert journal.stalled and kept.seed().unfinished
    stuck[0] = False
    loop.run_until(2.0)
    seed = queue().seed
    assert not seed.unfinished and [one.ok for one in seed.finished] == [True]
    assert seed.counters == {("actions", ("stop",)): 1.0} and not journal.stalled
    journal.append(Memory(b"second"))
    process.kill()
    loop.run_until(3.0)
    assert kept.seed().memory == b"first"


@pytest.mark.parametrize(("point", "kept", "written"), [
    (BEFORE_INTENT, False, False), (BEFORE_EFFECT, True, False), (MID_EFFECT, True, True)])
def test_an_agent_is_killed_before_intent_and_effect_and_behind_them(
    world: Cluster, point: int, kept: bool, written: bool,
) -> None:
    (edge,) = world.edges.values()
    world.weather.kill_mid_effect = 1.0
    edge.rng = OnePoint(point)
    edge.start()
    world.loop.run_until(0.2)
    assert edge.node is None
    assert list(edge.kept.intents) == ["1/store/run/run-0/put/1"] * kept
    assert list(world.store.docs) == ["run/run-0"] * written


class OnePoint(random.Random):
    """Always this one."""

    def __init__(self, point: int) -> None:
        super().__init__(1)
        self.point = point

    def randrange(self, *_: object) -> int:  # type: ignore[override]
        return self.point
