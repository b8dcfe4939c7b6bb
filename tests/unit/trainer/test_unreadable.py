"""What one rank cannot read is not bad: nothing is put aside for it, and its node is named."""

from __future__ import annotations

import errno
import os
from types import SimpleNamespace

import pytest
from test_restore_digests import LAYOUT, WORLD, Store, at_once

from holdfast.trainer.checkpoint import format as files
from holdfast.trainer.checkpoint import restore as restoring
from holdfast.trainer.group import BadCheckpoint, Group, RestoreFailed
from holdfast.trainer.standalone import Assignment
from holdfast.trainer.state import Entry

SHARDS, NAME = 3, files.directory_name(20, 1)
BINS = [f"{files.shard_name(rank, SHARDS)}.bin" for rank in range(SHARDS)]


def committed(root, step=20):
    folder = root / files.directory_name(step, 1)
    for rank in range(SHARDS):
        entries = [Entry(f"t{rank}", "uint8", (64,), 0, 64)]
        files.write_shard(folder, rank, SHARDS, entries, bytes([rank]) * 64)
    files.commit(folder, {"run": "r", "generation": 1, "step": step, "world": SHARDS,
                          "model": {"fingerprint": "f"}})
    return folder


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


class State(SimpleNamespace):
    """As much of a model's state as a restore asks for; `wants` says of which shards."""

    fingerprint = "f"

    def __init__(self, wanted):
        super().__init__(empty=False, wanted={f"t{number}" for number in wanted})

    def wants(self, entries):
        return entries[0].name in self.wanted

    def fill(self, entries, content, covered):
        pass

    def missing(self, covered):
        return ""

    def written(self):
        pass

    def digest(self):
        return "same"


class Client:
    """One rank's connection, as torch's: what it sets is under way until it asks for something."""

    def __init__(self, store):
        self.store, self.under_way = store, []

    def set(self, key, value):
        self.under_way.append((key, value))

    def arrive(self):
        while self.under_way:
            self.store.set(*self.under_way.pop(0))

    def get(self, key):
        self.arrive()
        return self.store.get(key)

    def multi_get(self, keys):
        self.arrive()
        return self.store.multi_get(keys)

    def check(self, keys):
        self.arrive()
        return all(key in self.store for key in keys)

    def wait(self, keys, _limit):
        self.multi_get(keys)


class Heard:
    def __init__(self):
        self.reports, self.bad = [], []

    def report(self, fault, text):
        self.reports.append((fault, text))

    def bad_checkpoint(self, path, why):
        self.bad.append((path, why))


class Ranks(SimpleNamespace):
    say, tell, all_say, meet = Group.say, Group.tell, Group.all_say, Group.meet


@pytest.fixture
def seen(tmp_path):
    """One folder as two nodes see it: by a path of each."""
    committed(tmp_path / "shared")
    for node in range(WORLD):
        (tmp_path / f"n{node}").symlink_to(tmp_path / "shared")
    return tmp_path


def restored(seen, wanted=((0, 1), (0, 2))):
    """What a resume from that folder came to on each rank, and what was told."""
    store, heard = Store(), Heard()

    def one(rank, any_of):
        group = Ranks(rank=rank, world=WORLD, store=Client(store), any=any_of, layout=LAYOUT,
                      shard=0, copies=(0, 1))
        where = Assignment(2, rank, rank, WORLD, resume_kind="disk", resume_step=20,
                           resume_generation=1, resume_path=str(seen / f"n{rank}" / NAME),
                           node=f"n{rank}", run="r")
        restoring.restore(where, group, State(wanted[rank]), restoring.Held(), heard,
                          dict, lambda *_: None)

    return at_once(one), heard


def refuse(monkeypatch, below, number, file=""):
    """This node gets this error for what lies there."""
    real = {"stat": os.stat, "open": os.open}

    def refused(call):
        def one(path, *rest, **more):
            if not isinstance(path, int) and str(path).startswith(str(below)) \
                    and str(path).endswith(file):
                raise OSError(number, os.strerror(number), str(path))
            return real[call](path, *rest, **more)
        return one

    for call in real:
        monkeypatch.setattr(os, call, refused(call))


def test_what_all_read_is_resumed_from(seen):
    found, heard = restored(seen)
    assert found == [None] * WORLD and heard.reports == [] == heard.bad


@pytest.mark.parametrize("rank", range(WORLD))
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_what_one_rank_cannot_read_stays_for_the_others(seen, monkeypatch, number, rank):
    refuse(monkeypatch, seen / f"n{rank}", number, files.MANIFEST)
    found, heard = restored(seen)
    monkeypatch.undo()
    assert all(type(one) is RestoreFailed for one in found), found
    for one in found:
        assert f"rank {rank} on n{rank}" in str(one) and os.strerror(number) in str(one)
        assert NAME in str(one) and files.MANIFEST in str(one)
    assert heard.bad == [] and not any(fault == "checkpoint_bad" for fault, _ in heard.reports)
    assert files.verify(seen / "shared" / NAME) == []


