"""The trainer's settings: train.toml, then key=value, checked at once.

Owns names, types, defaults and limits; docs/train.md is made from them.  Must not build anything.
Every error is found before the first is told, each with its key and what to set; an unknown key is
an error.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import difflib
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, Union, get_type_hints

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib  # type: ignore[no-redef,import-not-found]

from holdfast.worker import toml_text
from holdfast.worker.launcher.spec import moment
from holdfast.worker.time_limit import TooSlow

from .checkpoint.format import ALGORITHMS, open_regular

FILE_BYTES_MAX = 1 << 20
DEPTH_MAX = 32  # of tables in tables: what reads them goes down by calling itself
SHOWN_MAX = 100  # characters of a wrong value
# Of every number without a limit of its own: far from any run, and less than the most that a rank's
# page holds (worker/page.py), beyond which the agent takes the page for damaged.
MOST = 10**12
SEED_MAX = 2**63 - 1  # what every generator of random numbers takes
# Classes that moved, under the names that a train.toml may still give them.
MOVED = {
    "holdfast.trainer.model:Encoder": "holdfast.trainer.example.model:Encoder",
    "holdfast.trainer.data:CodeSearch": "holdfast.trainer.example.data:CodeSearch",
}


class ConfigError(ValueError):
    """Everything that is wrong with the settings, one line each."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(problems))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problems,)  # by itself it would be made of its text's letters


class Limit(NamedTuple):
    """What a value has to be: in words that follow "set", and as a test."""

    words: str
    holds: Callable[[Any], bool]


ABOVE_0 = Limit(f"a number above 0 and at most {MOST}", lambda value: 0 < value <= MOST)
FROM_0 = Limit(f"0 or more, at most {MOST}", lambda value: 0 <= value <= MOST)
FROM_1 = Limit(f"at least 1 and at most {MOST}", lambda value: 1 <= value <= MOST)
SEED = Limit(f"0 to {SEED_MAX}", lambda value: 0 <= value <= SEED_MAX)
BELOW_1 = Limit("0 up to below 1", lambda value: 0 <= value < 1)
CLASS = Limit('"module:Class"', lambda value: all(value.partition(":")[::2]))
STRATEGIES = ("ddp", "sdp", "fsdp", "mics", "pipeline")
STRATEGY = Limit(f'one of {", ".join(STRATEGIES)}, or "module:Class"',
                 lambda value: value in STRATEGIES or CLASS.holds(value))
ROWS = Limit("1 to 1000000", lambda value: 1 <= value <= 1_000_000)
STAGES = Limit("1 to 64", lambda value: 1 <= value <= 64)
SCHEDULE = Limit("interleaved or simple", lambda value: value in ("interleaved", "simple"))
REPARTITION = Limit("slow or never", lambda value: value in ("slow", "never"))
GOAL = Limit("speed or memory", lambda value: value in ("speed", "memory"))
DEVICES = ("auto", "cpu", "cuda", "accelerator", "xla")
DEVICE = Limit(f"one of {', '.join(DEVICES)}", lambda value: value in DEVICES)
MOMENT = Limit("2026-12-24T18:00+01:00, or +36h (m, h or d)",
               lambda value: not value or _is_moment(value))
DIGEST = Limit(f"one of {', '.join(ALGORITHMS)}", lambda value: value in ALGORITHMS)


def _is_moment(text: str) -> bool:
    try:
        moment(text)
    except argparse.ArgumentTypeError:
        return False
    return True


def setting(default: Any, text: str, limit: Limit | None = None) -> Any:
    """A field with its default, what it is for, and what its value has to be."""
    return dataclasses.field(default=default, metadata={"text": text, "limit": limit})


@dataclasses.dataclass(frozen=True)
class Options:
    """Base of a table of settings: fields with defaults and limits."""

    def problems(self) -> list[str]:
        """What is wrong, one line each: "key = value: set ..."."""
        limits = {one.name: one.metadata.get("limit") for one in dataclasses.fields(self)}
        return [f"{name} = {_shown(value)}: set {limit.words}" for name, limit in limits.items()
                if limit and not limit.holds(value := getattr(self, name))]


