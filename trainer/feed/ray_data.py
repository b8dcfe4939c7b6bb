"""A Ray dataset as the trainer's data: samples by number, as of shards.

Owns its settings.  Ray itself is in the child of fetch.py and in Ray's own processes
(ray_source.py), never in a rank; what comes from there is cut into shards, proven and kept as
shards.py has it, so that a position is a function of the step alone and a worker that Ray loses is
told as data.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from ..config import CLASS, FROM_1, ConfigError, Limit, read_options, setting
from .shards import CopyOptions, Shards


@dataclasses.dataclass(frozen=True)
class RayOptions(CopyOptions):
    """What the data set from Ray reads; it needs the extra holdfast[ray]."""

    dataset: str = setting(
        "", "module:function that is given `options` and returns a ray.data.Dataset",
        Limit('"module:function"', CLASS.holds))
    options: dict[str, Any] = dataclasses.field(
        default_factory=dict, metadata={"text": "what that function is given, whole"})
    address: str = setting(
        "auto", "of Ray's head; auto: the Ray that runs on this node", Limit("an address", bool))
    rows: int = setting(1024, "samples in a shard; at least 1", FROM_1)


class RayData(Shards):
    """As protocol.py's Data: `data = "holdfast.trainer.feed.ray_data:RayData"`."""

    CURE = ("see that `dataset` makes the same rows in the same order each time, and start all "
            "ranks anew")

    def __init__(self, options: dict[str, Any], work_dir: Path) -> None:
        chosen = read_options(RayOptions, options, "data_options")
        about = {"dataset": chosen.dataset, "options": chosen.options, "rows": chosen.rows,
                 "address": chosen.address, "work_dir": str(work_dir.absolute())}
        try:
            root = "ray:" + json.dumps(about, sort_keys=True)
        except TypeError as error:  # TOML has dates
            raise ConfigError([f"data_options.options: {error}: write it as text"]) from None
        self.open(f"ray {chosen.dataset}", chosen.fetcher(root, work_dir), chosen)
