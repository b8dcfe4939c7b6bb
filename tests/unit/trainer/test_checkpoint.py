"""Writing while training goes on: stalls, keep-N, and disks that refuse."""

from __future__ import annotations

import errno
import os
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import waiting

from holdfast.trainer.checkpoint import format as files
from holdfast.trainer.checkpoint import manifest
from holdfast.trainer.checkpoint.write import Checkpoints
from holdfast.trainer.config import load
from holdfast.trainer.loop import train
from holdfast.trainer.standalone import Standalone

HERE = Path(__file__).parent


class State:
    """As much of a model's state as a checkpoint asks for."""

    def share(self, number, of):
        return [], 0, 8

    def bytes(self, begin, end):
        return bytes(end - begin)

    def describe(self):
        return {}


class Said(Standalone):
    """Alone, with an ear for what is said."""

    def __init__(self):
        super().__init__()
        self.reports, self.commits = [], []

    def report(self, fault, text):
        self.reports.append((fault, text))

    def committed(self, generation, step, path, world):
        self.commits.append(step)


def run(tmp_path, *more, root=None):
    said = Said()
    result = train(load(None, [
        "model=tiny:Model", "data=tiny:Data", "steps=12", f"work_dir={tmp_path}",
        "checkpoint.every=4", f"checkpoint.dir={root or tmp_path / 'checkpoints'}", *more,
    ]), said)
    return result, said


@pytest.fixture(autouse=True)
def clean_group(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    yield
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def test_resumed_run_equals_one_that_never_stopped(tmp_path):
    constant = "optimizer.final_fraction=1"  # else the rate's plan depends on `steps`
    whole, _ = run(tmp_path / "a", constant)
    run(tmp_path / "b", "steps=4", constant)
    resumed, _ = run(tmp_path / "b", constant)
    assert resumed.digest == whole.digest


def test_a_checkpoint_is_read_when_its_models_class_has_moved(tmp_path):
    run(tmp_path, "steps=4")
    again, said = run(tmp_path, "steps=4", "model=tiny:Moved")
    assert again.step == 4 and said.commits == []  # no step was done anew


def test_manifest_says_what_the_run_was(tmp_path):
    run(tmp_path)
    manifest = files.read_manifest(Path(files.listing(tmp_path / "checkpoints")[0].path))
    about = manifest["run_manifest"]
    assert about["data_digest"] == "tiny" and about["config"]["steps"] == 12
    assert about["seed"] == 0 and about["began"] == {"from": "nothing"}
    assert about["packages"]["torch"] and manifest["model"]["class"] == "tiny:Model"
    assert manifest["step"] == 12 and manifest["world"] == 1


def test_no_secret_of_the_settings_lies_on_disk_and_the_run_goes_on(tmp_path):
    secret = ("data_options.hub_token=geheim", "data_options.url=https://me:geheim@host/x")
    run(tmp_path, "steps=4", *secret)
    again, said = run(tmp_path, "steps=8", *secret)
    assert again.step == 8 and said.commits == [8]  # resumed
    kept = tmp_path / "checkpoints" / manifest.MANIFESTS
    waiting.wait_for(lambda: len([*kept.glob("gen-*.json")]) == 2)
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) > 5 and not any(b"geheim" in path.read_bytes() for path in written)
    about = files.read_manifest(Path(files.listing(tmp_path / "checkpoints")[0].path))
    options = about["run_manifest"]["config"]["data_options"]
    assert options == {"hub_token": "***", "url": "https://***@host/x"}


def test_settings_without_secrets_are_kept_as_they_are():
    plain = load(None, ["model_options.width=7", "init_from=/a/b", "xla.neuron_cc_flags=-O1 --x=y"])
    found = manifest.run_manifest(plain, "")
    assert found["config"] == plain.as_dict()
    assert found["config_digest"] == files.digest(plain.text().encode())


def test_the_newest_whole_ones_are_kept(tmp_path):
    _, said = run(tmp_path, "checkpoint.every=2", "checkpoint.keep=2")
    kept = files.listing(tmp_path / "checkpoints")
    assert [one.step for one in kept] == said.commits[:-3:-1] and said.commits[-1] == 12
    assert not any(files.verify(one.path) for one in kept)


def test_bad_newest_is_put_aside_and_the_older_used(tmp_path):
    run(tmp_path, "steps=8")
    newest = Path(files.listing(tmp_path / "checkpoints")[0].path)
    os.truncate(newest / "shard-00000-of-00001.bin", 64)
    _, said = run(tmp_path)
    ((fault, text),) = [r for r in said.reports if r[0]]
    assert fault == "checkpoint_bad" and "shard-00000-of-00001.bin: truncated: 64 bytes" in text
    assert not newest.exists() and len(list((tmp_path / "checkpoints/quarantine").iterdir())) == 1


