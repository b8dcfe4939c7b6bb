"""Weights in and out of other tools' files: safetensors, and a plain torch state_dict.

Owns both formats and the way from and to a checkpoint.  Weights alone travel: names as the model
gives them, no optimizer.  A checkpoint's tensors are raw little-endian bytes already, as those of a
safetensors file are, so that they are copied from file to file, one at a time and without torch.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from . import format as files
from .tensors import WIDTHS, Piece, Place, weights

SAFETENSORS, TORCH = ".safetensors", (".pt", ".pth")
HEADER_MAX = 100 << 20  # as the format says
TENSORS_MAX = 1 << 20
# safetensors' words, by torch's
WORDS = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64",
    "int32": "I32", "int16": "I16", "int8": "I8", "uint64": "U64", "uint32": "U32",
    "uint16": "U16", "uint8": "U8", "bool": "BOOL", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "complex64": "C64",
}
NAMES = {word: name for name, word in WORDS.items()}


class Weights(NamedTuple):
    """What a file or a checkpoint holds, and how to call it in a new run's lineage."""

    places: list[Place]
    origin: dict[str, Any]


def export(checkpoint: Path, target: Path) -> int:
    """Writes the checkpoint's weights to `target`, whose name says the format.  Returns how many
    tensors.  Raises CheckpointError, OSError, ImportError where torch is needed and missing."""
    if target.suffix not in (SAFETENSORS, *TORCH):
        raise files.CheckpointError(f"{target.name}: name it *{SAFETENSORS} or *{TORCH[0]}")
    found = of_checkpoint(checkpoint)
    if target.suffix == SAFETENSORS:
        origin = {key: str(value) for key, value in found.origin.items()}
        _atomically(target, _safetensors(found.places, origin))
    else:
        import torch

        state = {place.name: _tensor(torch, place) for place in found.places}
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            torch.save(state, temporary)
            _atomically(target, None, temporary)
        finally:
            temporary.unlink(missing_ok=True)
    return len(found.places)


def bring(source: Path, root: Path) -> Path:
    """Makes a checkpoint of weights alone, proven like any, for `init_from`; returns it."""
    found = of_file(source)
    entries, offset = [], 0
    for place in found.places:
        entries.append(files.Entry(
            files.WEIGHTS + place.name, place.dtype, place.shape, offset, place.nbytes))
        offset += files.align(place.nbytes)
    data = bytearray(offset)
    for entry, place in zip(entries, found.places):
        data[entry.offset : entry.offset + entry.nbytes] = place.read()
    directory = root / files.directory_name(0, 0)
    if (directory / files.COMMIT).exists():
        raise files.CheckpointError(f"{directory} is there: give another directory")
    files.write_shard(directory, 0, 1, entries, data)
    files.commit(directory, {"run": "", "generation": 0, "step": 0, "world": 1,
                             "weights_only": True, "origin": found.origin, "model": {}})
    return directory


def read(path: Path) -> Weights:
    """Of a checkpoint, of a folder of them (the newest that proves), or of a file."""
    if not path.is_dir():
        return of_file(path)
    if (path / files.COMMIT).exists():
        return of_checkpoint(path)
    newest, _ = files.newest_valid(path)
    if newest is None:
        raise files.CheckpointError(f"{path}: holds no checkpoint that proves")
    return of_checkpoint(Path(newest.path))


def of_checkpoint(checkpoint: Path) -> Weights:
    if problems := files.verify(checkpoint):
        raise files.CheckpointError(f"{checkpoint}: {problems[0]}")
    manifest = files.read_manifest(checkpoint)
    origin = {"path": str(checkpoint.absolute()), "run": manifest.get("run", ""),
              "step": manifest["step"], "generation": manifest["generation"],
              "digest": files.digest_file(checkpoint / files.MANIFEST, "xxh3_128")}
    return Weights(weights(checkpoint, manifest), origin)


def of_file(path: Path) -> Weights:
    try:
        if not path.is_file():
            raise files.CheckpointError(f"{path}: no such file")
        if path.suffix == SAFETENSORS:
            places = _read_safetensors(path)
        elif path.suffix in TORCH:
            places = _read_torch(path)
        else:
            raise files.CheckpointError(f"{path}: not *{SAFETENSORS}, *{' or *'.join(TORCH)}")
        origin = {"path": str(path.absolute()), "digest": files.digest_file(path, "xxh3_128")}
    except OSError as error:
        raise files.CheckpointError(f"{path}: {error.strerror}") from None
    return Weights(sorted(places), origin)


