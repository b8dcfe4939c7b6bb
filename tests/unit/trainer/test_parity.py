"""Parity: what it says of pairs whose truth is known, and the files that it rests on."""

from __future__ import annotations

import json

import numpy as np
import pytest

from holdfast.trainer.checkpoint import format as files
from holdfast.trainer.quality import kept, parity

MRR = parity.metric("mrr@10")


class World:
    """Pairs as they come without end: a part of them changes its place from one run to the other,
    so that the true difference is known."""

    def __init__(self, seed: int, changing: float, worse: float) -> None:
        self.rng, self.changing = np.random.default_rng(seed), changing
        self.worse = worse  # of those that change; the others become better
        many = 1_000_000
        before, after = self.draw(many)
        values = MRR.of(before), MRR.of(after)
        self.difference = float(values[1].mean() - values[0].mean())
        self.relative = self.difference / float(values[0].mean())

    def draw(self, pairs: int) -> tuple[np.ndarray, np.ndarray]:
        before = np.minimum(self.rng.geometric(0.25, pairs), 40)
        moved = self.rng.random(pairs) < self.changing
        by = np.where(self.rng.random(pairs) < self.worse, 1, -1) * self.rng.integers(1, 4, pairs)
        return before, np.clip(np.where(moved, before + by, before), 1, 40)


@pytest.mark.parametrize(("changing", "worse"), [(0.3, 0.9), (0.1, 0.7)])
@pytest.mark.parametrize("relative", [True, False])
def test_the_interval_holds_the_truth_as_often_as_it_says(
    monkeypatch: pytest.MonkeyPatch, changing: float, worse: float, relative: bool
) -> None:
    monkeypatch.setattr(parity, "RESAMPLES", 1000)
    world, runs = World(1, changing, worse), 300
    truth = world.relative if relative else world.difference
    held = 0
    for seed in range(runs):
        found = parity.compare(*world.draw(400), MRR, parity.Margin(0.01, relative), seed)
        assert found.low is not None and found.high is not None
        held += found.low <= truth <= found.high
    # Of 1,500 such runs 93 to 96 % held; 300 have a standard deviation of 1.3 %.
    assert 0.91 <= held / runs <= 0.985, held / runs


def verdicts(world: World, margin: float, pairs: int, runs: int = 100) -> dict[str, int]:
    found = [parity.compare(*world.draw(pairs), MRR, parity.Margin(margin, True), seed).verdict
             for seed in range(runs)]
    return {verdict: found.count(verdict) for verdict in set(found)}


def test_what_it_says_is_seldom_wrong_and_more_pairs_make_it_sure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parity, "RESAMPLES", 1000)
    worse = World(2, 0.2, 0.9)
    assert worse.relative < -0.03
    edge = -worse.relative  # the truth lies on the margin: neither may be said more than 2.5 %
    found = verdicts(worse, edge, 400)
    assert found.get(parity.WITHIN, 0) <= 8 and found.get(parity.OUTSIDE, 0) <= 8, found
    assert found[parity.UNKNOWN] >= 84, found
    alike = World(3, 0.2, 0.5)
    assert abs(alike.relative) < 0.01
    assert verdicts(alike, 0.02, 100).get(parity.UNKNOWN, 0) >= 90  # the interval is far wider
    assert verdicts(alike, 0.02, 20_000, 25)[parity.WITHIN] >= 24
    assert verdicts(worse, 0.01, 20_000, 25)[parity.OUTSIDE] == 25


def test_an_interval_wider_than_the_margin_is_too_few_pairs_and_says_how_many_would_do() -> None:
    before, after = World(4, 0.2, 0.5).draw(512)
    found = parity.compare(before, after, MRR, parity.margin("0.1%"))
    assert found.low is not None and found.high is not None
    assert found.high - found.low > 2 * 0.001 and found.verdict == parity.UNKNOWN
    wide = parity.compare(before, after, MRR, parity.margin("10%"))
    assert wide.verdict == parity.WITHIN
    near = parity.compare(before, after, MRR, parity.Margin(abs(found.difference) + 0.002, True))
    assert near.verdict == parity.UNKNOWN
    wanted = int(near.why.split("some ")[1].split(" pairs")[0].replace(",", ""))
    assert wanted == pytest.approx(512 * ((found.high - found.low) / 2 / 0.002) ** 2, rel=0.02)


@pytest.mark.parametrize(("found", "of", "share"), [
    (0, 100, 0.036217), (3, 400, 0.021761), (5, 30, 0.347212)])
def test_a_share_is_bounded_exactly(found: int, of: int, share: float) -> None:
    """By the quantiles of the beta distribution, as any table has them."""
    assert parity._share_at_most(found, of) == pytest.approx(share, abs=1e-6)


def test_few_that_differ_are_enough_where_they_cannot_leave_the_margin() -> None:
    before, after = [1] * 400, [40] * 3 + [1] * 397
    found = parity.compare(before, after, MRR, parity.Margin(0.022, True))
    assert found.verdict == parity.WITHIN and found.high == pytest.approx(0.021761, abs=1e-6)
    assert found.low == -found.high, "how they differ is not known"
    narrow = parity.compare(before, after, MRR, parity.Margin(0.021, True))
    assert narrow.verdict == parity.UNKNOWN


