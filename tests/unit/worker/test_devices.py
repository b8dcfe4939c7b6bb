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


AMD = ["0000:05:00.0", "0000:26:00.0", "0001:46:00.0", "0000:65:00.1"]


@pytest.fixture()
def amd(tmp_path):
    """Two processors and four GPUs, as the kernel's driver for compute lists them; more than ten
    nodes, so that names in the order of letters would be another order."""
    nodes = tmp_path / "sys/class/kfd/kfd/topology/nodes"
    (tmp_path / "dev/dri").mkdir(parents=True)
    for number in (0, 1):
        (nodes / str(number)).mkdir(parents=True)
        (nodes / str(number) / "properties").write_text(
            "cpu_cores_count 96\nsimd_count 0\nlocation_id 0\ndomain 0\ndrm_render_minor 0\n")
    for number, address in enumerate(AMD):
        domain, bus, rest = address.split(":")
        device, function = rest.split(".")
        at = int(bus, 16) << 8 | int(device, 16) << 3 | int(function, 16)
        folder = nodes / str(8 + number)
        folder.mkdir(parents=True)
        (folder / "properties").write_text(
            "cpu_cores_count 0\nsimd_count 1216\nlocation_id %d\ndomain %d\n"
            "drm_render_minor %d\nunique_id %d\nname broken row here\n"
            % (at, int(domain, 16), 128 + 8 * number, 0xA1B2C3D400 + number))
        (tmp_path / "dev/dri" / ("renderD%d" % (128 + 8 * number))).touch()
    return str(tmp_path)


@pytest.mark.parametrize(("environ", "nproc", "numbers"), [
    ({}, 4, (0, 1, 2, 3)), ({}, 3, ()), ({"HIP_VISIBLE_DEVICES": "2,3"}, 2, (2, 3)),
    ({"CUDA_VISIBLE_DEVICES": "3"}, 1, (3,)), ({"HIP_VISIBLE_DEVICES": ""}, 4, ()),
    ({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "3"}, 1, (0,)),
    ({"ROCR_VISIBLE_DEVICES": "2,3"}, 4, (2, 3)), ({"ROCR_VISIBLE_DEVICES": "-1"}, 4, ()),
    ({"ROCR_VISIBLE_DEVICES": "3,1", "HIP_VISIBLE_DEVICES": "1"}, 4, (1,)),  # of those two
    ({"ROCR_VISIBLE_DEVICES": "GPU-000000a1b2c3d402"}, 1, (2,)),
])
def test_amds_variables_count_one_behind_the_other(amd, environ, nproc, numbers):
    assert devices.taken(environ, nproc, amd) == [AMD[number] for number in numbers]


def test_a_job_that_may_open_some_of_amds_counts_among_those(amd, monkeypatch):
    monkeypatch.setattr(devices.os, "access", lambda path, _: path.endswith(("D136", "D152")))
    assert devices.taken({}, 2, amd) == [AMD[1], AMD[3]]
    assert devices.taken({"HIP_VISIBLE_DEVICES": "1"}, 1, amd) == [AMD[3]]


def test_a_gpu_of_amds_that_is_cut_in_parts_is_nobodys(amd, tmp_path):
    twin = tmp_path / "sys/class/kfd/kfd/topology/nodes"
    (twin / "12").mkdir()
    (twin / "12/properties").write_text(
        (twin / "8/properties").read_text().replace("minor 128", "minor 160"))
    (tmp_path / "dev/dri/renderD160").touch()
    assert devices.taken({}, 5, amd) == AMD[1:]
