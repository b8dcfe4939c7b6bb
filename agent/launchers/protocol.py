"""The packets between a launcher and its agent, as types.

Owns names, fields and bounds of the protocol (one JSON object a packet, key "t" = type).  No
sockets here.  Unknown keys are ignored, so that neighbouring versions understand each other.
Every number is bounded here: nothing behind this file meets one that no float can hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from holdfast.worker import redact

from ..core.model import UNREADABLE, Amount, Commit, Ended, Parked, Seconds, SnapshotView, Whole

PROTOCOL = 1
PACKET_MAX_BYTES = 65536
RANKS_MAX = 1024  # of one launcher; admission.py says how many of all
NAME_MAX = 128
NNODES_MAX = 2048  # as worker/launcher/spec.py refuses more
NO_NODES = "a run over nodes needs a store that all of them reach"
# The agent of a node serves all runs there out of one store, and so cannot have one run's.
NODES_OWN = NO_NODES + (
    ", and this node's agent has one for this node alone (it reads no --rdzv-endpoint): set "
    'url = "etcd://HOST:2379,..." under [store] in its configuration, on all nodes; or start the '
    "run with HOLDFAST_RUNTIME_DIR=FOLDER and --rdzv-endpoint HOST:PORT on each: then it has an "
    "agent of its own there")
RUNS_OWN = NO_NODES + (
    ": name one of them with --rdzv-endpoint HOST:PORT, the same on all; or set url = "
    '"etcd://HOST:2379,..." under [store] in the file that HOLDFAST_CONFIG names')
# What is looked up, opened or compared by its exact text, and so is never redacted.
NAMES = frozenset({"t", "run", "node", "user", "id", "path", "cwd", "log_dir", "checkpoint_dir",
                   "python", "grade", "state", "signature", "outcome", "compile_caches"})


class Goal(msgspec.Struct, frozen=True):
    """What a run says of itself for the books: whose it is, when it must be done, and what a step
    of all its ranks is worth.  0 = not said."""

    team: str = ""
    queued_wall_s: Seconds = 0.0
    deadline_wall_s: Seconds = 0.0
    total_steps: Whole = 0
    samples_per_step: Amount = 0.0
    tokens_per_step: Amount = 0.0
    flops_per_step: Amount = 0.0
    peak_flops: Amount = 0.0


class Hello(msgspec.Struct, tag_field="t", tag="hello"):
    """A launcher introduces itself and its run."""

    run: str
    protocol: Whole = 0
    node: str = ""
    user: str = ""
    pid: Whole = 0
    grade: str = "script"
    nproc: Whole = 1
    max_restarts: Whole = 0
    argv: tuple[str, ...] = ()
    cwd: str = ""
    python: str = ""
    torch: str = ""
    log_dir: str = ""
    checkpoint_dir: str = ""
    hang_limit_s: Seconds = 0.0
    generation: Whole = 0
    started_boot_s: Seconds = 0.0
    compile_caches: tuple[str, ...] = ()  # where the job keeps what Neuron compiled
    visible: tuple[tuple[str, str], ...] = ()  # (vendor, value) of CUDA_VISIBLE_DEVICES, its like
    devices: tuple[str, ...] = ()  # the GPUs that its ranks would take, by their addresses on PCI
    ignored_checks: tuple[str, ...] = ()
    ignore_reason: str = ""
    wants_checks: str = ""
    nnodes: Whole = 1  # at most
    nnodes_min: Whole = 1
    node_rank: Whole = -1
    goal: Goal = Goal()
    unit: Whole = 1
    mixed: bool = False
    gang_limit_s: Seconds = 0.0


class Coming(msgspec.Struct, tag_field="t", tag="coming"):
    """A launcher imports before it can say hello: that is startup of the node, not idleness."""


class Page(msgspec.Struct, tag_field="t", tag="page"):
    """A rank's page and pidfd follow as descriptors."""

    rank: Whole
    generation: Whole
    pid: Whole
    local_rank: Whole = 0


class RankLevel(msgspec.Struct):
    """One rank as its launcher sees it."""

    rank: Whole
    pid: Whole
    generation: Whole
    state: str = "starting"
    local_rank: Whole = 0
    ended: Ended | None = None
    parked: Parked | None = None
    flight: tuple[tuple[Whole, str, str], ...] = ()  # last collectives: (sequence, name, sizes)
    place: Annotated[str, msgspec.Meta(max_length=NAME_MAX)] = ""  # its part in the strategy


class LogSeen(msgspec.Struct):
    """A line of a rank's log that a signature knows, from the sample of a live run."""

    signature: str
    role: str
    culprit: str
    rank: Whole = -1
    text: str = ""
    wall_s: Seconds = 0.0