def test_few_pairs_or_few_that_differ_are_not_enough() -> None:
    ones = [1] * 512
    assert parity.compare(ones[:29], ones[:29], MRR, parity.margin("0.1%")).verdict \
        == parity.UNKNOWN
    assert parity.compare(ones[:5], ones[:5], MRR, parity.margin("0.1%"), 0, True).verdict \
        == parity.WITHIN  # the same weights need no statistics
    assert parity.compare(ones, ones, MRR, parity.margin("0.1%")).verdict == parity.WITHIN
    few = parity.compare(ones, [2] * 9 + ones[9:], MRR, parity.margin("3%"))
    assert few.verdict == parity.UNKNOWN and few.differing == 9
    enough = parity.compare(ones, [2] * 10 + ones[10:], MRR, parity.margin("50%"))
    assert enough.verdict == parity.WITHIN
    nothing = parity.compare([20] * 99, [1] * 50 + [20] * 49, MRR, parity.margin("0.1%"))
    assert nothing.verdict == parity.UNKNOWN and nothing.low is None and "nothing" in nothing.why
    assert parity.compare([], [], MRR, parity.margin("1%"), 0, True).verdict == parity.UNKNOWN


def test_a_place_beyond_the_cutoff_counts_nothing_and_the_same_seed_gives_the_same() -> None:
    assert MRR.of([1, 2, 10, 11]).tolist() == [1.0, 0.5, 0.1, 0.0]
    assert parity.metric("recall_at_3").of([1, 3, 4]).tolist() == [1.0, 1.0, 0.0]
    first, second = World(5, 0.3, 0.5).draw(300)
    again = [parity.compare(first, second, MRR, parity.margin("1%"), seed) for seed in (7, 7, 8)]
    assert again[0] == again[1] != again[2]


@pytest.mark.parametrize("text", ["mrr", "mrr@0", "mrr@1001", "f1@10", "", "mrr@-1"])
def test_unknown_metrics(text: str) -> None:
    with pytest.raises(ValueError, match="give mrr@K"):
        parity.metric(text)


@pytest.mark.parametrize("text", ["0", "-1%", "nan", "101%", "2", "x%", "", "1e400"])
def test_impossible_margins(text: str) -> None:
    with pytest.raises(ValueError, match="give a part"):
        parity.margin(text)


# ------------------------------------------------------------------------------------- the files


def evaluation(step: int = 40, generation: int = 1, weights: str = "w", places=(1, 2, 3)):
    task = kept.Task(len(places), "pairs", list(places))
    return kept.Evaluation("m5", generation, step, "data", weights, {"text": task})


def test_an_evaluation_is_read_as_it_was_kept_and_the_newest_is_found(tmp_path) -> None:
    for step, generation in ((10, 2), (40, 1), (20, 2)):
        kept.save(tmp_path, evaluation(step, generation))
    path = kept.find(tmp_path)  # the later generation went back further: its word counts
    assert path.name == "step-000000020.gen-2.json"
    found = kept.load(path)
    assert found[:5] == evaluation(20, 2)[:5] and found.tasks == evaluation().tasks
    assert found.digest == files.digest(path.read_bytes())
    assert kept.load(kept.find(tmp_path, 40)).generation == 1
    with pytest.raises(kept.EvaluationError, match="no evaluation of step 11.*10, 20, 40"):
        kept.find(tmp_path, 11)
    with pytest.raises(kept.EvaluationError, match="holds no evaluation"):
        kept.find(tmp_path / "no")


def test_the_number_of_files_and_of_pairs_is_bounded(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(kept, "PAIRS_MAX", 2)
    for step in range(kept.FILES_MAX + 3):
        kept.save(tmp_path, evaluation(step))
        kept.keep_verdict(kept.load(kept.find(tmp_path)), {"verdict": "within"})
    names = sorted(path.name for path in (tmp_path / kept.EVALUATIONS).iterdir())
    assert len(names) == 2 * kept.FILES_MAX
    assert not [name for name in names if "step-000000002" in name]
    assert kept.load(kept.find(tmp_path)).tasks["text"] == kept.Task(3, "pairs", [1, 2])


@pytest.mark.parametrize("text", [
    "", "[]", "{", '{"format": 1}', '{"format": 2}', "[" * 100_000, '{"format": 1, "tasks": []}',
    json.dumps({"format": 1, "run": "a", "generation": 1, "step": 1, "data_digest": "",
                "weights": "", "tasks": {"a": {"pairs": 1, "pairs_digest": "", "places": [0]}}}),
    json.dumps({"format": 1, "run": "a", "generation": 1, "step": 1, "data_digest": "",
                "weights": "", "tasks": {}}),
])
def test_what_is_no_evaluation_is_said_with_its_name(tmp_path, text: str) -> None:
    file = tmp_path / "bad.json"
    file.write_text(text)
    with pytest.raises(kept.EvaluationError, match="bad.json"):
        kept.load(file)


def test_an_evaluation_belongs_to_a_checkpoint_by_the_weights(tmp_path) -> None:
    checkpoint = tmp_path / files.directory_name(40, 2)
    kept.save(tmp_path, evaluation(40, 1, "w"))  # of an earlier generation
    with pytest.raises(kept.EvaluationError, match="other weights"):
        kept.of_checkpoint(checkpoint, 40, 2, "w")
    kept.save(tmp_path, evaluation(40, 3, "w"))
    assert kept.of_checkpoint(checkpoint, 40, 2, "w").generation == 3
    with pytest.raises(kept.EvaluationError, match="other weights"):
        kept.of_checkpoint(checkpoint, 40, 2, "v")
    with pytest.raises(kept.EvaluationError, match="no evaluation of step 30"):
        kept.of_checkpoint(checkpoint, 30, 2, "w")
