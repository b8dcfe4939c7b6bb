"""The checkpoint on disk: names, durable writes, the commit marker, and the proof of every byte.

Owns the layout.  Must not import torch: `holdfast verify` and the launcher read checkpoints
without it.  A directory without COMMIT is not a checkpoint; "newest" is computed from names, never
stored.  Every world size can read every checkpoint: shards are contiguous runs of one sorted list.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Union

import xxhash

FORMAT = 1
MANIFEST, COMMIT, QUARANTINE = "manifest.json", "COMMIT", "quarantine"
FAILED = ".failed"  # an empty file: even a full disk takes its name
ALGORITHMS = ("xxh3_128", "sha256")
WEIGHTS = "model."  # how the names of parameters and buffers begin
ALIGN_BYTES = 64
JSON_BYTES_MAX = 64 << 20  # a shard's table of tensors; more is not ours
READ_BYTES = 4 << 20
TRAILER_BYTES = 8  # the length of a snapshot's table
LISTING_MAX = 10_000
_NAME = re.compile(r"step-(\d{9,18})\.gen-(\d{1,18})\Z")

Buffer = Union[bytes, bytearray, memoryview]
Pace = Callable[[int], None]


class CheckpointError(Exception):
    """A checkpoint that must not be used; the text names the file and what is wrong with it."""


class Unreadable(CheckpointError):
    """A file that this process could not read: nothing is known of its bytes, and another node, or
    a later try, may read them."""


class Missing(Unreadable):
    """A file that is not there, as far as this node sees."""


def words(error: BaseException) -> str:
    """What an exception says, in a person's line: the disk's own words need no name of a class."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def not_read(file: str, error: OSError) -> Unreadable:
    """What to raise for a file whose reading ended with this."""
    if isinstance(error, FileNotFoundError):
        return Missing(f"{file}: missing")
    return Unreadable(f"{file}: cannot be read: {words(error)}")


class Entry(NamedTuple):
    """`nbytes` bytes of one tensor, from its byte `begin` on; `shape` is the whole tensor's, and
    `offset` counts from the start of the file (or buffer) that holds them."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    begin: int = 0

    def as_table(self) -> dict[str, Any]:
        """`begin` is written only where it says something: most files hold whole tensors."""
        fields = self._asdict()
        return fields if self.begin else {k: v for k, v in fields.items() if k != "begin"}


def read_entries(table: dict[str, Any], file: str) -> list[Entry]:
    """The tensors of a shard's table.  Raises CheckpointError."""
    try:
        return [Entry(str(raw["name"]), str(raw["dtype"]), tuple(map(int, raw["shape"])),
                      int(raw["offset"]), int(raw["nbytes"]), int(raw.get("begin", 0)))
                for raw in table["tensors"]]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise CheckpointError(f"{file}: not a table of tensors") from None


class Found(NamedTuple):
    """A committed directory, as its name and marker say; its bytes are proven by `verify`."""

    generation: int
    step: int
    path: str
    world: int
    bad: str = ""


class Problem(NamedTuple):
    """What is wrong, and in which file."""

    file: str
    what: str
    unread: bool = False  # nothing is known of its bytes

    def __str__(self) -> str:
        return f"{self.file}: {self.what}"


# ------------------------------------------------------------------------------------ names


def directory_name(step: int, generation: int) -> str:
    return f"step-{step:09d}.gen-{generation}"


def shard_name(rank: int, world: int) -> str:
    return f"shard-{rank:05d}-of-{world:05d}"


def align(nbytes: int) -> int:
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def shard_ranges(entries: Sequence[Entry], world: int) -> list[tuple[int, int]]:
    """Cuts the list into `world` contiguous runs of about equal bytes: [(first, end)), ...].

    A run may be empty when there are fewer tensors than ranks.
    """
    total = sum(align(entry.nbytes) for entry in entries)
    ranges, first, seen = [], 0, 0
    for rank in range(world):
        end, goal = first, total * (rank + 1) / world
        while end < len(entries) and (rank == world - 1 or seen < goal):
            size = align(entries[end].nbytes)
            if seen + size / 2 > goal and rank < world - 1:
                break  # nearer to the goal without it
            seen, end = seen + size, end + 1
        ranges.append((first, end))
        first = end
    return ranges


