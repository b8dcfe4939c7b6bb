"""The seam: which strategy is taken, and what a strategy of the user's own may do."""

from __future__ import annotations

import pytest
import torch
from harness import Launcher, Lost

from holdfast.trainer.checkpoint.restore import Held, agreed_step
from holdfast.trainer.config import ConfigError, load
from holdfast.trainer.engines.strategy import Layout, Place
from holdfast.trainer.state import Rows, Spec, State

CPU = torch.device("cpu")


def config(tmp, *more):
    return load(None, ["model=tiny:Model", "data=tiny:Data", "steps=6", "batch=3",
                       "micro_batches=3", f"work_dir={tmp}", "checkpoint.every=0", *more])


def test_a_strategy_of_ones_own_is_taken_and_says_what_it_chose(tmp_path):
    launcher = Launcher(config(tmp_path, "strategy=own:Plain"), 2, tmp_path,
                        {(1, 1, 3, "forward_backward"): "kill"})
    own = launcher.run()
    plain = Launcher(config(tmp_path), 2, tmp_path).run()
    assert {r.digest for r in own.values()} == {r.digest for r in plain.values()}
    assert [e[4] for e in launcher.said("report")].count("own: 2 ranks") == 1


@pytest.mark.parametrize(("name", "said"), [
    ("own:FailsAtOnce", "raised KeyError: 'no such thing'"),
    ("own:FailsInAStep", "raised RuntimeError: my mistake"),
    ("own:Nothing", "own has no 'Nothing'"), ("nowhere:X", "no module 'nowhere'"),
])
def test_what_it_raises_is_a_setting_of_the_users(tmp_path, name, said):
    with pytest.raises(Lost, match="ConfigError: strategy = ") as found:
        Launcher(config(tmp_path, f"strategy={name}"), 2, tmp_path).run()
    assert said in str(found.value)


def test_both_ways_to_write_it(tmp_path):
    file = tmp_path / "train.toml"
    file.write_text('[strategy]\nname = "own:Plain"\n[strategy.strategy_options]\na = 1\n')
    chosen = load(str(file))
    assert (chosen.strategy, chosen.strategy_options) == ("own:Plain", {"a": 1})
    with pytest.raises(ConfigError, match="strategy = 'dpd': set one of ddp"):
        load(None, ["strategy=dpd"])


def filled(cut=lambda name, spec: None, names=None):
    specs = {"model.a": Spec(torch.float32, (5, 3)), "model.b": Spec(torch.float32, ())}
    state = State(specs, CPU, cut=cut, names=names)
    return state


def test_pieces_of_any_cut_make_any_other():
    whole = filled()
    whole.views["model.a"].copy_(torch.arange(15.0).view(5, 3))
    whole.views["model.b"].fill_(7.0)

    def rows(shard, shards):
        each = -(-5 // shards)
        first = min(5, shard * each)
        return lambda name, spec: Rows(first, min(5, first + each) - first, each)

    pieces = []
    for shard in range(3):
        piece = filled(rows(shard, 3))
        covered = {}
        entries, begin, end = whole.share(0, 1)
        piece.fill(entries, whole.bytes(begin, end), covered)
        assert piece.missing(covered) == ""
        first = 2 * shard
        assert piece.views["model.a"].tolist() == whole.views["model.a"][first : first + 2].tolist()
        pieces.append(piece)
    for shards in (1, 2, 5):
        for shard in range(shards):
            other, covered = filled(rows(shard, shards)), {}
            for piece in pieces:
                entries, begin, end = piece.share(0, 1)
                if other.wants(entries):
                    other.fill(entries, piece.bytes(begin, end), covered)
            assert other.missing(covered) == ""
            first, number, _ = rows(shard, shards)("", None)
            assert other.views["model.a"].tolist() == \
                whole.views["model.a"][first : first + number].tolist()
            assert float(other.views["model.b"]) == 7.0
    lacking, covered = filled(), {}
    for piece in (pieces[0], pieces[2]):
        entries, begin, end = piece.share(0, 1)
        lacking.fill(entries, piece.bytes(begin, end), covered)
    assert lacking.missing(covered) == "model.a"


def test_a_stage_holds_its_own_tensors_and_takes_no_others():
    stage, covered = filled(names=["model.b"]), {}
    whole = filled()
    whole.views["model.b"].fill_(3.0)
    entries, begin, end = whole.share(0, 1)
    stage.fill(entries, whole.bytes(begin, end), covered)
    assert stage.missing(covered) == "" and float(stage.views["model.b"]) == 3.0
    assert stage.fingerprint == whole.fingerprint and stage.nbytes < whole.nbytes


TWO_OF_TWO = Layout(tuple(Place(shard=rank % 2, data=rank) for rank in range(4)), shards=2, data=4)


def held(step, shard, torn=False, ready=False, shards=2):
    return Held(step=step, torn=torn, shard=shard, shards=shards, ready=ready)


@pytest.mark.parametrize(("ranks", "agreed"), [
    ([held(5, 0), held(5, 1), held(5, 0), Held()], 5),  # its copy has it
    ([held(5, 0), Held(), held(5, 0), Held()], None),  # both copies of shard 1 are gone
    ([held(6, 0), held(5, 1), held(5, 0), Held()], 5),  # one is ahead, another copy is not
    ([held(6, 0), held(5, 1, ready=True), held(5, 0), Held()], 6),  # it can follow
    ([held(6, 0), held(5, 1, torn=True, ready=True), held(5, 0), Held()], None),
    ([held(5, 0, ready=True), held(5, 1, ready=True), Held(), Held()], 5),  # nobody went ahead
    ([held(5, 0), held(5, 1, shards=4), Held(), Held()], None),  # cut in another way
    ([held(5, 1), held(5, 0), Held(), Held()], None),  # of another place
])
def test_the_step_that_survivors_agree_on(ranks, agreed):
    assert agreed_step(ranks, TWO_OF_TWO) == agreed