def test_a_directory_in_the_way_is_said_and_training_ends_well(tmp_path):
    (tmp_path / "file").write_text("")
    result, said = run(tmp_path, root=tmp_path / "file" / "x")
    assert result.step == 12
    faults = [text for fault, text in said.reports if fault == "checkpoint_failed"]
    assert faults and "Not a directory" in faults[0]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MB."""
    point = tmp_path / "disk"
    point.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(point)],
                          capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mounting a tmpfs needs root: {done.stderr.strip()}")
    yield point
    subprocess.run(["umount", "-l", str(point)], check=False)


def test_full_disk(tmp_path, small_disk):
    wide = "model_options.width=700"  # 6 MB of state
    result, said = run(tmp_path, wide, root=small_disk / "c")
    assert result.step == 12 and not said.commits
    failed = [text for fault, text in said.reports if fault == "checkpoint_failed"]
    assert failed and all("No space left on device" in text for text in failed)
    assert "training goes on, tried again in 4 steps" in failed[0]
    assert files.listing(small_disk / "c") == []
    assert not list(small_disk.rglob("*.bin"))  # the room is given back


@pytest.mark.parametrize("marks", [True, False])
def test_a_shard_whose_writer_failed_is_not_waited_for(tmp_path, monkeypatch, marks):
    """It is said at once by both, nothing is called durable, and the next try is a new one; also
    where the folder takes not even the mark that says so."""
    write, full = files.write_shard, [True]

    def no_room(directory, rank, *rest):
        if rank == 1 and full[0]:  # before its shard is whole: else rank 0 may take it
            directory.mkdir(exist_ok=True)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(directory, rank, *rest)

    def no_mark(*_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(files, "write_shard", no_room)
    if not marks:
        monkeypatch.setattr(files, "give_up_shard", no_mark)
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    store = dist.PrefixStore("holdfast/1", server)  # as the group has it
    options = load(None, ["checkpoint.wait_s=3600", f"work_dir={tmp_path}"]).checkpoint
    ranks = []
    for rank in range(2):
        one = Checkpoints(options, tmp_path, Said(), dict)
        one.join(SimpleNamespace(generation=1, rank=rank, world=2, run="x"),
                 SimpleNamespace(rank=rank, world=2, copies=(0, 1), aside=store.clone), State())
        ranks.append(one)
    for step, durable in ((4, False), (4, True), (8, True)):
        full[0] = not durable
        for one in reversed(ranks):
            one.save(step)
        for one in ranks:
            assert one._idle.wait(60)  # who waits for the failed shard waits for an hour
        assert [found.step for found in files.listing(tmp_path)][:1] == ([step] if durable else [])
        said = [text for fault, text in ranks[0].elastic.reports if fault]
        assert len(said) == 1 and "not committed, rank 1 could not write its part" in said[0]
        if not durable:
            assert "none of them became durable" in ranks[0].summary()
    assert "3 checkpoints" in ranks[0].summary() and "2 of them durable" in ranks[0].summary()
    for one in ranks:
        one.close()


def test_a_word_that_nobody_took_does_not_speak_for_the_next_try(tmp_path, monkeypatch):
    """Rank 0 failed as well, and read nothing; the folder is back as the step is saved again."""
    write, away, asked = files.write_shard, [True], []

    def stale(*_):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    def slow(directory, rank, *rest):
        if away[0]:
            stale()
        if rank == 1:
            before = len(asked)
            waiting.wait_for(lambda: len(asked) > before + 1)  # rank 0 asks meanwhile, and reads
        write(directory, rank, *rest)

    monkeypatch.setattr(files, "write_shard", slow)
    monkeypatch.setattr(files, "give_up_shard", stale)
    store = dist.HashStore()

    def aside():
        asked.append(1)
        return store

    options = load(None, ["checkpoint.wait_s=60", f"work_dir={tmp_path}"]).checkpoint
    ranks = [Checkpoints(options, tmp_path, Said(), dict) for _ in range(2)]
    for rank, one in enumerate(ranks):
        one.join(SimpleNamespace(generation=1, rank=rank, world=2, run="x"),
                 SimpleNamespace(rank=rank, world=2, copies=(0, 1), aside=aside), State())
    for gone in (True, False):
        away[0] = gone
        for one in ranks:
            one.save(4)
        for one in ranks:
            assert one._idle.wait(60)
    for one in ranks:
        one.close()
    assert ranks[0].elastic.commits == [4]


def test_the_store_of_a_generation_that_is_over_is_not_asked(tmp_path):
    """It may be gone, and torch waits a minute for one that is."""
    asked = []
    options = load(None, ["checkpoint.wait_s=60", f"work_dir={tmp_path}"]).checkpoint
    one = Checkpoints(options, tmp_path, Said(), dict)
    one.join(SimpleNamespace(generation=1, rank=0, world=2, run="x"),
             SimpleNamespace(rank=0, world=2, copies=(0, 1), aside=lambda: asked.append(1)),
             State())
    one.generation_over()
    one.save(4)
    assert one._idle.wait(30) and not asked
    one.close()


def alone(tmp_path):
    """One rank's checkpoints, without a model."""
    options = load(None, ["checkpoint.wait_s=5", f"work_dir={tmp_path}"]).checkpoint
    one = Checkpoints(options, tmp_path, Said(), dict)
    one.join(SimpleNamespace(generation=1, rank=0, world=1, run="x"),
             SimpleNamespace(rank=0, world=1, copies=(0,), aside=dist.HashStore), State())
    return one