# ------------------------------------------------------------------------------------ digests


def digest(data: Buffer, algorithm: str = "xxh3_128") -> str:
    """`algorithm:hex` of the bytes.  xxh3_128 takes 2.4 ms for 63 MB, sha256 35 ms."""
    if algorithm == "xxh3_128":
        return "xxh3_128:" + xxhash.xxh3_128_hexdigest(data)
    if algorithm == "sha256":
        return "sha256:" + hashlib.sha256(data).hexdigest()
    raise CheckpointError(f"digest {algorithm!r} is not known: one of {', '.join(ALGORITHMS)}")


def weights_digest(tensors: Iterable[tuple[str, Buffer]]) -> str:
    """Of the model's tensors among these, in the order of their names: the same weights give the
    same digest whatever the world, and whatever the optimizer holds."""
    hasher = xxhash.xxh3_128()
    for name, data in tensors:
        if name.startswith(WEIGHTS):
            hasher.update(f"{name} {memoryview(data).nbytes}\n".encode())
            hasher.update(data)
    return f"xxh3_128:{hasher.hexdigest()}"


def open_regular(path: Path) -> BinaryIO:
    """For reading, at once: a FIFO or a device in a file's place is an error, never a wait."""
    if not stat.S_ISREG(os.stat(path).st_mode):  # some devices act when they are opened
        raise OSError(errno.EINVAL, "no regular file", str(path))
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "no regular file", str(path))
    return open(descriptor, "rb")


def digest_file(path: Path, algorithm: str, pace: Pace | None = None) -> str:
    if algorithm not in ALGORITHMS:
        raise CheckpointError(f"{path}: digest {algorithm!r} is not known")
    hasher: Any = xxhash.xxh3_128() if algorithm == "xxh3_128" else hashlib.sha256()
    with open_regular(path) as file:
        while chunk := file.read(READ_BYTES):
            hasher.update(chunk)
            if pace is not None:
                pace(len(chunk))
    return f"{algorithm}:{hasher.hexdigest()}"


