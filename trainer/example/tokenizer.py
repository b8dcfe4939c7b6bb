"""A byte-level BPE trained on the corpus, and the corpus as token numbers.

Owns vocabulary and cache files.  Must not know of batches or ranks.  Both are functions of the
corpus and two numbers, so every rank finds the same; `tokenizers` is imported only to build them.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..checkpoint.format import write_file
from .corpus import Corpus, Say, digest_of, exclusive

PADDING, UNKNOWN = "[PAD]", "[UNK]"  # numbers 0 and 1


def train(texts: Sequence[str], vocabulary: int) -> Any:
    """A tokenizers.Tokenizer; the same texts give the same one."""
    # Forked ranks must not inherit rayon's threads: there are none while this is off.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[PADDING, UNKNOWN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False)
    tokenizer.train_from_iterator(texts, trainer, length=len(texts))
    return tokenizer


def encode(tokenizer: Any, texts: Sequence[str], tokens: int) -> np.ndarray:
    """[texts, tokens] of uint16, cut or padded with 0."""
    tokenizer.enable_truncation(tokens)
    tokenizer.enable_padding(length=tokens, pad_id=0, pad_token=PADDING)
    encoded = tokenizer.encode_batch(list(texts))
    return np.array([row.ids for row in encoded], dtype=np.uint16).reshape(len(texts), tokens)


def load_encoded(
    work_dir: Path, corpus: Corpus, vocabulary: int, tokens: int, say: Say
) -> tuple[np.ndarray, np.ndarray]:
    """[2, pairs, tokens]: queries, then documents; and which pairs are held out.  Built once."""
    key = digest_of(f"{corpus.digest} {vocabulary} {tokens}".encode())[-12:]
    path = work_dir / f"tokens-{key}.npz"
    with exclusive(path):
        if not path.exists():
            pairs = corpus.pairs()
            say(f"training a tokenizer of {vocabulary} entries on {len(pairs)} pairs")
            texts = [p.query for p in pairs] + [p.document for p in pairs]
            tokenizer = train(texts, vocabulary)
            write_file(work_dir / f"tokenizer-{key}.json", tokenizer.to_str().encode())
            encoded = encode(tokenizer, texts, tokens).reshape(2, len(pairs), tokens)
            buffer = io.BytesIO()
            np.savez(buffer, encoded=encoded, held_out=[pair.held_out for pair in pairs])
            write_file(path, buffer.getbuffer())
    with np.load(path) as loaded:
        return loaded["encoded"], loaded["held_out"]
