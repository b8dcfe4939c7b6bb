"""The layout on disk, and one clear line for everything that can be wrong with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from holdfast.trainer.checkpoint import format as files
from holdfast.trainer.checkpoint.format import Entry


def write(root, step=20, generation=3, world=2, fill=b"\1", algorithm="xxh3_128"):
    directory = root / files.directory_name(step, generation)
    for rank in range(world):
        entries = [Entry(f"t{rank}", "uint8", (100,), 0, 100)]
        files.write_shard(directory, rank, world, entries, fill * 128, algorithm)
    files.commit(directory, {"generation": generation, "step": step, "world": world}, algorithm)
    return directory


def flip(path, at=5):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "truncated": (lambda d: os.truncate(d / "shard-00001-of-00002.bin", 100),
                  "shard-00001-of-00002.bin: truncated: 100 bytes, not 128"),
    "too long": (lambda d: os.truncate(d / "shard-00001-of-00002.bin", 200), "too long: 200"),
    "flipped": (lambda d: flip(d / "shard-00000-of-00002.bin"),
                "shard-00000-of-00002.bin: bytes differ from what was written (xxh3_128)"),
    "missing": (lambda d: (d / "shard-00000-of-00002.bin").unlink(),
                "shard-00000-of-00002.bin: missing"),
    "table missing": (lambda d: (d / "shard-00000-of-00002.json").unlink(), ".json: missing"),
    "table flipped": (lambda d: flip(d / "shard-00000-of-00002.json"), ".json: bytes differ"),
    "torn manifest": (lambda d: os.truncate(d / "manifest.json", 50), "manifest.json: not JSON"),
    "manifest changed": (lambda d: (d / "manifest.json").write_text("{}"),
                         "manifest.json: its digest is not the one in COMMIT"),
    "no manifest": (lambda d: (d / "manifest.json").unlink(), "manifest.json: missing"),
    "no marker": (lambda d: (d / "COMMIT").unlink(), "COMMIT: missing"),
    "torn marker": (lambda d: (d / "COMMIT").write_text("{"), "COMMIT: not JSON (torn write?)"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(tmp_path, name):
    directory = write(tmp_path)
    assert files.verify(directory) == []
    damage, said = DAMAGE[name]
    damage(directory)
    assert said in "\n".join(map(str, files.verify(directory)))


def test_all_problems_are_told(tmp_path):
    directory = write(tmp_path)
    flip(directory / "shard-00000-of-00002.bin")
    (directory / "shard-00001-of-00002.bin").unlink()
    assert len(files.verify(directory)) == 2


def test_every_flipped_byte_is_found(tmp_path):
    directory = write(tmp_path)
    for name in sorted(os.listdir(directory)):
        data = (directory / name).read_bytes()
        for at in range(0, len(data), max(1, len(data) // 25)):
            flip(directory / name, at)
            assert files.verify(directory), f"{name} byte {at}"
            (directory / name).write_bytes(data)
    assert files.verify(directory) == []


def test_a_manifest_that_points_elsewhere_is_refused(tmp_path):
    directory = write(tmp_path)
    with pytest.raises(files.CheckpointError, match="outside the directory"):
        files.check_file(directory, {"file": "../x", "nbytes": 1, "digest": "xxh3_128:0"})


def test_sha256_on_request(tmp_path):
    directory = write(tmp_path, algorithm="sha256")
    assert files.verify(directory) == []
    flip(directory / "shard-00000-of-00002.bin")
    assert "(sha256)" in str(files.verify(directory)[0])


def test_marker_is_given_once(tmp_path):
    directory = write(tmp_path)
    with pytest.raises(FileExistsError):
        files.commit(directory, {"generation": 3, "step": 20, "world": 2})
    with pytest.raises(FileExistsError):
        files.write_exclusive(directory / "COMMIT", b"{}")
    assert files.verify(directory) == []


def test_listing_is_newest_first_and_ignores_the_rest(tmp_path):
    for step, generation in ((20, 1), (40, 1), (20, 3)):
        write(tmp_path, step, generation)
    (tmp_path / files.directory_name(60, 1)).mkdir()  # never committed
    (tmp_path / "other").mkdir()
    found = files.listing(tmp_path)
    assert [(f.step, f.generation, f.world, f.bad) for f in found] == [
        (20, 3, 2, ""), (40, 1, 2, ""), (20, 1, 2, "")]
    assert files.listing(tmp_path / "none") == []
    os.rename(found[0].path, tmp_path / files.directory_name(80, 3))
    assert "names another step" in files.listing(tmp_path)[0].bad


def test_a_later_generation_counts_before_a_higher_step(tmp_path, monkeypatch):
    """Generation 2 resumed from step 20 and made the first one's steps above it void."""
    for step, generation in ((20, 1), (60, 1), (40, 2)):
        write(tmp_path, step, generation)
    found, _ = files.newest_valid(tmp_path)
    assert (found.step, found.generation) == (40, 2)
    assert [(f.step, f.generation) for f in files.surplus(tmp_path, 1)] == [(60, 1), (20, 1)]
    monkeypatch.setattr(files, "LISTING_MAX", 1)  # of very many, the newest are looked at
    assert [f.step for f in files.listing(tmp_path)] == [40]


