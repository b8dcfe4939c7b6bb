"""The operator's own signatures of log lines: `[[signature]]` tables of agent.toml and conf.d.

Owns their checking.  A row that would never match, or whose sample it does not find, is refused
when the configuration is loaded, by file, signature and key; then nothing of it is used.  Reads no
file: config.py hands the tables over.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

from holdfast.worker.time_limit import TooSlow, at_most

from ..core.parse.logs.scan import Scanner
from ..core.parse.logs.signatures import CULPRITS, RETRYABLE, ROLES
from . import files

ROWS_MAX = 64  # in all files
TOTAL_BYTES = 24_000  # of all rows: they travel to each launcher in one packet
PATTERN_MAX = 1000
LITERAL_MIN, LITERAL_MAX = 3, 100  # a shorter one would stop the search at every other line
TEXTS_MAX = 8
SAMPLE_MAX = 2000
TEXT_MAX = 500
ROW_S = 2.0  # of the processor, for one pattern over its probes; a good one takes some milliseconds
TRIED_S = 5.0  # of it, for all of a file
PROBE_CHARS = 400
HEADS = 32  # beginnings of a sample
WORDS = re.compile(r"\w+\W?")
NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
KEYS = ("id", "role", "weak", "fatal", "category", "culprit", "retryable", "pattern", "literals",
        "samples", "note", "source")
CHOICES = {"role": ROLES, "culprit": CULPRITS, "retryable": RETRYABLE}


def check(value: object, origin: str, errors: list[str]) -> list[dict[str, Any]]:
    """The good rows of one file; each bad key is a line `file: signature NAME: key: what to do`."""
    if not isinstance(value, list) or not all(isinstance(row, dict) for row in value):
        errors.append(f"{origin}: signature: write [[signature]] in two brackets, once for each")
        return []
    good = []
    left_s = TRIED_S
    for number, row in enumerate(value[:ROWS_MAX], 1):
        name = row.get("id")
        where = f"{origin}: signature {name!r}" if name else f"{origin}: signature {number}"
        problems = list(_problems(row))
        if not problems:
            begin_s = time.process_time()  # as at_most counts
            problems = _tried(row, min(ROW_S, left_s))
            left_s -= time.process_time() - begin_s
        errors += [f"{where}: {key}: {why}" for key, why in problems]
        if not problems:
            good.append(row)
    if len(value) > ROWS_MAX:
        errors.append(f"{origin}: signature: {len(value)} rows: set at most {ROWS_MAX}")
    return good


def check_together(rows: Sequence[tuple[dict[str, Any], str]], errors: list[str]) -> None:
    """What only the rows (row, file) of all files together show: no name twice, and a size that
    travels."""
    seen: dict[str, str] = {}
    for row, origin in rows:
        if row["id"] in seen:
            errors.append(f"{origin}: signature {row['id']!r}: id: is also in {seen[row['id']]}: "
                          "give one of them another")
        seen.setdefault(row["id"], origin)
    size = sum(len(json.dumps(row)) for row, _ in rows)  # as it travels: escaped
    if rows and (len(rows) > ROWS_MAX or size > TOTAL_BYTES):
        errors.append(f"{rows[-1][1]}: signature: {len(rows)} rows with {size} bytes in all "
                      f"files: set at most {ROWS_MAX} and {TOTAL_BYTES}")


def _problems(row: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for key in row:
        if key not in KEYS:
            yield str(key), f"is unknown: set only {', '.join(KEYS)}"
    name = row.get("id")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        yield "id", "set a name of small letters, digits and _, such as our_storage_lost"
    for key, known in CHOICES.items():
        if row.get(key) not in known:
            yield key, f"{row.get(key)!r}: set one of {', '.join(known)}"
    for key in ("weak", "fatal"):
        if not isinstance(row.get(key, False), bool):
            yield key, "set true or false"
    for key, default in (("category", None), ("note", ""), ("source", "")):
        text = row.get(key, default)
        if not isinstance(text, str) or len(text) > TEXT_MAX:
            yield key, f"set a text of at most {TEXT_MAX} characters"
    yield from _pattern(row.get("pattern"))
    yield from _texts("literals", row.get("literals"), LITERAL_MIN, LITERAL_MAX)
    yield from _texts("samples", row.get("samples"), 1, SAMPLE_MAX)


def _tried(row: dict[str, Any], limit_s: float) -> list[tuple[str, str]]:
    """Whether it finds its samples, and in what time it passes lines that are hard to pass."""
    try:
        with at_most(limit_s):
            pattern = re.compile(row["pattern"], re.MULTILINE)
            for probe in _probes(row):
                pattern.search(probe)
            return list(_unfound(row))
    except TooSlow as error:
        if limit_s < ROW_S:
            return [("pattern", "was not tried, as those before it take too long: mend them")]
        return [("pattern", f"{error} on a line of {PROBE_CHARS} characters: give each repetition "
                            "an end of its own, as [^ ]+ has, and repeat no repetition")]


def _probes(row: dict[str, Any]) -> Iterator[str]:
    """Lines that almost match: what the pattern or a sample is made of, over and over, and an end
    that fits nothing.  A pattern with two ways through one of them doubles its time with each."""
    samples = [*row["samples"], *row["literals"]]
    words = {word for text in (*samples, row["pattern"]) for word in WORDS.findall(text)}
    units = sorted({*"aA0 .-_:/=", *"".join((*samples, row["pattern"])), *words, *samples})
    heads = {"", *row["literals"]}
    for sample in row["samples"]:
        heads |= {sample[:end] for end in range(1, len(sample), max(1, len(sample) // HEADS))}
    for unit in units:
        for head in sorted(heads):
            yield (head + unit * (PROBE_CHARS // len(unit)))[:PROBE_CHARS] + "\x00"


def _pattern(value: object) -> Iterator[tuple[str, str]]:
    if not isinstance(value, str) or not 0 < len(value) <= PATTERN_MAX:
        yield "pattern", f"set a regular expression of 1 to {PATTERN_MAX} characters"
        return
    try:
        with at_most(ROW_S):
            re.compile(value, re.MULTILINE)
    except (re.error, OverflowError, RecursionError, TooSlow) as error:
        yield "pattern", f"is no regular expression: {error}: mend it"


def _texts(key: str, value: object, least: int, most: int) -> Iterator[tuple[str, str]]:
    good = isinstance(value, list) and 1 <= len(value) <= TEXTS_MAX and all(
        isinstance(one, str) and least <= len(one) <= most and "\n" not in one for one in value)
    if not good:
        yield key, (f"set a list of 1 to {TEXTS_MAX} texts of {least} to {most} characters, "
                    "each on one line")


def _unfound(row: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Runs each sample through the engine as a log of one line would be."""
    catalogue = files.with_own(files.load_catalogue(), [row])
    for sample in row["samples"]:
        scanner = Scanner(catalogue)
        scanner.feed(sample.encode("utf-8", "replace") + b"\n")
        scanner.close()
        if all(match.signature != row["id"] for match in scanner.matches):
            shown = sample if len(sample) <= 60 else sample[:60] + "…"
            literal = any(one in sample for one in row["literals"])
            why = "pattern does not match it" if literal else "it holds none of the literals"
            yield "samples", f"{shown!r} is not found: {why}: change one of them"
