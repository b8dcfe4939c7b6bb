"""A pipeline in a world that became smaller or larger: other stages of the same cost table."""

from __future__ import annotations

import contextlib
import functools
import json
import tempfile
from types import SimpleNamespace

import pytest
import torch
from harness import Launcher
from test_pipeline import LIMIT_S, batch, strategy

from holdfast.trainer.config import ConfigError, load
from holdfast.trainer.engines.strategy import Member
from holdfast.trainer.move import missing
from holdfast.trainer.state import Spec, State

STEPS = 16
FEWER = ("pipeline.stages=3", "pipeline.fewest=2")
ASKED, PARTED = 3, 8  # at which step ranks are asked to leave, and behind which


def config(tmp, *more):
    return load(None, [
        "model=tiny:Chain", "data=tiny:Data", f"steps={STEPS}", "batch=3", "micro_batches=6",
        "strategy=pipeline", f"work_dir={tmp}", "checkpoint.every=0", "pipeline.repartition=never",
        *more])


class Resizing(Launcher):
    """Each plan behind the first is for a world of another size.  A rank that has no place there
    is ended, and so is everybody where the plan is not from survivors' memory, as the agent has it.
    """

    def __init__(self, *args, worlds, **named):
        super().__init__(*args, **named)
        self.worlds, self.asked = list(worlds), False

    def plan(self, kind="fresh", *resume):
        if self.generation:
            self.world = self.worlds.pop(0)
            for rank in [r for r in self.ranks if r >= self.world or kind != "survivor"]:
                process, pipe, _ = self.ranks.pop(rank)
                process.kill()
                process.join(5)
                pipe.close()
        super().plan(kind, *resume)

    def told(self, words):
        return [event[4] for event in self.said("report") if words in event[4]]


class Growing(Resizing):
    """Has all ranks leave behind a step, as for nodes that are back."""

    def heard(self, rank, message):
        super().heard(rank, message)
        if message[:2] == ("step", ASKED) and not self.asked:
            self.asked = True
            for _, pipe, _ in self.ranks.values():
                pipe.send(("park", (PARTED, False)))


# Slow steps until then: in this stand-in the order travels through a pipe.
LATE = {(1, 1, step, "optimizer"): "late" for step in range(ASKED, PARTED + 1)}


@functools.cache
def unbroken():
    with tempfile.TemporaryDirectory() as tmp:
        results = Launcher(config(tmp, *FEWER), 3, tmp).run(timeout_s=LIMIT_S)
        (digest,) = {r.digest for r in results.values()}
    return digest


def check_steps(launcher):
    """No step was done twice by one rank."""
    steps = [(event[1], event[3]) for event in launcher.said("step")]
    assert len(steps) == len(set(steps)), steps


# ------------------------------------------------------------------------------------- the layout


@pytest.mark.parametrize(("settings", "ranks", "stages"), [
    ((4, 0, 1), 4, 4), ((4, 0, 1), 8, 4), ((4, 0, 1), 3, 0), ((4, 0, 1), 0, 0),
    ((4, 3, 1), 4, 4), ((4, 3, 1), 3, 3), ((4, 3, 1), 6, 3), ((4, 3, 1), 12, 4),
    ((4, 3, 1), 7, 0), ((4, 3, 1), 2, 0), ((4, 1, 1), 7, 1), ((3, 2, 2), 6, 3), ((3, 2, 2), 4, 2),
    ((3, 2, 2), 10, 0), ((3, 3, 1), 2, 0),
])
def test_a_world_has_as_many_stages_as_it_can_be_cut_into(settings, ranks, stages):
    words = (f"pipeline.{key}={value}"
             for key, value in zip(("stages", "fewest", "group"), settings))
    assert config("/nowhere", *words).pipeline.stages_of(ranks, 0) == stages


@pytest.mark.parametrize(("ranks", "micro_batches", "stages"), [
    (4, 2, 2), (3, 2, 0), (3, 3, 1), (2, 1, 2), (1, 1, 1), (6, 2, 2)])
def test_fewer_stages_make_no_more_pipelines_than_there_are_micro_batches(
        ranks, micro_batches, stages):
    options = config("/nowhere", "pipeline.stages=2", "pipeline.fewest=1").pipeline
    assert options.stages_of(ranks, micro_batches) == stages


def test_fewer_stages_are_the_same_tables_best_cut_and_told():
    one, fixed = strategy(*FEWER), strategy("pipeline.stages=2")
    for each in (one, fixed):
        each.warm_up(batch())
    layout = one.lay_out([Member("a")] * 2)
    assert layout.cuts == fixed.lay_out([Member("a")] * 2).cuts
    assert [place.words for place in layout.places] == [
        "stage 1 of 2, pipeline 1", "stage 2 of 2, pipeline 1"]
    assert layout.words.startswith("pipeline of 2 stages (")
    assert "; pipeline.stages = 3 does not divide 2 ranks; " in layout.words
    assert "does not divide" not in one.lay_out([Member("a")] * 6).words
    with pytest.raises(ConfigError, match="stages = 3 does not divide 5 ranks, nor does any down "
                                          "to pipeline.fewest = 2: set one of 1, 5"):
        one.lay_out([Member("a")] * 5)


