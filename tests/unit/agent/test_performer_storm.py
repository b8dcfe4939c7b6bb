"""The real performer in virtual time: seeds of slow disks, lost answers, launchers and lives.

The simulator performs effects by an edge of its own; what the agent runs is held here.
"""

from __future__ import annotations

import asyncio
import random
import selectors
from types import SimpleNamespace

import pytest

from holdfast.agent.actions.performer import JOURNAL_WAIT_S, Performer
from holdfast.agent.core.model import Effect, EffectOutcome, Stop, StoreWrite
from holdfast.agent.history.journal import Finished, Intent
from holdfast.agent.launchers.protocol import Outcome
from holdfast.agent.store.base import Conflict, StoreError

LIVES, LIFE_S, TICK_S, DEADLINE_S = 3, 40.0, 0.5, 3.0


class VirtualLoop(asyncio.SelectorEventLoop):
    """Nobody waits in it: its clock goes to the next timer at once."""

    def __init__(self) -> None:
        self.now_s = 0.0
        super().__init__(SimpleNamespace(
            select=self._select, register=lambda *_: None, unregister=lambda *_: None,
            close=lambda: None, get_map=dict, get_key=self._nobody))

    def _nobody(self, file: object) -> None:
        raise KeyError(file)

    def _select(self, timeout_s: float | None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout_s is not None, "everybody waits for ever"
        self.now_s += timeout_s
        return []

    def time(self) -> float:
        return self.now_s


class Journal:
    """One life's queue in front of what lasts; nothing of it is written once that life is over."""

    def __init__(self, world: World) -> None:
        self.world, self.life, self.last_s = world, world.life, 0.0
        done = {one.id for one in world.finished}
        self.seed = SimpleNamespace(
            counters={}, finished=tuple(world.finished),
            unfinished=tuple(one for id, one in world.intents.items() if id not in done))

    @property
    def stalled(self) -> bool:
        return self.world.stalled

    def append(self, *records: object, synced: bool = False, wait: bool = False):
        world, done = self.world, self.world.loop.create_future() if wait else None
        slow = world.rng.random() < 0.2 or world.stalled
        delay_s = world.rng.uniform(0.0, 2.0 if slow else JOURNAL_WAIT_S / 2)
        self.last_s = max(self.last_s, world.loop.time() + delay_s)  # one after the other
        world.loop.call_at(self.last_s, self._commit, records, done)
        return done

    def _commit(self, records: tuple[object, ...], done: asyncio.Future | None) -> None:
        if self.life != self.world.life:
            return  # the process is gone
        for one in records:
            if isinstance(one, Intent):
                assert one.id not in self.world.intents, "one intent for an id"
                self.world.intents[one.id] = one
            elif isinstance(one, Finished):
                assert one.id not in {old.id for old in self.world.finished}, "one outcome"
                self.world.finished.append(one)
        if done is not None and not done.done():
            done.set_result(None)


class World:
    """Journal, store and launcher, which outlive an agent, and what they saw of each effect."""

    def __init__(self, seed: int) -> None:
        self.rng, self.loop = random.Random(seed), asyncio.get_running_loop()
        self.intents: dict[str, Intent] = {}
        self.finished: list[Finished] = []
        self.stalled = False
        self.writes: list[str] = []
        self.answers: dict[str, Outcome] = {}  # of the launcher, which repeats them
        self.life, self.launcher, self.is_there = 0, (1, 0.0), True
        self.levels: dict[str, EffectOutcome] = {}
        self.listed: dict[str, Effect] = {}
        self.of_life: dict[str, int] = {}
        # id -> when, whether the journal stalled, and the launcher that it was decided for
        self.begun: dict[str, tuple[float, bool, tuple[int, float]]] = {}
        self.errors: list[object] = []
        self.loop.set_exception_handler(lambda loop, context: self.errors.append(context))

    def begin(self) -> None:
        """An agent's life: what it knows is what was committed.  An effect whose intent is not is
        nothing that the core remembers either, as its memory is of the same transaction."""
        self.life += 1
        self.listed = {id: one for id, one in self.listed.items() if id in self.intents}
        self.levels.clear()
        self.performer = Performer(
            Journal(self), self, self.order, lambda why: None, self.wrong,
            lambda run: self.launcher, self.never, self.never)

    def wrong(self, part: str, error: BaseException | str) -> None:
        self.errors += [error] if isinstance(error, BaseException) else []

    def first(self, id: str) -> None:
        """Something is done for an effect: its intent is on disk, or the disk had its time."""
        since_s, stalled, launcher = self.begun[id]
        assert launcher == self.launcher or id in self.listed and self.listed[id].kind == "put"
        waited_s = self.loop.time() - since_s
        assert id in self.intents or stalled or waited_s > JOURNAL_WAIT_S - 1e-6, "no intent"

    async def never(self, *_: object) -> str:
        raise AssertionError("no such effect is asked for")

    # ------------------------------------------------------------ the store

    async def put(self, write: StoreWrite) -> int:
        self.writes.append(write.key)
        self.first(write.key.removeprefix("run/"))
        await asyncio.sleep(self.rng.expovariate(1.0))
        error = self.rng.choice([None, None, Conflict("x"), StoreError("down"), TimeoutError("y")])
        if error is not None:
            raise error
        return 1

    # ------------------------------------------------------------ the launcher

    def order(self, run: str, fields: dict[str, object]) -> str:
        if not self.is_there:
            return "no launcher"
        id = str(fields["id"])
        assert id not in self.levels, "an order for what is over"
        assert self.of_life[id] == self.life, "an order of an earlier life"
        self.first(id)
        if id not in self.answers:
            self.answers[id] = Outcome(id, self.rng.random() < 0.8)
        if self.rng.random() < 0.8:  # else its answer is lost with the connection
            for _ in range(self.rng.choice([1, 1, 2])):
                self.loop.call_later(self.rng.expovariate(1.0), self.say, self.answers[id])
        return ""

    def say(self, answer: Outcome) -> None:
        if self.is_there:
            self.performer.launcher_outcome("r", answer)

    def comes(self) -> None:
        self.is_there = True
        self.performer.launcher_came("r")
        for answer in list(self.answers.values())[-8:]:
            self.say(answer)

    # ------------------------------------------------------------ the core's side

    def step(self, asks: bool = True) -> None:
        now_s = self.loop.time()
        for outcome in self.performer.outcomes(self.listed, now_s):
            if outcome.id in self.listed:
                assert self.levels.setdefault(outcome.id, outcome) == outcome, "two outcomes"
                del self.listed[outcome.id]
        if asks and self.rng.random() < 0.5:
            self.ask(f"{len(self.of_life)}")
        fresh = self.performer.fresh(self.listed.values())
        self.begun |= {one.id: (now_s, self.stalled, self.launcher) for one in fresh}
        self.performer.perform(fresh, b"memory")
        assert not self.performer.fresh(self.listed.values()), "asked for twice"

    def ask(self, id: str) -> None:
        body = (StoreWrite(f"run/{id}", 0, b"{}") if self.rng.random() < 0.3
                else Stop("r", 1, (), 1.0, "storm"))
        kind = "put" if isinstance(body, StoreWrite) else "stop"
        self.listed[id] = Effect(id, kind, "run/r", "storm", DEADLINE_S, body)
        self.of_life[id] = self.life

    def weather(self) -> None:
        chance = self.rng.random()
        self.stalled = chance < 0.1
        if 0.1 < chance < 0.2:
            self.is_there = False
        elif 0.2 < chance < 0.25:
            self.launcher = (self.launcher[0] + 1, self.loop.time())
            self.answers.clear()
            self.comes()
        elif not self.is_there:
            self.comes()


async def storm(seed: int) -> World:
    world = World(seed)
    for life in range(LIVES):
        world.begin()
        last = life == LIVES - 1
        until_s = world.loop.time() + LIFE_S * (1.0 if last else world.rng.random())
        while world.loop.time() < until_s:
            world.weather()
            world.step()
            await asyncio.sleep(TICK_S)
        if not last:
            await world.performer.close()
    deadline_s = world.loop.time() + 3 * DEADLINE_S
    world.stalled = False
    while world.listed and world.loop.time() < deadline_s:
        world.step(asks=False)
        await asyncio.sleep(TICK_S)
    await asyncio.sleep(3.0)  # what is on its way to the journal
    return world


def of_seed(seed: int) -> World:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(storm(seed))


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_every_effect_is_settled_once_whatever_goes_wrong(first: int) -> None:
    for seed in range(first, first + 50):
        world = of_seed(seed)
        assert not world.errors, f"{seed}: {world.errors}"
        assert not world.listed and not world.performer.in_flight, seed
        assert len(world.writes) == len(set(world.writes)), f"{seed}: written twice"
        done = {one.id: one.ok for one in world.finished}
        for id, outcome in world.levels.items():
            assert id in done or id not in world.intents, f"{seed}: no outcome of {id} is kept"
            assert done.get(id, outcome.ok) == outcome.ok, f"{seed}: {id} ended in two ways"
