"""Gradients in balanced parts: the same sums, and a lost rank leaves no trace."""

from __future__ import annotations

import pytest
from harness import Launcher, Lost

from holdfast.trainer.config import load

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


def test_nodes_of_unlike_size_are_a_setting(tmp_path):
    with pytest.raises(Lost, match=r"unlike numbers of ranks \(a: 2, b: 1\)"):
        Launcher(config(tmp_path, "strategy=sdp", *TWO_NODES[:3]), 3, tmp_path).run()
