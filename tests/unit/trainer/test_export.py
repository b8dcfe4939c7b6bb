"""Embeddings to files: whole, each once, whatever is lost on the way."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import test_checkpoint as runs
import torch
from harness import Launcher

from holdfast.trainer import export
from holdfast.trainer.checkpoint import format as files
from holdfast.trainer.config import ConfigError, ExportOptions, load

LIMIT_S = 300.0  # a busy machine starts ranks slowly
clean_group = runs.clean_group


def config(tmp, *more):
    return load(None, [
        "model=tiny:Embedding", "data=tiny:Data", "steps=4", "batch=3", "micro_batches=4",
        f"work_dir={tmp}", "checkpoint.every=4", "export.field=x", "export.rows=7", *more])


def rows_of(folder: Path) -> np.ndarray:
    return np.concatenate([np.load(one) for one in sorted(folder.glob("part-*.npy"))])


def test_a_lost_rank_costs_a_part_and_the_files_are_the_same(tmp_path):
    Launcher(config(tmp_path), 2, tmp_path).run(timeout_s=LIMIT_S)
    (found,) = files.listing(tmp_path / "checkpoints")
    resume = ("disk", found.step, found.generation, found.path)
    whole, faulty = tmp_path / "whole", tmp_path / "faulty"
    Launcher(config(tmp_path, f"export.dir={whole}"), 1, tmp_path).run(resume, LIMIT_S)
    launcher = Launcher(config(tmp_path, f"export.dir={faulty}"), 2, tmp_path,
                        {(1, 1, 4, "eval"): "kill"}, standby=1)
    launcher.run(resume, LIMIT_S)
    assert [kind for kind, _ in launcher.plans] == ["disk", "survivor"], launcher.log()
    assert rows_of(whole).shape == (40, 33) and np.array_equal(rows_of(whole), rows_of(faulty))
    told = json.loads((faulty / files.COMMIT).read_bytes())
    assert told["samples"] == 40 and len(told["parts"]) == 6
    # Again, nothing is computed but a part in which a byte changed meanwhile.
    before = (faulty / "part-000002.npy").read_bytes()
    (faulty / "part-000002.npy").write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    times = {one.name: one.stat().st_mtime_ns for one in faulty.glob("*.npy")}
    again = Launcher(config(tmp_path, f"export.dir={faulty}"), 1, tmp_path)
    again.run(resume, LIMIT_S)
    assert "parts do not prove: made again" in str(again.said("report"))
    assert (faulty / "part-000002.npy").read_bytes() == before
    later = {one.name: one.stat().st_mtime_ns for one in faulty.glob("*.npy")}
    assert [name for name in times if times[name] != later[name]] == ["part-000002.npy"]


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Settings of a run that ddp has trained, where it lies, and what ddp exports of it: parts of
    3, 3 and 2 batches, so that two ranks have neither equally many parts nor equal ones."""
    tmp = tmp_path_factory.mktemp("shared")
    settings = ["model=tiny:Searched", "data_options.samples=350", "steps=2", "batch=3",
                "micro_batches=2", "checkpoint.every=2", "export.field=x", "export.rows=130"]
    runs.run(tmp, *settings)
    runs.run(tmp, *settings, f"export.dir={tmp / 'ddp'}")
    (found,) = files.listing(tmp / "checkpoints")
    return settings, tmp, ("disk", found.step, found.generation, found.path)


