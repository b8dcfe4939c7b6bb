"""Training logs on disk: the shipped signatures, and files of any kind.

Owns reading: plain or packed, standard input, the last bytes of a file that still grows, in pieces
and with a limit.  Lines are judged by agent/core/parse/logs/scan.py.
"""

from __future__ import annotations

import io
import os
import re
import time
import tomllib
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from gzip import BadGzipFile, GzipFile
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ..catalog.load import neuron_codes
from ..core.parse.logs import root as logroot
from ..core.parse.logs import unlisted
from ..core.parse.logs.families import HARMLESS, Families, Family
from ..core.parse.logs.lines import NO_RANK
from ..core.parse.logs.scan import Scanner
from ..core.parse.logs.signatures import (
    CULPRITS,
    PYTHON,
    RETRYABLE,
    ROLES,
    ROOT,
    SIGNAL,
    UNPLACED,
    Catalogue,
    Match,
    Signature,
)
from ..core.parse.logs.subjects import FAINT, SURE, Subjects
from ..system.regular import NotRegular, open_regular

SHIPPED = Path(__file__).parent.parent / "catalog/log_signatures.toml"
FAMILIES = SHIPPED.with_name("log_families.toml")
SUBJECTS = SHIPPED.with_name("log_subjects.toml")
LISTS = ("words", "names", "classes", "frames", "raises")  # of a family's keys
PIECE_BYTES = 1 << 20
FILE_MAX_BYTES = 64 << 30  # of an unpacked file; the rest is left unread, and the report says so
TAIL_BYTES = 1 << 20  # of each file of a run that goes on
TAILS_S = 6.0  # for the ends of all files; a line can be crafted to be slow
FURTHER_BYTES = 2 << 20  # of all files that are searched for what no signature knows
FURTHER_LEAST_BYTES = 64 << 10  # of one of them
FURTHER_CHARS = 400_000  # of the lines among these that are read one by one
FURTHER_LEAST_CHARS = 32_000
FILES_MAX = 8192
CATALOGUE_MAX_BYTES = 1 << 20
HOLE = bytes(64)  # what was dropped of a file reads as zeros
UNKNOWN = (b"Traceback (most recent call last):\n  File \"train.py\", line 1, in <module>\n"
           b"RuntimeError: failed to open the device: no such file or directory\n")
GZIP = b"\x1f\x8b"
TEXT_BYTES = 64 << 10
CONTROLS = bytes(set(range(1, 32)) - set(b"\b\t\n\f\r\x1b"))
# Where a path names a rank: rank3.log, rank_3/..., 3/stderr.log, 3.out, g2-rank3.a1/stdout.log, but
# not lora_rank16/train.log: there a rank is something else.
_RANK = re.compile(
    r"(?:^|/)rank[-_.]?(?P<folder>\d{1,6})/|rank[-_.]?(?P<rank>\d{1,6})(?!\d)"
    r"(?=[^/]*$|[^/]*/std(?:out|err)\b[^/]*$)"
    r"|(?:^|/)(?P<dir>\d{1,6})/std(?:out|err)\b|(?:^|/)(?P<stem>\d{1,6})\.(?:log|out|err|txt)\b"
)


class Report(NamedTuple):
    """The result of reading logs."""

    diagnosis: logroot.Diagnosis
    names: tuple[str, ...]
    nbytes: int
    handled: tuple[tuple[str, int], ...]  # signature, times: the process went on
    skipped: int  # lines over the limits
    problems: tuple[str, ...]  # files that could not be read to their end
    note: str = ""  # the note of the root's signature
    unread: int = 0  # files of which nothing could be read


def load_catalogue(path: Path = SHIPPED) -> Catalogue:
    """Raises ValueError that names file, signature and key, and OSError."""
    with path.open("rb") as file:
        text = file.read(CATALOGUE_MAX_BYTES).decode()
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: {error}") from error
    kinds = tables.get("exceptions", {})
    roles = {name: role for role in ROLES for name in kinds.get(role, ())}
    return Catalogue(
        signatures=tuple(_signature(path, row) for row in tables.get("signature", ())),
        gates=tuple(gate.encode() for gate in tables["gates"]),
        signal_gates=tuple(gate.encode() for gate in tables["signal_gates"]),
        exceptions=roles, cascade_text=tuple(kinds.get("cascade_text", ())),
        exit_codes=dict(tables.get("exit_codes", {})), nrt=neuron_codes(),
    )


