"""Embeddings to files: whole, each once, whatever is lost on the way."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import Launcher

from holdfast.trainer import export
from holdfast.trainer.checkpoint import format as files
from holdfast.trainer.config import ConfigError, ExportOptions, load

LIMIT_S = 300.0  # a busy machine starts ranks slowly


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


def parts(folder, samples=20, rows=6, **about) -> export.Parts:
    made = export.Parts(ExportOptions(dir=str(folder), rows=rows), samples, about)
    made.begin()
    return made


def test_each_part_is_some_ranks_whatever_is_done_and_whoever_is_there(tmp_path):
    made = parts(tmp_path)
    assert [list(made.mine(rank, 3)) for rank in range(3)] == [[0, 3], [1], [2]]
    made.write(1, np.zeros((6, 2)))
    (tmp_path / "part-000002.npy").write_bytes(b"half of it")  # without its table
    assert [list(made.mine(rank, 2)) for rank in range(2)] == [[0, 3], [2]]
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
    assert not (tmp_path / files.COMMIT).exists() and list(made.mine(0, 1)) == [1, 3]
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
    with pytest.raises(ConfigError, match="export.field = 'z': set one of x, y"):
        export.encode(lambda x: x, Data(), "z", range(3), torch.device("cpu"), lambda: None)
