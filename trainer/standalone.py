"""What holdfast.worker.elastic offers, for a trainer without a launcher.

Owns the trainer's life alone or under plain torchrun: one generation, whose world comes from the
environment, and no recovery within it.  Must not import worker.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from .checkpoint import format
from .config import ConfigError

RANKS_MAX = 1 << 20
PORT_MAX = 65535


class Broken(RuntimeError):
    """Never raised here: nothing but a launcher can end a generation."""


class Assignment(NamedTuple):
    """As holdfast.worker.elastic.Assignment; an empty store_host means env:// or no group."""

    generation: int
    rank: int
    local_rank: int
    world: int
    store_host: str = ""
    store_port: int = 0
    resume_kind: str = "fresh"
    resume_step: int = 0
    resume_generation: int = 0
    resume_path: str = ""
    history: tuple[tuple[int, int], ...] = ()
    node: str = ""
    run: str = ""
    labels: tuple[tuple[str, str], ...] | None = None


class GenerationLost(RuntimeError):
    """The group broke, and nobody is there to plan the next one."""


class Place(NamedTuple):
    """Which rank of how many this process is."""

    rank: int
    local_rank: int
    world: int


def place(environ: Mapping[str, str]) -> Place:
    """As the environment says, which anybody may have set.  Raises ConfigError."""
    problems: list[str] = []

    def bounded(name: str, default: int, least: int, most: int) -> int:
        text = environ.get(name, str(default))
        if not (text.isascii() and text.isdecimal() and len(text) < 12
                and least <= int(text) <= most):
            problems.append(f"${name} is {text[:40]!r}: set {least} to {most}, or unset it")
            return default
        return int(text)

    world = bounded("WORLD_SIZE", 1, 1, RANKS_MAX)
    rank = bounded("RANK", 0, 0, world - 1)
    local_rank = bounded("LOCAL_RANK", 0, 0, world - 1)
    if "MASTER_ADDR" in environ:
        bounded("MASTER_PORT", 0, 1, PORT_MAX)
    elif world > 1:
        problems.append(f"$WORLD_SIZE is {world} and $MASTER_ADDR is not set: start the ranks with "
                        "`holdfast train` or torchrun, or unset it")
    if problems:
        raise ConfigError(problems)
    return Place(rank, local_rank, world)


class Standalone:
    """The same calls as the elastic module's, for one generation.  ConfigError where the
    environment names no place in a world."""

    Broken = Broken

    def __init__(self) -> None:
        self.place = place(os.environ)

    def active(self) -> bool:
        return False

    def ready(self, checkpoint_dir: str = "", keep: int = 3, commits: Any = ()) -> Assignment:
        """Resumes from the newest checkpoint that proves; rank 0 finds it, once joined."""
        known = format.listing(checkpoint_dir) if checkpoint_dir else []
        return Assignment(
            generation=max((found.generation for found in known), default=0) + 1,
            rank=self.place.rank,
            local_rank=self.place.local_rank,
            world=self.place.world,
            resume_kind="newest",
            resume_path=checkpoint_dir,
            run=os.environ.get("TORCHELASTIC_RUN_ID", "") or "alone",
        )

    def park(
        self, step: int, torn: bool, reason: str, meanwhile: Callable[[], None] | None = None,
        shard: int = 0, shards: int = 1, ready: bool = False, error: str = "",
    ) -> Assignment:
        raise GenerationLost(f"at step {step}: {reason}; no launcher to plan another generation")

    def raised(self, error: BaseException) -> str:
        """Raises it again: nobody plans a generation in which this process could go on."""
        raise error

    def phase(self, name: str) -> None: ...

    def step_begin(self) -> None: ...

    def step_end(self, step: int, loss: float) -> None: ...

    def broken(self) -> bool:
        return False

    def register_group(
        self, group: Any, cut_sockets: Callable[[], None] | None, alike: Sequence[Any] = ()
    ) -> None: ...

    def progress(self, step: int, loss: float, rate: float, total_steps: int) -> None: ...

    def placed(self, words: str) -> None: ...

    def report(self, fault: str, text: str) -> None:
        print(f"{fault}: {text}" if fault else text, file=sys.stderr, flush=True)

    def committed(self, generation: int, step: int, path: str, world: int) -> None: ...

    def verified(self, path: str) -> None: ...

    def bad_checkpoint(self, path: str, why: str) -> None: ...

    def skip_collective(self) -> bool:
        return False

    def stop_after(self) -> int:
        return 0

    def park_after(self) -> tuple[int, bool]:
        return 0, False

    def snapshot_buffer(self, nbytes: int) -> memoryview | None:
        return None

    def snapshot_commit(self, step: int, digest: str) -> None: ...

    def snapshot_shards(self) -> list[Any]:
        return []
