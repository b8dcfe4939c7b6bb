"""Promotion: everything that must hold, each named when it does not, and the copy that is whole."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path

import pytest

from holdfast.agent.cli import main
from holdfast.trainer.checkpoint import format as files
from holdfast.trainer.checkpoint import tensors
from holdfast.trainer.quality import kept
from holdfast.trainer.quality import promote as promotion

ABOUT = dict.fromkeys(promotion.NEEDED, "known") | {"seed": 0}


def checkpoint(root: Path, about: dict | None = None, generation: int = 1) -> Path:
    directory = root / files.directory_name(40, generation)
    for rank in range(2):
        entries = [files.Entry(f"{kind}.{rank}", "float32", (16,), 64 * place, 64)
                   for place, kind in enumerate(("adamw.exp_avg", "model.layer"))]
        files.write_shard(directory, rank, 2, entries, bytes([rank]) * 128)
    files.commit(directory, {"generation": generation, "step": 40, "world": 2, "run": "m5",
                             "run_manifest": ABOUT if about is None else about})
    return directory


def judged(directory: Path, verdict: str = "within", weights: str = "", **other) -> None:
    weights = weights or tensors.weights_digest(directory, files.read_manifest(directory))
    kept.save(directory.parent, kept.Evaluation(
        "m5", 1, 40, "data", weights, {"text": kept.Task(3, "p", [1, 2, 3])}))
    one = kept.load(kept.find(directory.parent))
    second = {"run": one.run, "step": one.step, "path": one.path, "digest": one.digest}
    found = {"metric": "mrr@10", "verdict": verdict, "margin": 0.001, "relative": True}
    first = other.get("first", {**second, "run": "base", "path": "/base", "digest": "another"})
    kept.keep_verdict(one, {
        "verdict": verdict, "first": first or second, "second": second,
        "metrics": other.get("metrics", [found, {**found, "metric": "recall@10",
                                                 "margin": 0.02, "relative": False}])})


def test_what_holds_everything_appears_whole(tmp_path, capsys) -> None:
    source, target = checkpoint(tmp_path / "ckpt"), tmp_path / "models/m5-7"
    judged(source)
    assert main(["promote", str(source), str(target)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "promoted" in said and "mrr@10: within 0.1 % of base, step 40 (/base)" in said
    assert "recall@10: within 0.02 of base" in said
    assert files.verify(target) == []
    note = json.loads((target / promotion.NOTE).read_bytes())
    assert note["run"] == "m5" and note["parity"]["verdict"] == "within"
    assert [(one["metric"], one["margin"]) for one in note["parity"]["metrics"]] == [
        ("mrr@10", 0.001), ("recall@10", 0.02)]
    assert (note["parity"]["first"]["run"], note["parity"]["second"]["run"]) == ("base", "m5")
    assert {path.name for path in target.iterdir()} == {
        path.name for path in source.iterdir()} | {promotion.NOTE}
    assert [path.name for path in target.parent.iterdir()] == ["m5-7"]
    before = os.stat(target / files.MANIFEST).st_ino
    assert main(["promote", str(source), str(target)]) == 2  # never replaced
    assert "give a new name" in capsys.readouterr().out
    assert os.stat(target / files.MANIFEST).st_ino == before


def flipped(source: Path) -> None:
    data = bytearray((source / "shard-00001-of-00002.bin").read_bytes())
    data[7] ^= 1
    (source / "shard-00001-of-00002.bin").write_bytes(data)


@pytest.mark.parametrize(("about", "harm", "said"), [
    (ABOUT, flipped, "not verified: shard-00001-of-00002.bin: bytes differ"),
    (ABOUT, lambda source: (source / files.COMMIT).unlink(), "not verified: COMMIT: missing"),
    (ABOUT, lambda source: judged(source, "too few pairs to tell"),
     "parity not passed: too few pairs to tell"),
    (ABOUT, lambda source: judged(source, "outside"), "parity not passed: outside"),
    (ABOUT, lambda source: judged(source, first=None), "it is of an evaluation with itself"),
    (ABOUT, lambda source: judged(source, metrics=[]), "does not name runs, metric and margin"),
    (ABOUT, lambda source: judged(source, weights="others"), "other weights"),
    (ABOUT, lambda source: shutil.rmtree(source.parent / kept.EVALUATIONS),
     "no evaluation of step 40"),
    (ABOUT, lambda source: next((source.parent / kept.EVALUATIONS).glob("parity-*")).unlink(),
     "no parity: run `holdfast parity"),
    ({**ABOUT, "git": {}}, lambda source: None, "manifest not complete: git is missing"),
    ({}, lambda source: None, "manifest not complete: environment is missing"),
])
def test_each_reason_is_named_and_nothing_is_made(tmp_path, about, harm, said, capsys) -> None:
    source, target = checkpoint(tmp_path / "ckpt", about), tmp_path / "models/m5-7"
    judged(source)
    harm(source)
    assert main(["promote", str(source), str(target), "--json"]) == 2
    answer = json.loads(capsys.readouterr().out)
    assert any(said in one for one in answer["refused"]), answer
    assert not target.parent.exists()


def test_all_reasons_are_named_at_once(tmp_path) -> None:
    source = checkpoint(tmp_path / "ckpt", {**ABOUT, "packages": {}})
    (tmp_path / "there").mkdir()
    with pytest.raises(promotion.Refused) as caught:
        promotion.promote(source, tmp_path / "there")
    assert len(caught.value.reasons) == 3


@pytest.mark.parametrize("number", range(1, 6))
def test_a_disk_that_fails_anywhere_leaves_nothing(tmp_path, monkeypatch, number) -> None:
    source, target = checkpoint(tmp_path / "ckpt"), tmp_path / "models/m5-7"
    judged(source)
    calls, fsync = [], os.fsync

    def failing(descriptor):
        calls.append(descriptor)
        if len(calls) == number:
            raise OSError(5, "Input/output error")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    assert main(["promote", str(source), str(target)]) == 1
    assert list(target.parent.iterdir()) == []


def test_what_an_ended_one_left_is_taken_away_and_two_never_mix(tmp_path) -> None:
    source, target = checkpoint(tmp_path / "ckpt"), tmp_path / "models/m5-7"
    judged(source)
    left = target.parent / ".m5-7.promoting"
    left.mkdir(parents=True)
    (left / "shard-00000-of-00002.bin").write_bytes(b"half")
    promotion.promote(source, target)
    assert [path.name for path in target.parent.iterdir()] == ["m5-7"]
    results = []

    def one() -> None:
        try:
            promotion.promote(source, tmp_path / "models/m5-8")
            results.append("there")
        except promotion.Refused as refused:
            results.append(str(refused))

    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results.count("there") == 1 and len(results) == 4, results
    assert files.verify(tmp_path / "models/m5-8") == []
