"""A pipeline whose rank becomes slow: cut anew behind a step, with the same bits at the end."""

from __future__ import annotations

import functools
import json
import re
import tempfile
from pathlib import Path

import pytest
import torch
from harness import Launcher
from test_pipeline import strategy

from holdfast.trainer.checkpoint import format as files
from holdfast.trainer.checkpoint.manifest import MANIFESTS
from holdfast.trainer.config import load
from holdfast.trainer.engines.strategy import Member

LIMIT_S = 150.0  # each rank traces the model: seconds, on a busy machine many
STEPS = 60


def config(tmp, *more):
    return load(None, [
        "model=slowed:Model", "data=tiny:Data", f"model_options.slow={tmp}/slow", f"steps={STEPS}",
        "batch=2", "micro_batches=4", "strategy=pipeline", f"work_dir={tmp}", "checkpoint.every=0",
        *more])


class Slowing(Launcher):
    """Has ranks become slow, or fast again, once a step is told: {step: {rank: times}}."""

    def __init__(self, *args, slow, **named):
        super().__init__(*args, **named)
        self.slow = dict(slow)

    def heard(self, rank, message):
        if message[0] == "step" and message[1] in self.slow:
            part = self.tmp / "slow.part"
            part.write_text(json.dumps(self.slow.pop(message[1])))
            part.rename(self.tmp / "slow")
        super().heard(rank, message)

    def told(self, words):
        return [event[4] for event in self.said("report") if words in event[4]]


@functools.cache
def unbroken(world, *more):
    """Never cut anew, and nobody waits: neither changes a bit."""
    with tempfile.TemporaryDirectory() as tmp:
        Path(tmp, "slow").write_text(json.dumps(dict.fromkeys(range(world), 0.0)))
        never = config(tmp, "pipeline.repartition=never", *more)
        results = Launcher(never, world, Path(tmp)).run(timeout_s=LIMIT_S)
        (digest,) = {r.digest for r in results.values()}
    return digest


def test_a_slow_rank_gets_less(tmp_path):
    """By seconds that are measured; a rank that waits is slow on any machine."""
    launcher = Slowing(config(tmp_path), 2, tmp_path, slow={12: {1: 3.0}})
    results = launcher.run(timeout_s=LIMIT_S)
    first = launcher.told("cut anew")[0]
    assert re.search(
        r"rank 1 \(stage 2 of 2, pipeline 1\) computes at [2-7]\d % of the fastest stage's speed: "
        r"the pipeline is cut anew, 1\.[2-9]\d times the throughput expected; 0\.0 MB sent, every "
        r"byte proven, in ", first), first
    assert {r.digest for r in results.values()} == {unbroken(2)}
    assert launcher.plans == [("fresh", 0)]
    (kept,) = (tmp_path / "checkpoints" / MANIFESTS).glob("gen-*.json")
    assert [len(one["pieces"]) for one in json.loads(kept.read_bytes())["strategy"]["stages"]] != [
        int(number) for number in re.findall(r"(\d+) pieces", launcher.told("pipeline of 2")[0])]
    steps = [(e[1], e[3]) for e in launcher.said("step")]
    assert len(steps) == len(set(steps)) == 2 * STEPS


CUT = "pipeline of 2 stages ("  # said where a generation begins with other cuts than this rank said
TOLD = ("model=tiny:Chain", "steps=50", "strategy=own_pipeline:Told")


def check_whole(launcher, results, *more):
    """The bits of a run that was never cut anew, and no step twice."""
    assert {r.digest for r in results.values()} == {
        unbroken(launcher.world, *TOLD, "pipeline.repartition=never", *more)}, launcher.log()
    steps = [(e[1], e[3]) for e in launcher.said("step")]
    assert len(steps) == len(set(steps))


def test_every_rank_enters_the_group_of_all_equally_often(tmp_path):
    """By that number the agent tells who left a collective out.  Stages in the middle send twice
    as much as those at the ends, and who gets pieces of a slow rank's is sent them."""
    launcher = Slowing(config(tmp_path, *TOLD, "strategy=own_pipeline:Counted", "steps=30",
                              "pipeline.stages=3"), 3, tmp_path, slow={})
    launcher.run(timeout_s=LIMIT_S)
    assert launcher.told("is cut anew")
    lines = (tmp_path / "counted").read_text().splitlines()
    counted = [tuple(map(int, line.split())) for line in lines]
    assert len(counted) == 3 * 30
    assert len({step for step, _ in counted}) == len(set(counted)) == 30, counted


def test_a_rank_that_was_slow_gets_all_of_it_back(tmp_path):
    more = ("strategy=own_pipeline:ToldForAWhile", "steps=60")
    launcher = Slowing(config(tmp_path, *TOLD, *more), 2, tmp_path, slow={})
    check_whole(launcher, launcher.run(timeout_s=LIMIT_S), *more)
    there, back = launcher.told("is cut anew")
    assert "rank 1 (stage 2 of 2, pipeline 1) computes at 20 %" in there
    assert "no rank is slow any more" in back
    assert launcher.plans == [("fresh", 0)]


# Before a rank makes its new part, sends, goes on, has the next step's gradients, enters that step:
# which cuts the survivors go on with.  None: that depends on who was how far.
AROUND = {"hold": "old", "moves": None, "moved": "new", "norm": "new", "update": "new"}


