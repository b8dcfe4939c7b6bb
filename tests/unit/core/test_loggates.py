"""The quick search finds what the plain one finds, whatever the bytes and wherever blocks end."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.agent.core.parse.logs import literals
from holdfast.agent.logs import files

CATALOGUE = files.load_catalogue()
GATES = CATALOGUE.gates + CATALOGUE.signal_gates
WORDS = st.sampled_from([*GATES, b"\n", b" ", b"step 1 loss 2.0\n", b"x" * 700, b"Traceb", b"ror"])


def plain(data: bytes, pieces: tuple[bytes, ...]) -> set[tuple[int, int]]:
    """Line by line, piece by piece."""
    found: set[tuple[int, int]] = set()
    start = 0
    for line in data.split(b"\n"):
        found |= {(start, start + line.find(piece)) for piece in pieces if piece in line}
        start += len(line) + 1
    return found


@settings(max_examples=150, deadline=None)
@given(st.lists(WORDS, max_size=60), st.integers(1, 3000))
@example([b"x" * 700, b"rror", b"\n", b"rror"], 1)
def test_nothing_is_lost_at_any_block(words: list[bytes], block: int) -> None:
    data = b"".join(words)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(literals, "BLOCK_BYTES", block)
        for pieces in (GATES, GATES[:2]):
            found = list(literals.hits(data, 0, len(data), pieces))
            assert set(found) == plain(data, pieces) and len(found) <= len(GATES) * len(data)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=2000), st.lists(st.binary(min_size=1, max_size=6), max_size=12))
def test_pieces_of_any_bytes(data: bytes, pieces: list[bytes]) -> None:
    whole = tuple(dict.fromkeys(one for one in pieces if b"\n" not in one))
    assert set(literals.hits(data, 0, len(data), whole)) == plain(data, whole)


def test_only_between_begin_and_limit() -> None:
    data = b"rror\nquiet\nrror\nrror\n"
    assert list(literals.hits(data, 5, 16, GATES)) == [(11, 11)]


def test_most_of_a_healthy_log_is_not_searched() -> None:
    line = b"2026-11-20 10:20:20,123 [rank3] INFO iteration 312/ 500000 | lm loss: 2.609532E+00 |\n"
    sieve = literals.sieve_of(CATALOGUE.gates)
    assert len(line.translate(None, sieve.dropped)) < len(line) / 3
    assert all(len(piece.rest) >= literals.KEPT_LEAST for piece in sieve.pieces)
