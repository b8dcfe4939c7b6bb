"""A data set of shards, on local disk or S3: samples by number, whatever shard they lie in.

Owns the index, the local copies and what is told when a shard is not what it was.  Where a sample
lies is a function of its number alone, and its number one of the step's (trainer/data.py): nothing
is kept that could be lost, so that each is seen once an epoch whatever ranks come and go.  A shard
that has vanished is the data's fault: no restart brings it back, and none is tried.
"""

from __future__ import annotations

import bisect
import dataclasses
import io
import json
import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ..checkpoint import format as files
from ..config import FROM_0, FROM_1, ConfigError, Limit, Options, read_options, setting
from ..protocol import Batch
from .fetch import Fetcher, NotThere, TooSlow

INDEX = "index.json"
INDEX_BYTES_MAX = 64 << 20
SHARDS_MAX = 1_000_000
PREFETCH_MAX = 8
PAIR = ("query", "document")  # the arrays of a sample that is held out


@dataclasses.dataclass(frozen=True)
class CopyOptions(Options):
    """What is kept of shards, and how long one is waited for."""

    in_memory: int = setting(8, "shards that a rank keeps in memory; at least 1", FROM_1)
    deadline_s: float = setting(
        300.0, "for one shard to come, every wait for a slow store in it; at most 3600",
        Limit("above 0 and at most 3600", lambda value: 0.0 < value <= 3600.0))
    local_gb: float = setting(
        0.0, "of copies in `work_dir`; 0 = half of what its disk has free", FROM_0)
    held_out: int = setting(
        0, "of the last samples, so many are kept for evaluation, `query` and `document` of each, "
        "and never trained on; 0 = none", FROM_0)

    def fetcher(self, root: str, work_dir: Path) -> Fetcher:
        return Fetcher(root, work_dir / "shards", self.deadline_s, int(self.local_gb * 1e9))


@dataclasses.dataclass(frozen=True)
class ShardOptions(CopyOptions):
    """What the data set of shards reads."""

    root: str = setting("", "a directory or s3://bucket/prefix that has index.json", Limit(
        "a directory or s3://bucket/prefix", bool))


class Shard(NamedTuple):
    """One file of arrays, each with as many rows as the others."""

    name: str
    rows: int
    nbytes: int
    digest: str

    @property
    def copy(self) -> str:
        """Its name on local disk, by what is in it: another data set's shard has another one."""
        return f"{self.digest}-{self.name}"


def write(root: Path, arrays: Sequence[dict[str, np.ndarray]]) -> None:
    """Makes such a data set on local disk: one shard for each of `arrays`, and the index."""
    shards = []
    for number, one in enumerate(arrays):
        buffer = io.BytesIO()
        np.savez(buffer, **one)  # type: ignore[arg-type]
        data, name = buffer.getvalue(), f"shard-{number:06d}.npz"
        root.mkdir(parents=True, exist_ok=True)
        files.write_file(root / name, data)
        rows = {len(array) for array in one.values()}
        if len(rows) != 1:
            raise ValueError(f"{name}: arrays of {sorted(rows)} rows")
        shards.append(Shard(name, rows.pop(), len(data), files.digest(data))._asdict())
    files.write_file(root / INDEX, files.to_json({"format": 1, "shards": shards}))