@dataclasses.dataclass(frozen=True)
class OptimizerOptions(Options):
    """AdamW; the rate rises over `warmup_steps`, then falls as a cosine to a fraction of it."""

    learning_rate: float = setting(
        5e-4, "the highest rate, reached after `warmup_steps`; above 0", ABOVE_0)
    weight_decay: float = setting(0.01, "decoupled decay of the weights; 0 or more", FROM_0)
    beta1: float = setting(0.9, "memory of the gradient's mean; 0 up to below 1", BELOW_1)
    beta2: float = setting(0.98, "memory of its square; 0 up to below 1", BELOW_1)
    warmup_steps: int = setting(20, "steps over which the rate rises; 0 or more", FROM_0)
    final_fraction: float = setting(0.1, "of the highest rate, at the last step; 0 or more", FROM_0)
    clip_norm: float = setting(1.0, "gradients are scaled down to this norm; 0 = never", FROM_0)


@dataclasses.dataclass(frozen=True)
class CheckpointOptions(Options):
    """What is written to disk, in the background."""

    dir: str = setting(
        "", "where, a folder for this run alone; empty: `checkpoints` in `work_dir`")
    every: int = setting(
        50, "steps between two; 0 = never",
        Limit(f"0 (never) or more, at most {MOST}", FROM_0.holds))
    keep: int = setting(3, "how many valid ones stay; at least 1", FROM_1)
    digest: str = setting("xxh3_128", f"proves each file; one of {', '.join(ALGORITHMS)}", DIGEST)
    wait_s: float = setting(
        60.0, "seconds that rank 0 waits for the others' shards; at most 3600",
        Limit("above 0 and at most 3600", lambda value: 0.0 < value <= 3600.0))
    read_back_mb_s: float = setting(
        200.0, "pace, in MB/s, at which rank 0 reads each one back; verified only then",
        Limit("1 to 1000000", lambda value: 1.0 <= value <= 1e6))


@dataclasses.dataclass(frozen=True)
class SnapshotOptions(Options):
    """Copies of the state in the launcher's memory."""

    enabled: bool = setting(True, "whether they are taken, where they fit")
    cost_percent: float = setting(0.25, "of step time, over the steps in between; above 0", ABOVE_0)
    every: int = setting(0, "steps between two; 0 = chosen from the measured cost",
                         Limit(f"0 (chosen by cost) or more, at most {MOST}", FROM_0.holds))


@dataclasses.dataclass(frozen=True)
class ExportOptions(Options):
    """Embeddings of all samples to files instead of training; `--export DIR` sets `dir`."""

    dir: str = setting("", "where to; empty: training")
    field: str = setting("document", "which of a batch's tensors is embedded")
    rows: int = setting(
        4096, "samples in a part, which is what a lost rank costs; 1 to 1000000", ROWS)