@pytest.mark.parametrize(("at", "group"), [*((at, 1) for at in AROUND), ("norm", 2)])
def test_a_rank_lost_around_the_move_leaves_old_cuts_or_new_ones(tmp_path, at, group):
    """Several pipelines: the lost part comes from its copy, under cuts that all the others have."""
    more = ("snapshot.enabled=false", f"pipeline.group={group}", "micro_batches=8")
    launcher = Slowing(config(
        tmp_path, *TOLD, *more, "strategy=own_pipeline:Killed", "strategy_options.rank=2",
        f"strategy_options.at={at}", f"strategy_options.once={tmp_path}/once"),
        4 * group, tmp_path, slow={})
    results = launcher.run(timeout_s=LIMIT_S)
    check_whole(launcher, results, *more)
    assert [kind for kind, _ in launcher.plans] == ["fresh", "survivor"], launcher.plans
    said = [(event[0], event[4]) for event in launcher.said("report")]
    begun = [number for number, words in said if words.startswith(CUT)]
    if AROUND[at] is not None:
        assert begun == ([1] if AROUND[at] == "old" else [1, 2]), said
    if AROUND[at] == "old":
        assert any(number == 2 and "is cut anew" in words for number, words in said), said


def test_a_lost_part_of_the_only_pipeline_comes_from_memory_whatever_its_cut(tmp_path):
    """The snapshot is of the old cuts, of the step behind which the model was cut anew."""
    launcher = Slowing(config(
        tmp_path, *TOLD, "snapshot.every=1", "strategy=own_pipeline:Killed",
        "strategy_options.rank=0", "strategy_options.at=norm",
        f"strategy_options.once={tmp_path}/once"), 2, tmp_path, slow={}, snapshots=True)
    results = launcher.run(timeout_s=LIMIT_S)
    check_whole(launcher, results)
    (anew,) = launcher.told("is cut anew")
    step = int(re.match(r"step (\d+): ", anew)[1])
    assert launcher.plans == [("fresh", 0), ("snapshot", step)]


def test_what_is_saved_behind_the_move_is_read_under_any_cut(tmp_path):
    launcher = Slowing(config(tmp_path, *TOLD, "checkpoint.every=30"), 2, tmp_path, slow={})
    check_whole(launcher, launcher.run(timeout_s=LIMIT_S))
    (anew,) = launcher.told("is cut anew")
    assert int(re.match(r"step (\d+): ", anew)[1]) < 30
    (found,) = [one for one in files.listing(str(tmp_path / "checkpoints")) if one.step == 30]
    about = files.read_manifest(Path(found.path))["run_manifest"]["strategy"]
    home = strategy("model=tiny:Chain")
    home.warm_up({"x": torch.zeros(2, 8), "y": torch.zeros(2, 1)})
    before = home.lay_out([Member()] * 2).about["stages"]
    assert [one["pieces"] for one in about["stages"]] != [one["pieces"] for one in before]
    for stages in (2, 3):
        folder = tmp_path / str(stages)
        folder.mkdir()
        again = Slowing(config(
            folder, *TOLD, "strategy=pipeline", f"pipeline.stages={stages}",
            "pipeline.repartition=never"), stages, folder, slow={})
        results = again.run(("disk", 30, found.generation, found.path), timeout_s=LIMIT_S)
        assert {r.digest for r in results.values()} == {
            unbroken(2, *TOLD, "pipeline.repartition=never")}


def test_what_arrives_damaged_is_not_gone_over_to(tmp_path):
    launcher = Slowing(config(tmp_path, *TOLD, "strategy=own_pipeline:Damaged"), 2, tmp_path,
                       slow={1: {}})
    check_whole(launcher, launcher.run(timeout_s=LIMIT_S))
    first = launcher.told("is cut anew")[0]
    assert first.endswith(": left as it is, what was sent arrived damaged")
    assert launcher.plans == [("fresh", 0)]


def test_the_newest_cuts_that_all_hold_are_taken():
    """Some had proven their new part when a peer was lost, and some had not; one holds nothing."""
    one = strategy("model=tiny:Chain")
    one.warm_up({"x": torch.zeros(2, 8), "y": torch.zeros(2, 1)})
    old, new = (0, one.home), (1, (one.home[0] - 1,))

    def cuts(*held):
        members = [Member(said=json.dumps({"held": each, "measured": None, "trace_s": 0.1}))
                   for each in held]
        layout = one.lay_out([*members, Member()])
        return layout.version, layout.cuts

    assert cuts([old, new], [old], [old, new]) == old
    assert cuts([old, new], [new], []) == new
    assert cuts([old, new], [old, new], [old, new]) == new
    assert cuts([], [], []) == old


def test_a_proposal_traces_nothing_since_no_phase_is_there_for_it():
    one = strategy("model=tiny:Chain")
    one.warm_up({"x": torch.zeros(2, 8), "y": torch.zeros(2, 1)})
    one.lay_out([Member()] * 2)
    other = (one.home[0] - 1,)
    assert one._laid_out(1, other).cuts == other and list(one.pipes) == [one.home]
    one.hold(one._laid_out(1, other), 0)
    assert other in one.pipes


@pytest.mark.parametrize("kind", ["TracedOnce", "NoMemory"])
def test_a_model_that_cannot_be_traced_again_is_left_as_it_is(tmp_path, kind):
    """On one rank alone: the others are not left waiting, and a healthy run goes on."""
    launcher = Slowing(config(tmp_path, *TOLD, f"strategy=own_pipeline:{kind}"), 2, tmp_path,
                       slow={})
    check_whole(launcher, launcher.run(timeout_s=LIMIT_S))
    first = launcher.told("is cut anew")[0]
    assert "left as it is, another rank cannot hold its part" in first