def test_what_has_no_room_for_the_fewest_stages_says_so_at_the_start():
    """And not on the day on which a node is lost."""
    one = strategy(*FEWER)
    one.warm_up(batch())
    needs = {stages: max(int(found["memory_bytes"]) for found in
                         one.lay_out([Member("a")] * stages).about["stages"])
             for stages in (2, 3)}
    assert needs[3] < needs[2]
    one.lay_out([Member("a", needs[2])] * 3)
    with pytest.raises(ConfigError, match=r"pipeline\.fewest = 2: .*stage \d of 2 \(.*\) needs"):
        one.lay_out([Member("a", needs[3])] * 3)
    with pytest.raises(ConfigError, match="pipeline.fewest = 4: set at most stages = 3, or 0"):
        config("/nowhere", "pipeline.stages=3", "pipeline.fewest=4")


# ------------------------------------------------------------------------------------- with ranks


def test_a_stage_that_nobody_else_has_comes_from_the_disk_into_fewer(tmp_path):
    """The only pipeline lost a rank, and nobody takes its place: the same bits at the end."""
    launcher = Resizing(
        config(tmp_path, *FEWER, "checkpoint.every=4"), 3, tmp_path,
        {(1, 2, 11, "forward_backward"): "kill"}, worlds=[2])
    results = launcher.run(timeout_s=LIMIT_S)
    assert {r.digest for r in results.values()} == {unbroken()}, launcher.log()
    assert launcher.plans[0] == ("fresh", 0) and launcher.plans[1] in (("disk", 4), ("disk", 8))
    assert len(launcher.plans) == 2 and len(results) == 2
    assert len(launcher.told("pipeline of 2 stages (")) == 1


def test_ranks_that_come_make_it_more_stages_and_are_sent_what_they_lack(tmp_path):
    """From the memory of those that have all of it; one that dies in between costs nothing."""
    launcher = Growing(
        config(tmp_path, *FEWER, "strategy=own_pipeline:LostAsItComes", "strategy_options.rank=2",
               f"strategy_options.once={tmp_path}/once"), 2, tmp_path, LATE, worlds=[3, 3])
    results = launcher.run(timeout_s=LIMIT_S)
    assert {r.digest for r in results.values()} == {unbroken()}, launcher.log()
    assert [kind for kind, _ in launcher.plans] == ["fresh", "survivor", "survivor"]
    assert len(results) == 3 and (tmp_path / "once").exists()
    check_steps(launcher)


def test_survivors_that_hold_all_of_it_go_on_with_fewer_stages(tmp_path):
    """Of two pipelines of two stages a rank is lost: three of one stage are left."""
    launcher = Resizing(
        config(tmp_path, "pipeline.stages=2", "pipeline.fewest=1"), 4, tmp_path,
        {(1, 3, 7, "forward_backward"): "kill"}, worlds=[3])
    results = launcher.run(timeout_s=LIMIT_S)
    assert len({r.digest for r in results.values()}) == 1 and len(results) == 3, launcher.log()
    assert launcher.plans == [("fresh", 0), ("survivor", 7)]
    check_steps(launcher)


# ------------------------------------------------------------------------------------- the exchange


class Store(dict):
    def set(self, key, value):
        self[key] = value.encode()

    def multi_get(self, keys):
        return [self[key] for key in keys]


def exchange(*ranks):
    """What each of them finds, where a rank is (what it held, what it needs), by names."""
    def state(names):
        return State({name: Spec(torch.float32, (3,)) for name in names}, torch.device("cpu"))

    store, asked = Store(), []
    for rank, (held, needs) in enumerate(ranks):
        one = SimpleNamespace(rank=rank, world=len(ranks), store=store, asked=lambda: 1)
        asked.append((one, state(held) if held else None, state(needs)))
    for one in asked:
        with contextlib.suppress(KeyError):  # the others have not said theirs yet
            missing(*one)
    (found,) = {json.dumps(missing(*one)) for one in asked}
    return json.loads(found)


def test_only_what_a_rank_did_not_hold_is_sent_and_nothing_is_made_up():
    assert exchange(("ab", "a"), ("cd", "bc"), ("", "d")) == [["b", 0, 1], ["d", 1, 2]]
    assert exchange(("ab", "abc"), ("c", "")) == [["c", 1, 0]]
    assert exchange(("ab", "a"), ("", "bc")) is None, "nobody has c"
    assert exchange(("a", ""), ("a", ""), ("", "a"), ("", "a")) == [["a", 0, 2], ["a", 1, 3]], (
        "copies send to one each")
