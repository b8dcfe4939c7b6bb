"""Order, corpus, tokenizer, model and measure, by value."""

from __future__ import annotations

import collections
import json

import numpy as np
import pytest
import torch

from holdfast.trainer.config import ConfigError, OptimizerOptions
from holdfast.trainer.data import Sampler, seed_for
from holdfast.trainer.evaluate import places_of, retrieval
from holdfast.trainer.example import corpus, tokenizer
from holdfast.trainer.example.model import Encoder
from holdfast.trainer.optimizer import learning_rate

SOURCE = '''
def first(a):
    """Adds one to the number given.

    And more prose."""
    return a + 1

class Second:
    """Holds a value for a while."""
    value = 3

    async def third(self):
        """Gives the value, later than now."""
        return self.value

def again(a):
    """tiny"""
    return 0

def only():
    """Nothing but a docstring here."""
'''


@pytest.mark.parametrize("samples, batch, micro_batches", [(40, 3, 2), (17, 4, 3), (12, 12, 1)])
def test_each_sample_exactly_once_an_epoch(samples, batch, micro_batches):
    sampler = Sampler(samples, 5, batch, micro_batches)
    steps = samples  # as many samples as whole epochs have
    seen = [i for s in range(steps) for m in range(micro_batches) for i in sampler.indices(s, m)]
    epochs = len(seen) // samples
    for epoch in range(epochs):
        assert sorted(seen[epoch * samples : (epoch + 1) * samples]) == list(range(samples))
    assert len({tuple(seen[e * samples : (e + 1) * samples]) for e in range(epochs)}) > 1


def test_order_is_a_function_of_seed_and_epoch_alone():
    one, two = Sampler(100, 1, 5, 2), Sampler(100, 1, 5, 2)
    assert one.indices(37, 1) == [two.indices(s, 1) for s in range(38)][37]
    assert Sampler(100, 2, 5, 2).indices(0, 0) != one.indices(0, 0)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_micro_batches_are_dealt_once(world):
    sampler = Sampler(100, 0, 2, 5)
    dealt = [m for rank in range(world) for m in sampler.mine(rank, world)]
    assert sorted(dealt) == list(range(5))


def test_too_few_micro_batches_or_samples():
    with pytest.raises(ConfigError, match="set micro_batches to at least 6"):
        Sampler(100, 0, 2, 5).mine(0, 6)
    with pytest.raises(ConfigError, match="smaller batch"):
        Sampler(3, 0, 2, 2)


def test_seeds_differ_and_stay():
    seeds = {seed_for(seed, s, m) for seed in range(3) for s in range(50) for m in range(4)}
    assert len(seeds) == 600
    assert seed_for(0, 0, 0) == 6238072747940578789


def test_pairs_of_a_tree(tmp_path):
    (tmp_path / "one.py").write_text(SOURCE)
    (tmp_path / "two.py").write_text(SOURCE.split("class")[0])  # a repetition
    (tmp_path / "broken.py").write_text("def (")
    (tmp_path / "latin.py").write_bytes(b"# \xe4\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "skipped.py").write_text(SOURCE)
    pairs = corpus.extract(tmp_path, lambda text: None)
    assert [p.name for p in pairs] == ["one:first", "one:Second", "one:Second.third"]
    assert pairs[0].query == "Adds one to the number given."
    assert pairs[0].document == "def first(a):\n    return a + 1"
    assert "later than now" in pairs[1].document  # an inner docstring is part of the code
    assert "later than now" not in pairs[2].document


def test_split_is_about_one_in_twenty():
    counts = collections.Counter(
        corpus.Pair(f"m:f{n}", "q", "d").held_out for n in range(4000)
    )
    assert 140 < counts[True] < 260


def test_tokenizer_is_deterministic_and_cached(tmp_path):
    pairs = [corpus.Pair(f"m:f{n}", f"adds {n} to the value", f"def f{n}(v): return v + {n}")
             for n in range(60)]
    text = corpus.Corpus("".join(json.dumps(pair) + "\n" for pair in pairs).encode())
    assert text.pairs() == pairs
    said = []
    one, held = tokenizer.load_encoded(tmp_path / "a", text, 300, 16, said.append)
    two, _ = tokenizer.load_encoded(tmp_path / "b", text, 300, 16, said.append)
    three, _ = tokenizer.load_encoded(tmp_path / "a", text, 300, 16, said.append)
    assert one.shape == (2, 60, 16) and one.dtype == np.uint16 and one.max() < 300
    assert (one == two).all() and (one == three).all() and len(said) == 2
    assert held.tolist() == [pair.held_out for pair in pairs]


def test_reference_model_has_about_five_million_parameters():
    parameters = sum(p.numel() for p in Encoder({}).parameters())
    assert 5.2e6 < parameters < 5.4e6


def test_embeddings_have_length_one_and_ignore_padding():
    model = Encoder({"layers": 2, "width": 16, "heads": 2, "vocabulary": 50, "tokens": 8})
    tokens = torch.tensor([[5, 6, 7, 0, 0, 0, 0, 0]])
    long, short = model.embed(tokens), model.embed(tokens[:, :3])
    assert torch.allclose(long.norm(dim=1), torch.ones(1), atol=1e-6)
    assert torch.allclose(long, short, atol=1e-6)
    loss = model({"query": tokens.repeat(3, 1), "document": tokens.repeat(3, 1)})
    assert abs(loss.item() - np.log(3)) < 1e-5  # all pairs alike: as good as a guess


def test_bad_model_options():
    with pytest.raises(ConfigError, match="model_options.width = 10: set a multiple of heads"):
        Encoder({"width": 10})


def test_retrieval_by_value():
    def found(queries, documents):
        return retrieval(places_of(queries, documents))

    documents = torch.eye(12)
    assert found(documents, documents) == {"mrr_at_10": 1.0, "recall_at_10": 1.0}
    second = torch.eye(12) * 0.5 + torch.roll(torch.eye(12), 1, dims=1)
    assert found(second, documents) == {"mrr_at_10": 0.5, "recall_at_10": 1.0}
    same = torch.ones(12, 12)
    assert found(same, same) == {"mrr_at_10": 0.0, "recall_at_10": 0.0}


def test_learning_rate_rises_then_falls():
    options = OptimizerOptions(learning_rate=1.0, warmup_steps=10, final_fraction=0.1)
    rates = [learning_rate(options, step, 100) for step in range(101)]
    assert rates[0] == pytest.approx(0.1) and max(rates) == rates[10] == pytest.approx(1.0)
    assert rates[100] == pytest.approx(0.1) and rates[11:] == sorted(rates[11:], reverse=True)