class LogLevel(msgspec.Struct):
    """What the launcher's log child did so far; it may be asked for more."""

    read_bytes: Whole = 0
    skipped_bytes: Whole = 0
    cpu_s: Seconds = 0.0
    rss_bytes: Whole = 0
    failures: Whole = 0
    problem: str = ""
    lines: tuple[tuple[str, str, str, Whole], ...] = ()  # signature, role, culprit, how many
    seen: tuple[LogSeen, ...] = ()  # newest last


class Endpoint(msgspec.Struct):
    """Where a generation's store listens, on the first of its nodes."""

    generation: Whole
    host: str
    port: Whole


class Levels(msgspec.Struct, tag_field="t", tag="levels"):
    """Everything a launcher knows, whole each time."""

    n: Whole = 0
    generation: Whole = 0
    state: str = "idle"
    shutdown: str = ""
    compiling: str = ""
    checkpoint_dir: str = ""  # known once the trainer has listed it, which is after the hello
    keep: Whole = 0
    startup_s: Seconds = 0.0
    ranks: tuple[RankLevel, ...] = ()
    commits: tuple[Commit, ...] = ()
    snapshot: SnapshotView | None = None
    logs: LogLevel | None = None  # None: this launcher reads none
    endpoint: Endpoint | None = None  # None: another node hosts the store, or there is one node


class Outcome(msgspec.Struct, tag_field="t", tag="outcome"):
    """What became of one effect."""

    id: str
    ok: bool
    error: str = ""
    detail: str = ""


class Report(msgspec.Struct, tag_field="t", tag="report"):
    """A rank says that something of its own does not work (a snapshot, a checkpoint)."""

    rank: Whole = -1
    fault: str = ""
    text: str = ""


class Bye(msgspec.Struct, tag_field="t", tag="bye"):
    """The launcher leaves on purpose."""

    code: Whole = 0


Packet = Hello | Coming | Page | Levels | Outcome | Report | Bye
_decoder: msgspec.json.Decoder[Packet] = msgspec.json.Decoder(Packet)
_encoder = msgspec.json.Encoder()


def decode(packet: bytes) -> Packet:
    """A packet's meaning.  msgspec.DecodeError (or its ValidationError) says what is wrong."""
    try:
        read = _decoder.decode(packet)
    except RecursionError as error:
        raise msgspec.DecodeError("nested beyond reason") from error
    if not redact.may_hold(packet.decode("utf-8", "replace")):
        return read
    plain = msgspec.to_builtins(read)
    return msgspec.convert(_told(plain), type(read))


def _told(value: Any, key: str = "") -> Any:
    """A packet's content as the agent may keep it: without the secrets in a job's words."""
    if isinstance(value, dict):
        return {name: _told(one, name) for name, one in value.items()}
    if key == "argv":
        return redact.redacted_words(value)
    if isinstance(value, (list, tuple)):
        return [_told(one, key) for one in value]
    if not isinstance(value, str) or key in NAMES:
        return value
    if key == "detail" and value.startswith("{"):  # evidence, and what the log child found
        try:
            return msgspec.json.encode(_told(msgspec.json.decode(value))).decode()
        except (*UNREADABLE, ValueError):
            return redact.redacted(value)
    return redact.redacted(value)


def encode(fields: Mapping[str, object]) -> bytes:
    """A packet's bytes.  ValueError when it would be longer than a packet may be."""
    packet = _encoder.encode(fields)
    if len(packet) > PACKET_MAX_BYTES:
        raise ValueError(f"packet of {len(packet)} bytes is longer than {PACKET_MAX_BYTES}")
    return packet


def refusal(hello: Hello, many_nodes: bool = False, is_runs_own: bool = False) -> str:
    """Why a launcher cannot be served, or "" when it can.  `many_nodes`: other nodes reach the
    agent's store.  `is_runs_own`: the agent serves one run, and is no node's."""
    if not 1 <= hello.protocol <= PROTOCOL + 1 or hello.protocol < PROTOCOL - 1:
        return (
            f"this agent speaks protocol {PROTOCOL} and works with its neighbours; the launcher "
            f"speaks {hello.protocol}: install the same release of holdfast for both")
    name_is_clean = 0 < len(hello.run) <= NAME_MAX and hello.run.isprintable()
    if not name_is_clean or "/" in hello.run or hello.run.startswith("."):
        return f"run name {hello.run[:40]!r} must be 1 to {NAME_MAX} characters without '/'"
    if not 0 < hello.nproc <= RANKS_MAX:
        return f"nproc is {hello.nproc}: set 1 to {RANKS_MAX}"
    if not 1 <= hello.nnodes_min <= hello.nnodes <= NNODES_MAX:
        return f"nnodes is {hello.nnodes_min}:{hello.nnodes}: set 1 to {NNODES_MAX}, or MIN:MAX"
    if not 1 <= hello.unit <= hello.nnodes:
        return f"--unit {hello.unit} of {hello.nnodes} nodes: set 1 to {hello.nnodes}"
    if hello.nnodes > 1 and not many_nodes:
        return RUNS_OWN if is_runs_own else NODES_OWN
    return ""
