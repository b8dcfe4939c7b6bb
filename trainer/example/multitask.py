"""Several tasks and two kinds of input through one encoder: text and pictures of code.

Owns the model with its heads, and the data that feeds them.  Must not know of ranks or steps.
Three tasks share every layer but the last: text finds the code for a docstring, picture finds the
code for the picture of its page, kind says what the code defines.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import FROM_0, Limit, read_options, setting
from ..protocol import Batch
from . import corpus, picture
from .data import CodeSearch, say
from .model import Encoder, EncoderOptions

TASKS = ("text", "picture", "kind")
WEIGHT = Limit("0 or more, one of them above 0", FROM_0.holds)


@dataclasses.dataclass(frozen=True)
class MultiTaskOptions(EncoderOptions):
    """What the built-in model of several tasks reads, besides the encoder's own."""

    text: float = setting(1.0, "weight of the task in the loss; 0 or more", WEIGHT)
    picture: float = setting(0.5, "weight of the task in the loss; 0 or more", WEIGHT)
    kind: float = setting(0.1, "weight of the task in the loss; 0 or more", WEIGHT)

    def problems(self) -> list[str]:
        found = super().problems()
        if not any(getattr(self, task) > 0 for task in TASKS):
            found.append("text, picture, kind = 0: set one of them above 0")
        return found


class MultiTask(Encoder):
    """As Encoder, with pictures beside tokens and a head for each task."""

    def __init__(self, options: dict[str, Any]) -> None:
        chosen = read_options(MultiTaskOptions, options, "model_options")
        base = {field.name for field in dataclasses.fields(EncoderOptions)}
        super().__init__({key: value for key, value in options.items() if key in base})
        self.weights = {task: float(getattr(chosen, task)) for task in TASKS}
        width, head = chosen.width, chosen.head_width
        self.patches = nn.Linear(picture.PATCH_VALUES, width)
        self.places = nn.Parameter(torch.empty(picture.PATCHES, width))
        nn.init.normal_(self.places, std=0.02)
        self.picture_head = nn.Sequential(
            nn.Linear(width, head), nn.GELU(), nn.Linear(head, head))
        self.kind_head = nn.Linear(width, len(picture.KINDS))

    def pooled(self, inputs: Tensor) -> Tensor:
        """Tokens [rows, length] or patches [rows, patches, values] -> [rows, width]."""
        if inputs.dim() == 2:
            real = inputs != 0
            hidden = self.tokens(inputs) + self.positions[: inputs.shape[1]]
        else:
            real = torch.ones(inputs.shape[:2], dtype=torch.bool, device=inputs.device)
            hidden = self.patches(inputs) + self.places
        return self.encoded(hidden, real)

    def embed(self, inputs: Tensor, task: str = "text") -> Tensor:
        """For retrieval rows of length 1; for `kind` a score a kind."""
        pooled = self.pooled(inputs)
        if task == "kind":
            scores: Tensor = self.kind_head(pooled)
            return scores
        return F.normalize((self.head if task == "text" else self.picture_head)(pooled), dim=-1)

    def forward(self, batch: Batch) -> Tensor:
        pairs = batch["query"].shape[0]
        texts = self.pooled(torch.cat([batch["query"], batch["document"]]))
        documents = texts[pairs:]
        loss = self.weights["text"] * self.contrast(*F.normalize(self.head(texts), dim=-1).split(
            pairs))
        if self.weights["picture"]:
            both = torch.cat([self.pooled(batch["picture"]), documents])
            loss = loss + self.weights["picture"] * self.contrast(
                *F.normalize(self.picture_head(both), dim=-1).split(pairs))
        if self.weights["kind"]:
            loss = loss + self.weights["kind"] * F.cross_entropy(
                self.kind_head(documents), batch["kind"])
        return loss


class CodePages(CodeSearch):
    """As CodeSearch, and for each pair the picture of its code and what that defines."""

    def __init__(self, options: dict[str, Any], work_dir: Path) -> None:
        super().__init__(options, work_dir)
        text = corpus.load(work_dir, say)
        pages, kinds = picture.load_drawn(work_dir, text, say)
        mine, limit = self.held_out, self._held_out.shape[1]
        self._pages, self._kinds = pages[~mine], kinds[~mine]
        self._held_pages, self._held_kinds = pages[mine][:limit], kinds[mine][:limit]
        self.digest = corpus.digest_of(f"{self.digest} pictures {picture.VERSION}".encode())

    def batch(self, indices: Sequence[int]) -> Batch:
        rows = list(indices)
        return {**super().batch(indices), "picture": _floats(self._pages[rows]),
                "kind": torch.from_numpy(self._kinds[rows])}

    def heldout(self) -> Mapping[str, tuple[Tensor, Tensor]]:  # type: ignore[override]
        queries, documents = super().heldout()
        return {"text": (queries, documents),
                "picture": (_floats(self._held_pages), documents),
                "kind": (documents, torch.from_numpy(self._held_kinds))}


def _floats(pages: Any) -> Tensor:
    return torch.from_numpy(picture.patches(pages)).float()
