"""Which rank of a group holds which shard: what a lost node must leave, what survivors keep."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from harness import Launcher
from test_fewer_stages import Resizing, check_steps
from test_pipeline import LIMIT_S, batch, losses
from test_pipeline import config as pipeline_config
from test_pipeline import strategy as pipeline
from test_sharded import MICS, config, run

from holdfast.agent.core.model import LEVELS
from holdfast.trainer.checkpoint.restore import Held
from holdfast.trainer.config import ConfigError
from holdfast.trainer.engines import topology
from holdfast.trainer.engines.reduce_scatter import sum_in_rank_order
from holdfast.trainer.engines.strategy import Member

RAILS = tuple(f"topology.{rank}={'left' if rank % 2 == 0 else 'right'}" for rank in range(4))


def members(nodes, held=None):
    """By rank: its node, and the shard that it holds, of two."""
    return [Member(node, held=(shard, 2) if shard is not None else ())
            for node, shard in zip(nodes, held or [None] * len(nodes))]


def copies(groups):
    return [tuple(sorted(ranks)) for ranks in zip(*groups)]


def alone(groups, nodes):
    """How many shards have all their copies on one node."""
    return sum(len({nodes[rank] for rank in ranks}) == 1 for ranks in zip(*groups))


# ------------------------------------------------------------------------------------ by value


def test_the_copies_of_a_shard_are_not_all_on_one_node():
    nodes = "aaaabbbb"
    groups = topology.near_first(list("klmnklmn"), 2)
    assert groups == [(0, 4), (1, 5), (2, 6), (3, 7)]
    made = topology.apart(groups, members(nodes), shards=2)
    assert made == [(4, 0), (1, 5), (2, 6), (3, 7)]
    assert "all copies" not in topology.exposed(copies(made), members(nodes))
    assert topology.exposed(copies(groups), members(nodes)) == (
        "; 2 shard(s) with all copies on one node")


@pytest.mark.parametrize(("nodes", "groups"), [
    ("aaaa", [(0, 1), (2, 3)]),  # one node in all
    ("aabb", [(0, 1), (2, 3)]), ("abcd", [(0, 1), (2, 3)]),  # they are apart
    ("aabb", [(0, 1, 2, 3)]),  # there are no copies
])
def test_groups_that_no_other_order_helps_are_left_as_they_are(nodes, groups):
    assert topology.apart(groups, members(nodes), shards=len(groups[0])) == groups
    assert topology.exposed(copies(groups), members(nodes)) == ""


def test_what_cannot_be_apart_is_said():
    made = topology.apart([(0, 1), (2, 3)], members("aaab"), shards=2)
    assert alone(made, "aaab") == 1
    assert topology.exposed(copies(made), members("aaab")) == (
        "; 1 shard(s) with all copies on one node")


def test_it_is_the_best_of_all_orders():
    draw = random.Random(0)
    for _ in range(300):
        size, count = draw.randint(2, 3), draw.randint(2, 3)
        nodes = [draw.choice("aabc") for _ in range(size * count)]
        order = draw.sample(range(size * count), size * count)
        groups = [tuple(order[first : first + size]) for first in range(0, len(order), size)]
        made = topology.apart(groups, members(nodes), shards=size)
        assert [sorted(ranks) for ranks in made] == [sorted(ranks) for ranks in groups]
        best = min(alone((groups[0], *rest), nodes) for rest in itertools.product(
            *(itertools.permutations(ranks) for ranks in groups[1:])))
        assert alone(made, nodes) == best, (nodes, groups, made)


def test_survivors_keep_what_they_hold_and_newcomers_take_the_rest():
    groups = [(0, 4), (1, 5), (2, 6), (3, 7)]
    first = topology.apart(groups, members("aaaabbbb"), shards=2)
    seat = {rank: ranks.index(rank) for ranks in first for rank in ranks}
    for lost in ("aaaa", "bbbb"):  # a spare comes, under the same numbers
        held = [seat[rank] if node != lost[0] else None for rank, node in enumerate("aaaabbbb")]
        nodes = "".join("c" if node == lost[0] else node for node in "aaaabbbb")
        assert topology.apart(groups, members(nodes, held), shards=2) == first
    # Node b goes, a is alone, and then c comes: nobody on a has to be sent anything twice.
    less = topology.apart([(0, 1), (2, 3)], members("aaaa", [1, 0, 0, 0]), shards=2)
    assert less == [(1, 0), (2, 3)]
    more = topology.apart(groups, members("aaaacccc", [1, 0, 0, 1, *[None] * 4]), shards=2)
    assert more == [(4, 0), (1, 5), (2, 6), (7, 3)]


def test_a_survivor_changes_its_place_only_where_another_has_what_it_holds():
    groups = [(0, 2), (1, 3)]
    made = topology.apart(groups, members("aabb", [0, 0, 1, 1]), shards=2)
    assert alone(made, "aabb") == 0 and made != groups
    last = members("aabb", [0, None, None, 1])  # each of its shard
    assert topology.apart(groups, last, shards=2) == groups
    assert "2 shard(s)" in topology.exposed(copies(groups), last)


def test_what_is_held_of_another_cut_or_not_whole_binds_nobody():
    groups, plain = [(0, 2), (1, 3)], members("abab")
    for held in ((0, 4), (-1, 0)):
        others = [one._replace(held=held) for one in plain]
        assert topology.apart(groups, others, shards=2) == topology.apart(groups, plain, shards=2)
    # Nobody has shard 1: who has shard 0 need not keep it.
    assert topology.apart(groups, members("aabb", [None, None, 0, 0]), shards=2) == (
        topology.apart(groups, members("aabb"), shards=2))


def test_ranks_of_the_release_before_know_one_order_alone():
    groups = [(0, 2), (1, 3)]
    told = [one._replace(held=None) for one in members("aabb")]
    assert topology.apart(groups, told, shards=2) == groups


def test_a_missing_label_is_an_error_at_the_start_alone():
    given = {"a": "left"}
    new = members("aab")
    for held in ((), None):
        with pytest.raises(ConfigError, match=r"no label for node b \(rank 2\): set"):
            topology.labels(given, [one._replace(held=held) for one in new])
    for held in ((0, 2), (-1, 0)):  # one that has trained is there, whatever is left of it
        late = [new[0]._replace(held=held), *new[1:]]
        assert topology.labels(given, late) == ["left", "left", "b"]
        assert topology.words(given, late) == (
            "; labels of [topology], none for node b (rank 2): near no other node")
    assert topology.words(given, late[:2]) == "; labels of [topology]"
    assert topology.words({}, late) == ""
    assert Held().told == () and Held(step=3).told == (-1, 0)
    assert Held(step=3, torn=False, shard=1, shards=2).told == (1, 2)


# ------------------------------------------------------------------------------- agents' labels


RACKS = {"a": {"rack": "1", "nvlink_domain": "x"}, "b": {"rack": "1", "nvlink_domain": "x"},
         "c": {"rack": "1", "nvlink_domain": "y"}, "d": {"rack": "2", "model": "H100"},
         "e": {"rack": "2"}, "f": {}, "g": {"shelf": "3"}, "h": {"rack": "3"}}


def labelled(nodes):
    return [Member(node, held=(), labels=RACKS[node]) for node in nodes]


def test_an_nvlink_domain_is_as_a_node_and_wider_parts_only_say_who_is_nearer():
    assert topology.LEVELS == LEVELS  # in the agents' own order
    ranks = labelled("aabcd")
    assert topology.labels({}, ranks) == ["/1/x"] * 3 + ["/1/y", "d"]
    assert topology.places({}, ranks)[2:] == [("1", "x", "b"), ("1", "y", "c"), ("2", "", "d")]
    given = {"a": "left", "b": "left", "c": "left", "d": "right"}  # what is set wins
    assert topology.labels(given, ranks) == ["left"] * 4 + ["right"]
    assert topology.places(given, ranks) == [("left",)] * 4 + [("right",)]
    assert topology.words(given, ranks) == "; labels of [topology]"
    assert topology.words({}, ranks) == "; labels of the nodes' agents (rack, nvlink_domain)"


@pytest.mark.parametrize("told", [None, {}, {"shelf": "3"}])
def test_without_labels_near_is_who_is_on_the_same_node(told):
    ranks = [Member(node, labels=told) for node in "abab"]
    assert topology.labels({}, ranks) == list("abab") and topology.words({}, ranks) == ""
    assert topology.near_first(topology.places({}, ranks), 2) == [(0, 2), (1, 3)]


@pytest.mark.parametrize(("nodes", "size", "groups"), [
    ("adbe", 2, [(0, 2), (1, 3)]),  # by rack
    ("acba", 2, [(0, 3), (1, 2)]),  # the node first, then the rack
    ("acbd", 2, [(0, 2), (1, 3)]),  # the domain before the rack
    ("adce", 2, [(0, 2), (1, 3)]),  # two domains of one rack
    ("adfceg", 2, [(0, 3), (1, 4), (2, 5)]),  # f and g have none, and are what is left
    ("fagdeb", 3, [(0, 1, 5), (2, 3, 4)]),  # they are not near each other either
    ("aebdbc", 3, [(0, 2, 4), (1, 3, 5)]),
])
def test_groups_fill_from_the_narrowest_part_to_the_widest(nodes, size, groups):
    assert topology.near_first(topology.places({}, labelled(nodes)), size) == groups


def test_a_domain_that_is_called_as_a_node_is_another_place():
    ranks = [Member("a", labels={"nvlink_domain": "b"}), Member("b", labels={})]
    assert len({*topology.labels({}, ranks)}) == 2


def test_a_node_without_labels_of_its_agent_is_said_and_ends_nothing():
    """They are not the run's settings: also as it starts."""
    ranks = labelled("ahfg")
    assert topology.labels({}, ranks) == ["/1/x", "h", "f", "g"]
    assert topology.words({}, ranks) == (
        "; labels of the nodes' agents (rack, nvlink_domain), none for node f (rank 2), g (rank 3):"
        " near no other node")