class Shards:
    """As protocol.py's Data: `data = "holdfast.trainer.feed.shards:Shards"`."""

    CURE = "put it back, or set data_options.root to a data set that is whole"

    def __init__(self, options: dict[str, Any], work_dir: Path) -> None:
        chosen = read_options(ShardOptions, options, "data_options")
        root = chosen.root.rstrip("/")
        self.open(root, chosen.fetcher(root, work_dir), chosen)

    def open(self, root: str, fetcher: Fetcher, chosen: CopyOptions) -> None:
        """Reads the index, and what is held out; `root` is what messages call the data set."""
        self.root, self._fetcher, self._keep = root, fetcher, chosen.in_memory
        data = self._read_index()
        self.shards = _index(f"{self.root}/{INDEX}", data)
        self.digest = files.digest(data)
        self._ends = [0]
        for shard in self.shards:
            self._ends.append(self._ends[-1] + shard.rows)
        self._open: OrderedDict[int, dict[str, np.ndarray]] = OrderedDict()
        self._samples = self._ends[-1] - chosen.held_out
        if chosen.held_out:
            self._hold_out(chosen.held_out)

    def _hold_out(self, count: int) -> None:
        """Takes the last samples, before any rank waits for another one in an evaluation."""
        if self._samples < 1:
            raise ConfigError([f"data_options.held_out = {count}: {self.root} has {self._ends[-1]} "
                               "samples: set fewer, so that some are left to train on"])
        self.digest = files.digest(f"{self.digest} heldout {count}".encode())
        numbers = range(self._samples, self._ends[-1])
        pairs = {name: list[np.ndarray]() for name in PAIR}
        self.soon(numbers)
        for shard, row in map(self.place, numbers):
            arrays = self._arrays(shard)
            if missing := [name for name in PAIR if name not in arrays]:
                raise ConfigError([
                    f"data_options.held_out = {count}: {self.root}/{self.shards[shard].name} has "
                    f"{', '.join(sorted(arrays))}, and no {' and no '.join(missing)}: name the "
                    "arrays so, or set held_out = 0"])
            for name, rows in pairs.items():
                rows.append(arrays[name][row].copy())  # a view would keep the shard in memory
        try:
            queries, documents = (torch.from_numpy(np.stack(rows)) for rows in pairs.values())
        except (TypeError, ValueError) as error:  # of shapes that differ, or no numbers
            raise ConfigError([f"data_options.held_out = {count}: {self.root}: {error}: make all "
                               "rows of one shape and of numbers, or set held_out = 0"]) from None
        self.heldout = lambda: (queries, documents)  # without it nothing is evaluated

    def __len__(self) -> int:
        return self._samples

    def batch(self, indices: Sequence[int]) -> Batch:
        self.soon(indices)
        rows = [(self._arrays(shard), row) for shard, row in map(self.place, indices)]
        return {key: torch.from_numpy(np.stack([arrays[key][row] for arrays, row in rows]))
                for key in rows[0][0]}

    def soon(self, indices: Sequence[int]) -> None:
        """Begins to bring the first PREFETCH_MAX shards that these need, in the background."""
        needed = dict.fromkeys(self.place(index)[0] for index in indices)
        absent = [self.shards[number] for number in needed if number not in self._open]
        self._fetcher.ask({shard.copy: shard.name for shard in absent[:PREFETCH_MAX]})

    def place(self, index: int) -> tuple[int, int]:
        """Which shard, and which of its rows."""
        shard = bisect.bisect_right(self._ends, index) - 1
        return shard, index - self._ends[shard]

    def _arrays(self, number: int) -> dict[str, np.ndarray]:
        if number not in self._open:
            shard = self.shards[number]
            data = self._read(shard.name, shard.copy)
            if files.digest(data) != shard.digest:  # the copy may be damaged, and not the shard
                self._fetcher.forget(shard.copy)
                data = self._read(shard.name, shard.copy)
            if files.digest(data) != shard.digest:
                self._fetcher.forget(shard.copy)
                raise self._bad(shard.name, "has other bytes than the index says")
            try:
                with np.load(io.BytesIO(data), allow_pickle=False) as loaded:
                    arrays = {key: loaded[key] for key in loaded.files}
            except (ValueError, OSError, KeyError, EOFError) as error:
                raise self._bad(shard.name, f"cannot be read: {error}") from None
            if not arrays or {len(array) for array in arrays.values()} != {shard.rows}:
                raise self._bad(shard.name, f"has not {shard.rows} rows in every array")
            self._open[number] = arrays
            while len(self._open) > self._keep:
                self._open.popitem(last=False)
        self._open.move_to_end(number)
        return self._open[number]

    def _read_index(self) -> bytes:
        """From the root, whatever was read there before."""
        own = f"index-{os.uname().nodename}-{os.getpid()}.json"
        self._fetcher.forget(own)
        data = self._read(INDEX, own)
        self._fetcher.forget(own)
        return data

    def _read(self, name: str, copy: str) -> bytes:
        try:
            return self._fetcher.read(name, copy)
        except NotThere as error:
            raise self._bad(name, f"has vanished ({error})" if name != INDEX else str(
                error)) from None
        except TooSlow as error:
            raise ConfigError([f"data: {self.root}/{name} {error}"]) from None
        except OSError as error:
            raise self._bad(name, f"cannot be read: {error.strerror}") from None

    def _bad(self, name: str, what: str) -> ConfigError:
        return ConfigError([f"data: {self.root}/{name} {what}: {self.CURE}"])


def _index(name: str, data: bytes) -> list[Shard]:
    try:
        if len(data) > INDEX_BYTES_MAX:
            raise ValueError
        value = json.loads(data)
        shards = [Shard(str(one["name"]), int(one["rows"]), int(one["nbytes"]), str(one["digest"]))
                  for one in value["shards"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ConfigError([f"data: {name} is no index of shards: write it with "
                           "holdfast.trainer.feed.shards.write"]) from None
    if not 0 < len(shards) <= SHARDS_MAX or any(
            one.rows < 1 or Path(one.name).name != one.name or Path(one.copy).name != one.copy
            for one in shards):
        raise ConfigError([f"data: {name} lists no shards, or one that is empty or elsewhere"])
    return shards