def _signature(path: Path, row: dict[str, Any]) -> Signature:
    where = f"{path}: signature {row.get('id', '?')!r}"
    allowed = {"role": ROLES, "culprit": CULPRITS, "retryable": RETRYABLE}
    for key, values in allowed.items():
        if row.get(key) not in values:
            raise ValueError(f"{where}: {key} must be one of {', '.join(values)}")
    try:
        return Signature(
            id=row["id"], role=row["role"], weak=bool(row.get("weak")), category=row["category"],
            culprit=row["culprit"], retryable=row["retryable"], note=row.get("note", ""),
            pattern=re.compile(row["pattern"], re.MULTILINE), literals=tuple(row["literals"]),
            below=re.compile(row["below"]) if "below" in row else None,
            fatal=bool(row.get("fatal")),
        )
    except KeyError as error:
        raise ValueError(f"{where}: set {error.args[0]}") from error
    except re.error as error:
        raise ValueError(f"{where}: pattern: {error}") from error


@lru_cache(maxsize=2)
def load_families(path: Path = FAMILIES) -> Families:
    """Read when a log is diagnosed, not when the live sample starts.  Raises as load_catalogue."""
    with path.open("rb") as file:
        tables = tomllib.loads(file.read(CATALOGUE_MAX_BYTES).decode())
    return Families(
        tuple(_family(path, row) for row in tables["family"]),
        tuple(gate.encode() for gate in tables["gates"]),
        tables.get("finished", ""),
        load_subjects(),
    )


def load_subjects(path: Path = SUBJECTS) -> Subjects:
    """Raises ValueError for a culprit that there is not, or a word that stands twice in one."""
    with path.open("rb") as file:
        tables = tomllib.loads(file.read(CATALOGUE_MAX_BYTES).decode())
    points: dict[str, dict[str, int]] = {}
    for culprit, lists in tables.items():
        if culprit not in CULPRITS or lists.keys() != {"sure", "faint"}:
            raise ValueError(f"{path}: [{culprit}] is no culprit with `sure` and `faint`")
        for worth, words in ((SURE, lists["sure"]), (FAINT, lists["faint"])):
            for word in (" ".join(one.split()) for one in words.split(",")):
                if culprit in points.setdefault(word, {}):
                    raise ValueError(f"{path}: [{culprit}] has {word!r} twice")
                points[word][culprit] = worth
    return Subjects(points)


def _family(path: Path, row: dict[str, Any]) -> Family:
    where = f"{path}: family {row.get('id', '?')!r}"
    rest = {name: value for name, value in row.items() if name != "samples"}
    rest |= {name: tuple(rest[name]) for name in LISTS if name in rest}
    defaults = {"role": ROOT, "category": row.get("id", ""), "culprit": "unknown",
                "retryable": "depends", "words": ()}
    try:
        one = Family(**defaults | rest)
    except TypeError as error:
        raise ValueError(f"{where}: {error}") from error
    allowed = {"role": (*ROLES, HARMLESS, UNPLACED), "culprit": CULPRITS, "retryable": RETRYABLE}
    for key, values in allowed.items():
        if getattr(one, key) not in values:
            raise ValueError(f"{where}: {key} must be one of {', '.join(values)}")
    return one


def with_own(catalogue: Catalogue, rows: Sequence[dict[str, Any]]) -> Catalogue:
    """The catalogue with an operator's rows in front, which win over shipped ones of the same name.
    Raises ValueError for a row that agent/logs/operator_signatures.py would have refused."""
    own = tuple(_signature(Path("signature"), row) for row in rows)
    names = {one.id for one in own}
    shipped = tuple(one for one in catalogue.signatures if one.id not in names)
    gates, signal_gates = list(catalogue.gates), list(catalogue.signal_gates)
    for one in own:
        gathered = signal_gates if one.role == SIGNAL else gates
        for literal in (text.encode() for text in one.literals):
            if not any(gate in literal for gate in (*gates, *gathered)):
                gathered.append(literal)
    return catalogue._replace(
        signatures=own + shipped, gates=tuple(gates), signal_gates=tuple(signal_gates)
    )