@pytest.mark.parametrize("told", [0, 1, 3, 4])
def test_a_label_that_all_have_is_as_none_also_where_some_agents_do_not_know_it_yet(told):
    """On EC2 an agent asks for its placement group, and a plan may be made meanwhile."""
    ranks = [Member(node, labels={"efa_group": "z/g"} if at < told else {})
             for at, node in enumerate("abcd")]
    assert topology.near_first(topology.places({}, ranks), 2) == [(0, 1), (2, 3)]
    assert topology.near_first(topology.places({}, ranks[::-1]), 2) == [(0, 1), (2, 3)]
    assert topology.labels({}, ranks) == list("abcd") and topology.words({}, ranks) == ""


@pytest.mark.parametrize(("nodes", "near"), [
    ("aabbcccc", 4),  # two domains of four
    ("aaaabbbb", 1),  # one domain: nothing is far
    ("aabbccdd", 2),  # unlike domains: by node
    ("aabccdde", 1),
])
def test_hops_go_by_domain_and_where_those_are_unlike_by_node(nodes, near):
    assert topology.ranks_a_hop({}, labelled(nodes), [tuple(range(8))]) == near
    given = {node: "left" if node == nodes[0] else "right" for node in nodes}
    assert topology.ranks_a_hop(given, labelled(nodes), [tuple(range(8))]) == (
        4 if nodes == "aaaabbbb" else 1)  # as the release before has it


