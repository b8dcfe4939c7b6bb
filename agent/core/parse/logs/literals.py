"""Which lines of a log hold one of a few pieces of text, at a fraction of a search for each.

Owns the search and nothing of what the pieces mean.  A healthy log holds none of them, so all time
goes into finding nothing: eighteen searches over every byte took 10.6 ns a byte, 1.8 % of a core at
100 MB a minute.  Two things make it 2 to 5 ns.  A search for one byte costs next to nothing, and a
piece with a byte that a block lacks is not there: step lines repeat, with few letters.  And most of
a log is digits, blanks and the commonest letters; without these a piece is still telling ("ailed"
keeps "ald"), and what is left to search is a quarter.  Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

BLOCK_BYTES = 1 << 15
DIRECT_MAX = 3  # pieces that are searched without taking bytes out first
KEPT_LEAST = 3  # bytes of a piece that stay; fewer would be found everywhere
# Commonest first: letters as in English and in step lines, then what is common in both.
COMMON = b" 0e1itonars2l34567.8d9:-mcgpu|_,[]/=hfbyvwkxjqz"


class Piece(NamedTuple):
    """`rest` is what is left of a piece when the dropped bytes are taken out."""

    whole: bytes
    rest: bytes
    bytes: frozenset[int]


class Sieve(NamedTuple):
    """Everything that follows from the pieces alone."""

    dropped: bytes
    bytes: tuple[int, ...]  # that any piece has
    pieces: tuple[Piece, ...]


@lru_cache(maxsize=16)
def sieve_of(pieces: tuple[bytes, ...]) -> Sieve:
    """Drops the commonest bytes as long as enough of each piece stays."""
    kept = {byte for piece in pieces for byte in piece}
    left = {piece: len(piece) for piece in pieces}
    for byte in COMMON:
        fewer = {piece: length - piece.count(byte) for piece, length in left.items()}
        if all(length >= min(KEPT_LEAST, len(piece)) for piece, length in fewer.items()):
            kept.discard(byte)
            left = fewer
    dropped = bytes(byte for byte in range(256) if byte not in kept)
    made = (Piece(one, one.translate(None, dropped), frozenset(one)) for one in pieces)
    return Sieve(dropped, tuple(sorted({byte for one in pieces for byte in one})), tuple(made))


def hits(
    buffer: bytes, begin: int, limit: int, pieces: tuple[bytes, ...]
) -> Iterator[tuple[int, int]]:
    """(begin of the line, place of the piece) of the first place of each piece in each line of
    buffer[begin:limit], which is whole lines.  An empty piece stands nowhere."""
    pieces = tuple(piece for piece in pieces if piece)
    sieve = sieve_of(pieces)
    while begin < limit:
        end = min(begin + BLOCK_BYTES, limit)
        if end < limit:
            end = (buffer.find(b"\n", end, limit) + 1) or limit
        for piece in _possible(buffer[begin:end], sieve):
            yield from _places(buffer, begin, end, piece.whole)
        begin = end


def _possible(block: bytes, sieve: Sieve) -> list[Piece]:
    """Pieces that may stand in the block; those that do are among them."""
    present = {byte for byte in sieve.bytes if byte in block}
    found = [piece for piece in sieve.pieces if piece.bytes <= present]
    if len(found) <= DIRECT_MAX:
        return found
    left = block.translate(None, sieve.dropped)
    return [piece for piece in found if piece.rest in left]


def _places(buffer: bytes, begin: int, limit: int, piece: bytes) -> Iterator[tuple[int, int]]:
    at = buffer.find(piece, begin, limit)
    while at >= 0:
        yield max(begin, buffer.rfind(b"\n", begin, at) + 1), at
        end = buffer.find(b"\n", at, limit)
        at = buffer.find(piece, end, limit) if end >= 0 else -1
