"""Pipelines: the same gradients as one model's, a lost stage, and what cannot be cut."""

from __future__ import annotations

import functools
import re
import tempfile

import pytest
import torch
from harness import Launcher

from holdfast.trainer.config import ConfigError, load, named_class
from holdfast.trainer.engines.strategy import Member, Setup, build

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
    layout = one.lay_out([Member("a")] * 6)
    assert [place.shard for place in layout.places] == [0, 1, 2, 0, 1, 2]
    assert [place.data for place in layout.places] == [0, 0, 0, 1, 1, 1]
    assert layout.groups["copies"] == [(0, 3), (1, 4), (2, 5)]
    assert "pipeline of 3 stages" in layout.words and "expected bubble" in layout.words
    held = [one._names(stage, one.home) for stage in range(3)]
    whole = [name for name, _ in named_class("tiny:Chain", "")({}).named_parameters()]
    assert sorted(sum(held, [])) == sorted(whole) and all(held)
    assert len(layout.about["stages"]) == 3
    assert sum((stage["pieces"] for stage in layout.about["stages"]), []) == names


@pytest.mark.parametrize(("more", "said"), [
    (["model=tiny:Untraceable"], "tiny:Untraceable cannot be traced: .*or set strategy = 'ddp'"),
    (["model=tiny:Tied", "pipeline.stages=3"],
     "3 stages need 2 cuts, and 1 are free: first.weight.* shared by pieces on both sides"),
    (["model=tiny:Shared"], "blocks.0.0.weight and blocks.2.0.weight are one parameter, which a "
     "cut would part: untie them, or set strategy = 'ddp'"),
    (["pipeline.stages=30"], "30 stages of 19 pieces: set 1 to 19 stages"),
    (["model=tiny:Model"], "tiny:Model has the buffer 'norm.running_mean'"),
])
def test_what_cannot_be_cut_is_a_sentence(more, said):
    with pytest.raises(ConfigError, match=said):
        strategy(*more).warm_up(batch())


