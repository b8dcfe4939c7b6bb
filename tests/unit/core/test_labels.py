"""What a node is labelled with: the operator's word, and what its machine tells."""

from __future__ import annotations

import pytest

from holdfast.agent.core.model import Readings, readings_of
from holdfast.agent.core.nodes.labels import LABEL_MAX, NodeLabels


def readings(*subjects: tuple[str, str]) -> Readings:
    return readings_of((name, subject, 1.0, 5.0) for name, subject in subjects)


GPU = "accelerator_info", "vendor=nvidia,device=0,name=NVIDIA H100 80GB HBM3"
EC2 = "ec2_instance_info"


@pytest.mark.parametrize(("subjects", "expected"), [
    ([], {}),
    ([GPU, (GPU[0], GPU[1].replace("device=0", "device=1"))], {"model": "NVIDIA H100 80GB HBM3"}),
    ([GPU, (GPU[0], "vendor=nvidia,device=1,name=NVIDIA T4")],
     {"model": "NVIDIA H100 80GB HBM3 + NVIDIA T4"}),
    ([GPU, (GPU[0], "vendor=nvidia,device=1,name=")], {"model": "NVIDIA H100 80GB HBM3"}),
    ([(GPU[0], "vendor=neuron,device=0,name=trainium2")], {"model": "trainium2"}),
    ([(EC2, "id=i-1,zone=us-east-1a,zone_id=use1-az6,placement_group=pg 7")],
     {"efa_group": "use1-az6/pg 7"}),
    ([(EC2, "id=i-1,zone=us-east-1a,zone_id=,placement_group=")], {"efa_group": "us-east-1a"}),
    ([(GPU[0], f"vendor=nvidia,device=0,name={'x' * 300}\n\x1b[2J")], {"model": "x" * LABEL_MAX}),
    ([(GPU[0], "vendor=nvidia,device=0,name=a\n\x1bb")], {"model": "a__b"}),
])
def test_a_machine_tells_its_model_and_its_place_in_ec2(
    subjects: list[tuple[str, str]], expected: dict[str, str]
) -> None:
    assert dict(NodeLabels().of((), readings(*subjects))) == expected


def test_the_operators_word_goes_before_the_machines() -> None:
    labels = NodeLabels().of((("rack", "r7"), ("model", "H100")), readings(GPU))
    assert labels == (("model", "H100"), ("rack", "r7"))


def test_labels_follow_the_readings() -> None:
    labels = NodeLabels()
    assert labels.of((), readings(GPU)) == (("model", "NVIDIA H100 80GB HBM3"),)
    other = readings((GPU[0], "vendor=nvidia,device=0,name=NVIDIA T4"))
    assert labels.of((), other) == (("model", "NVIDIA T4"),)
    assert labels.of((), readings()) == ()
