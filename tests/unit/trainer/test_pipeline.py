"""Pipelines: the same gradients as one model's, a lost stage, and what cannot be cut."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import pytest
import torch
from harness import Launcher

from holdfast.trainer.checkpoint import format as files
from holdfast.trainer.checkpoint import portable
from holdfast.trainer.config import ConfigError, load, named_class
from holdfast.trainer.engines.strategy import Setup, build

STEPS = 8
LIMIT_S = 300.0  # each rank traces the model: seconds, on a busy machine many


def config(tmp, *more):
    return load(None, [
        "model=tiny:Chain", "data=tiny:Data", f"steps={STEPS}", "batch=3", "micro_batches=6",
        "strategy=pipeline", f"work_dir={tmp}", "checkpoint.every=0", *more])


def strategy(*more):
    chosen = config("/nowhere", *more)

    def model():
        torch.manual_seed(1)
        return named_class(chosen.model, "model")(chosen.model_options)

    return build(Setup(chosen, model, torch.device("cpu")))


def batch():
    return {"x": torch.zeros(3, 8), "y": torch.zeros(3, 1)}


@functools.cache
def unbroken(world, *more):
    with tempfile.TemporaryDirectory() as tmp:
        results = Launcher(config(tmp, *more), world, tmp).run(timeout_s=LIMIT_S)
        (digest,) = {r.digest for r in results.values()}
    return digest


# ------------------------------------------------------------------------------------- the cut


def test_the_plan_is_the_same_everywhere_and_told(tmp_path):
    one = strategy("pipeline.stages=3")
    one.warm_up(batch())
    names = [piece.name for piece in one.pieces]
    assert names[:2] == ["inputs", "first"] and names[-1] == "last" and "blocks.2.0" in names
    layout = one.lay_out(["a"] * 6)
    assert [place.shard for place in layout.places] == [0, 1, 2, 0, 1, 2]
    assert [place.data for place in layout.places] == [0, 0, 0, 1, 1, 1]
    assert layout.groups["copies"] == [(0, 3), (1, 4), (2, 5)]
    assert "pipeline of 3 stages" in layout.words and "expected bubble" in layout.words
    held = [one._names(stage) for stage in range(3)]
    whole = [name for name, _ in named_class("tiny:Chain", "")({}).named_parameters()]
    assert sorted(sum(held, [])) == sorted(whole) and all(held)
    assert len(layout.about["stages"]) == 3
    assert sum((stage["pieces"] for stage in layout.about["stages"]), []) == names


@pytest.mark.parametrize(("more", "said"), [
    (["model=tiny:Untraceable"], "tiny:Untraceable cannot be traced: .*or set strategy = 'ddp'"),
    (["model=tiny:Tied", "pipeline.stages=3"],
     "3 stages need 2 cuts, and 1 are free: first.weight.* shared by pieces on both sides"),
    (["pipeline.stages=30"], "30 stages of 19 pieces: set 1 to 19 stages"),
    (["model=tiny:Model"], "tiny:Model has the buffer 'norm.running_mean'"),
])
def test_what_cannot_be_cut_is_a_sentence(more, said):
    with pytest.raises(ConfigError, match=said):
        strategy(*more).warm_up(batch())


def test_stages_that_do_not_divide_the_ranks_are_a_sentence():
    one = strategy()
    with pytest.raises(ConfigError, match="stages = 2 does not divide 3 ranks: set one of 1, 3"):
        one.lay_out(["a"] * 3)
    with pytest.raises(ConfigError, match="pipeline.schedule = 'x': set interleaved or simple"):
        config("/nowhere", "pipeline.schedule=x")


# ------------------------------------------------------------------------------------- with ranks


@pytest.mark.parametrize("schedule", ["simple", "interleaved"])
def test_the_losses_are_those_of_one_model(tmp_path, schedule):
    """Three stages, values that skip one, and no dropout: step for step the loss of plain ddp."""
    still = ["model=tiny:Still", f"work_dir={tmp_path}"]
    told = {}
    stages = ["pipeline.stages=3", f"pipeline.schedule={schedule}"]
    for name, world, more in (("ddp", 1, ["strategy=ddp"]), ("pipeline", 3, stages)):
        launcher = Launcher(config(tmp_path / name, *still, *more), world, tmp_path / name)
        (tmp_path / name).mkdir()
        launcher.run(timeout_s=LIMIT_S)
        told[name] = {event[3]: event[4] for event in launcher.said("step") if event[1] == 0}
    assert len(told["ddp"]) == STEPS
    assert told["pipeline"] == pytest.approx(told["ddp"], rel=1e-5)


def test_a_lost_stage_comes_from_its_copy_and_no_step_is_redone(tmp_path):
    launcher = Launcher(config(tmp_path), 4, tmp_path, {
        (1, 1, 2, "forward_backward"): "kill", (2, 2, 4, "optimizer"): "kill",
        (3, 0, 6, "step_begin"): "kill"}, standby=1)
    results = launcher.run(timeout_s=LIMIT_S)
    assert {r.digest for r in results.values()} == {unbroken(4)}, launcher.log()
    assert [kind for kind, _ in launcher.plans] == ["fresh"] + ["survivor"] * 3
    steps = [(e[1], e[3]) for e in launcher.said("step")]
    assert len(steps) == len(set(steps))


def test_what_a_pipeline_saved_ddp_reads_and_the_other_way_round(tmp_path):
    """Weights and moments travel whole: the same run, with another strategy in its second half."""
    for first, second in (("pipeline", "ddp"), ("ddp", "pipeline")):
        tmp = tmp_path / first
        tmp.mkdir()
        more = ["model=tiny:Still", "checkpoint.every=4"]
        Launcher(config(tmp, *more, f"strategy={first}", "steps=4",
                        "optimizer.final_fraction=1"), 2, tmp).run(timeout_s=LIMIT_S)
        (found,) = [f for f in files.listing(tmp / "checkpoints") if f.step == 4]
        launcher = Launcher(config(tmp, *more, f"strategy={second}",
                                   "optimizer.final_fraction=1"), 2, tmp)
        launcher.run(("disk", found.step, found.generation, found.path), LIMIT_S)
        newest = portable.read(Path(files.listing(tmp / "checkpoints")[0].path))
        assert newest.origin["step"] == STEPS
        told = {place.name: portable.tensor(place) for place in newest.places}
        if first == "pipeline":
            before = told
    assert before.keys() == told.keys()
    assert all(torch.allclose(before[name], told[name], atol=1e-5) for name in told)