@pytest.mark.parametrize("error", [
    MemoryError("no more"), torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")])
def test_no_memory_to_trace_with_is_no_mistake_in_the_model(monkeypatch, error):
    """Code 78 would end a run whose world shrank, for the want of memory at that moment."""
    from tiny import Chain

    def forward(_self, _batch):
        raise error

    monkeypatch.setattr(Chain, "forward", forward)
    with pytest.raises(type(error), match=re.escape(str(error))):
        strategy("model=tiny:Chain").warm_up(batch())


def test_stages_that_do_not_divide_the_ranks_are_a_sentence():
    one = strategy()
    with pytest.raises(ConfigError, match="stages = 2 does not divide 3 ranks: set one of 1, 3"):
        one.lay_out([Member("a")] * 3)
    with pytest.raises(ConfigError, match="pipeline.schedule = 'x': set interleaved or simple"):
        config("/nowhere", "pipeline.schedule=x")


# ------------------------------------------------------------------------------------- with ranks


@pytest.mark.parametrize(("schedule", "number"), [
    ("simple", 3), ("interleaved", 3), ("interleaved", 4)])
def test_the_losses_are_those_of_one_model(tmp_path, schedule, number):
    """A value that skips all stages between, and no dropout: step for step the loss of plain ddp.
    Sent past the others, it had four stages wait for each other."""
    still = ["model=tiny:Still", f"work_dir={tmp_path}"]
    told = {}
    stages = [f"pipeline.stages={number}", f"pipeline.schedule={schedule}"]
    for name, world, more in (("ddp", 1, ["strategy=ddp"]), ("pipeline", number, stages)):
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


def resident(one):
    """Bytes of the model's parameters that lie outside of the state, each storage once."""
    state = one.state.data.untyped_storage().data_ptr() if one.state is not None else 0
    found = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes()
             for p in one.model.parameters()}
    found.pop(state, None)
    return sum(found.values())


def test_a_rank_keeps_its_stage_alone_before_and_behind_a_cut_made_anew():
    one = strategy()
    one.warm_up(batch())
    assert resident(one) == 0
    layout = one.lay_out([Member("a")] * 2)
    one.hold(layout, 1)
    assert resident(one) == 0
    one.initialise()
    whole = dict(one.setup.build().named_parameters())
    assert all(torch.equal(p, whole[name.removeprefix("model.")])
               for name, p in one.parameters.items())
    one.hold(one._laid_out(1, (one.home[0] - 1,)), 1)
    one.initialise()
    assert resident(one) < sum(p.numel() * 4 for p in one.parameters.values())  # the old cuts'
    assert all(torch.equal(p, whole[name.removeprefix("model.")])
               for name, p in one.parameters.items())
    shared = strategy("pipeline.group=2")
    shared.warm_up(batch())
    shared.hold(shared.lay_out([Member("a")] * 4), 0)
    assert resident(shared) == sum(p.numel() * 4 for p in shared.parameters.values())


def test_a_stage_that_fits_nowhere_is_named_and_what_fits_is_cut_so():
    def most(layout):
        return max(stage["memory_bytes"] for stage in layout.about["stages"])

    def laid_out(memory_bytes, *more):
        one = strategy("pipeline.stages=3", *more)
        one.warm_up({"x": torch.zeros(300, 8), "y": torch.zeros(300, 1)})
        return one.lay_out([Member("a", memory_bytes)] * 3)

    quick, small = laid_out(0), laid_out(0, "pipeline.optimize=memory")
    assert most(small) < most(quick)
    chosen = laid_out(most(small))
    assert chosen.cuts != quick.cuts and most(chosen) == most(small)
    with pytest.raises(ConfigError, match=r"stage \d of 3 \(.* to .*\) needs 1 MB a rank, and "
                                          r"there are 1: no cut into 3 stages keeps every one"):
        laid_out(most(small) - 1)


def test_the_first_line_counts_what_crosses_slow_links():
    """Activations on, gradients back, for each micro-batch; and the sums over a stage's copies."""
    one = strategy()
    one.warm_up({"x": torch.zeros(300, 8), "y": torch.zeros(300, 1)})
    layout = one.lay_out([Member("a"), Member("b")])
    (sent, _) = (stage["send_bytes"] for stage in layout.about["stages"])
    assert sent > 20_000 and layout.words.endswith(
        f"; {6 * sent / 1e6:.1f} MB a rank over slow links a step")
    layout = one.lay_out([Member("a")] * 2 + [Member("b")] * 2)
    most = max(sum(p.numel() for p in one.pipes[one.home].get_stage_module(n).parameters())
               for n in (0, 1))
    assert layout.words.endswith(f"; {4 * most / 1e6:.1f} MB a rank over slow links a step")


GROUPS = ("pipeline.group=2",)


def test_ranks_of_a_stage_share_it_in_groups_of_near_ones():
    one = strategy(*GROUPS, "topology.a=left", "topology.b=right")
    one.warm_up(batch())
    nodes = [Member(node) for node in "aabbaabb"]
    layout = one.lay_out(nodes)
    assert layout.groups["pipeline"] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert layout.groups["shard"] == [(0, 4), (2, 6), (1, 5), (3, 7)]  # left, right of each stage
    assert layout.groups["copies"] == [(0, 2), (4, 6), (1, 3), (5, 7)]
    assert [layout.holders(shard) for shard in range(4)] == list(layout.groups["copies"])
    assert layout.places[6].words == "stage 1 of 2, pipeline 4, shard 2 of 2, partition group 2"
    assert [place.data for place in layout.places] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert "in 2 group(s) of 2 of its 4 ranks (pipeline.group)" in layout.words
    sizes = [sum(p.numel() for p in one.pipe.get_stage_module(n).parameters()) for n in (0, 1)]
    # A rank's half of the larger stage is summed with the one other that holds it: a ring of two.
    assert f"{4 * max(sizes) / 2 / 1e6:.1f} MB a rank over slow" in layout.words
    assert layout.about["group"] == 2
    held = []
    for rank in (0, 4):  # the two ranks of a group hold all of a stage between them
        state = one.hold(layout, rank)
        assert state is one.hold(layout, rank)
        held.append(sum(p.numel() for p in one.rows.values()))
        assert sum(p.numel() for p in one.parameters.values()) == sizes[0]
    assert sum(held) == sizes[0] and all(held)
    for stages, said in ((2, "divide the 3 ranks of a stage: set one of 1, 3"),
                         (3, "divide the 1 ranks of a stage: set one of 1$")):
        lone = strategy(*GROUPS, f"pipeline.stages={stages}")
        lone.warm_up(batch())
        with pytest.raises(ConfigError, match=f"pipeline.group = 2 does not {said}"):
            lone.lay_out(nodes[: 3 if stages == 3 else 6])


def losses(launcher):
    """As rank 0 told them: of its own micro-batches."""
    return {event[3]: event[4] for event in launcher.said("step") if event[1] == 0}


def test_a_group_sums_as_one_model_does_bucket_by_bucket(tmp_path):
    """Two stages, each shared by two ranks, tensors of one row among them: the losses of ddp, and
    in smaller buckets the same bits."""
    told, ended = {}, {}
    for name, world, more in (
            ("ddp", 2, ["strategy=ddp"]), ("pipeline", 4, GROUPS),
            ("small", 4, [*GROUPS, "strategy=own_pipeline:SmallBuckets"])):
        (tmp_path / name).mkdir()
        launcher = Launcher(config(tmp_path / name, "model=tiny:Still", *more), world,
                            tmp_path / name)
        ended[name] = {r.digest for r in launcher.run(timeout_s=LIMIT_S).values()}
        told[name] = losses(launcher)
    assert len(told["ddp"]) == STEPS
    assert told["pipeline"] == pytest.approx(told["ddp"], rel=1e-5)
    assert ended["pipeline"] == ended["small"] and len(ended["pipeline"]) == 1


def test_a_lost_shard_of_a_stage_comes_from_its_replica(tmp_path):
    """Two stages of two shards, twice: every loss is made good from the other group's memory."""
    more = ["micro_batches=8", "model=tiny:Still"]
    launcher = Launcher(config(tmp_path, *GROUPS, *more), 8, tmp_path, {
        (1, 5, 2, "forward_backward"): "kill", (2, 2, 4, "optimizer"): "kill"})
    results = launcher.run(timeout_s=LIMIT_S)
    assert {r.digest for r in results.values()} == {unbroken(8, *GROUPS, *more)}, launcher.log()
    assert [kind for kind, _ in launcher.plans] == ["fresh"] + ["survivor"] * 2
    steps = [(e[1], e[3]) for e in launcher.said("step")]
    assert len(steps) == len(set(steps))
    (tmp_path / "ddp").mkdir()
    ddp = Launcher(config(tmp_path / "ddp", *more, "strategy=ddp"), 4, tmp_path / "ddp")
    ddp.run(timeout_s=LIMIT_S)
    assert losses(launcher) == pytest.approx(losses(ddp), rel=1e-5)


def test_the_end_is_the_same_wherever_the_model_is_cut(tmp_path):
    """What dropout draws and the norm follow from the model alone: 2, 3 and 4 stages, same bits."""
    assert len({unbroken(stages, f"pipeline.stages={stages}") for stages in (2, 3, 4)}) == 1
