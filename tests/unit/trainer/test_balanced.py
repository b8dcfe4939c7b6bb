"""Gradients in balanced parts: the same sums, and a lost rank leaves no trace."""

from __future__ import annotations

import pytest
import torch
from harness import Launcher, Lost
from tiny import Model

from holdfast.trainer.config import load
from holdfast.trainer.engines.strategy import Member, Setup, build

TWO_NODES = tuple(f"topology.{rank}={'ab'[rank // 2]}" for rank in range(4))


def config(tmp, *more):
    return load(None, ["model=tiny:Model", "data=tiny:Data", "steps=6", "batch=3",
                       "micro_batches=8", f"work_dir={tmp}", "checkpoint.every=0", *more])


def test_sums_are_torchs_and_a_lost_rank_leaves_no_trace(tmp_path):
    clean = Launcher(config(tmp_path, "strategy=own:Checked", *TWO_NODES), 4, tmp_path).run()
    launcher = Launcher(config(tmp_path, "strategy=sdp", *TWO_NODES), 4, tmp_path,
                        {(1, 2, 2, "forward_backward"): "kill",
                         (2, 1, 4, "forward_backward"): "kill"})
    hurt = launcher.run()
    assert {r.digest for r in clean.values()} == {r.digest for r in hurt.values()}
    assert [kind for kind, _ in launcher.plans] == ["fresh", "survivor", "survivor"]
    # The objective is ddp's; only the order of the sums is another one.
    plain = Launcher(config(tmp_path, "strategy=ddp"), 4, tmp_path).run()
    assert clean[0].loss == pytest.approx(plain[0].loss, rel=1e-4)


def test_the_first_line_and_every_place_say_who_sends_what():
    def strategy(name):
        chosen = config("/nowhere", f"strategy={name}", "model_options.width=300", *TWO_NODES)
        return build(Setup(chosen, lambda: Model(chosen.model_options), torch.device("cpu")))

    weights = sum(p.numel() * 4 for p in Model({"width": 300}).parameters())
    layout = strategy("sdp").lay_out([Member()] * 4)
    assert [place.words for place in layout.places] == [
        f"node {node} of 2, rank {rank} of 2" for node in (1, 2) for rank in (1, 2)]
    # A node sends half of the sums out and half back, over its two ranks.
    assert layout.words.endswith(
        f"; {weights / 2 / 1e6:.1f} MB a rank over slow links a step")
    layout = strategy("ddp").lay_out([Member()] * 4)
    assert layout.words.startswith("ddp: all of it on each of 4 ranks") and layout.words.endswith(
        f"; {1.5 * weights / 1e6:.1f} MB a rank over slow links a step")  # a ring of four


def test_nodes_of_unlike_size_are_a_setting(tmp_path):
    with pytest.raises(Lost, match=r"unlike numbers of ranks \(a: 2, b: 1\)"):
        Launcher(config(tmp_path, "strategy=sdp", *TWO_NODES[:3]), 3, tmp_path).run()


def test_a_mistake_in_a_lane_ends_the_rank_and_is_told(tmp_path):
    """Nobody waits for ever for a bucket whose sum failed."""
    with pytest.raises(Lost, match="rank 1: AttributeError: 'NoneType' object has no attribute"):
        Launcher(config(tmp_path, "strategy=own:Breaks", *TWO_NODES), 4, tmp_path).run()