# ------------------------------------------------------------------------------------ writing


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_temporary(path: Path, data: Buffer) -> Path:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb", buffering=0) as file:
            view = memoryview(data).cast("B")
            while view:  # a raw write may take less than it was given
                view = view[file.write(view) :]
            os.fsync(file.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def write_file(path: Path, data: Buffer) -> None:
    """Writes durably: a reader sees the old file or the whole new one.  Raises OSError."""
    temporary = _write_temporary(path, data)
    os.replace(temporary, path)
    sync_directory(path.parent)


def write_exclusive(path: Path, data: Buffer) -> None:
    """As write_file, but FileExistsError if the name is taken: the marker is given once."""
    temporary = _write_temporary(path, data)
    try:
        os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


def to_json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def write_shard(
    directory: Path,
    rank: int,
    world: int,
    entries: Iterable[Entry],
    data: Buffer,
    algorithm: str = "xxh3_128",
) -> None:
    """One rank's tensors, then the table that describes them: the table means "shard is whole"."""
    name = shard_name(rank, world)
    directory.mkdir(parents=True, exist_ok=True)
    take_back_shards(directory, (rank,), world)
    write_file(directory / f"{name}.bin", data)
    table = {
        "tensors": [entry.as_table() for entry in entries],
        "digest": digest(data, algorithm),
        "nbytes": memoryview(data).nbytes,
    }
    write_file(directory / f"{name}.json", to_json(table))


def to_trailer(entries: Iterable[Entry]) -> bytes:
    """The table at the end of a snapshot, so that its bytes describe themselves."""
    table = to_json({"tensors": [entry.as_table() for entry in entries]})
    return table + len(table).to_bytes(TRAILER_BYTES, "little")


def read_trailer(data: memoryview) -> tuple[list[Entry], memoryview]:
    """A snapshot's table and its tensors' bytes.  Raises CheckpointError."""
    end = data.nbytes - TRAILER_BYTES
    first = end - int.from_bytes(data[max(0, end) :], "little")
    if not 0 <= first <= end:
        raise CheckpointError("snapshot: no table at its end")
    try:
        table = json.loads(bytes(data[first:end]))
    except (ValueError, RecursionError):
        raise CheckpointError("snapshot: no table at its end") from None
    return read_entries(table, "snapshot"), data[:first]


def give_up_shard(directory: Path, rank: int, world: int) -> None:
    """Says to whoever waits for this shard that it will not come.  Raises OSError."""
    (directory / (shard_name(rank, world) + FAILED)).touch()


def take_back_shards(directory: Path, ranks: Iterable[int], world: int) -> None:
    """Forgets that these would not come."""
    for rank in ranks:
        (directory / (shard_name(rank, world) + FAILED)).unlink(missing_ok=True)


def given_up(directory: Path, world: int) -> list[int]:
    """Ranks whose writers have failed."""
    names = ((rank, shard_name(rank, world) + FAILED) for rank in range(world))
    return [rank for rank, name in names if (directory / name).exists()]


def missing_ranks(directory: Path, world: int) -> list[int]:
    return [rank for rank in range(world)
            if not (directory / (shard_name(rank, world) + ".json")).exists()]


def missing_shards(directory: Path, world: int) -> list[str]:
    return [shard_name(rank, world) + ".json" for rank in missing_ranks(directory, world)]


def commit(directory: Path, manifest: dict[str, Any], algorithm: str = "xxh3_128") -> None:
    """Writes manifest.json and then COMMIT.  Raises FileExistsError when committed before."""
    if (directory / COMMIT).exists():
        raise FileExistsError(f"{directory / COMMIT} is there: what is committed stays as it is")
    world, shards = int(manifest["world"]), []
    for rank in range(world):
        table_path = directory / f"{shard_name(rank, world)}.json"
        table_bytes = table_path.read_bytes()
        table = json.loads(table_bytes)
        shards.append(
            {"file": f"{shard_name(rank, world)}.bin", "nbytes": table["nbytes"],
             "digest": table["digest"]}
        )
        shards.append(
            {"file": table_path.name, "nbytes": len(table_bytes),
             "digest": digest(table_bytes, algorithm)}
        )
    body = to_json({**manifest, "format": FORMAT, "shards": shards, "created_wall_s": time.time()})
    write_file(directory / MANIFEST, body)
    sync_directory(directory.parent)
    marker = {
        "generation": manifest["generation"],
        "step": manifest["step"],
        "manifest_digest": digest(body, algorithm),
    }
    write_exclusive(directory / COMMIT, to_json(marker))


# ------------------------------------------------------------------------------------ reading


def _load_json(path: Path) -> dict[str, Any]:
    try:
        with open_regular(path) as file:
            text = file.read(JSON_BYTES_MAX + 1)
        if len(text) > JSON_BYTES_MAX:
            raise CheckpointError(f"{path.name}: larger than {JSON_BYTES_MAX} bytes")
        value = json.loads(text)
    except OSError as error:
        raise not_read(path.name, error) from None
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path.name}: not JSON (torn write?)") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path.name}: not a JSON object")
    return value


def parse_name(name: str) -> tuple[int, int] | None:
    """(step, generation) of a directory's name, None for any other name."""
    match = _NAME.match(name)
    return (int(match[1]), int(match[2])) if match else None


