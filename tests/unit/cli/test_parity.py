"""`holdfast parity`: two runs' evaluations in, a table and an exit code out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from holdfast.agent.cli import main
from holdfast.trainer.quality import kept

pytest.importorskip("numpy", reason="the trainer's extra is not installed")

Captured = pytest.CaptureFixture[str]


def run(root: Path, name: str, places: list[int], pairs: str = "p", task: str = "text") -> str:
    kept.save(root / name, kept.Evaluation(
        name, 1, 40, "data", f"weights of {name}",
        {task: kept.Task(len(places), pairs, places)}))
    return str(root / name)


def test_within_outside_and_too_few_pairs(tmp_path: Path, capsys: Captured) -> None:
    good = [1, 2, 3, 4] * 128
    first, same = run(tmp_path, "a", good), run(tmp_path, "b", list(good))
    worse, hardly = run(tmp_path, "c", [9] * 512), run(tmp_path, "d", [2] * 20 + good[20:])
    assert main(["parity", first, same, "--metric", "mrr@10", "--within", "0.1%"]) == 0
    said = capsys.readouterr().out
    assert "mrr@10  0.5208  0.5208  +0 %" in said and "within (512 pairs, 0 differ)" in said
    assert main(["parity", first, worse, "--within", "0.1%"]) == 1
    assert "outside" in capsys.readouterr().out
    assert main(["parity", first, hardly, "--within", "0.1%", "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "too few pairs to tell"
    assert found["metrics"][0]["low"] < -0.001
    # Of several metrics the worst word is the answer.
    assert main(["parity", first, worse, "--metric", "recall@10", "--metric", "mrr@10"]) == 1
    assert main(["parity", first, hardly, "--metric", "recall@10", "--metric", "mrr@10"]) == 3


def test_the_verdict_lies_beside_what_was_judged_and_is_void_once_that_changed(
    tmp_path: Path, capsys: Captured
) -> None:
    first, second = run(tmp_path, "a", [1] * 64), run(tmp_path, "b", [1] * 64)
    assert main(["parity", first, second]) == 0
    judged = kept.load(kept.find(Path(second)))
    assert kept.verdict_on(judged)["verdict"] == "within"
    assert kept.margins(kept.verdict_on(judged)) == [
        f"mrr@10: within 0.1 % of a, step 40 ({kept.find(Path(first))})"]
    run(tmp_path, "b", [2] * 64)
    with pytest.raises(kept.EvaluationError, match="is not about"):
        kept.verdict_on(kept.load(kept.find(Path(second))))
    with pytest.raises(kept.EvaluationError, match="no parity"):
        kept.verdict_on(kept.load(kept.find(Path(first))))


def test_one_evaluation_is_not_compared_with_itself(tmp_path: Path, capsys: Captured) -> None:
    first, copy = run(tmp_path, "a", [1] * 64), str(tmp_path / "copy")
    shutil.copytree(first, copy)
    for second in (first, str(kept.find(Path(first))), copy):
        assert main(["parity", first, second]) == 2
        assert "one and the same evaluation, of a, step 40" in capsys.readouterr().err
    # Evaluated again behind a restart: other bytes, and no other run.
    kept.save(Path(copy), kept.load(kept.find(Path(first)))._replace(generation=2))
    assert main(["parity", first, copy]) == 2
    capsys.readouterr()
    assert not [*tmp_path.rglob("parity-*")]
    # Another run that came to the same weights is another one.
    theirs = kept.load(kept.find(Path(first)))._replace(run="b")
    kept.save(tmp_path / "b", theirs)
    assert main(["parity", first, str(tmp_path / "b")]) == 0


@pytest.mark.parametrize(("more", "said"), [
    (["--metric", "f1"], "give mrr@K or recall@K"), (["--within", "0"], "give a part as 0.1%"),
    (["--task", "image"], "no task 'image'; give --task text"), (["--step", "7"], "of step 7"),
])
def test_a_wrong_question_is_answered_with_what_to_give(
    tmp_path: Path, capsys: Captured, more: list[str], said: str
) -> None:
    first, second = run(tmp_path, "a", [1] * 64), run(tmp_path, "b", [1] * 64)
    assert main(["parity", first, second, *more]) == 2
    assert said in capsys.readouterr().err


def test_a_file_of_another_step_than_the_one_asked_for_is_refused(
    tmp_path: Path, capsys: Captured
) -> None:
    runs = run(tmp_path, "a", [1] * 64), run(tmp_path, "b", [1] * 64)
    first, second = (kept.find(Path(one)) for one in runs)
    step = kept.load(first).step
    assert main(["parity", str(first), str(second), "--step", str(step)]) == 0
    assert main(["parity", str(first), str(second), "--step", str(step + 1)]) == 2
    assert f"is of step {step}, not {step + 1}" in capsys.readouterr().err


def test_other_pairs_and_no_evaluation_cannot_be_compared(tmp_path: Path, capsys: Captured) -> None:
    first, second = run(tmp_path, "a", [1] * 64), run(tmp_path, "b", [1] * 64, pairs="others")
    assert main(["parity", first, second]) == 2
    assert "other pairs" in capsys.readouterr().err
    assert main(["parity", first, str(tmp_path / "no")]) == 2
    assert "holds no evaluation" in capsys.readouterr().err
