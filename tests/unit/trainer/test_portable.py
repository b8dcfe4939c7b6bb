"""Weights out and in: safetensors as its own library reads it, a plain state_dict, and new runs."""

from __future__ import annotations

import json
import os
import struct
import threading
from pathlib import Path

import pytest
import test_checkpoint as runs
import tiny
import torch
import torch.distributed as dist
import waiting
from harness import Launcher

from holdfast.agent.cli import main
from holdfast.trainer.checkpoint import format as files
from holdfast.trainer.checkpoint import manifest, portable, tensors
from holdfast.trainer.checkpoint.restore import read_into
from holdfast.trainer.checkpoint.tensors import Place
from holdfast.trainer.config import ConfigError, load
from holdfast.trainer.state import State, specs_of

clean_group = runs.clean_group


@pytest.fixture
def trained(tmp_path) -> Path:
    runs.run(tmp_path)
    return Path(files.listing(tmp_path / "checkpoints")[0].path)


def state_dict(checkpoint: Path) -> dict[str, torch.Tensor]:
    return {place.name: portable.tensor(place) for place in portable.read(checkpoint).places}


def test_a_state_dict_of_torch_holds_the_same_bits(trained, tmp_path, capsys) -> None:
    assert main(["checkpoint", "export", str(trained), str(tmp_path / "m.pt")]) == 0
    loaded = torch.load(tmp_path / "m.pt", weights_only=True)
    wanted = state_dict(trained)
    assert loaded.keys() == wanted.keys() and "norm.running_mean" in loaded
    assert all(torch.equal(loaded[name], wanted[name]) for name in wanted)
    tiny.Model({}).load_state_dict(loaded)


def test_safetensors_as_its_own_library_reads_and_writes_it(trained, tmp_path) -> None:
    library = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    assert main(["checkpoint", "export", str(trained), str(tmp_path / "m.safetensors")]) == 0
    loaded, wanted = library.load_file(tmp_path / "m.safetensors"), state_dict(trained)
    assert loaded.keys() == wanted.keys()
    assert all(torch.equal(loaded[name], wanted[name]) for name in wanted)
    others = {name: torch.arange(24).to(getattr(torch, name)).reshape(2, 3, 4)
              for name in portable.WORDS if hasattr(torch, name)}
    others |= {"scalar": torch.tensor(3.5), "none": torch.empty(0, 4)}
    library.save_file(others, tmp_path / "o.safetensors", {"by": "the library"})
    read = {one.name: portable.tensor(one) for one in portable.of_file(
        tmp_path / "o.safetensors").places}
    assert read.keys() == others.keys()
    for name, one in others.items():
        assert read[name].dtype == one.dtype and read[name].shape == one.shape
        assert torch.equal(read[name].float() if "complex" not in name else read[name],
                           one.float() if "complex" not in name else one), name


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_there_and_back_the_weights_have_the_same_digest(trained, tmp_path, suffix, capsys) -> None:
    file = tmp_path / f"m{suffix}"
    assert main(["checkpoint", "export", str(trained), str(file)]) == 0
    assert main(["checkpoint", "import", str(file), str(tmp_path / "back")]) == 0
    (back,) = files.listing(tmp_path / "back")
    assert main(["verify", str(tmp_path / "back")]) == 0

    def digest(path):
        return tensors.weights_digest(path, files.read_manifest(path))

    assert digest(Path(back.path)) == digest(trained)
    assert main(["checkpoint", "import", str(file), str(tmp_path / "back")]) == 2  # is there


def header(table: object, data: bytes = b"") -> bytes:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return struct.pack("<Q", len(text)) + text + data


def one(**changed: object) -> dict[str, object]:
    return {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changed}}