def listing(root: str | os.PathLike[str]) -> list[Found]:
    """Every committed directory, newest (generation, step) first; [] when there is none.

    A later generation that resumed further back has made the higher steps of an earlier one void,
    so the generation comes first, as in the agent's rule of which commits count.  Cheap: reads
    names and markers, proves nothing.  A marker that does not fit gives `bad`.
    """
    found = []
    try:
        names = os.listdir(root)
    except OSError:
        return []
    parsed = [(one, name) for name in names if (one := parse_name(name)) is not None]
    parsed.sort(key=lambda item: (item[0][1], item[0][0]), reverse=True)
    for (step, generation), name in parsed[:LISTING_MAX]:
        path = Path(root) / name
        try:
            if not (path / COMMIT).exists():
                continue
            worlds = [int(f.name[-10:-5]) for f in path.glob("shard-*-of-?????.json")]
        except OSError:
            continue  # it cannot be seen from here
        bad = ""
        try:
            marker = _load_json(path / COMMIT)
            if (marker.get("step"), marker.get("generation")) != (step, generation):
                bad = f"{COMMIT}: names another step or generation than the directory"
        except Unreadable:
            pass  # what nobody could read is not known to be bad
        except CheckpointError as error:
            bad = str(error)
        found.append(Found(generation, step, str(path), max(worlds, default=0), bad))
    return found


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest, proven by COMMIT's digest of it.  Raises CheckpointError."""
    marker = _load_json(directory / COMMIT)
    manifest = _load_json(directory / MANIFEST)
    expected = str(marker.get("manifest_digest", ""))
    try:
        actual = digest_file(directory / MANIFEST, expected.split(":")[0])
    except OSError as error:
        raise not_read(MANIFEST, error) from None
    if actual != expected:
        raise CheckpointError(f"{MANIFEST}: its digest is not the one in {COMMIT}")
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{MANIFEST}: format {manifest.get('format')!r}, not {FORMAT}")
    for key, kind in (("step", int), ("generation", int), ("world", int), ("shards", list)):
        if not isinstance(manifest.get(key), kind):
            raise CheckpointError(f"{MANIFEST}: key {key!r} is missing or not {kind.__name__}")
    if (marker.get("step"), marker.get("generation")) != (
        manifest["step"],
        manifest["generation"],
    ):
        raise CheckpointError(f"{COMMIT}: names another step or generation than {MANIFEST}")
    return manifest


def check_file(
    directory: Path, listed: dict[str, Any], content: Buffer | None = None,
    pace: Pace | None = None,
) -> None:
    """Proves one file of the manifest (or the bytes read from it).  Raises CheckpointError."""
    name, nbytes, expected = (str(listed.get("file", "")), listed.get("nbytes"),
                              str(listed.get("digest", "")))
    if not name or os.path.basename(name) != name:
        raise CheckpointError(f"{MANIFEST}: lists a file {name!r} outside the directory")
    algorithm = expected.split(":")[0]
    try:
        if content is None:
            size = (directory / name).stat().st_size
        else:
            size = memoryview(content).nbytes
        if size != nbytes:
            kind = "truncated" if size < int(nbytes or 0) else "too long"
            raise CheckpointError(f"{name}: {kind}: {size} bytes, not {nbytes}")
        if content is None:
            actual = digest_file(directory / name, algorithm, pace)
        else:
            actual = digest(content, algorithm)
    except OSError as error:
        raise not_read(name, error) from None
    if actual != expected:
        raise CheckpointError(f"{name}: bytes differ from what was written ({algorithm})")


def verify(directory: str | os.PathLike[str], pace: Pace | None = None) -> list[Problem]:
    """Every reason why this checkpoint must not be used; [] = every byte is proven.  `pace` is
    called with the bytes of each piece that was read, and may take its time."""
    root = Path(directory)
    problems = []
    try:
        if not root.is_dir():
            return [Problem(str(root), "no such directory", unread=True)]
        manifest = read_manifest(root)
    except OSError as error:
        return [Problem(str(root), f"cannot be read: {words(error)}", unread=True)]
    except CheckpointError as error:
        return [problem_of(error)]
    # Both names count: by the first it is chosen, and a copy may have been given another.
    for name in dict.fromkeys((os.path.basename(os.path.abspath(root)), root.resolve().name)):
        named = parse_name(name)
        if named is not None and named != (manifest["step"], manifest["generation"]):
            problems.append(Problem(MANIFEST, "is of step %d, generation %d, and not of %s" % (
                manifest["step"], manifest["generation"], name)))
    wanted = {shard_name(r, manifest["world"]) + end for r in range(manifest["world"])
              for end in (".bin", ".json")}
    listed = {str(item.get("file")) for item in manifest["shards"] if isinstance(item, dict)}
    problems += [Problem(MANIFEST, f"does not list {name}") for name in sorted(wanted - listed)]
    for item in manifest["shards"]:
        try:
            check_file(root, item, pace=pace)
        except CheckpointError as error:
            problems.append(problem_of(error))
    return problems