def test_a_sum_is_in_the_order_of_ranks_whatever_their_places():
    """In another order these are 0 and 1, not 2."""
    of_ranks = {3: torch.tensor([1e8]), 4: torch.tensor([-1e8]), 7: torch.tensor([2.0])}
    for places in itertools.permutations(of_ranks):
        found = torch.empty(1)
        sum_in_rank_order(torch.stack([of_ranks[rank] for rank in places]), found, places)
        assert found.item() == 2.0


# ------------------------------------------------------------------------------------ with ranks


def test_a_lost_node_takes_no_shard_with_it(tmp_path):
    """Each rail is a group over two nodes; both ranks of one node are killed."""
    clean = run(tmp_path / "clean", *MICS, *RAILS, nodes=["aabb"])
    ddp = run(tmp_path / "ddp", nodes=["aabb"])
    launcher = run(tmp_path / "lost", *MICS, *RAILS, nodes=["aabb"], faults={
        (1, 0, 3, "data"): "kill", (1, 1, 3, "data"): "kill"})
    assert [kind for kind, _ in launcher.plans] == ["fresh", "survivor"], launcher.log()
    assert launcher.redone == 0 and launcher.digests == clean.digests
    assert losses(clean) == pytest.approx(losses(ddp), rel=1e-5)


def test_those_that_are_left_are_a_group_in_the_order_of_what_they_hold(tmp_path):
    """One group of all ranks, and rank 0 in it has the second shard."""
    launcher = Resizing(config(tmp_path, *MICS, *RAILS), 4, tmp_path, {
        (1, 2, 3, "data"): "kill", (1, 3, 3, "data"): "kill"}, worlds=[2])
    launcher.nodes = ["aabb"]
    results = launcher.run(timeout_s=120)
    assert [kind for kind, _ in launcher.plans] == ["fresh", "survivor"], launcher.log()
    assert len(results) == 2 and len({one.digest for one in results.values()}) == 1
    check_steps(launcher)
    clean = run(tmp_path / "clean", *MICS, world=2)
    assert losses(launcher)[8] == pytest.approx(losses(clean)[8], rel=1e-5)


