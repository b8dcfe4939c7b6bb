"""The seam between the training loop and a way of training in parallel.

Owns what a strategy must offer, and the choice of one.  A strategy says how a step is done and who
holds which part of the state; when a step is taken, saved or restored is the loop's.  The contract
is docs/engines.md.
"""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..config import Config, ConfigError, named_class
from ..state import State

BUILT_IN = {
    "ddp": "holdfast.trainer.engines.ddp:DataParallel",
    "sdp": "holdfast.trainer.engines.balanced:Balanced",
    "fsdp": "holdfast.trainer.engines.sharded:FullySharded",
    "mics": "holdfast.trainer.engines.sharded:MiCS",
    "pipeline": "holdfast.trainer.engines.pipeline:Pipeline",
}
Ranks = tuple[int, ...]
# Whether torch makes a group whose ranks are not in the order of their numbers (2.13 does).
IN_ORDER = "sort_ranks" in inspect.signature(dist.new_group).parameters
# torch, Python's own, and our way into torch's collectives.
LIBRARIES = (Path(torch.__file__).parent, Path(traceback.__file__).parent,
             Path(__file__).parents[1] / "breakable.py")
# What a library raises for how it was called.  A RuntimeError of torch's may be a lost peer whom
# nobody names, and what else comes from a library is often the machine's.
MISTAKES = (TypeError, ValueError, LookupError, AttributeError, AssertionError, NotImplementedError)
# What a setting does not cure, of those that a strategy's own file may raise.
_MACHINE = (torch.AcceleratorError, EOFError, futures.CancelledError, futures.BrokenExecutor)
_SETTINGS = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError)
# What torch says when memory is short or a device fails, in a plain RuntimeError.
_MEMORY_WORDS = ("out of memory", "allocate memory", "enough memory", "resource_exhausted")
_MACHINE_WORDS = (
    "cuda error", "cuda driver", "hip error", "cublas", "cusolver", "cudnn error", "miopen", "nrt_",
    "can't start new thread",
)
CHAIN_MAX = 100  # exceptions that led to one another


class Setup(NamedTuple):
    """What a strategy is built from, once in a process."""

    config: Config
    build: Callable[[], nn.Module]  # the seeded, untrained model on the CPU, anew each time
    device: torch.device
    engines: Mapping[str, str] | None = None  # classes that this device has in place of BUILT_IN


class Member(NamedTuple):
    """A rank as the others know it before anything is laid out."""

    node: str = ""
    memory_bytes: int = 0  # of its device, or its part of its node's
    said: str = ""  # by its strategy: Movable.said
    # The shard that its process holds whole, and of how many; (-1, 0) where it has trained and
    # holds none; () for one that is new; None where some rank is of a release that tells nothing.
    held: tuple[int, ...] | None = None
    # Of its node in the network, by the plan: {"rack": "r7"}.  None where the plan has none of any
    # node, or some rank is not told: its agent or launcher is of a release that tells none.
    labels: Mapping[str, str] | None = None


class Place(NamedTuple):
    """One rank's part: which of the state's shards it holds, and whose data it computes."""

    shard: int = 0
    data: int = 0  # ranks of the same number are given the same micro-batches
    words: str = ""  # for people: "stage 2 of 4, partition group 1"


class Layout(NamedTuple):
    """Who does what in one generation: the same on every rank."""

    places: tuple[Place, ...]  # by rank
    shards: int = 1  # pieces that the state is cut into; each rank holds one
    data: int = 1  # how many ranks (or groups of them) share the micro-batches
    # Process groups to be made: every rank in one each, its number there its place in the tuple.
    groups: Mapping[str, Sequence[Ranks]] = {}
    alike: Sequence[str] = ()  # groups in which every rank enters equally many collectives
    words: str = ""  # what was chosen and why, said once at the start
    about: Mapping[str, Any] = {}  # the same for the run's manifest
    cuts: tuple[int, ...] = ()  # of a pipeline: the first piece of each stage after the first
    version: int = 0  # how often the model was cut anew
    own: Sequence[str] = ()  # groups that threads of the strategy enter: never that of all itself
    host: Sequence[str] = ()  # groups of tensors in host memory: gloo's, wherever the state lies

    def holders(self, shard: int) -> Ranks:
        """The ranks that hold this shard: copies of one another."""
        return tuple(rank for rank, place in enumerate(self.places) if place.shard == shard)


class MicroBatch(NamedTuple):
    """One forward and backward pass."""

    number: int  # of the step's micro-batches, over all ranks
    seed: int  # for torch.manual_seed, so that it is the same wherever it is computed
    batch: dict[str, Tensor]
    of: int  # how many the step has: the objective is the mean over them


