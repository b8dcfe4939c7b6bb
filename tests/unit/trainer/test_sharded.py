"""fsdp and mics: the same sums as ddp, the same promises after a fault, and each other's files."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import pytest
import torch
from blocks import Model
from harness import Launcher, Lost

from holdfast.trainer.checkpoint import format as files
from holdfast.trainer.checkpoint.restore import read_into
from holdfast.trainer.config import ConfigError, load
from holdfast.trainer.engines import topology
from holdfast.trainer.engines.hierarchical import InTwoHops
from holdfast.trainer.engines.memory import Need
from holdfast.trainer.engines.strategy import Member
from holdfast.trainer.quality import kept
from holdfast.trainer.state import State, specs_of

STEPS, WORLD = 8, 4
FSDP, MICS = ("strategy=fsdp",), ("strategy=mics", "mics.group=2")


def config(tmp, *more):
    return load(None, [
        "model=blocks:Model", "data=tiny:Data", f"steps={STEPS}", "batch=3",
        f"micro_batches={WORLD + 1}", f"work_dir={tmp}", "checkpoint.every=0",
        "optimizer.warmup_steps=1000", *more])


def run(tmp, *more, world=WORLD, faults=None, snapshots=False, **options):
    Path(tmp).mkdir(exist_ok=True)
    launcher = Launcher(config(tmp, *more), world, tmp, faults, snapshots)
    for name, value in options.items():
        setattr(launcher, name, value)
    launcher.digests = {r.digest for r in launcher.run(timeout_s=120).values()}
    steps = [(e[1], e[3]) for e in launcher.said("step")]
    launcher.redone = len(steps) - len(set(steps))
    return launcher


@functools.cache
def unbroken(*strategy):
    with tempfile.TemporaryDirectory() as tmp:
        (digest,) = run(tmp, *strategy).digests
    return digest


def test_kills_anywhere_leave_no_trace_and_redo_nothing_while_a_copy_lives(tmp_path):
    launcher = run(tmp_path, *MICS, faults={
        (1, WORLD - 1, 2, "forward_backward"): "kill",
        (2, 0, 3, "data"): "kill",
        (3, 1, 5, "optimizer"): "kill",  # the others may be a step ahead, or not all of them
    })
    assert launcher.digests == {unbroken(*MICS)}, launcher.log()
    assert [kind for kind, _ in launcher.plans] == ["fresh"] + ["survivor"] * 3
    assert launcher.redone == 0


def test_fsdp_in_groups_takes_a_lost_shard_from_its_copy(tmp_path):
    """The same groups as those of mics, and so the same bits."""
    launcher = run(tmp_path, *FSDP, "fsdp.group=2", faults={(1, 3, 3, "optimizer"): "kill"})
    assert launcher.digests == {unbroken(*MICS)}, launcher.log()
    assert [kind for kind, _ in launcher.plans] == ["fresh", "survivor"] and launcher.redone == 0


TWO_NODES = ("topology.0=a", "topology.1=a", "topology.2=b", "topology.3=b")


def test_a_group_over_nodes_gathers_in_two_hops_and_to_the_same_bits(tmp_path):
    """Through a loss, whose newcomer is in all the groups of the hops."""
    launcher = run(tmp_path / "hops", *FSDP, "fsdp.group=4", *TWO_NODES, faults={
        (1, 2, 3, "optimizer"): "gloo"})
    assert launcher.digests == {unbroken(*FSDP)}, launcher.log()
    assert len(launcher.plans) == 2
    said = [event[4] for event in launcher.said("report")]
    assert any("gathered in two hops, 2 places of 2 ranks a group" in text for text in said), said
    flat = run(tmp_path / "flat", *FSDP, "fsdp.hierarchical=false", *TWO_NODES, "steps=1")
    assert not any("two hops" in event[4] for event in flat.said("report"))


def test_two_hops_bring_the_rows_in_rank_order():
    """Four ranks, two to a node; each hop is carried out as a group of these ranks would."""
    class Hop:
        def __init__(self, others):
            self.others = others

        def size(self):
            return len(self.others)

    rows = [torch.full((3,), float(rank)) for rank in range(4)]
    into = torch.empty(12)

    def gather(output, given, group):
        torch.cat([of(given) for of in group.others], out=output)

    # Rank 1 holds place 1 of node 0; rank 3 is its counterpart, rank 0 its neighbour.
    across = Hop([lambda given: given, lambda _: rows[3]])
    inside = Hop([lambda given: given - 1, lambda given: given])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "all_gather_into_tensor", gather)
        InTwoHops(across, inside)(into, rows[1], None)
    assert torch.equal(into, torch.cat(rows))


def test_a_rank_that_did_not_step_ends_the_step_at_the_next_join(tmp_path):
    """Rank 0 has stepped; rank 1, its group's other half, has not, and its copy is killed."""
    launcher = run(tmp_path, *MICS, faults={
        (1, 3, 4, "optimizer"): "kill", (1, 1, 4, "optimizer"): "gloo",
    })
    assert launcher.digests == {unbroken(*MICS)}, launcher.log()
    parked = {e[1]: (e[3], e[8]) for e in launcher.said("parked")}
    assert parked[1] == (4, True), parked
    assert launcher.redone == 0 and {kind for kind, _ in launcher.plans[1:]} == {"survivor"}