@pytest.mark.parametrize("way", [(), MICS])
def test_a_node_without_a_label_that_comes_later_ends_no_run(tmp_path, way):
    """It takes the place of one that was lost."""
    places = ("topology.a=left", "topology.b=right")
    launcher = run(tmp_path, *way, *places, nodes=["aabb", "aacc"], faults={
        (1, 2, 3, "data"): "kill", (1, 3, 3, "data"): "kill", (2, 0, 5, "data"): "kill"})
    assert [kind for kind, _ in launcher.plans] == ["fresh", "survivor", "survivor"]
    told = [event[4] for event in launcher.said("report") if "none for node" in event[4]]
    # Rank 0 of the last generation is new, and is told what the one before it was.
    assert len(told) == 2 and told[0].endswith(
        "; labels of [topology], none for node c (rank 2), c (rank 3): near no other node")


def groups_of(launcher, generation):
    """Which ranks share a copy of the state, by what each of them was told."""
    found = {}
    for number, rank, _, words, _ in launcher.said("placed"):
        if number == generation:
            found.setdefault(words.rpartition("partition group ")[2], []).append(rank)
    return sorted(sorted(ranks) for ranks in found.values())


def in_racks(**racks):
    return {node: (("rack", rack),) if rack else () for node, rack in racks.items()}


def test_groups_are_formed_anew_from_each_generations_labels(tmp_path):
    """A node of the other rack takes a lost one's place, and then one that nobody labelled."""
    launcher = run(tmp_path / "lost", *MICS, nodes=["abcd", "aecd", "fecd"],
                   labels=in_racks(a="1", b="2", c="1", d="2", e="1", f=""), faults={
                       (1, 1, 3, "data"): "kill", (2, 0, 5, "data"): "kill"})
    assert [kind for kind, _ in launcher.plans] == ["fresh", "survivor", "survivor"]
    assert [groups_of(launcher, generation) for generation in (1, 2, 3)] == [
        [[0, 2], [1, 3]], [[0, 1], [2, 3]], [[0, 3], [1, 2]]], launcher.log()
    assert launcher.redone == 0 and len(launcher.digests) == 1
    told = [event[4] for event in launcher.said("report") if "labels of" in event[4]]
    assert told[0].endswith("; labels of the nodes' agents (rack)"), told
    assert told[-1].endswith("(rack), none for node f (rank 0): near no other node"), told
    ddp = run(tmp_path / "ddp")
    assert losses(launcher) == pytest.approx(losses(ddp), rel=1e-5)


def test_where_one_rank_is_told_no_labels_nobody_goes_by_them(tmp_path):
    """Its agent or its launcher is of the release before, which sends none."""
    labels = in_racks(a="1", b="2", c="1", d="2")
    del labels["b"]
    launcher = run(tmp_path, *MICS, "steps=2", nodes=["abcd"], labels=labels)
    assert groups_of(launcher, 1) == [[0, 1], [2, 3]], launcher.log()
    assert not any("labels of" in event[4] for event in launcher.said("report"))
    launcher = run(tmp_path, *MICS, "steps=2", *RAILS, nodes=["abcd"], labels=in_racks(
        a="1", b="1", c="2", d="2"))
    assert groups_of(launcher, 1) == [[0, 2], [1, 3]]  # by [topology], which wins


def test_a_stages_shards_are_not_all_on_one_node_either(tmp_path):
    rails = [f"topology.{rank}={'left' if rank // 2 % 2 == 0 else 'right'}" for rank in range(8)]
    more = ["pipeline.group=2", "micro_batches=8", "model=tiny:Still"]
    one = pipeline(*more, *rails)
    one.warm_up(batch())
    layout = one.lay_out(members("aaaabbbb"))
    assert layout.groups["shard"] == [(4, 0), (2, 6), (5, 1), (3, 7)]
    assert layout.groups["copies"] == [(2, 4), (0, 6), (3, 5), (1, 7)]
    (tmp_path / "lost").mkdir()
    launcher = Launcher(pipeline_config(tmp_path / "lost", *more, *rails), 8, tmp_path / "lost", {
        (1, rank, 2, "data"): "kill" for rank in range(4)})
    launcher.nodes = ["aaaabbbb"]
    launcher.run(timeout_s=LIMIT_S)
    assert [kind for kind, _ in launcher.plans] == ["fresh", "survivor"], launcher.log()
    (tmp_path / "ddp").mkdir()
    ddp = Launcher(pipeline_config(tmp_path / "ddp", *more, "strategy=ddp"), 4, tmp_path / "ddp")
    ddp.run(timeout_s=LIMIT_S)
    assert losses(launcher) == pytest.approx(losses(ddp), rel=1e-5)
