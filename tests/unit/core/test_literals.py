"""The search for a few pieces of text in many lines."""

from __future__ import annotations

from holdfast.agent.core.parse.logs import literals


def test_an_empty_piece_stands_nowhere_and_ends_no_search() -> None:
    text = b"step 1\nit failed\n"
    assert list(literals.hits(text, 0, len(text), (b"", b"failed"))) == [(7, 10)]
    assert list(literals.hits(text, 0, len(text), (b"",))) == []
    assert list(literals.hits(text, 0, len(text), ())) == []