@pytest.mark.parametrize("strategy", [FSDP, MICS])
def test_without_a_copy_the_snapshot_is_used_and_then_the_disk(tmp_path, strategy):
    lost = {(1, 1, 6, "data"): "kill", (1, 3, 6, "data"): "kill"}  # both copies of shard 1
    launcher = run(tmp_path / "s", *strategy, "snapshot.every=4", snapshots=True, faults=lost)
    assert launcher.plans == [("fresh", 0), ("snapshot", 4)]
    assert launcher.digests == {unbroken(*strategy)}, launcher.log()
    launcher = run(tmp_path / "d", *strategy, "checkpoint.every=4", faults=lost)
    assert launcher.plans == [("fresh", 0), ("disk", 4)]
    assert launcher.digests == {unbroken(*strategy)}, launcher.log()


def whole(path):
    state = State(specs_of(Model({})), torch.device("cpu"))
    read_into(Path(path), state)
    return state


def test_what_one_has_saved_every_other_loads_and_goes_on_from(tmp_path):
    """Saved under each after 4 steps, loaded under each: equal bytes, and the next loss equal."""
    ways = {"ddp": (), "fsdp": FSDP, "mics": MICS}
    made = {}
    for name, way in ways.items():
        run(tmp_path / name, *way, "checkpoint.every=4", "steps=4", "data=blocks:Data")
        (found,) = files.listing(tmp_path / name / "checkpoints")
        assert files.verify(found.path) == []
        state = whole(found.path)
        made[name] = (found, state)
        weights = files.weights_digest(
            (name, view.numpy().tobytes()) for name, view in state.views.items())
        assert kept.of_checkpoint(Path(found.path), 4, 1, weights).step == 4
    for name, (_, state) in made.items():
        for tensor, view in state.views.items():  # AdamW's last bit depends on a tensor's length
            torch.testing.assert_close(view, made["ddp"][1].views[tensor], rtol=1e-5, atol=1e-8,
                                       msg=lambda text, name=name: f"{name}: {text}")
    for saved, (found, _) in made.items():
        losses = {}
        for loaded, way in ways.items():
            tmp = tmp_path / f"{saved}-{loaded}"
            tmp.mkdir()
            launcher = Launcher(config(tmp, *way, "steps=5"), WORLD, tmp)
            launcher.generation = 1
            launcher.run(("disk", 4, 1, found.path))
            losses[loaded] = sorted(e[4] for e in launcher.said("step"))
        assert len(losses["ddp"]) == WORLD
        assert all(found == losses["ddp"] for found in losses.values()), (saved, losses)


def test_gradients_are_those_of_ddp(tmp_path):
    """After one step exp_avg is a tenth of the gradient."""
    found = {}
    for name, way in {"ddp": (), "fsdp": FSDP, "mics": MICS}.items():
        run(tmp_path / name, *way, "steps=1", "checkpoint.every=1", "optimizer.clip_norm=0",
            "micro_batches=9")
        found[name] = whole(files.listing(tmp_path / name / "checkpoints")[0].path)
    for name in ("fsdp", "mics"):
        for tensor, view in found[name].views.items():
            if "exp_avg." in tensor:
                apart = (view - found["ddp"].views[tensor]).abs().max()
                assert apart <= 1e-7, (name, tensor, apart)


