"""Which GPUs a launcher says that its ranks take, on a tree as NVIDIA's driver makes it."""

from __future__ import annotations

import pytest

from holdfast.worker import devices

ADDRESSES = ["0000:1b:00.0", "0000:4e:00.0", "0000:9b:00.0", "0000:dc:00.0"]
MINORS = [1, 0, 3, 2]  # the driver's numbers are not in the order of the addresses


@pytest.fixture()
def root(tmp_path):
    (tmp_path / "dev").mkdir()
    for number, (address, minor) in enumerate(zip(ADDRESSES, MINORS)):
        folder = tmp_path / "proc/driver/nvidia/gpus" / address
        folder.mkdir(parents=True)
        (folder / "information").write_text(
            "Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 512\n"
            "GPU UUID: \t GPU-%d5f3a1c2-0d7b\nBus Location: \t %s\nDevice Minor: \t %d\n"
            % (number, address, minor))
        (tmp_path / "dev" / ("nvidia%d" % minor)).touch()
    return str(tmp_path)


@pytest.mark.parametrize(("listed", "nproc", "numbers"), [
    (None, 8, (0, 1, 2, 3)), (None, 4, (0, 1, 2, 3)), ("", 4, ()), ("-1", 4, ()),
    (None, 3, ()), (None, 1, ()),  # any of them, as the job may choose by an argument
    ("2,3", 4, (2, 3)), ("3, 0", 4, (3, 0)), ("2,3", 1, (2,)), ("1,-1,2", 4, (1,)),
    ("1,7,2", 4, (1,)), ("GPU-25f3a1c2-0d7b,GPU-0", 4, (2, 0)),
    ("MIG-25f3a1c2-0d7b", 1, ()), ("GPU-", 1, ()), ("none", 4, ()),
])
def test_what_the_environment_lets_be_seen_is_taken_one_a_rank(root, listed, nproc, numbers):
    environ = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    assert devices.taken(environ, nproc, root) == [ADDRESSES[number] for number in numbers]


def test_in_a_job_that_may_open_some_alone_numbers_count_among_those(root, monkeypatch):
    """Slurm's second job on a node sees its GPUs as 0 and 1, as the first one sees its own."""
    monkeypatch.setattr(devices.os, "access", lambda path, _: path.endswith(("nvidia3", "nvidia2")))
    for environ in ({}, {"CUDA_VISIBLE_DEVICES": "0,1"}):
        assert devices.taken(environ, 8, root) == ADDRESSES[2:]
    assert devices.taken({"CUDA_VISIBLE_DEVICES": "2,3"}, 8, root) == []


def test_a_node_without_a_driver_or_with_one_that_tells_nothing_has_none(tmp_path, root):
    assert devices.taken({}, 8, str(tmp_path / "nowhere")) == []
    for address in ADDRESSES:
        path = tmp_path / "proc/driver/nvidia/gpus" / address / "information"
        path.write_bytes(b"\xff\x00Device Minor: x\n" * 1000)
    assert devices.taken({}, 8, root) == []


def test_a_gpu_that_is_cut_in_parts_is_nobodys_whoever_was_given_one(root, tmp_path):
    """A container's runtime hands over a part with its GPU, and names neither in CUDA's list."""
    parts = tmp_path / "proc/driver/nvidia/capabilities/gpu0/mig"  # of 0000:4e:00.0
    parts.mkdir(parents=True)
    assert devices.taken({}, 8, root) == ADDRESSES  # as where no part was made of it
    (parts / "gi3").mkdir()
    assert devices.taken({}, 4, root) == [ADDRESSES[number] for number in (0, 2, 3)]
    assert devices.taken({"CUDA_VISIBLE_DEVICES": "1,2"}, 2, root) == [ADDRESSES[2]]
