"""Gradients in balanced parts: the same sums, and a lost rank leaves no trace."""

from __future__ import annotations

import types

import pytest
import torch
from harness import Launcher, Lost
from tiny import Model

from holdfast.trainer.config import ConfigError, load
from holdfast.trainer.engines.balanced import Lane
from holdfast.trainer.engines.strategy import Member, Setup, build

TWO_NODES = tuple(f"topology.{rank}={'ab'[rank // 2]}" for rank in range(4))


def config(tmp, *more):
    return load(None, ["model=tiny:Model", "data=tiny:Data", "steps=6", "batch=3",
                       "micro_batches=8", f"work_dir={tmp}", "checkpoint.every=0", *more])


def strategy(name, *more):
    chosen = config("/nowhere", f"strategy={name}", "model_options.width=300", *more)
    return build(Setup(chosen, lambda: Model(chosen.model_options), torch.device("cpu")))


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
    # A device's gradients cross from host memory, in the same order.
    launcher = Launcher(config(tmp_path, "strategy=own:ThroughHost", *TWO_NODES), 4, tmp_path,
                        {(1, 3, 2, "forward_backward"): "kill"})
    assert {r.digest for r in launcher.run().values()} == {r.digest for r in hurt.values()}
    assert [kind for kind, _ in launcher.plans] == ["fresh", "survivor"]


@pytest.mark.parametrize("labels", ["aa", "ab"])
def test_a_lane_shares_no_group_where_that_has_all_ranks(tmp_path, labels):
    """One node, and nodes of one rank.  Lanes take their buckets in an order of each rank's own,
    and DDP asks all ranks which parameters were used meanwhile."""
    where = [f"topology.{rank}={label}" for rank, label in enumerate(labels)]
    two_buckets = "model_options.width=700"
    Launcher(config(tmp_path, "strategy=own:Checked", two_buckets, "steps=2", *where), 2,
             tmp_path).run()


def test_in_a_device_stream_a_sum_begins_behind_its_bucket_and_is_told_when_it_is_done(monkeypatch):
    """By stand-ins of torch's streams: no device is here."""
    done = []

    def does(name, found=None):
        return lambda *given: done.append((name, *given)) or found

    lane = Lane(0, torch.device("cpu"))
    lane.stream = types.SimpleNamespace(
        wait_event=does("wait for"), synchronize=does("wait until it is done"))
    computes = types.SimpleNamespace(record_event=does("mark", "filled"))
    monkeypatch.setattr(torch.accelerator, "current_stream", does("stream of", computes))
    monkeypatch.setattr(torch.accelerator, "set_stream", does("go to"))
    bucket = types.SimpleNamespace(record_stream=does("keep for"), device="cuda:1")
    filled = lane.take(bucket)
    with lane.behind(filled):
        done.append("sum")
    assert done == [
        ("keep for", lane.stream), ("stream of", "cuda:1"), ("mark",), ("go to", lane.stream),
        ("wait for", "filled"), "sum", ("wait until it is done",)]


def test_the_first_line_and_every_place_say_who_sends_what():
    weights = sum(p.numel() * 4 for p in Model({"width": 300}).parameters())
    sdp = strategy("sdp", *TWO_NODES)
    layout = sdp.lay_out([Member()] * 4)
    assert [place.words for place in layout.places] == [
        f"node {node} of 2, rank {rank} of 2" for node in (1, 2) for rank in (1, 2)]
    # A node sends half of the sums out and half back, over its two ranks.
    assert 4 * weights < sdp.state.nbytes + weights < 4.01 * weights
    assert layout.words.endswith(
        f"; {4 * weights / 1e6:.1f} MB a rank: weights, gradients and moments; "
        f"{weights / 2 / 1e6:.1f} MB a rank over slow links a step")
    layout = strategy("ddp", *TWO_NODES).lay_out([Member()] * 4)
    assert layout.words.startswith("ddp: all of it on each of 4 ranks") and layout.words.endswith(
        f"; {1.5 * weights / 1e6:.1f} MB a rank over slow links a step")  # a ring of four


def test_labels_of_several_nodes_do_for_whatever_nodes_are_left():
    """A label that lost one of its nodes is not as large as the others any more."""
    sdp = strategy("sdp", "topology.n1=a", "topology.n2=a", "topology.n3=b", "topology.n4=b")
    members = [Member(name) for name in ("n1", "n1", "n2", "n2", "n3", "n3", "n4", "n4")]
    layout = sdp.lay_out(members)
    assert layout.groups["inside0"] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert "2 equal part(s), one for each node of 4 ranks, 2 bucket(s)" in layout.words
    layout = sdp.lay_out(members[:6])
    assert layout.groups["inside0"] == [(0, 1), (2, 3), (4, 5)]
    assert layout.groups["across1"] == [(0, 2, 4), (1, 3, 5)]
    assert layout.places[5].words == "node 3 of 3, rank 2 of 2"
    assert ("3 equal part(s), one for each node of 2 ranks (by the nodes' names: the labels of "
            "[topology] have unlike numbers of ranks), 2 bucket(s)") in layout.words
    with pytest.raises(ConfigError, match=r"unlike numbers of ranks \(n1: 2, n2: 2, n3: 1\)"):
        sdp.lay_out(members[:5])


def test_an_nvlink_domain_among_the_agents_labels_is_a_node():
    domains = {"n1": "x", "n2": "x", "n3": "y", "n4": "y"}
    members = [Member(name, labels={"rack": "1", "nvlink_domain": domains[name]})
               for name in domains for _ in range(2)]
    assert strategy("sdp").lay_out(members).groups["inside0"] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    left = strategy("sdp").lay_out(members[:6])
    assert left.groups["inside0"] == [(0, 1), (2, 3), (4, 5)]
    assert "(by the nodes' names: the labels of the nodes' agents have unlike" in left.words
    rack = [one._replace(labels={"rack": "1"}) for one in members]  # is no fast place
    assert len(strategy("sdp").lay_out(rack).groups["inside0"]) == 4


def test_lanes_have_groups_of_their_own_once_every_rank_knows_of_them():
    """A rank of the release before shares the group of all: it would wait for one alone."""
    one = strategy("sdp")
    new = one.lay_out([Member("a", held=()), Member("b", held=(0, 1))])
    assert set(new.own) == set(new.groups) and set(new.host) < set(new.own)
    old = one.lay_out([Member("a", held=()), Member("b")])
    assert old.own == () and not old.host and old.groups == new.groups


def test_nodes_of_unlike_size_are_a_setting(tmp_path):
    with pytest.raises(Lost, match=r"unlike numbers of ranks \(a: 2, b: 1\)"):
        Launcher(config(tmp_path, "strategy=sdp", *TWO_NODES[:3]), 3, tmp_path).run()


def test_a_mistake_in_a_lane_ends_the_rank_and_is_told(tmp_path):
    """Nobody waits for ever for a bucket whose sum failed."""
    with pytest.raises(Lost, match="rank 1: AttributeError: 'NoneType' object has no attribute"):
        Launcher(config(tmp_path, "strategy=own:Breaks", *TWO_NODES), 4, tmp_path).run()
