"""Snapshots: a kill at any moment leaves at least one whole half, and rubbish is skipped."""

from __future__ import annotations

import os

import pytest

from holdfast.worker.rank import snapshot


def take(file: snapshot.SnapshotFile, step: int, rank: int = 0, world: int = 1, fill: int = 0):
    buffer = file.begin(10)
    buffer[:] = bytes([fill or step]) * 10
    file.commit(1, rank, world, step, 10, "digest-%d" % step)


@pytest.fixture()
def file():
    fd = snapshot.create(10)
    yield snapshot.SnapshotFile(fd)
    os.close(fd)


def test_a_new_file_holds_nothing(file):
    assert file.shards() == []


def test_step_zero_can_be_held(file):
    take(file, 0, fill=7)
    (shard,) = file.shards()
    assert (shard.step, bytes(shard.data), shard.digest) == (0, b"\x07" * 10, "digest-0")


def test_two_halves_hold_the_two_newest_steps(file):
    for step in (3, 6, 9):
        take(file, step)
    assert sorted(shard.step for shard in file.shards()) == [6, 9]
    assert all(bytes(s.data) == bytes([s.step]) * 10 for s in file.shards())


def test_a_kill_while_writing_leaves_the_older_one_whole(file):
    take(file, 3)
    take(file, 6)
    file.begin(10)[:5] = b"torn!"
    (shard,) = file.shards()
    assert shard.step == 6 and bytes(shard.data) == b"\x06" * 10


def test_a_reader_elsewhere_sees_the_same(file):
    take(file, 4)
    fd = snapshot.create(10)
    assert snapshot.shards_of([fd]) == []
    os.close(fd)


def test_the_newest_step_needs_every_ranks_shard():
    files = [snapshot.SnapshotFile(snapshot.create(10)) for _ in range(2)]
    for step in (3, 6):
        take(files[0], step, rank=0, world=2)
    take(files[1], 3, rank=1, world=2)
    shards = [shard for file in files for shard in file.shards()]
    assert snapshot.newest_whole(shards) == (1, 3, 2)
    take(files[1], 6, rank=1, world=2)
    shards = [shard for file in files for shard in file.shards()]
    assert snapshot.newest_whole(shards) == (1, 6, 2)
    assert snapshot.newest_whole([]) is None


def test_what_is_no_snapshot_is_skipped_or_refused(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"\0" * 8192)
    fd = os.open(path, os.O_RDWR)
    with pytest.raises(ValueError):
        snapshot.SnapshotFile(fd)
    assert snapshot.shards_of([fd]) == []
    os.close(fd)


def test_a_buffer_larger_than_its_half_is_refused(file):
    with pytest.raises(ValueError, match="room for"):
        file.begin(snapshot.half_bytes(10) + 1)


def test_the_budget_is_a_tenth_of_free_memory_at_most():
    with open("/proc/meminfo") as meminfo:
        free = next(int(line.split()[1]) for line in meminfo if line.startswith("MemAvailable"))
    assert 0 < snapshot.budget_bytes() <= free * 1024 * 0.12
