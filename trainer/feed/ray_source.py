"""A Ray dataset as files of rows: one actor in Ray holds them, the child of fetch.py reads them.

Owns the actor and what each of Ray's errors means.  Runs in that child and in Ray's workers, never
in a rank: Ray takes signals over, keeps threads, and ends its driver when its head is gone.

The rows are those of one pass in the order of the dataset's blocks, which Ray keeps where it is
asked to (`preserve_order`), cut every so many rows: where blocks end follows from the cluster's
size, and must not matter.  What Ray cannot promise is that a dataset which is made again has the
same rows; that is found by the digests of the first index.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import threading
from typing import Any

import numpy as np

from ..checkpoint import format as files
from ..config import ConfigError, named_class
from .fetch import Absent, Get, Slow

INDEX = "index.json"
SHARDS_MAX = 1_000_000


class Holder:
    """The actor: one for all ranks of a run.  It ends with the child that asked for it first, and
    whoever asks next makes another one."""

    def __init__(self, about: dict[str, Any]) -> None:
        self.about = about
        self.held = dict[str, Any]()  # name -> object in Ray's store

    def read(self, name: str) -> bytes | None:
        """A file of rows, or the index of them; None where there is none of this name."""
        import ray

        if not self.held:
            self.held = self.made()
        found = self.held.get(name)
        return None if found is None else bytes(ray.get(found))

    def made(self) -> dict[str, Any]:
        import ray

        # Before the dataset: it takes what is set here along.
        ray.data.DataContext.get_current().execution_options.preserve_order = True
        dataset = named_class(self.about["dataset"], "data_options.dataset")(self.about["options"])
        held, shards = dict[str, Any](), list[dict[str, Any]]()
        for batch in dataset.iter_batches(
                batch_size=self.about["rows"], batch_format="numpy", drop_last=False):
            name, data = f"rows-{len(shards):06d}.npz", packed(batch)
            held[name] = ray.put(data)
            shards.append({"name": name, "rows": len(next(iter(batch.values()))),
                           "nbytes": len(data), "digest": files.digest(data)})
            if len(shards) > SHARDS_MAX:
                raise ValueError(f"has more than {SHARDS_MAX} shards: set a larger "
                                 "data_options.rows")
        if not shards:
            raise ValueError("has no rows")
        held[INDEX] = ray.put(files.to_json({"format": 1, "shards": shards}))
        return held


def packed(batch: dict[str, np.ndarray]) -> bytes:
    """Raises ValueError for columns that are no numbers."""
    for name, column in batch.items():
        if column.dtype.hasobject or column.dtype.kind not in "biuf":
            raise ValueError(f"column {name!r} is {column.dtype}: rows need numbers, or arrays of "
                             "one shape")
    buffer = io.BytesIO()
    np.savez(buffer, **batch)  # type: ignore[arg-type]
    return buffer.getvalue()


def ray_get(root: str) -> Get:
    """Raises ImportError where ray or what its datasets need is not installed."""
    importlib.import_module("ray.data")
    return Reader(root).get


class Reader:
    """In the child: Ray's driver.  Its lanes ask at the same time."""

    def __init__(self, root: str) -> None:
        self.about: dict[str, Any] = json.loads(root.removeprefix("ray:"))
        self.name = f"holdfast-{files.digest(root.encode())}"
        self.lock = threading.Lock()
        self.holder: Any = None

    def get(self, name: str) -> bytes:
        """Raises Slow for what Ray lost, which comes again, and ValueError for what does not."""
        import ray

        holder = None
        try:
            holder = self.connected()
            found = ray.get(holder.read.remote(name))
        except (ray.exceptions.RayError, ConnectionError) as error:
            with self.lock:
                if self.holder is holder:
                    self.holder = None  # the next asks for it by name, and makes it where it ended
            raise told(error, self.about["dataset"]) from None
        if found is None:
            raise Absent("the dataset has fewer rows now")
        return bytes(found)

    def connected(self) -> Any:
        import ray

        with self.lock:
            if self.holder is None:
                if not ray.is_initialized():
                    ray.init(address=self.about["address"], namespace="holdfast",
                             log_to_driver=False, logging_level="ERROR")
                search = os.pathsep.join(
                    filter(None, [os.environ.get("PYTHONPATH", ""), os.getcwd()]))
                self.holder = ray.remote(Holder).options(
                    name=self.name, get_if_exists=True, num_cpus=0,
                    runtime_env={"env_vars": {"PYTHONPATH": search}}).remote(self.about)
            return self.holder


def told(error: BaseException, dataset: str) -> Exception:
    """What Ray lost may come again; what the dataset's own code raised comes again as it was."""
    from ray.exceptions import RayError, RayTaskError, UserCodeException

    outer = error
    while isinstance(error, RayTaskError) and isinstance(error.cause, BaseException):
        outer, error = error, error.cause
    if isinstance(error, ConfigError):
        return error
    if isinstance(error, UserCodeException):  # what a function of the dataset's raised
        return ValueError(f"{dataset} raised {_first_cause(str(outer)) or error}")
    words = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if isinstance(error, (RayError, ConnectionError)):
        return Slow(words)
    return ValueError(f"{dataset} raised {words}")


def _first_cause(text: str) -> str:
    """The last line of the first traceback in a chain: Ray hands on no more of it than its text."""
    first = text.partition("\n\nThe above exception was")[0].strip()
    return first.splitlines()[-1] if first else ""