@pytest.mark.parametrize("error", [
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), MemoryError(),
    ValueError("Expecting value: line 1 column 1 (char 0)")])
def test_whatever_one_checkpoint_fails_of_is_said_and_the_next_is_written(
    tmp_path, monkeypatch, error
):
    """A package's METADATA that is no UTF-8, a table that is no JSON: not only the disk refuses."""
    def fails(*_):
        raise error

    one = alone(tmp_path)
    with monkeypatch.context() as broken:
        broken.setattr(files, "commit", fails)
        one.save(4)
        assert one._idle.wait(20)
    (said,) = one.elastic.reports
    assert said[0] == "checkpoint_failed" and type(error).__name__ in said[1], said
    one.save(8)
    one.close()
    assert one.elastic.commits == [8] and not one._thread.is_alive()
    assert len(one.elastic.reports) == 1, "nothing was left out"


def test_what_its_marker_stands_on_is_not_deleted_when_the_disk_fails_behind_it(
    tmp_path, monkeypatch
):
    """The marker is given, and then its folder's entry is refused: whoever reads it finds all."""
    sync, root = files.sync_directory, tmp_path / files.directory_name(4, 1)

    def refused(path):
        if (root / files.COMMIT).exists():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(path)

    monkeypatch.setattr(files, "sync_directory", refused)
    one = alone(tmp_path)
    one.save(4)
    one.close()
    ((fault, text),) = one.elastic.reports
    assert fault == "checkpoint_failed" and "Input/output error" in text
    assert files.verify(root) == [] and not list(root.glob("*.failed"))


def test_read_only_disk(tmp_path, small_disk):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    result, said = run(tmp_path, root=small_disk / "c")
    assert result.step == 12
    # One may be left out before: the writer of the one before it is just starting.
    assert any("Read-only file system" in text for _, text in said.reports), said.reports


def command(*arguments, launcher=()):
    path = os.pathsep.join([str(HERE), *(p for p in sys.path if p)])
    return subprocess.run(
        [sys.executable, *launcher, "-m", "holdfast.trainer", *arguments],
        capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )


def test_alone_as_a_command(tmp_path):
    done = command("model=tiny:Model", "data=tiny:Data", "steps=4", f"work_dir={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert "step 4/4" in done.stdout and '"digest"' in done.stderr
    assert "unused parameters" not in done.stderr
    done = command("model=tiny:Model", "stepz=1", "seed=x")
    assert done.returncode == 78 and "stepz: unknown key; did you mean steps?" in done.stderr


def test_plain_torchrun(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # torchrun leaves a folder there
    done = command(
        "model=tiny:Model", "data=tiny:Data", "steps=4", f"work_dir={tmp_path}",
        "checkpoint.every=2",
        launcher=("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"))
    assert done.returncode == 0, done.stderr[-2000:]
    assert files.listing(tmp_path / "checkpoints")[0].world == 2


def test_the_manifest_names_whatever_device_torch_computes_on(monkeypatch):
    """An accelerator that is no GPU of CUDA's is no processor."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(torch.xpu, "get_device_name", lambda: "a card")
    found = manifest.run_manifest(load(None, ["device=accelerator"]), "")["machine"]
    assert (found["device"], found["name"]) == ("xpu", "a card")
    found = manifest.run_manifest(load(None, ["device=cpu"]), "")["machine"]
    assert (found["device"], found["name"]) == ("cpu", platform.machine())