# ------------------------------------------------------------------------------------ safetensors


def _safetensors(places: Iterable[Place], about: Mapping[str, str]) -> Iterator[bytes]:
    """The file, piece by piece: length, table, then the tensors, the widest elements first, so
    that each is aligned to its own."""
    for place in places:
        if place.dtype not in WORDS:
            raise files.CheckpointError(f"{place.name}: {place.dtype} has no word in safetensors")
    ordered = sorted(places, key=lambda place: (-WIDTHS[place.dtype], place.name))
    table: dict[str, Any] = {"__metadata__": dict(about)}
    offset = 0
    for place in ordered:
        table[place.name] = {"dtype": WORDS[place.dtype], "shape": list(place.shape),
                             "data_offsets": [offset, offset + place.nbytes]}
        offset += place.nbytes
    header = json.dumps(table, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    yield struct.pack("<Q", len(header)) + header
    for place in ordered:
        yield place.read()


def _read_safetensors(path: Path) -> list[Place]:
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(HEADER_MAX, size - 8):
            raise files.CheckpointError(f"{path}: no safetensors file, or cut off")
        try:
            table = json.loads(file.read(length))
            table.pop("__metadata__", None)
            places = [_place(path, 8 + length, name, one) for name, one in table.items()]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise files.CheckpointError(f"{path}: no table of tensors at its beginning") from None
    if len(places) > TENSORS_MAX:
        raise files.CheckpointError(f"{path}: more than {TENSORS_MAX} tensors")
    end = 8 + length
    for place in sorted(places, key=lambda one: (one.pieces[0].offset, one.nbytes)):
        if place.pieces[0].offset != end:
            raise files.CheckpointError(f"{path}: {place.name} does not begin where another ends")
        end += place.nbytes
    if end != size:
        raise files.CheckpointError(f"{path}: {size} bytes, and its table speaks of {end}")
    return places


def _place(path: Path, begin: int, name: str, one: dict[str, Any]) -> Place:
    dtype = NAMES[one["dtype"]]
    shape = tuple(int(n) for n in one["shape"])
    first, end = (int(n) for n in one["data_offsets"])
    if first < 0 or min(shape, default=0) < 0 or end - first != math.prod(shape) * WIDTHS[dtype]:
        raise ValueError(name)
    piece = Piece(0, path, begin + first, end - first)
    return Place(name, dtype, shape, (piece,), end - first)


# ------------------------------------------------------------------------------------ torch


class _Loaded(NamedTuple):
    """As Place, of a tensor that torch has read."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    tensor: Any
    nbytes: int

    def read(self) -> bytes:
        import torch

        return bytes(self.tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def _read_torch(path: Path) -> list[Any]:
    """A dict of tensors, or one under "state_dict".  Nothing in the file is executed."""
    import pickle

    import torch

    try:
        value = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError, KeyError) as error:
        said = str(error).split("\n")[0][:200]
        raise files.CheckpointError(f"{path}: torch cannot read it: {said}") from None
    value = value.get("state_dict", value) if isinstance(value, dict) else value
    if not (isinstance(value, dict) and 0 < len(value) <= TENSORS_MAX
            and all(isinstance(one, torch.Tensor) for one in value.values())):
        raise files.CheckpointError(f"{path}: not a dict of tensors, nor one under `state_dict`")
    return [_Loaded(str(name), str(one.dtype).removeprefix("torch."), tuple(one.shape), one,
                    one.numel() * one.element_size()) for name, one in value.items()]


def _tensor(torch: Any, place: Place) -> Any:
    data = torch.frombuffer(bytearray(place.read()), dtype=torch.uint8) if place.nbytes else \
        torch.empty(0, dtype=torch.uint8)
    return data.view(getattr(torch, place.dtype)).view(place.shape)


def tensor(place: Place) -> Any:
    """One tensor, for whoever has torch."""
    import torch

    return _tensor(torch, place)


def _atomically(target: Path, parts: Iterable[bytes] | None, written: Path | None = None) -> None:
    """The whole file appears at once; a reader sees the old one or the new one."""
    temporary = written or target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        if parts is not None:
            with open(temporary, "wb") as file:
                for part in parts:
                    file.write(part)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
        files.sync_directory(target.parent)
    finally:
        temporary.unlink(missing_ok=True)
