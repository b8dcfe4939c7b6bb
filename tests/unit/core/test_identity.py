"""A node's identity: from samples, into its document, and beside others'."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.agent.core.model import Doc, Ended, Settings
from holdfast.agent.core.nodes.identity import Identity, compare, of, read, renewed

from .driver import Lab

HOST = ("host_info", "vendor=Amazon EC2,product=p5.48xlarge,cpu=EPYC,kernel=6.8", 1.0, 1.0)
NCCL = ("software_info", "component=nccl,version=2.21.5", 1.0, 1.0)
GPUS = tuple(
    ("accelerator_info", f"vendor=nvidia,device={n},name=H100,uuid=u{n},pci=p{n},driver=535",
     1.0, 1.0) for n in range(8)
)
SPOT = ("ec2_spot_action_timestamp_seconds", "action=terminate", 1795168920.0, 1.0)


def identity(lab: Lab) -> Identity:
    found = read(lab.docs["identity/a"])
    assert found is not None
    return found


def test_samples_become_values_by_source() -> None:
    instance = ("ec2_instance_info", "id=i-1,type=p5.48xlarge,zone=us-east-2b,image=", 1.0, 1.0)
    other = ("software_info", "component=nccl,version=2.18.3", 1.0, 1.0)
    found = of((HOST, NCCL, other, *GPUS, instance, ("host_load_average", "window=1m", 1.0, 1.0)))
    assert found == {
        "node": {"host.vendor": "Amazon EC2", "host.product": "p5.48xlarge", "host.cpu": "EPYC",
                 "host.kernel": "6.8", "software.nccl": "2.18.3 + 2.21.5"},
        "nvidia": {"nvidia.count": "8", "nvidia.name": "H100", "nvidia.driver": "535"},
        "instance": {"instance.type": "p5.48xlarge", "instance.zone": "us-east-2b"},
    }


def test_the_document_is_written_once_and_again_when_something_changed() -> None:
    lab = Lab()
    lab.begin()
    lab.samples = (HOST, NCCL)
    (effect,) = lab.step()
    assert effect.subject == "store/identity/a"
    assert not lab.settle() and identity(lab).changes == ()
    lab.samples = (HOST, NCCL, *GPUS)  # a source that comes later is no change
    assert len(lab.settle()) == 1 and identity(lab).changes == ()
    lab.samples = (HOST, ("software_info", "component=nccl,version=2.26.2", 1.0, 1.0))
    assert len(lab.settle()) == 1
    (change,) = identity(lab).changes
    assert (change.key, change.before, change.after) == ("software.nccl", "2.21.5", "2.26.2")
    assert identity(lab).values()["nvidia.count"] == "8", "what is not read now stays as it was"
    lab.samples = (HOST,)
    lab.settle()
    assert "software.nccl" not in identity(lab).values()
    assert identity(lab).changes[-1].after == ""


def test_equal_samples_write_nothing_and_neither_does_a_restart() -> None:
    lab = Lab()
    lab.begin()
    lab.samples = (HOST, NCCL)
    lab.settle()
    lab.samples = tuple(one[:3] + (2.0,) for one in lab.samples)
    assert not lab.settle()
    lab.restart_agent()
    assert not lab.settle() and lab.docs["identity/a"].version == 1


def test_a_refused_write_is_repeated_and_a_store_that_is_down_is_left_alone() -> None:
    lab = Lab()
    lab.begin()
    lab.samples = (HOST,)
    lab.store_up = False
    assert not [e for e in lab.step() if "identity" in e.subject]
    lab.store_up, lab.refuse_puts = True, 1
    lab.step(1.0)
    lab.step(20.0)
    lab.samples = (HOST, NCCL)
    lab.step(20.0)
    assert identity(lab).values()["software.nccl"] == "2.21.5"


def test_a_document_of_junk_is_replaced() -> None:
    lab = Lab()
    lab.begin()
    lab.docs["identity/a"] = Doc("identity/a", 7, b'{"sources": 5}')
    lab.samples = (HOST,)
    lab.settle()
    assert identity(lab).values()["host.kernel"] == "6.8"


# ------------------------------------------------------------- beside others


def node(**software: str) -> Identity:
    return Identity({"node": {f"software.{key}": value for key, value in software.items()}})


def test_who_differs_from_most_is_named() -> None:
    same, odd = node(nccl="2.21.5", efa="2.13"), node(nccl="2.18.3", efa="2.13")
    found = compare({"a": same, "b": same, "c": odd})
    assert found.compared == 2 and not found.unread
    (one,) = found.differences
    assert (one.key, one.most, one.agree, one.of) == ("software.nccl", "2.21.5", 2, 3)
    assert one.nodes == (("c", "2.18.3"),)


def test_without_a_majority_all_are_named_and_a_missing_value_is_one() -> None:
    found = compare({"a": node(nccl="1"), "b": node(nccl="2"), "c": node()})
    (one,) = found.differences
    assert (one.most, one.agree) == ("", 0)
    assert one.nodes == (("a", "1"), ("b", "2"), ("c", ""))
    (lacks,) = compare({"a": node(nccl="1"), "b": node(nccl="1"), "c": node()}).differences
    assert lacks.nodes == (("c", ""),) and lacks.most == "1"
    (extra,) = compare({"a": node(nccl="1"), "b": node(), "c": node()}).differences
    assert extra.nodes == (("a", "1"),) and (extra.most, extra.agree) == ("", 2)


def test_a_source_that_a_node_has_not_said_is_unread_and_no_difference() -> None:
    gpus = Identity({"node": {}, "nvidia": {"nvidia.driver": "535"}})
    found = compare({"a": gpus, "b": gpus, "c": node()})
    assert not found.differences and found.unread == (("c", "nvidia"),)


@pytest.mark.parametrize("nodes", [{}, {"a": node(nccl="1")}])
def test_one_node_or_none_has_nothing_to_differ_from(nodes: dict[str, Identity]) -> None:
    found = compare(nodes)
    assert not found.differences and not found.unread


@given(st.dictionaries(st.sampled_from("abcde"), st.dictionaries(
    st.sampled_from(["host", "node"]),
    st.dictionaries(st.sampled_from("xyz"), st.sampled_from(["", "1", "2"])))))
def test_a_difference_adds_up(said: dict[str, dict[str, dict[str, str]]]) -> None:
    found = compare({name: Identity(sources) for name, sources in said.items()})
    for one in found.differences:
        assert one.agree + len(one.nodes) == one.of and one.agree * 2 > one.of or one.agree == 0
        assert len({value for _, value in one.nodes} | ({one.most} if one.agree else set())) > 1


def test_changes_are_bounded() -> None:
    known = None
    for number in range(100):
        known = renewed(known, {"node": {"software.nccl": str(number)}}, float(number))
    assert known is not None and len(known.changes) == 32
    assert known.changes[-1].after == "99"
    assert read(Doc("identity/a", 1, msgspec.json.encode(known))) == known


# ------------------------------------------------------------- a spot instance is taken back


def test_a_spot_notice_is_shown_and_ends_the_run_only_where_that_is_allowed() -> None:
    lab = Lab()
    lab.begin()
    lab.samples = (SPOT,)
    lab.settle()
    assert [one.fault for one in lab.decision.verdicts] == ["ec2_spot_interruption"]
    assert lab.view.state == "running" and not lab.finishes()
    assert not lab.decision.verdicts[0].act

    lab = Lab(settings=Settings(allow=("drain_node",)))
    lab.begin()
    lab.samples = (SPOT,)
    for _ in range(5):
        lab.step(1.0)
    assert {rank.state for rank in lab.view.ranks} == {"ended"}
    assert lab.finishes() == [75]
    (finish,) = (one for one in lab.log if one.kind == "finish")
    assert finish.reason.startswith("the run was drained: EC2 takes this spot instance back")
    assert lab.decision.verdicts[0].act


def test_a_paused_run_and_one_that_is_done_are_not_ended() -> None:
    lab = Lab(settings=Settings(allow=("drain_node",)))
    lab.begin()
    lab.node.cases["r"].operator.pause(True)
    lab.samples = (SPOT,)
    lab.settle()
    assert {rank.state for rank in lab.view.ranks} == {"running"}

    lab = Lab(settings=Settings(allow=("drain_node",)))
    lab.begin()
    for number in (0, 1):
        lab.end(number, Ended(0, outcome="done", boot_s=lab.boot_s))
    lab.samples = (SPOT,)
    lab.settle()
    assert lab.finishes() == [0]