def test_newest_valid_and_quarantine(tmp_path):
    write(tmp_path, 20)
    newer = write(tmp_path, 40)
    flip(newer / "shard-00000-of-00002.bin")
    found, bad = files.newest_valid(tmp_path)
    assert found.step == 20 and [b.step for b, _ in bad] == [40]
    place = files.quarantine(newer, "bytes differ (xxh3)")
    assert place == tmp_path / "quarantine" / "step-000000040.gen-3.bytes-differ-xxh3"
    assert [f.step for f in files.listing(tmp_path)] == [20]


def test_what_was_put_aside_is_named_and_a_quarantine_that_cannot_be_read_is_not_empty(
    tmp_path, monkeypatch
):
    assert files.put_aside(tmp_path) == []
    place = files.quarantine(write(tmp_path, 20), "bytes differ")
    (place.parent / ".nfs0001").touch()
    assert files.put_aside(tmp_path) == [str(place)]

    def refused(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(files.os, "listdir", refused)
    assert files.put_aside(tmp_path) == [str(place.parent)]


def test_keep_counts_valid_ones_only(tmp_path):
    made = [write(tmp_path, step) for step in (10, 20, 30, 40)]
    flip(made[3] / "shard-00000-of-00002.bin")
    assert [f.step for f in files.surplus(tmp_path, 2)] == [10]
    files.delete(made[0])
    assert not made[0].exists() and files.surplus(tmp_path, 2) == []


@pytest.mark.parametrize("world", [1, 2, 3, 5, 9])
def test_ranges_cover_all_and_are_balanced(world):
    sizes = [64 * n for n in (100, 1, 1, 50, 30, 30, 200, 1, 60)]
    entries = [Entry(f"t{i}", "uint8", (n,), 0, n) for i, n in enumerate(sizes)]
    ranges = files.shard_ranges(entries, world)
    assert ranges[0][0] == 0 and ranges[-1][1] == len(entries) and len(ranges) == world
    assert all(a[1] == b[0] for a, b in zip(ranges, ranges[1:]))
    loads = [sum(sizes[first:end]) for first, end in ranges]
    assert max(loads) <= sum(sizes) / world + max(sizes)


def test_half_a_write_leaves_no_trace(tmp_path, monkeypatch):
    files.write_file(tmp_path / "a", b"old")
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(5, "bad disk")))
    with pytest.raises(OSError):
        files.write_file(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"old" and os.listdir(tmp_path) == ["a"]


def test_reader_needs_no_torch(tmp_path):
    write(tmp_path)
    code = ("import sys; from holdfast.trainer.checkpoint import format as f;"
            f"print(len(f.listing({str(tmp_path)!r})), 'torch' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
    assert done.stdout.split() == ["1", "False"], done.stderr


def test_tables_are_json(tmp_path):
    table = json.loads((write(tmp_path) / "shard-00000-of-00002.json").read_text())
    assert table["tensors"][0] == {
        "name": "t0", "dtype": "uint8", "shape": [100], "offset": 0, "nbytes": 100}


def test_which_shards_are_missing_and_whose_writer_gave_up(tmp_path):
    entries = [Entry("t", "uint8", (100,), 0, 100)]
    files.write_shard(tmp_path, 1, 3, entries, b"\1" * 128)
    names = [f"{files.shard_name(rank, 3)}.json" for rank in (0, 2)]
    assert files.missing_shards(tmp_path, 3) == names and files.given_up(tmp_path, 3) == []
    for rank in (0, 2):
        (tmp_path / (files.shard_name(rank, 3) + files.FAILED)).touch()
    assert files.given_up(tmp_path, 3) == [0, 2]
    files.take_back_shards(tmp_path, (2,), 3)
    assert files.given_up(tmp_path, 3) == [0]


def test_the_number_of_the_layout_stays_what_others_have_read(tmp_path):
    manifest = json.loads((write(tmp_path) / files.MANIFEST).read_bytes())
    assert manifest["format"] == 1