class Strategy(Protocol):
    """A way of training in parallel, built once in a process as `Class(setup)`.

    A generation calls lay_out, hold, [initialise], wrap, then for every step run, norm, update and
    forget; leave ends it.  A process lives through many generations; what it holds stays, unless
    its next place is another one.  What raises ConfigError ends the run, and no restart follows.
    """

    def __init__(self, setup: Setup) -> None: ...

    def warm_up(self, batch: dict[str, Tensor]) -> None:
        """Whatever makes a first step slow, on values that are thrown away.  No group is there."""
        ...

    def lay_out(self, members: Sequence[Member]) -> Layout:
        """Who does what in a world of these, by rank."""
        ...

    def hold(self, layout: Layout, rank: int) -> State:
        """The state of this place: as it was where this process held it before, else zeros."""
        ...

    def initialise(self) -> None:
        """Writes the seeded, untrained model into the state."""
        ...

    def wrap(self, group: Any, check: Callable[..., None]) -> None:
        """Makes ready to step in this group.  `check()` raises when the generation is over; it is
        cheap (0.2 us) and is to be called often."""
        ...

    def run(
        self, micro_batches: Sequence[MicroBatch], look: Callable[[int, float], None],
        skip: Callable[[], bool],
    ) -> float:
        """All micro-batches of this rank, forward and backward; leaves the sums of their gradients
        over all ranks, and returns the mean loss of this rank's.

        `look(number, loss)` comes before each backward pass and may raise.  `skip()` is asked
        where gradients are about to be summed: True means to leave that out, as a fault.
        """
        ...

    def norm(self) -> float:
        """Of all gradients.  Returns on no rank before every rank has the sums of its own."""
        ...

    def update(self, rate: float, norm: float) -> None:
        """Clips to optimizer.clip_norm and steps.  Talks to nobody."""
        ...

    def forget(self) -> None:
        """Drops the gradients."""
        ...

    def leave(self) -> None:
        """The group is over; state and gradients stay."""
        ...

    def encoder(self) -> AbstractContextManager[Callable[[Tensor], Tensor] | None]:
        """The model's `embed` in evaluation, or None; all ranks call it equally often."""
        ...


class Move(NamedTuple):
    """A tensor of the state that a rank sends to one that has not held it."""

    name: str
    source: int
    target: int


class Proposal(NamedTuple):
    """Another layout to go over to, or None; and a sentence for people that says why."""

    layout: Layout | None
    words: str


@runtime_checkable
class Movable(Protocol):
    """What a strategy offers besides that may change who holds what between two steps.

    Places keep their shards' numbers.  `hold` of the layout before gives what was held before,
    until `norm` has returned under the new one: by then every rank has gone over."""

    def said(self) -> str:
        """What all ranks are to know of this one when a generation is laid out."""
        ...

    def kept(self) -> State | None:
        """What this rank held before the newest layout, where that cuts the state into another
        number of shards: as it was until `norm` has returned.  None where nothing of it is here."""
        ...

    def proposed(self, left: int) -> Proposal | None:
        """Behind each step, with `left` to follow: the same on every rank, without asking any."""
        ...

    def moves(self, before: Layout, after: Layout) -> Sequence[Move]:
        """All that ranks have to send each other; what a rank holds under both is not in it."""
        ...

    def moved(self, layout: Layout, seconds: float) -> None:
        """This one is in force: the new one, or the old one where the new was left."""
        ...


def build(setup: Setup) -> Strategy:
    """The strategy that the settings name.  Raises ConfigError."""
    name = setup.config.strategy
    with told(name):
        known = BUILT_IN if setup.engines is None else setup.engines
        strategy: Strategy = named_class(known.get(name, name), "strategy")(setup)
    return strategy


@contextmanager
def told(
    name: str, lost: Callable[[BaseException], bool] = lambda _error: False
) -> Iterator[None]:
    """What a strategy of the user's raises is a setting of theirs: a sentence and no restart.

    Its own is what its file raises, and what torch or Python's library says of how that file has
    called it.  The model's errors are what they are; so is all that a restart may cure: what the
    loop takes for a generation that is `lost`, memory that is short, a device, a disk or a
    connection that fails.
    """
    try:
        yield
    except (ConfigError, FloatingPointError):
        raise
    except Exception as error:
        frame = None if name in BUILT_IN else _own_frame(error, _file_of(name))
        if frame is None or any(lost(one) or _of_the_machine(one) for one in chain(error)):
            raise
        line = " ".join(str(error).split())[:300]
        raise ConfigError([
            f"strategy = {name!r} raised {type(error).__name__}: {line} "
            f"({Path(frame.filename).name}, line {frame.lineno}): mend it, or set strategy to one "
            f"of {', '.join(BUILT_IN)}"]) from error


def _file_of(name: str) -> Path | None:
    """Of its class, which the module that a setting names may have from another one."""
    module, _, attribute = name.partition(":")
    found = getattr(sys.modules.get(module), attribute, None)
    file = getattr(sys.modules.get(getattr(found, "__module__", module)), "__file__", None)
    return Path(file) if file else None


def _own_frame(error: BaseException, file: Path | None) -> traceback.FrameSummary | None:
    """This file's frame that raised it, or that called the library that did, by a mistake."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path == file:
            return frame
        if not isinstance(error, MISTAKES):
            return None
        # Other packages may lie below Python's own library.
        installed = {"site-packages", "dist-packages"} & {*path.parts}
        of_torch, of_python, of_ours = map(path.is_relative_to, LIBRARIES)
        of_python = (of_python and not installed) or frame.filename.startswith("<frozen ")
        if not (of_torch or of_python or of_ours):
            return None
    return None


def chain(error: BaseException) -> Iterator[BaseException]:
    """It and what led to it: a strategy may have put a lost peer into words of its own."""
    found: BaseException | None = error
    for _ in range(CHAIN_MAX):
        if found is None:
            return
        yield found
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)


def of_memory(error: BaseException) -> BaseException | None:
    """That a device's or the node's memory was short, if the error came from it."""
    return next(filter(_short_of_memory, chain(error)), None)


def _short_of_memory(error: BaseException) -> bool:
    said = str(error).lower()
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(
        word in said for word in _MEMORY_WORDS)


def _of_the_machine(error: BaseException) -> bool:
    said = str(error).lower()
    of_system = isinstance(error, OSError) and not isinstance(error, _SETTINGS)
    return (of_system or _short_of_memory(error) or isinstance(error, _MACHINE)
            or any(word in said for word in _MACHINE_WORDS))
