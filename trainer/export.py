"""Embeddings of all samples to files: part by part, begun again where it ended, proven by digest.

Owns the folder that `holdfast train --export DIR` fills.  A part is a run of samples; whichever
rank is there makes it, so that a lost rank, a smaller world or a new start costs the part that was
being made.  A part counts once its table lies beside it, and the folder once COMMIT names every
digest.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .checkpoint import format as files
from .config import ConfigError, ExportOptions

ROWS = 64  # encoded at a time
PARTS_MAX = 1_000_000


class Parts:
    """The folder: which parts there are, and which are whole."""

    def __init__(self, options: ExportOptions, samples: int, about: dict[str, Any]) -> None:
        self.root, self.rows, self.samples = Path(options.dir), options.rows, samples
        self.count = -(-samples // options.rows)
        self.about = {**about, "samples": samples, "rows": options.rows, "field": options.field}
        if self.count > PARTS_MAX:
            raise ConfigError([f"export.rows = {options.rows} makes {self.count} parts: set "
                               f"{-(-samples // PARTS_MAX)} or more"])

    def begin(self) -> None:
        """Raises ConfigError where the folder is of other weights or other data."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            try:
                files.write_exclusive(self.root / "about.json", files.to_json(self.about))
            except FileExistsError:
                pass
            found = json.loads((self.root / "about.json").read_bytes())
        except OSError as error:
            raise ConfigError([f"export.dir = {self.root}: {error.strerror}"]) from None
        except ValueError:
            found = {}
        wrong = sorted(key for key in self.about if found.get(key) != self.about[key])
        if wrong:
            raise ConfigError([
                f"export.dir = {self.root} holds an export with another {', '.join(wrong)}: set "
                "another directory"])

    def name(self, part: int) -> str:
        return f"part-{part:06d}.npy"

    def samples_of(self, part: int) -> range:
        return range(part * self.rows, min(self.samples, (part + 1) * self.rows))

    def whole(self, part: int) -> bool:
        """Whether its table is there: its bytes are proven when all are."""
        return (self.root / f"{self.name(part)}.json").exists()

    def missing(self) -> list[int]:
        """Parts that have yet to be made."""
        return [part for part in range(self.count) if not self.whole(part)]

    @property
    def batches(self) -> int:
        """In which the largest part is encoded."""
        return -(-min(self.rows, self.samples) // ROWS)

    def write(self, part: int, rows: np.ndarray) -> None:
        """The bytes, then the table that says that they are whole."""
        buffer = io.BytesIO()
        np.save(buffer, rows, allow_pickle=False)
        data = buffer.getvalue()
        files.write_file(self.root / self.name(part), data)
        table = {"file": self.name(part), "nbytes": len(data), "digest": files.digest(data)}
        files.write_file(self.root / f"{self.name(part)}.json", files.to_json(table))

    def commit(self) -> list[str]:
        """Proves every part, and then says so in COMMIT.  Parts that do not prove are taken away,
        to be made again; returns their names."""
        tables, bad = [], []
        for part in range(self.count):
            table = self.root / f"{self.name(part)}.json"
            try:
                one = json.loads(table.read_bytes())
                files.check_file(self.root, one)
                tables.append(one)
            except (OSError, ValueError, files.CheckpointError):
                table.unlink(missing_ok=True)
                bad.append(self.name(part))
        if not bad:
            files.write_file(self.root / files.COMMIT,
                             files.to_json({**self.about, "parts": tables}))
        return bad


def turns(missing: Sequence[int], rank: int, world: int) -> Iterator[tuple[int, bool]]:
    """The part that this rank encodes in each turn, and whether it is this rank's to write: each
    rank has equally many turns, and who has no part left takes another one's for nothing."""
    for first in range(rank, len(missing) + rank, world):
        yield missing[min(first, len(missing) - 1)], first < len(missing)


def encode(
    embed: Callable[[Tensor], Tensor], data: Any, field: str, samples: Sequence[int],
    device: torch.device, check: Callable[[], None], times: int = 0,
) -> np.ndarray:
    """Embeddings of these samples, in their order.

    Where a strategy shares the weights, every rank has to be in each call of `embed`: it is called
    `times` at least, in the end with the last batch again, whose embeddings are dropped."""
    found = []
    for first in range(0, len(samples), ROWS):
        check()
        batch = data.batch(samples[first : first + ROWS])
        if field not in batch:
            raise ConfigError([f"export.field = {field!r}: set one of {', '.join(batch)}"])
        inputs = batch[field].to(device)
        found.append(embed(inputs).float().cpu().numpy())
    for _ in range(times - len(found)):
        check()
        embed(inputs)
    return np.concatenate(found)