@pytest.mark.parametrize("rank", range(WORLD))
def test_a_mount_that_is_missing_on_one_node_is_no_missing_checkpoint(seen, rank):
    (seen / f"n{rank}").unlink()
    (seen / f"n{rank}").mkdir()
    found, heard = restored(seen)
    assert all(type(one) is RestoreFailed for one in found), found
    assert all(f"rank {rank} on n{rank}" in str(one) for one in found)
    assert heard.bad == [] and files.verify(seen / "shared" / NAME) == []


@pytest.mark.parametrize("number", [0, 2])
def test_a_file_that_one_node_does_not_see_yet_is_there_for_the_others(seen, number):
    """A network file system may say for a while that it is not there."""
    view = seen / "n1"
    view.unlink()
    (view / NAME).mkdir(parents=True)
    for file in (seen / "shared" / NAME).iterdir():
        if file.name != BINS[number]:
            (view / NAME / file.name).symlink_to(file)
    found, heard = restored(seen)
    assert all(type(one) is RestoreFailed for one in found), found
    assert all(f"rank 1 on n1: {BINS[number]}: missing" in str(one) for one in found)
    assert heard.bad == [] and files.verify(seen / "shared" / NAME) == []


@pytest.mark.parametrize("number", range(SHARDS))
def test_a_file_that_rank_0_lacks_as_well_is_a_fault_of_the_checkpoint(seen, number):
    """Also where rank 0 itself does not use it (shard 2)."""
    (seen / "shared" / NAME / BINS[number]).unlink()
    found, heard = restored(seen)
    assert all(type(one) is BadCheckpoint for one in found), found
    ((path, why),) = heard.bad
    assert path == str(seen / "n0" / NAME) and why == f"{BINS[number]}: missing"
    assert len(list((seen / "shared" / files.QUARANTINE).iterdir())) == 1


@pytest.mark.parametrize("number", range(SHARDS))
def test_bytes_that_differ_are_put_aside_whoever_read_them(seen, number):
    flip(seen / "shared" / NAME / BINS[number])
    found, heard = restored(seen)
    assert all(type(one) is BadCheckpoint for one in found), found
    assert [why for _, why in heard.bad] == [
        f"{BINS[number]}: bytes differ from what was written (xxh3_128)"]
    assert not (seen / "shared" / NAME).exists()


def test_a_folder_that_cannot_be_renamed_is_refused_all_the_same(seen, monkeypatch):
    flip(seen / "shared" / NAME / BINS[0])
    monkeypatch.setattr(os, "rename", lambda *_: (_ for _ in ()).throw(OSError(errno.EROFS, "x")))
    found, heard = restored(seen)
    assert all(type(one) is BadCheckpoint for one in found) and len(heard.bad) == 1


def test_a_marker_that_cannot_be_read_is_not_known_to_be_bad(tmp_path, monkeypatch):
    first, second = committed(tmp_path, 20), committed(tmp_path, 40)
    (tmp_path / "away").mkdir()
    refuse(monkeypatch, second, errno.EIO, files.COMMIT)
    assert [(one.step, one.bad) for one in files.listing(tmp_path)] == [(20, "")]
    monkeypatch.undo()
    real, eio = files.open_regular, OSError(errno.EIO, os.strerror(errno.EIO))
    monkeypatch.setattr(files, "open_regular", lambda path: (_ for _ in ()).throw(eio) if path == (
        second / files.COMMIT) else real(path))
    assert [(one.step, one.bad) for one in files.listing(tmp_path)] == [(40, ""), (20, "")]
    assert first.exists()


def newest(root):
    heard = Heard()
    group = SimpleNamespace(rank=0, store=Store())
    try:
        return restoring._newest(group, root, heard), heard
    except RestoreFailed as error:
        return error, heard


def test_alone_what_cannot_be_read_is_passed_over_and_stays(tmp_path, monkeypatch):
    committed(tmp_path, 20)
    newer = committed(tmp_path, 40)
    refuse(monkeypatch, newer, errno.EIO, BINS[1])
    found, heard = newest(tmp_path)
    monkeypatch.undo()
    assert found == ("disk", 20, str(tmp_path / files.directory_name(20, 1)))
    assert files.verify(newer) == []
    ((fault, text),) = heard.reports
    assert fault == "checkpoint_failed" and str(newer) in text and "Input/output error" in text


def test_alone_a_run_does_not_begin_anew_where_its_checkpoints_cannot_be_read(
    tmp_path, monkeypatch
):
    only = committed(tmp_path, 40)
    refuse(monkeypatch, only, errno.EIO, BINS[1])
    found, _ = newest(tmp_path)
    monkeypatch.undo()
    assert type(found) is RestoreFailed and "Input/output error" in str(found)
    assert files.verify(only) == []
