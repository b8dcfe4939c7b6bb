"""Code as a picture of its page: where ink is, line by line, and the patches that a model reads.

Owns the drawing and its cache file: a second kind of input that needs no download.  Must not know
of tokens, batches or ranks.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..checkpoint.format import write_file
from .corpus import Corpus, Say, digest_of, exclusive

VERSION = 1  # of the drawing: another one is another cache file
LINES, COLUMNS = 32, 64  # of the page, from its upper left corner
PATCH_LINES, PATCH_COLUMNS = 4, 16
PATCHES = (LINES // PATCH_LINES) * (COLUMNS // PATCH_COLUMNS)
PATCH_VALUES = PATCH_LINES * PATCH_COLUMNS
KINDS = ("function", "method", "class")  # what a document defines


def draw(text: str) -> np.ndarray:
    """[LINES, COLUMNS] of 0 and 1: 1 where a character is that leaves ink."""
    page = np.zeros((LINES, COLUMNS), dtype=np.uint8)
    for number, line in enumerate(text.expandtabs(4).split("\n")[:LINES]):
        for column, character in enumerate(line[:COLUMNS]):
            page[number, column] = not character.isspace()
    return page


def patches(pages: np.ndarray) -> np.ndarray:
    """[rows, LINES, COLUMNS] -> [rows, PATCHES, PATCH_VALUES], each in reading order."""
    rows = len(pages)
    cut = pages.reshape(rows, LINES // PATCH_LINES, PATCH_LINES,
                        COLUMNS // PATCH_COLUMNS, PATCH_COLUMNS)
    return cut.transpose(0, 1, 3, 2, 4).reshape(rows, PATCHES, PATCH_VALUES)


def kind_of(document: str, name: str) -> int:
    """Which of KINDS: by the first words of the code, and by whether its name has an owner."""
    if document.lstrip().startswith("class "):
        return 2
    return int("." in name.partition(":")[2])


def load_drawn(work_dir: Path, corpus: Corpus, say: Say) -> tuple[np.ndarray, np.ndarray]:
    """[pairs, LINES, COLUMNS] of bits that `patches` takes, and each pair's kind.  Built once."""
    path = work_dir / f"pictures-{digest_of(f'{corpus.digest} {VERSION}'.encode())[-12:]}.npz"
    with exclusive(path):
        if not path.exists():
            pairs = corpus.pairs()
            say(f"drawing {len(pairs)} pages of code")
            drawn: Sequence[np.ndarray] = [np.packbits(draw(pair.document)) for pair in pairs]
            kinds = [kind_of(pair.document, pair.name) for pair in pairs]
            buffer = io.BytesIO()
            np.savez(buffer, drawn=np.stack(drawn), kinds=np.array(kinds, dtype=np.int64))
            write_file(path, buffer.getbuffer())
    with np.load(path) as loaded:
        pages = np.unpackbits(loaded["drawn"], axis=1).reshape(-1, LINES, COLUMNS)
        return pages, loaded["kinds"]