@pytest.mark.parametrize("data", [
    b"", b"1234567", struct.pack("<Q", 1 << 60), header(b"{"), header(b"[" * 100_000), header([]),
    header({"w": 3}), header(one(), b"1234567"), header(one(), b"123456789"),
    header(one(shape=[3]), b"12345678"), header(one(shape=[-1, -2]), b"12345678"),
    header(one(dtype="F4"), b"12345678"), header(one(data_offsets=[4, 12]), b"x" * 12),
    header(one(data_offsets=[-8, 0]), b""),
    header({**one(), "v": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}, b"x" * 12),
])
def test_a_damaged_file_is_named_and_nothing_is_made(tmp_path, data: bytes, capsys) -> None:
    file = tmp_path / "bad.safetensors"
    file.write_bytes(data)
    assert main(["checkpoint", "import", str(file), str(tmp_path / "to")]) == 2
    assert "bad.safetensors" in capsys.readouterr().err and not (tmp_path / "to").exists()


def test_a_pickle_is_not_executed(tmp_path, capsys) -> None:
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "made"),)

    torch.save({"w": Evil()}, tmp_path / "evil.pt")
    assert main(["checkpoint", "import", str(tmp_path / "evil.pt"), str(tmp_path / "to")]) == 2
    assert "torch cannot read it" in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


def test_a_write_that_fails_leaves_the_old_file(trained, tmp_path, monkeypatch) -> None:
    target = tmp_path / "m.safetensors"
    target.write_bytes(b"old")
    calls = []

    def failing(place):
        calls.append(place)
        if len(calls) > 2:
            raise OSError(28, "No space left on device")
        return b"\0" * place.nbytes

    monkeypatch.setattr(Place, "read", failing)
    assert main(["checkpoint", "export", str(trained), str(target)]) == 2
    assert target.read_bytes() == b"old" and len(calls) == 3
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".m")] == []


# ------------------------------------------------------------------------------------- init_from


@pytest.mark.parametrize("kind", ["checkpoint", "folder", ".safetensors", ".pt", "imported"])
def test_a_new_run_begins_with_the_weights_alone(trained, tmp_path, kind: str, capsys) -> None:
    source = {"checkpoint": trained, "folder": trained.parent}.get(kind, tmp_path / f"m{kind}")
    if kind == "imported":
        source = tmp_path / "imported"
        portable.export(trained, tmp_path / "m.safetensors")
        portable.bring(tmp_path / "m.safetensors", source)
    elif kind.startswith("."):
        portable.export(trained, source)
    new = tmp_path / "new"
    result, said = runs.run(new, f"init_from={source}", "steps=1", "checkpoint.every=1",
                            "optimizer.learning_rate=1e-12", "optimizer.warmup_steps=0",
                            "optimizer.weight_decay=0")
    assert result.step == 1 and any("from the weights of" in text for _, text in said.reports)
    found = files.read_manifest(Path(files.listing(new / "checkpoints")[0].path))
    began = found["run_manifest"]["began"]
    assert began["from"] == "weights" and began["digest"].startswith("xxh3_128:")
    assert (began.get("step") == 12) == (kind in ("checkpoint", "folder"))
    before = state_dict(trained)
    after = state_dict(Path(files.listing(new / "checkpoints")[0].path))
    assert all(torch.allclose(before[name], after[name], atol=1e-6)
               for name in before if name.startswith("layers"))
    # Resuming is told apart: the same settings go on with what is their own.
    _, said = runs.run(new, f"init_from={source}", "steps=3")
    assert not any("from the weights of" in text for _, text in said.reports)
    kept = sorted((new / "checkpoints" / manifest.MANIFESTS).iterdir())
    assert json.loads(kept[-1].read_bytes())["began"]["from"] == "disk"


