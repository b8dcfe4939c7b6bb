"""docs/train.md: every setting of the trainer, as its tables declare them.

Owns the page's shape.  Names, types, defaults and texts are those of config.py and of the
example's model.py, multitask.py and data.py; a field without a text is an error, so that no
setting goes undescribed.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Union, get_type_hints

from .config import Config, Options
from .example.data import CodeSearchOptions
from .example.model import EncoderOptions
from .example.multitask import MultiTaskOptions
from .feed.ray_data import RayOptions
from .feed.shards import ShardOptions

HEAD = """# Settings of the trainer

Generated from trainer/config.py, trainer/example/model.py and trainer/example/data.py; do not edit.

    holdfast train --nproc-per-node 2 --config train.toml steps=500 optimizer.learning_rate=1e-3

The file is read first, then each `key=value` on top of it; a table's key is written with a dot. An
unknown key is an error, and all errors are told at once, each with what to set. The flags are the
launcher's own: `holdfast train --help` lists them.

## Another number of ranks

A run that shrinks or grows, in place or from a checkpoint, takes the same samples in the same
order: a step's micro-batches are dealt to the ranks there are, each with random numbers of its
own, and the gradient is the mean over all of them. Only floats are summed in another order: over
100 steps with a shrink and a growth among them every step's mean loss stays within 1e-4 of its
size, and every weight within 1e-3, of a run whose world never changed. A test holds a tenth of
that over 60 steps on processors, with 4 ranks that become 3 and 4 again.

What a model keeps in buffers, as BatchNorm's statistics, is rank 0's, which then sees other
micro-batches. So does the loss that `status`, the live page and the log show while it trains: it is
one rank's mean over its own micro-batches. The one in the result's line is the whole step's.
"""
KINDS: dict[Any, str] = {Union[int, str]: "text or whole number",
                         float: "number", int: "whole number", str: "text", bool: "true or false"}


def render_train_docs() -> str:
    """The whole page."""
    nested = {f.name: type(f.default) for f in dataclasses.fields(Config)
              if isinstance(f.default, Options)}
    page = HEAD + _section("The run", Config, set(nested))
    for name, kind in nested.items():
        page += _section(f"[{name}]", kind, set())
    page += _section("[model_options]", EncoderOptions, set())
    page += _section("[model_options] of `holdfast.trainer.example.multitask:MultiTask`",
                     MultiTaskOptions, {f.name for f in dataclasses.fields(EncoderOptions)})
    page += _section("[data_options]", CodeSearchOptions, set())
    page += _section("[data_options] of `holdfast.trainer.feed.shards:Shards`",
                     ShardOptions, set())
    return page + _section("[data_options] of `holdfast.trainer.feed.ray_data:RayData`",
                           RayOptions, set())


def _section(title: str, kind: type[Options], left_out: set[str]) -> str:
    lines = ["", f"## {title}", "", " ".join((kind.__doc__ or "").split()), "",
             "| key | type | default | what it is for |", "|---|---|---|---|"]
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if field.name not in left_out:
            text = field.metadata["text"]
            wanted = KINDS.get(hints[field.name], "table")
            lines.append(f"| `{field.name}` | {wanted} | `{_default(field)}` | {text} |")
    return "\n".join(lines) + "\n"


def _default(field: dataclasses.Field[Any]) -> str:
    return json.dumps({} if field.default is dataclasses.MISSING else field.default)