def rank_of(path: str) -> int:
    found = list(_RANK.finditer(path.replace(os.sep, "/")))
    if not found:
        return NO_RANK
    match = found[-1]
    return int(next(group for group in match.groups() if group))


def diagnose(
    paths: Sequence[str], standard_input: BinaryIO | None = None,
    own: Sequence[dict[str, Any]] = (),
) -> Report:
    """The report on whole files; `-` is standard input, `own` an operator's signatures.  A file
    that cannot be read is a problem of the report: one bad file of 512 must not hide the others."""
    catalogue = with_own(load_catalogue(), own)
    scanners, problems, total, unread = [], [], 0, 0
    if len(paths) > FILES_MAX:
        problems.append(f"{len(paths) - FILES_MAX} of {len(paths)} files were not read")
    for index, path in enumerate(paths[:FILES_MAX]):
        scanner = Scanner(catalogue, index, rank_of(path), families=load_families())
        nbytes, problem = _read(path, standard_input, scanner)
        total += nbytes
        unread += nbytes == 0 and problem != ""
        problems += [f"{path}: {problem}"] if problem else []
        scanners.append(scanner)
    return _report(catalogue, scanners, paths, total, problems)._replace(unread=unread)


class Span(NamedTuple):
    """The part of a rank's file that one generation wrote."""

    path: str
    rank: int
    begin: int = 0
    end: int = -1  # -1: as far as it goes now


def diagnose_tails(
    spans: Sequence[Span], catalogue: Catalogue, tail_bytes: int = TAIL_BYTES,
    limit_s: float = TAILS_S,
) -> Report:
    """The report on the end of each span.  A file that cannot be read is named and left out, and so
    are the last ones when the time is over.  Where lines have no times, the order of the spans is
    the order of events.  What no signature knows is looked for only where no file has a root
    that is sure: that search costs ten times as much."""
    scanners: list[Scanner] = []
    parts: list[Span] = []
    problems: list[str] = []
    total, end_s = 0, time.monotonic() + limit_s
    for index, span in enumerate(spans[:FILES_MAX]):
        if index and time.monotonic() > end_s:
            left = len(spans) - index
            problems.insert(0, f"{left} of {len(spans)} files were not read within {limit_s:g} s")
            break
        scanner = Scanner(catalogue, index, span.rank, signals=False, families=load_families(),
                          later=True)
        try:
            begin, data = read_tail(span, tail_bytes)
        except (OSError, NotRegular) as error:
            problems.append(f"{span.path}: {getattr(error, 'strerror', '') or error}")
            begin, data = span.begin, b""
        scanner.feed(data)
        scanner.close()
        total += len(data)
        scanners.append(scanner)
        parts.append(span._replace(begin=begin, end=begin + len(data)))
    if not any(one.sure() for one in scanners):
        _look_further(scanners, parts, end_s)
    for scanner, part in zip(scanners, parts, strict=True):
        scanner.matches = [placed(one, part, part.begin) for one in scanner.matches]
    return _report(catalogue, scanners, [span.path for span in spans], total, problems)


def get_ready(catalogue: Catalogue) -> None:
    """Loads and compiles what the first diagnosis needs: it comes while ranks come back, which need
    the processor."""
    scanner = Scanner(catalogue, 0, NO_RANK, signals=False, families=load_families(), later=True)
    scanner.feed(UNKNOWN)
    scanner.close()
    scanner.look_further(UNKNOWN)