def problem_of(error: CheckpointError) -> Problem:
    """Where the marker was read, a file that is not beside it is a fault of the checkpoint, as far
    as one node can tell; one without a marker may be on a disk that is not here."""
    file, _, what = str(error).partition(": ")
    lacks = isinstance(error, Missing) and file != COMMIT
    return Problem(file, what, isinstance(error, Unreadable) and not lacks)


def lacking(directory: Path) -> str:
    """A file that the manifest lists and that is not beside it, in words; "" where none is known
    to be gone."""
    try:
        for name in (str(item["file"]) for item in read_manifest(directory)["shards"]):
            try:
                os.stat(directory / name)
            except FileNotFoundError:
                return f"{name}: missing"
    except (OSError, CheckpointError):
        pass
    return ""


def may_be_committed(directory: Path) -> bool:
    """False where there is no marker; a disk that does not say keeps what is there."""
    try:
        os.stat(directory / COMMIT)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


# ------------------------------------------------------------------------------------ housekeeping


def quarantine(path: Path, reason: str) -> Path:
    """Renames a bad checkpoint out of the way (nothing is deleted) and returns its new place."""
    word = re.sub(r"[^a-z0-9]+", "-", reason.lower()).strip("-")[:60] or "bad"
    target = path.parent / QUARANTINE / f"{path.name}.{word}"
    target.parent.mkdir(exist_ok=True)
    number = 1
    while target.exists() and number < 1000:  # the same step may go bad again after a rerun
        number += 1
        target = target.with_name(f"{path.name}.{word}.{number}")
    os.rename(path, target)
    sync_directory(path.parent)
    return target


def put_aside(root: Path) -> list[str]:
    """Paths of the checkpoints of this folder that were quarantined; [] where none was.  Of a
    quarantine that cannot be read its own path: what lies in it is not known to be nothing."""
    try:
        names = os.listdir(root / QUARANTINE)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError:
        return [str(root / QUARANTINE)]
    return sorted(str(root / QUARANTINE / name) for name in names if name.startswith("step-"))


def newest_valid(root: Path) -> tuple[Found | None, list[tuple[Found, Problem]]]:
    """The newest checkpoint whose every byte is proven, and what is wrong with those passed over:
    that they are bad, where it is known."""
    passed: list[tuple[Found, Problem]] = []
    for found in listing(root):
        problems = verify(found.path)
        if not problems:
            return found, passed
        passed.append((found, worst(problems)))
    return None, passed


def worst(problems: list[Problem]) -> Problem:
    """The first that makes a checkpoint bad; the first of all where nothing is known of its bytes.
    """
    return next((one for one in problems if not one.unread), problems[0])


def surplus(root: Path, keep: int) -> list[Found]:
    """Checkpoints beyond the newest `keep` valid ones, oldest last.  Bad ones do not count."""
    valid = 0
    for index, found in enumerate(listings := listing(root)):
        if valid >= keep:
            return listings[index:]
        valid += not found.bad and not verify(found.path)
    return []


def delete(path: Path) -> None:
    """Removes a checkpoint, marker first: half a deletion is never taken for a checkpoint."""
    (path / COMMIT).unlink(missing_ok=True)
    sync_directory(path)
    for file in sorted(path.iterdir()):
        file.unlink(missing_ok=True)
    path.rmdir()
