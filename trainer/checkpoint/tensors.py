"""The tensors of a checkpoint as bytes by name: where each lies, and the digest of all weights.

Owns the way from a proven manifest to the bytes of one tensor.  Must not import torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from . import format as files

# Bytes of an element, by torch's word for its type.
WIDTHS = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2,
    "int8": 1, "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1, "bool": 1, "float8_e4m3fn": 1,
    "float8_e5m2": 1, "complex64": 8,
}

class Piece(NamedTuple):
    """A run of bytes of one tensor, from its byte `begin` on, in one file."""

    begin: int
    file: Path
    offset: int
    nbytes: int


class Place(NamedTuple):
    """One whole tensor; a sharded strategy leaves its rows in several files."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    nbytes: int

    def read(self) -> bytes:
        data = bytearray(self.nbytes)
        for piece in self.pieces:
            with open(piece.file, "rb") as file:
                file.seek(piece.offset)
                part = file.read(piece.nbytes)
            if len(part) != piece.nbytes:
                raise files.CheckpointError(f"{piece.file.name}: truncated at {self.name}")
            data[piece.begin : piece.begin + piece.nbytes] = part
        return bytes(data)


def places(checkpoint: Path, manifest: dict[str, Any]) -> list[Place]:
    """Every tensor, sorted by name.  Raises CheckpointError for a table that is not one, or where a
    part of a tensor is in no file."""
    pieces: dict[str, list[Piece]] = {}
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    for rank in range(manifest["world"]):
        name = files.shard_name(rank, manifest["world"])
        try:
            table = json.loads((checkpoint / f"{name}.json").read_bytes())
        except OSError as error:
            raise files.CheckpointError(f"{name}.json: {error.strerror}") from None
        except ValueError:
            raise files.CheckpointError(f"{name}.json: not JSON") from None
        for entry in files.read_entries(table, f"{name}.json"):
            kinds[entry.name] = entry.dtype, entry.shape
            pieces.setdefault(entry.name, []).append(
                Piece(entry.begin, checkpoint / f"{name}.bin", entry.offset, entry.nbytes))
    return [_whole(name, *kinds[name], sorted(found)) for name, found in sorted(pieces.items())]


def _whole(name: str, dtype: str, shape: tuple[int, ...], pieces: list[Piece]) -> Place:
    """Copies of one piece count once; a gap between two is an error."""
    reached, chosen = 0, list[Piece]()
    for piece in pieces:
        if piece.begin > reached:
            break
        if piece.begin + piece.nbytes > reached or not chosen:
            chosen.append(piece)
            reached = piece.begin + piece.nbytes
    numbers, width = math.prod(shape), WIDTHS.get(dtype)
    if width is not None and reached != numbers * width:
        raise files.CheckpointError(f"{files.MANIFEST}: a part of {name} is in no shard")
    return Place(name, dtype, shape, tuple(chosen), reached)


def weights(checkpoint: Path, manifest: dict[str, Any]) -> list[Place]:
    """The model's alone, named as the model names them."""
    return [place._replace(name=place.name.removeprefix(files.WEIGHTS))
            for place in places(checkpoint, manifest) if place.name.startswith(files.WEIGHTS)]


def weights_digest(checkpoint: Path, manifest: dict[str, Any]) -> str:
    """As State.weights_digest says it of the same weights in memory."""
    def all_of_them() -> Iterator[tuple[str, bytes]]:
        for place in weights(checkpoint, manifest):
            yield files.WEIGHTS + place.name, place.read()

    return files.weights_digest(all_of_them())