def _look_further(scanners: Sequence[Scanner], parts: Sequence[Span], end_s: float) -> None:
    """The newest logs first, the same share of each, until bytes or time are used up."""
    filled = [number for number, part in enumerate(parts) if part.end > part.begin]
    share = max(FURTHER_LEAST_BYTES, FURTHER_BYTES // max(1, len(filled)))
    share = min(share, unlisted.TAIL_BYTES)
    chars = max(FURTHER_LEAST_CHARS, FURTHER_CHARS // max(1, len(filled)))
    chars = min(chars, unlisted.BUDGET_CHARS)
    left = FURTHER_BYTES
    for number in sorted(filled, key=lambda one: _written_s(parts[one].path), reverse=True):
        if left <= 0 or time.monotonic() > end_s:
            return
        part = parts[number]
        try:
            begin, data = read_tail(part, share)
        except (OSError, NotRegular):
            continue  # it could be read before, and what was found then stays
        if begin + len(data) == part.end:
            scanners[number].look_further(data, chars)
            left -= len(data)


def _written_s(path: str) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0


def placed(match: Match, span: Span, begin: int) -> Match:
    """A match in a rank's own file is that rank's: a line may number ranks within a group."""
    rank = span.rank if span.rank != NO_RANK else match.rank
    return match._replace(offset=match.offset + begin, rank=rank)


def read_tail(span: Span, nbytes: int) -> tuple[int, bytes]:
    """(where it begins, the last bytes of a span).  A file that was cut has nothing of it."""
    with open(open_regular(span.path), "rb", buffering=0) as file:
        size = file.seek(0, io.SEEK_END)
        end = size if span.end < 0 else min(size, span.end)
        begin = max(0, span.begin, end - nbytes)
        file.seek(begin)
        data = file.read(max(0, end - begin)) or b""
    behind = data.rfind(HOLE) + len(HOLE) if HOLE in data else 0  # only what is of one piece
    return begin + behind, data[behind:]


def _report(
    catalogue: Catalogue, scanners: Iterable[Scanner], paths: Sequence[str], total: int,
    problems: list[str],
) -> Report:
    scanners = list(scanners)
    matches = [match for scanner in scanners for match in scanner.matches]
    handled: dict[str, int] = {}
    for scanner in scanners:
        for name, times in scanner.handled.items():
            handled[name] = handled.get(name, 0) + times
    found = logroot.diagnose(matches, catalogue.exit_codes)
    if not total:
        found = found._replace(hint="nothing was read: the logs are empty")
    root = found.root
    notes = {one.id: one.note for one in (*catalogue.signatures, PYTHON)}
    note = dict(root.fields).get("nrt_said") or notes.get(root.signature, "") if root else ""
    return Report(
        found, tuple(paths), total, tuple(sorted(handled.items())),
        sum(one.skipped for one in scanners), tuple(problems), note,
    )


@contextmanager
def _opened(path: str, standard_input: BinaryIO | None) -> Iterator[BufferedReader | GzipFile]:
    """The file, unpacked where its first bytes are those of a packed one, whatever its name."""
    if path == "-":  # a copy, since the process's own must stay open
        source = os.dup(standard_input.fileno() if standard_input else 0)
    else:
        source = open_regular(path)
    with open(source, "rb") as file:
        if file.peek(2)[:2] == GZIP:
            with GzipFile(fileobj=file) as unpacked:
                yield unpacked
        else:
            yield file


def _read(path: str, standard_input: BinaryIO | None, scanner: Scanner) -> tuple[int, str]:
    """(bytes read, why reading ended early or ""); of a truncated file, as much as there is."""
    total, problem, waiting, text = 0, "", bytearray(), True
    try:
        with _opened(path, standard_input) as file:
            while piece := file.read1(PIECE_BYTES):
                text = text if total else _is_text(piece)
                if HOLE in piece:  # the launcher dropped the middle of a log (--log-limit)
                    piece = piece.replace(b"\0", b"")
                total += len(piece)
                waiting += piece
                if len(waiting) >= PIECE_BYTES:
                    scanner.feed(bytes(waiting))
                    waiting.clear()
                if total >= FILE_MAX_BYTES:
                    problem = f"only the first {FILE_MAX_BYTES >> 30} GB were read"
                    break
    except (EOFError, zlib.error, BadGzipFile) as error:
        problem = f"not whole: {error}"
    except OSError as error:
        problem = error.strerror or str(error)
    except NotRegular:
        problem = "is no regular file: give `-` and pipe it to standard input"
    scanner.feed(bytes(waiting))
    scanner.close()
    if not text and not scanner.matches:  # junk at the begin of a log hides nothing
        return 0, "is no text: unpack it, or leave it out"
    return total, problem


def _is_text(piece: bytes) -> bool:
    """Whether bytes are text: any alphabet, colours and the holes of a truncated file are."""
    head = piece[:TEXT_BYTES]
    return len(head) - len(head.translate(None, CONTROLS)) <= len(head) // 20