@pytest.mark.parametrize(("name", "way"), [
    ("fsdp", ["strategy=fsdp"]), ("mics", ["strategy=own:Near", "mics.group=2"]),
    ("pipeline", ["strategy=pipeline", "pipeline.stages=2"]),
])
def test_shared_weights_export_what_whole_ones_do(shared, name, way):
    settings, tmp, resume = shared
    more = load(None, [*settings, *way, "data=tiny:Data", f"work_dir={tmp}",
                       f"export.dir={tmp / name}"])
    faults = {(1, 1, 2, "eval"): "kill"} if name == "fsdp" else {}
    launcher = Launcher(more, 2, tmp, faults)
    launcher.run(resume, LIMIT_S)
    assert [kind for kind, _ in launcher.plans] == ["disk"] * (1 + len(faults)), launcher.log()
    wanted, found = rows_of(tmp / "ddp"), rows_of(tmp / name)
    assert found.shape == (350, 33) and np.allclose(found, wanted, rtol=0, atol=1e-5)
    assert len(json.loads((tmp / name / files.COMMIT).read_bytes())["parts"]) == 3
    # Another strategy goes on with the folder: the weights are the same, whoever held what.
    (tmp / name / "part-000001.npy.json").unlink()
    times = {one.name: one.stat().st_mtime_ns for one in (tmp / name).glob("*.npy")}
    runs.run(tmp, *settings, f"export.dir={tmp / name}")
    later = {one.name: one.stat().st_mtime_ns for one in (tmp / name).glob("*.npy")}
    assert [one for one in times if times[one] != later[one]] == ["part-000001.npy"]


def parts(folder, samples=20, rows=6, **about) -> export.Parts:
    made = export.Parts(ExportOptions(dir=str(folder), rows=rows), samples, about)
    made.begin()
    return made


def test_each_part_is_some_ranks_whatever_is_done_and_whoever_is_there(tmp_path):
    made = parts(tmp_path)
    assert made.missing() == [0, 1, 2, 3] and made.batches == 1
    assert [list(export.turns(made.missing(), rank, 3)) for rank in range(3)] == [
        [(0, True), (3, True)], [(1, True), (3, False)], [(2, True), (3, False)]]
    made.write(1, np.zeros((6, 2)))
    (tmp_path / "part-000002.npy").write_bytes(b"half of it")  # without its table
    assert made.missing() == [0, 2, 3]
    assert [list(export.turns([], rank, 2)) for rank in range(2)] == [[], []]
    assert sorted(sample for part in range(made.count) for sample in made.samples_of(part)) == \
        list(range(20))


def test_commit_names_every_digest_or_nothing(tmp_path):
    made = parts(tmp_path)
    for part in range(4):
        made.write(part, np.full((2, 2), part))
    data = (tmp_path / "part-000003.npy").read_bytes()
    (tmp_path / "part-000003.npy").write_bytes(data[:-1])
    (tmp_path / "part-000001.npy").unlink()
    assert made.commit() == ["part-000001.npy", "part-000003.npy"]
    assert not (tmp_path / files.COMMIT).exists() and made.missing() == [1, 3]
    for part in (1, 3):
        made.write(part, np.full((2, 2), part))
    assert made.commit() == []
    assert len(json.loads((tmp_path / files.COMMIT).read_bytes())["parts"]) == 4


def test_another_model_or_another_cut_needs_another_directory(tmp_path):
    parts(tmp_path, state="a")
    parts(tmp_path, state="a")
    with pytest.raises(ConfigError, match="an export with another rows, state: set another dir"):
        parts(tmp_path, rows=5, state="b")
    (tmp_path / "about.json").write_text("{")
    with pytest.raises(ConfigError, match="set another directory"):
        parts(tmp_path, state="a")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file/x: Not a directory"):
        parts(tmp_path / "file" / "x")
    with pytest.raises(ConfigError, match="export.rows = 1 makes 1000001 parts: set 2 or more"):
        export.Parts(ExportOptions(rows=1), export.PARTS_MAX + 1, {})


def test_a_field_that_no_batch_has_is_named():
    class Data:
        def batch(self, indices):
            return {"x": torch.zeros(len(indices), 2), "y": torch.zeros(len(indices))}

    made = export.encode(lambda x: x + 1, Data(), "x", range(130), torch.device("cpu"),
                         lambda: None)
    assert made.shape == (130, 2) and made.min() == 1
    calls = []
    made = export.encode(lambda x: calls.append(len(x)) or x, Data(), "x", range(70),
                         torch.device("cpu"), lambda: None, 4)
    assert made.shape == (70, 2) and calls == [64, 6, 6, 6]
    with pytest.raises(ConfigError, match="export.field = 'z': set one of x, y"):
        export.encode(lambda x: x, Data(), "z", range(3), torch.device("cpu"), lambda: None)