@dataclasses.dataclass(frozen=True)
class PipelineOptions(Options):
    """For strategy = "pipeline": the model cut into stages (docs/engines.md)."""

    stages: int = setting(2, "ranks that share one model; divides the ranks; 1 to 64", STAGES)
    fewest: int = setting(
        0, "the fewest stages that a world may be cut into; 0 = always `stages`, and the run waits "
        "for ranks", FROM_0)
    schedule: str = setting(
        "interleaved", "interleaved (1F1B, less memory) or simple (GPipe)", SCHEDULE)
    optimize: str = setting("speed", "what the cut makes even: speed or memory", GOAL)
    group: int = setting(
        1, "ranks that share one copy of a stage, each with its rows of it; at least 1", FROM_1)
    repartition: str = setting(
        "slow", "slow: cut anew when a rank has become slow, or fast again; or never", REPARTITION)

    def problems(self) -> list[str]:
        found = super().problems()
        if self.fewest > self.stages:
            found.append(f"fewest = {self.fewest}: set at most stages = {self.stages}, or 0")
        return found

    def stages_of(self, ranks: int, micro_batches: int) -> int:
        """The most stages that a world of so many ranks can have; 0 = it cannot be laid out.  With
        fewer of them there are more pipelines, and each wants a micro-batch (0 = as many as there
        are ranks)."""
        some = range(self.stages, (self.fewest or self.stages) - 1, -1)
        most = micro_batches or ranks
        return next((one for one in some if ranks and ranks % (one * self.group) == 0
                     and (one == self.stages or ranks // one <= most)), 0)


@dataclasses.dataclass(frozen=True)
class FsdpOptions(Options):
    """`strategy = "fsdp"`: every rank holds its rows of every tensor."""

    group: int = setting(
        0, "ranks that share one copy of the state, copied in each group; 0 = all ranks", FROM_0)
    hierarchical: bool = setting(
        True, "gather in two hops where a group has several ranks on each of several nodes")


@dataclasses.dataclass(frozen=True)
class SdpOptions(Options):
    """`strategy = "sdp"`: ddp whose gradients cross between nodes in balanced parts."""

    lanes: int = setting(2, "buckets of gradients in flight, each in groups of its own; 1 to 3",
                         Limit("1 to 3", lambda value: 1 <= value <= 3))


@dataclasses.dataclass(frozen=True)
class MicsOptions(Options):
    """`strategy = "mics"`: the state in the smallest groups of near ranks, copied in each group."""

    group: Union[int, str] = setting(
        "auto", "ranks in a group, a divisor of the world; auto = as few as memory allows",
        Limit(f"auto, or at least 1 and at most {MOST}",
              lambda value: value == "auto" or isinstance(value, int) and FROM_1.holds(value)))
    memory_gb: float = setting(
        0.0, "that a rank may use; 0 = four fifths of its device, or of its part of the node",
        FROM_0)
    hierarchical: bool = setting(
        True, "gather in two hops where a group has several ranks on each of several nodes")


@dataclasses.dataclass(frozen=True)
class XlaOptions(Options):
    """For device = "xla": graphs are compiled, and their shapes stay (docs/engines.md)."""

    pad: bool = setting(
        False, "fill a smaller batch with zeros to the first one's shape; else that is an error")
    precompile: bool = setting(
        False, "compile ahead, on all processors, by neuron_parallel_compile where it is installed")
    neuron_cc_flags: str = setting(
        "", "$NEURON_CC_FLAGS of the ranks; empty: as the environment has it")


@dataclasses.dataclass(frozen=True)
class Config(Options):
    """Everything one run is told.  Steps are optimizer steps, batches are counted in pairs."""

    model: str = setting(
        "holdfast.trainer.example.model:Encoder", "module:Class of the model", CLASS)
    data: str = setting(
        "holdfast.trainer.example.data:CodeSearch", "module:Class of the data", CLASS)
    strategy: str = setting(
        "ddp", "how ranks share a step (docs/engines.md), or module:Class of your own", STRATEGY)
    seed: int = setting(0, "of weights and of the order of samples; 0 or more", SEED)
    steps: int = setting(200, "how many; at least 1", FROM_1)
    batch: int = setting(4, "samples in a micro-batch; at least 1", FROM_1)
    micro_batches: int = setting(0, "in a step, over all ranks; 0 = one for each rank", FROM_0)
    device: str = setting(
        "auto", "cpu, cuda, accelerator (what torch has), xla; auto = cuda where it is", DEVICE)
    work_dir: str = setting("holdfast-work", "corpus, tokenizer and checkpoints lie here")
    deadline: str = setting(
        "", "when it must be done, as `--deadline` of docs/jobs.md; empty: none", MOMENT)
    init_from: str = setting(
        "", "a new run from these weights: a checkpoint, *.safetensors or *.pt; empty: untrained")
    log_every: int = setting(10, "steps between two lines; at least 1", FROM_1)
    eval_every: int = setting(0, "steps between two evaluations; 0 = at the end only", FROM_0)
    optimizer: OptimizerOptions = OptimizerOptions()
    checkpoint: CheckpointOptions = CheckpointOptions()
    snapshot: SnapshotOptions = SnapshotOptions()
    export: ExportOptions = ExportOptions()
    pipeline: PipelineOptions = PipelineOptions()
    fsdp: FsdpOptions = FsdpOptions()
    mics: MicsOptions = MicsOptions()
    sdp: SdpOptions = SdpOptions()
    xla: XlaOptions = XlaOptions()
    topology: dict[str, Any] = dataclasses.field(
        default_factory=dict,
        metadata={"text": "node's name, or rank = label; ranks of one label are near each other; "
                          "empty: the labels of the nodes' agents, else the nodes"})
    model_options: dict[str, Any] = dataclasses.field(
        default_factory=dict, metadata={"text": "what the model's class is given, whole"})
    data_options: dict[str, Any] = dataclasses.field(
        default_factory=dict, metadata={"text": "what the data's class is given, whole"})
    strategy_options: dict[str, Any] = dataclasses.field(
        default_factory=dict, metadata={"text": "for a strategy of your own: in `setup.config`"})

    @property
    def checkpoint_dir(self) -> Path:
        return Path(self.checkpoint.dir or Path(self.work_dir) / "checkpoints").absolute()

    @property
    def together(self) -> tuple[int, str]:
        """A world is a multiple of so many ranks, and which settings want that; (1, "") for any."""
        if self.strategy == "pipeline":
            words = f"pipeline.stages = {self.pipeline.stages}"
            if self.pipeline.fewest:
                words += f", pipeline.fewest = {self.pipeline.fewest}"
            more = f" and pipeline.group = {self.pipeline.group}" if self.pipeline.group > 1 else ""
            return self.pipeline.stages * self.pipeline.group, words + more
        group = {"fsdp": self.fsdp.group, "mics": self.mics.group}.get(self.strategy)
        if isinstance(group, int) and group > 1:
            return group, f"{self.strategy}.group = {group}"
        return 1, ""

    @property
    def fewer(self) -> bool:
        """Whether a smaller world is laid out otherwise, and need not be a multiple of `together`.
        """
        return self.strategy == "pipeline" and 0 < self.pipeline.fewest < self.pipeline.stages

    def fits(self, ranks: int) -> bool:
        """Where `fewer`: whether a world of so many can be laid out."""
        return self.pipeline.stages_of(ranks, self.micro_batches) > 0

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def text(self) -> str:
        return json.dumps(self.as_dict(), sort_keys=True)


Table = TypeVar("Table", bound=Options)


def from_text(text: str) -> Config:
    """What `Config.text` wrote.  Raises ConfigError."""
    return read_options(Config, json.loads(text))


def read_options(kind: type[Table], values: Mapping[str, Any], where: str = "") -> Table:
    """Builds one table of settings.  Raises ConfigError with all that is wrong in it."""
    problems: list[str] = []
    table = _table(kind, values, where + "." if where else "", problems)
    if problems:
        raise ConfigError(problems)
    assert table is not None
    return table


def _table(
    kind: type[Table], values: Mapping[str, Any], prefix: str, problems: list[str]
) -> Table | None:
    hints, chosen, before = get_type_hints(kind), dict[str, Any](), len(problems)
    for key, value in values.items():
        wanted = hints.get(key)
        if wanted is None:
            near = difflib.get_close_matches(key, hints, 1)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"set one of {', '.join(hints)}"
            problems.append(f"{prefix}{key}: unknown key; {hint}")
        elif isinstance(wanted, type) and issubclass(wanted, Options):
            if isinstance(value, Mapping):
                inner: type[Options] = wanted
                table = _table(inner, value, f"{prefix}{key}.", problems)
                chosen[key] = inner() if table is None else table
            else:
                problems.append(f"{prefix}{key} = {_shown(value)}: set a table [{prefix}{key}]")
        else:
            fits, fitted = _fit(wanted, value)
            if fits:
                chosen[key] = fitted
            else:
                name = wanted.__name__ if wanted in (int, float, str, bool) else (
                    "int or str" if wanted == Union[int, str] else "table")
                problems.append(f"{prefix}{key} = {_shown(value)}: set a value of type {name}")
    built = kind(**chosen)  # what does not fit is told above; the rest is checked all the same
    problems += [prefix + problem for problem in built.problems()]
    return built if len(problems) == before else None


def _fit(wanted: Any, value: Any) -> tuple[bool, Any]:
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        # Beyond every limit it stays as it was written: a float may not hold it.
        return True, float(value) if abs(value) <= MOST else value
    if wanted == Union[int, str]:
        return type(value) in (int, str), value
    if wanted in (int, float, str, bool):
        return type(value) is wanted, value
    return isinstance(value, Mapping), dict(value) if isinstance(value, Mapping) else value


def from_arguments(arguments: Sequence[str] | None = None) -> Config:
    """The trainer's own command line; None for this process's.  Raises ConfigError."""
    parser = argparse.ArgumentParser(prog="holdfast train", description="One rank of a run.")
    parser.add_argument("--config", help="a TOML file", default=None)
    parser.add_argument("--export", metavar="DIR", default="",
                        help="write embeddings of all samples there instead of training")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parsed = parser.parse_intermixed_args(arguments)
    # Quoted: a directory may be called 7, or true.
    more = [f"export.dir={json.dumps(parsed.export)}"] if parsed.export else []
    return load(parsed.config, [*parsed.overrides, *more])


def load(path: str | None, overrides: Sequence[str] = ()) -> Config:
    """train.toml (or none) with `a.b=value` on top.  Raises ConfigError."""
    problems: list[str] = []
    values = _read_file(Path(path), problems) if path else {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            problems.append(f"{override!r}: set it as key=value")
            continue
        table: Any = values
        *parents, last = key.split(".")
        for parent in parents:
            table = table.setdefault(parent, {}) if isinstance(table, dict) else None
        if not isinstance(table, dict):
            problems.append(f"{key}: {'.'.join(parents)} is not a table")
            continue
        table[last] = _value(text)
    for key in [key for key, value in values.items() if _is_deep(value)]:
        problems.append(f"{key[:SHOWN_MAX]}: more than {DEPTH_MAX} tables or lists in one another: "
                        "set fewer")
        del values[key]
    if isinstance(chosen := values.get("strategy"), dict):  # [strategy] name = "..."
        values.update({key: value for key, value in chosen.items() if key != "name"})
        values["strategy"] = chosen.get("name", Config.strategy)
    if isinstance(when := values.get("deadline"), datetime.date):  # TOML's own, with a time or not
        values["deadline"] = when.isoformat()
    config = _table(Config, values, "", problems)
    if problems:
        raise ConfigError([f"{path}: {p}" if path else p for p in problems])
    assert config is not None
    return config


def _read_file(path: Path, problems: list[str]) -> dict[str, Any]:
    """What a FIFO, a device or an endless text stands for is an error here, and never a wait: the
    launcher reads before it answers a Ctrl-C."""
    try:
        with open_regular(path) as file:
            text = file.read(FILE_BYTES_MAX + 1)
        if len(text) > FILE_BYTES_MAX:
            problems.append(f"larger than {FILE_BYTES_MAX} bytes: set a smaller file")
            return {}
        return toml_text.parse(tomllib.loads, text)
    except OSError as error:
        problems.append(f"cannot be read: {error.strerror}: set a TOML file that you may read")
    except TooSlow as error:
        problems.append(f"{error} to read: shorten its keys and tables")
    except ValueError as error:  # a number of 5,000 digits is one, too
        problems.append(f"not TOML: {error}")
    return {}


def _is_deep(value: Any) -> bool:
    """Whether tables and lists lie in one another deeper than they are read."""
    level = [value]
    for _ in range(DEPTH_MAX):
        level = [inner for one in level if isinstance(one, (dict, list))
                 for inner in (one.values() if isinstance(one, dict) else one)]
    return bool(level)


def _value(text: str) -> Any:
    """A TOML value; what is none is a string, so that paths need no quotes."""
    try:
        return toml_text.parse(tomllib.loads, f"value = {text}")["value"]
    except ValueError:
        return text


def _shown(value: Any) -> str:
    """A value in an error: an end of what is long."""
    try:
        text = repr(value)
    except ValueError:  # a whole number of more digits than Python writes
        return "a number of thousands of digits"
    return text if len(text) <= SHOWN_MAX else text[:SHOWN_MAX] + "..."


def named_class(name: str, key: str) -> Any:
    """The class that "module:Class" names.  Raises ConfigError naming the key."""
    module, _, attribute = MOVED.get(name, name).partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        if error.name and not module.startswith(error.name):
            raise  # the module is there; an import of its own is not
        raise ConfigError([f"{key} = {name!r}: no module {error.name!r}; set PYTHONPATH"]) from None
    except AttributeError:
        raise ConfigError([f"{key} = {name!r}: {module} has no {attribute!r}"]) from None
