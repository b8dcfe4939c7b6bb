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
