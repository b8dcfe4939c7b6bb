"""Several tasks, text and pictures through one encoder: what is drawn, learnt and measured."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from harness import Launcher

from holdfast.trainer.config import ConfigError, load
from holdfast.trainer.evaluate import evaluate, places_of_class
from holdfast.trainer.example import corpus, picture
from holdfast.trainer.example.model import Encoder
from holdfast.trainer.example.multitask import CodePages, MultiTask

SMALL = {"layers": 1, "width": 32, "heads": 2, "vocabulary": 400, "tokens": 32, "head_width": 32}
ALONE = SimpleNamespace(rank=0, world=1, device=torch.device("cpu"), gather=lambda one: [one])


def measured(model, pairs):
    with torch.inference_mode():
        return evaluate(model.embed, pairs, ALONE)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> CodePages:
    """Of 400 functions that speak the words of their docstrings, and a class now and then."""
    work, draw, pairs = tmp_path_factory.mktemp("work"), np.random.RandomState(0), []
    words = [a + b for a in ("read", "sort", "find", "copy", "send") for b in ("er", "ing", "able")]
    for n in range(400):
        said = draw.choice(words, 3, replace=False)
        code = "".join(f"    {' ' * 4 * (n * k % 3)}{word}({'y' * (n % 23)})\n"
                       for k, word in enumerate(said))
        pairs.append(corpus.Pair(
            f"m:{'C.' * (n % 2)}f{n}", f"{' '.join(said)} all of {n}.",
            f"{'class' if n % 5 == 0 else 'def'} f{n}({'self' * (n % 2)}, x):\n{code}"))
    text = corpus.Corpus("".join(
        corpus.json.dumps(pair) + "\n" for pair in pairs).encode())
    before, corpus.load = corpus.load, lambda *_: text
    try:
        yield CodePages({"tokens": 32, "vocabulary": 400}, Path(work))
    finally:
        corpus.load = before


def test_a_page_is_drawn_where_ink_is_and_cut_in_reading_order() -> None:
    page = picture.draw("ab c\n\td" + "\n" * 40 + "x" * 100)
    assert page[0, :5].tolist() == [1, 1, 0, 1, 0] and page[1, :6].tolist() == [0, 0, 0, 0, 1, 0]
    assert page.sum() == 4
    numbers = np.arange(picture.LINES * picture.COLUMNS).reshape(
        1, picture.LINES, picture.COLUMNS)
    cut = picture.patches(numbers)
    assert cut.shape == (1, picture.PATCHES, picture.PATCH_VALUES)
    assert cut[0, 0, :17].tolist() == [*range(16), 64] and cut[0, 1, 0] == 16
    assert sorted(cut.ravel()) == sorted(numbers.ravel())


@pytest.mark.parametrize(("document", "name", "kind"), [
    ("def f(x):", "m:f", "function"), ("    async def f(x):", "m:C.f", "method"),
    ("class C(B):", "m:A.C", "class"), ("@d\ndef f():", "m:f", "function"),
])
def test_kinds(document: str, name: str, kind: str) -> None:
    assert picture.KINDS[picture.kind_of(document, name)] == kind


def test_the_same_numbers_give_the_same_batch_with_its_pictures(data: CodePages) -> None:
    batch = data.batch([3, 1])
    assert batch["picture"].shape == (2, picture.PATCHES, picture.PATCH_VALUES)
    assert batch["kind"].shape == (2,) and batch["query"].shape == (2, 32)
    again = data.batch([1, 3])
    assert all(torch.equal(batch[key], again[key].flip(0)) for key in batch)
    held = data.heldout()
    assert list(held) == ["text", "picture", "kind"]
    rows = {len(one) for pair in held.values() for one in pair}
    assert len(rows) == 1 and rows.pop() > 0


def test_all_tasks_are_learnt_and_each_is_measured(data: CodePages) -> None:
    torch.manual_seed(0)
    model, seen = MultiTask({**SMALL, "kind": 1.0}), data.batch(range(48))
    # What it was trained on: whether it generalises is a matter of more than 60 steps.
    pairs = {"text": (seen["query"], seen["document"]),
             "picture": (seen["picture"], seen["document"]),
             "kind": (seen["document"], seen["kind"])}
    before = measured(model, pairs)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    draw = np.random.RandomState(0)
    for _ in range(60):
        batch = data.batch(draw.choice(48, 24, replace=False).tolist())
        loss = model(batch)
        optimizer.zero_grad()
        loss.backward()
        assert all(one.grad is not None for one in model.parameters())
        optimizer.step()
    after = measured(model, pairs)
    assert list(after.figures) == ["mrr_at_10", "recall_at_10", "picture_mrr_at_10",
                                   "picture_recall_at_10", "kind_accuracy"]
    for name in ("mrr_at_10", "picture_mrr_at_10", "kind_accuracy"):
        assert after.figures[name] > 1.3 * before.figures[name], (name, before, after)
    places = after.tasks["kind"].places
    assert np.mean(np.array(places) == 1) == pytest.approx(after.figures["kind_accuracy"], abs=1e-6)


def test_shared_weights_learn_all_tasks_as_whole_ones_do(tmp_path: Path) -> None:
    """Under each strategy the mean loss of every step, and what is evaluated after the last."""
    losses, evaluated = {}, {}
    ways = {"ddp": [], "fsdp": ["strategy=fsdp"],
            "pipeline": ["strategy=pipeline", "pipeline.stages=2"]}
    small = {**SMALL, "layers": 2, "vocabulary": 50, "tokens": 8}
    for name, way in ways.items():
        (tmp_path / name).mkdir()
        launcher = Launcher(load(None, [
            "model=holdfast.trainer.example.multitask:MultiTask", "data=blocks:Pages", "steps=3",
            "batch=4", "micro_batches=2", f"work_dir={tmp_path / name}", "checkpoint.every=0",
            *(f"model_options.{key}={value}" for key, value in small.items()), *way,
        ]), 2, tmp_path / name)
        evaluated[name] = [one.evaluation for one in launcher.run().values()]
        told = [(event[3], event[4]) for event in launcher.said("step")]
        losses[name] = [np.mean([loss for at, loss in told if at == step]) for step in (1, 2, 3)]
        assert len(told) == 6 and np.isfinite(losses[name]).all()
    assert {"mrr_at_10", "picture_mrr_at_10", "kind_accuracy"} < evaluated["ddp"][0].keys()
    for name in ways:
        assert losses[name] == pytest.approx(losses["ddp"], rel=1e-5), name
        assert evaluated[name] == evaluated["ddp"], name


def test_one_task_alone_is_measured_as_before(data: CodePages) -> None:
    torch.manual_seed(0)
    model = Encoder(SMALL)
    found = measured(model, data.heldout()["text"])
    assert list(found.figures) == ["mrr_at_10", "recall_at_10"] and list(found.tasks) == ["text"]


def test_a_class_is_placed_by_its_score_and_ties_count_against_it() -> None:
    scores = torch.tensor([[0.1, 0.9, 0.5], [0.1, 0.9, 0.5], [0.2, 0.2, 0.2]])
    assert places_of_class(scores, torch.tensor([1, 0, 2])).tolist() == [1, 3, 3]


def test_weights_of_tasks() -> None:
    with pytest.raises(ConfigError, match="set one of them above 0"):
        MultiTask({**SMALL, "text": 0.0, "picture": 0.0, "kind": 0.0})
    with pytest.raises(ConfigError, match="model_options.kind = -1.0: set 0 or more"):
        MultiTask({**SMALL, "kind": -1.0})