@pytest.mark.parametrize("way", [
    ["strategy=fsdp"], ["strategy=mics", "mics.group=1"],
    ["strategy=pipeline", "pipeline.stages=2"],
])
def test_shared_weights_begin_a_new_run_as_well(tmp_path, way) -> None:
    runs.run(tmp_path, "model=tiny:Still", "steps=4")
    (found,) = files.listing(tmp_path / "checkpoints")
    new = tmp_path / "new"
    launcher = Launcher(load(None, [
        "model=tiny:Still", "data=tiny:Data", "steps=1", "batch=3", "micro_batches=2", *way,
        f"init_from={found.path}", f"work_dir={new}", "checkpoint.every=1",
        "optimizer.learning_rate=1e-12", "optimizer.warmup_steps=0", "optimizer.weight_decay=0",
    ]), 2, tmp_path)
    launcher.run()
    assert "from the weights of" in str(launcher.said("report"))
    made = Path(files.listing(new / "checkpoints")[0].path)
    began = files.read_manifest(made)["run_manifest"]["began"]
    assert (began["from"], began["step"]) == ("weights", 4)
    assert began["digest"].startswith("xxh3_128:")
    before, after = state_dict(Path(found.path)), state_dict(made)
    assert before.keys() == after.keys()
    assert all(torch.allclose(before[name], after[name], rtol=0, atol=1e-6) for name in before)
    state = State(specs_of(tiny.Still({})), torch.device("cpu"))
    read_into(made, state)
    counts = {float(view) for name, view in state.views.items() if name.startswith("adamw.step.")}
    assert counts == {1.0}  # and not the 5 of one that had resumed


def said_of(tmp_path, *more) -> str:
    with pytest.raises(ConfigError) as caught:
        runs.run(tmp_path, *more)
    if dist.is_initialized():  # what came up only once the ranks had met
        dist.destroy_process_group()
    return str(caught.value)


def test_what_does_not_fit_is_named(trained, tmp_path) -> None:
    new = tmp_path / "new"
    assert "holds no checkpoint" in said_of(new, f"init_from={tmp_path}")
    assert "no such file" in said_of(new, f"init_from={tmp_path / 'no.pt'}")
    other = said_of(new, f"init_from={trained}", "model=tiny:OtherModel")
    assert "init_from: (33, 8) of layers.0.weight is not this model's (17, 8)" in other
    torch.save({"w": torch.zeros(1)}, tmp_path / "w.pt")
    text = said_of(new, f"init_from={tmp_path / 'w.pt'}")
    assert "has no layers.0.bias" in text and "has, and this model has not, w" in text
    own = said_of(tmp_path, f"init_from={trained}")
    assert "a run resumes from there by itself" in own


def test_weights_alone_cannot_be_resumed_from(trained, tmp_path) -> None:
    portable.export(trained, tmp_path / "m.safetensors")
    portable.bring(tmp_path / "m.safetensors", tmp_path / "weights")
    with pytest.raises(ConfigError, match="holds weights alone.*set init_from"):
        runs.run(tmp_path / "new", root=tmp_path / "weights")


# ------------------------------------------------------------------------------------- manifest


def test_the_environment_is_kept_without_secrets() -> None:
    kept = manifest.environment({
        "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "1", "HOLDFAST_TOKEN_FILE": "/x", "HOME": "/h",
        "AWS_SECRET_ACCESS_KEY": "s", "SLURM_JWT": "s", "HOLDFAST_URL": "https://u:geheim@h/x",
        "WANDB_API_KEY": "s", "PYTHONPATH": "/p", "MY_DSN": "x", "CUDA_X" * 50: "y" * 5000,
        "NCCL_SHAPE": "a hf_abcdefghijklmnopqrstuvwxyz0123 b",
        "NCCL_LONG": f"{'x' * (manifest.VALUE_MAX - 20)} http://u:geheim-geheim-geheim@h/x",
    })
    assert kept.keys() == {"NCCL_DEBUG", "OMP_NUM_THREADS", "HOLDFAST_URL", "PYTHONPATH",
                           "CUDA_X" * 50, "NCCL_SHAPE", "NCCL_LONG"}
    assert "geheim" not in kept["HOLDFAST_URL"] + kept["NCCL_LONG"]
    assert "hf_" not in kept["NCCL_SHAPE"]
    assert max(map(len, kept.values())) == manifest.VALUE_MAX
    many = manifest.environment({f"NCCL_{number}": "" for number in range(1000)})
    assert len(many) == manifest.VARIABLES_MAX


