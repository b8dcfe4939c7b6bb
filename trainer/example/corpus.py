"""Docstring -> code pairs from the standard library of the Python that runs.

Owns the extraction and its cache file.  Must not know of tokens, ranks or training.  The order is
that of module, then position; the split is by a hash of the pair's name, so that it stays when
pairs come and go.  The text is what this machine has: nothing is downloaded.
"""

from __future__ import annotations

import ast
import fcntl
import json
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import xxhash

from ..checkpoint.format import write_file

VERSION = 1  # of the extraction: another one is another cache file
SKIPPED = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__",
           "pydoc_data", "turtledemo", "config"}
SOURCE_BYTES_MAX = 1 << 20
DOCUMENT_CHARACTERS_MAX = 2000
QUERY_CHARACTERS = (12, 400)
HELD_OUT_PER_MILLE = 50

Say = Callable[[str], None]


class Pair(NamedTuple):
    """`name` is module:qualified.name, `query` the docstring's first paragraph."""

    name: str
    query: str
    document: str

    @property
    def held_out(self) -> bool:
        return number_of(self.name) % 1000 < HELD_OUT_PER_MILLE


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """One process at a time builds what lies at `path`; the others wait, then find it there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(path.name + ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class Corpus:
    """All pairs as one file's bytes: `pairs` are parsed only when asked for (50 ms)."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.digest = digest_of(data)

    def pairs(self) -> list[Pair]:
        return [Pair(*json.loads(line)) for line in self._data.splitlines()]


def load(work_dir: Path, say: Say) -> Corpus:
    """The corpus; extracted once, then read from `work_dir`."""
    version = ".".join(map(str, sys.version_info[:3]))
    path = work_dir / f"corpus-{version}-{VERSION}.jsonl"
    with exclusive(path):
        if not path.exists():
            say("extracting docstring -> code pairs from the standard library")
            pairs = extract(Path(sysconfig.get_paths()["stdlib"]), say)
            lines = (json.dumps(pair, ensure_ascii=False) + "\n" for pair in pairs)
            write_file(path, "".join(lines).encode("utf-8", "backslashreplace"))
    return Corpus(path.read_bytes())


def number_of(text: str) -> int:
    return int(xxhash.xxh3_64_intdigest(text.encode("utf-8", "backslashreplace")))


def digest_of(data: bytes) -> str:
    return "xxh3_128:" + str(xxhash.xxh3_128_hexdigest(data))


def extract(root: Path, say: Say) -> list[Pair]:
    """Pairs of every module below `root`, without repetitions.  Unreadable files are skipped."""
    files = sorted(
        Path(folder) / file
        for folder, folders, names in os.walk(root)
        if _prune(folders)
        for file in names
        if file.endswith(".py")
    )
    pairs: list[Pair] = []
    seen: set[int] = set()
    for number, file in enumerate(files, 1):
        for pair in _pairs_of(file, root):
            key = number_of(pair.query + "\0" + pair.document)
            if key not in seen:
                seen.add(key)
                pairs.append(pair)
        if number % 200 == 0 or number == len(files):
            say(f"corpus: {number}/{len(files)} modules, {len(pairs)} pairs")
    return pairs


def _prune(folders: list[str]) -> bool:
    folders[:] = sorted(f for f in folders if f not in SKIPPED and not f.startswith("config-"))
    return True


def _pairs_of(file: Path, root: Path) -> Iterator[Pair]:
    try:
        if file.stat().st_size > SOURCE_BYTES_MAX:
            return
        source = file.read_text(encoding="utf-8")
        tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError, RecursionError):
        return
    module = ".".join(file.relative_to(root).with_suffix("").parts)
    yield from _walk(tree, source.splitlines(), f"{module}:")


def _walk(node: ast.AST, lines: list[str], prefix: str) -> Iterator[Pair]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        query = re.split(r"\n\s*\n", ast.get_docstring(child) or "", maxsplit=1)[0]
        query = " ".join(query.split())[: QUERY_CHARACTERS[1]]
        if len(query) >= QUERY_CHARACTERS[0]:
            document = _code(child, lines)
            if document:
                yield Pair(prefix + child.name, query, document)
        yield from _walk(child, lines, f"{prefix}{child.name}.")


def _code(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, lines: list[str]) -> str:
    """The source of the definition without its docstring, which would give the answer away."""
    docstring = node.body[0]
    assert docstring.end_lineno is not None and node.end_lineno is not None
    head = lines[node.lineno - 1 : docstring.lineno - 1]
    body = lines[docstring.end_lineno : node.end_lineno]
    if not head or not body:
        return ""  # a one-liner, or nothing but a docstring
    return "\n".join(line.rstrip() for line in head + body)[:DOCUMENT_CHARACTERS_MAX]