def test_a_weight_that_a_unit_has_twice_is_trained_as_one(tmp_path):
    losses = {}
    for name, way in {"ddp": (), "fsdp": FSDP}.items():
        launcher = run(tmp_path / name, *way, "model=blocks:Computed", "steps=3", world=2)
        losses[name] = sorted((e[1], e[3], e[4]) for e in launcher.said("step"))
    assert len(losses["ddp"]) == 6 and losses["fsdp"] == losses["ddp"]


@pytest.mark.parametrize(("settings", "said"), [
    (("strategy=mics", "mics.group=3"), "mics.group = 3 does not divide the world of 4 ranks"),
    (("strategy=fsdp", "fsdp.group=3"), "set one of 1, 2, 4"),
    ((*MICS, "topology.elsewhere=a"), "set topology.NODE or topology.RANK"),
    (("strategy=mics", "mics.memory_gb=0.00000001"), "start more ranks, set a smaller model"),
    ((*MICS, "model=blocks:Tied"), "blocks.2.0.weight is also blocks.0.0.weight"),
    ((*FSDP, "model=blocks:Scalar"), "parameter scale is a scalar"),
])
def test_bad_settings_are_a_sentence(tmp_path, settings, said):
    with pytest.raises(Lost, match="ConfigError") as found:
        run(tmp_path, *settings)
    assert said in str(found.value)


# ------------------------------------------------------------------------------------ by value


def test_near_ranks_share_a_group():
    assert topology.near_first(list("aabb"), 2) == [(0, 1), (2, 3)]
    assert topology.near_first(list("abab"), 2) == [(0, 2), (1, 3)]
    assert topology.near_first(list("aaab"), 2) == [(0, 1), (2, 3)]
    assert topology.near_first(list("abab"), 4) == [(0, 1, 2, 3)]
    nodes = [Member("x"), Member("x"), Member("y"), Member("y")]
    assert topology.labels({}, nodes) == ["x", "x", "y", "y"]
    assert topology.labels({"x": "left", "2": "left", "y": "right"}, nodes) == [
        "left", "left", "left", "right"]
    with pytest.raises(ConfigError, match=r"no label for node y \(rank 2\), y \(rank 3\)"):
        topology.labels({"x": "left"}, nodes)


@pytest.mark.parametrize(("labels", "groups", "ranks"), [
    ("aabb", [(0, 1, 2, 3)], 2),
    ("aaabbb", [(0, 1, 2, 3, 4, 5)], 3),
    ("aabbccdd", [(0, 1, 2, 3), (4, 5, 6, 7)], 2),
    ("aabb", [(0, 1), (2, 3)], 1),  # no group spans nodes
    ("aaab", [(0, 1, 2, 3)], 1),
    ("abab", [(0, 1, 2, 3)], 1),  # the rows of one node lie apart
    ("aabbbb", [(0, 1, 2, 3), (4, 5)], 1),  # and not every group does
    ("abcd", [(0, 1, 2, 3)], 1),
])
def test_hops_need_as_many_ranks_of_every_node_side_by_side(labels, groups, ranks):
    assert topology.ranks_a_label(list(labels), groups) == ranks


def test_bytes_over_slow_links_by_value():
    """4 ranks on 2 nodes, 4 micro-steps, 100 bytes of weights."""
    nodes = list("aabb")
    near = topology.slow_bytes(nodes, [(0, 1), (2, 3)], 100, 4)
    assert near == 50  # one all-reduce of half of it with one other, whatever the micro-steps
    assert topology.slow_bytes(nodes, [(0, 1, 2, 3)], 100, 4) == 4 * (2 * 25) + 4 * 2 * 75
    assert topology.slow_bytes(list("aaaa"), [(0, 1), (2, 3)], 100, 4) == 0
    in_two_hops = topology.slow_bytes(nodes, [(0, 1, 2, 3)], 100, 4, near=2)
    assert in_two_hops == 4 * (2 * 25) + 4 * 2 * 25


def test_need_shrinks_with_the_group_and_no_further_than_what_is_gathered():
    need = Need.of(Model({}), ["blocks.0", "blocks.1", "blocks.2"])
    numbers = sum(p.numel() for p in Model({}).parameters())
    assert (need.weights, need.moments) == (4 * numbers, 8 * numbers)
    assert need.bytes(1) - need.bytes(2) == 8 * numbers
    assert need.unit == 4 * (33 * 33 + 33)