def test_a_run_without_checkpoints_keeps_its_manifest_too(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    runs.run(tmp_path, "checkpoint.every=0", "steps=2")
    folder = tmp_path / "checkpoints" / manifest.MANIFESTS
    waiting.wait_for(lambda: list(folder.glob("gen-*.json")))
    found = json.loads(next(folder.glob("gen-*.json")).read_bytes())
    assert found["environment"]["NCCL_DEBUG"] == "INFO" and found["began"] == {"from": "nothing"}
    assert found["config"]["steps"] == 2 and found["machine"]["device"] == "cpu"


def test_the_manifest_is_written_again_where_the_layout_is_another(tmp_path, monkeypatch) -> None:
    slow, began = threading.Event(), manifest.run_manifest
    monkeypatch.setattr(manifest, "run_manifest", lambda *given: slow.wait(60) and began(*given))
    one = manifest.Manifest(load(None, [f"work_dir={tmp_path}"]), "data")
    said = []

    def laid_out(stages: list[int], generation: int) -> None:
        one.strategy = {"name": "pipeline", "stages": stages}
        one.keep("m5", generation, lambda *words: said.append(words))

    def written() -> dict[str, list[int]]:
        folder = tmp_path / "checkpoints" / manifest.MANIFESTS
        return {path.name: json.loads(path.read_bytes())["strategy"]["stages"]
                for path in sorted(folder.glob("gen-*.json"))}

    laid_out([1, 3], 1)
    laid_out([2, 2], 1)  # while the first one is written yet
    laid_out([2, 2], 2)
    laid_out([4], 3)
    slow.set()
    waiting.wait_for(lambda: len(written()) == 2)
    assert written() == {"gen-000000001.json": [2, 2], "gen-000000003.json": [4]} and not said


def test_the_settings_name_the_source() -> None:
    assert load(None, ["init_from=/a/b"]).init_from == "/a/b"


# ------------------------------------------------------------------------------------- shards


def sharded(root: Path, rows: list[tuple[int, int]]) -> Path:
    """One tensor of 6 rows of 2 numbers, of which each rank holds some."""
    directory, whole = root / files.directory_name(3, 1), bytes(range(48))
    for rank, (first, end) in enumerate(rows):
        entry = files.Entry("model.w", "float32", (6, 2), 0, 8 * (end - first), 8 * first)
        files.write_shard(directory, rank, len(rows), [entry], whole[8 * first : 8 * end])
    files.commit(directory, {"generation": 1, "step": 3, "world": len(rows)})
    return directory


@pytest.mark.parametrize("rows", [
    [(0, 6)], [(0, 2), (2, 6)], [(4, 6), (0, 4)], [(0, 3), (3, 6), (0, 3), (3, 6)],
])
def test_pieces_of_a_tensor_become_one_whatever_the_shards(tmp_path, rows) -> None:
    checkpoint = sharded(tmp_path, rows)
    ((place,),) = [portable.of_checkpoint(checkpoint).places]
    assert place.read() == bytes(range(48)) and place.shape == (6, 2)
    assert tensors.weights_digest(checkpoint, files.read_manifest(checkpoint)) == \
        files.weights_digest([("model.w", bytes(range(48)))])


@pytest.mark.parametrize("rows", [[(0, 2), (3, 6)], [(0, 5)], [(1, 6)]])
def test_a_part_that_is_in_no_shard_is_named(tmp_path, rows) -> None:
    with pytest.raises(files.CheckpointError, match="a part of w|a part of model.w"):
        portable.of_checkpoint(sharded(tmp_path, rows))
