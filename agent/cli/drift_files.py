"""Compares what `holdfast drift --json` said on several nodes, without an agent.

Owns reading these documents: one in a file, several one after the other, or lines that `srun
--label` and `pdsh` gave a name in front.  What differs is found by agent/core/nodes/identity.py, as
an agent does.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, BinaryIO, NamedTuple

import msgspec

from holdfast.agent.core.nodes import identity
from holdfast.worker.exits import USAGE

from .text import Failure

BYTES_MAX = 32 << 20  # of all files: 4096 nodes say less than 6 kB each
NODES_MAX = 4096
KEYS_MAX = 4096  # nodes of one cluster say the same 30 to 60
PROBLEMS_MAX = 16
QUOTED = 60  # characters of the wrong text that an error shows
STDIN = "-"
ASK = "write it anew with `holdfast drift --json` on that node"
MIXED = ("write it anew; of several nodes at once, let srun put a name before each line (--label), "
         "or write one file a node")
# srun writes "07: ", pdsh "node-a: ".
LABELLED = re.compile(r"([^\s:\"{}\[\]]{1,256}):(?: (.*))?")
Text = Annotated[str, msgspec.Meta(max_length=1024)]


class Change(msgspec.Struct):
    node: Text
    key: Text
    before: Text
    after: Text
    wall_s: Annotated[float, msgspec.Meta(ge=0, le=1e11)]


class Document(msgspec.Struct):
    """The part of a document that is read; its own comparison is made anew."""

    node: Text
    run: Text
    nodes: Annotated[list[Text], msgspec.Meta(min_length=1)]
    identities: dict[Text, dict[Text, dict[Text, Text]]]
    changes: list[Change]


class Found(NamedTuple):
    """A document, and where it stands: words for a person."""

    place: str
    document: Document


class Bad(Exception):
    """What is wrong with a file, and what to do."""


def compared(files: Sequence[str], standard_input: BinaryIO | None = None) -> dict[str, Any]:
    """The answer of /api/v1/drift about all nodes in these files; `-` is standard input.  Raises
    Failure that names every bad file."""
    found: list[Found] = []
    problems: list[str] = []
    left = BYTES_MAX
    for name in dict.fromkeys(files):
        place = "standard input" if name == STDIN else name
        try:
            text = _read(name, standard_input, left)
            left -= len(text)
            found += _documents(place, text)
        except Bad as error:
            problems.append(f"{place}: {error}")
    known = _merged(found, problems)
    nodes = sorted({node for one in found for node in one.document.nodes} | set(known))
    keys = {key for one in known.values() for key in one.values()}
    for what, number, most in (("nodes", len(nodes), NODES_MAX), ("keys", len(keys), KEYS_MAX)):
        if number > most:
            problems.append(f"{number} {what} in all, and {most} are compared at most: give fewer")
    if problems:
        more = len(problems) - PROBLEMS_MAX
        end = [f"and {more} more"] if more > 0 else []
        raise Failure("\n".join([*problems[:PROBLEMS_MAX], *end]), USAGE)
    return identity.answer(_same(found, "node"), _same(found, "run"), nodes, known)


def _same(found: list[Found], name: str) -> str:
    """The value that all of them have, or ""."""
    said = {getattr(one.document, name) for one in found}
    return said.pop() if len(said) == 1 else ""


def _read(name: str, standard_input: BinaryIO | None, most: int) -> bytes:
    try:
        if name == STDIN:
            given = standard_input or (sys.stdin.buffer if sys.stdin is not None else None)
            if given is None:
                raise Bad("closed: nothing can come from there")
            text = given.read(most + 1)
        else:
            with open(name, "rb") as file:
                text = file.read(most + 1)
    except OSError as error:
        raise Bad(f"cannot be read: {error.strerror or error}") from error
    if len(text) > most:
        raise Bad(f"too long: {BYTES_MAX >> 20} MiB are read in all, and a node says a few kB; "
                  "give what `holdfast drift --json` wrote and nothing else")
    return text


def _documents(place: str, raw: bytes) -> Iterator[Found]:
    """Each document of a file.  Raises Bad."""
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise Bad(f"no text (byte {error.start} is not UTF-8): {ASK}") from error
    if not text.strip():
        raise Bad(f"empty: {ASK}, and look at what it says there")
    labelled = _unlabelled(text)
    for label, part in labelled.items():
        where = f"{place}, lines of {label}" if label else place
        try:
            yield from (Found(where, one) for one in _decoded(part))
        except Bad as error:
            raise Bad(f"lines of {label}: {error}" if label else str(error)) from error


def _unlabelled(text: str) -> dict[str, str]:
    """Name in front of the lines -> the text behind it; "" -> the text as it is, when not all its
    lines have a name or none has JSON behind it. srun cuts a task's words every 1024 bytes, within
    a value as well, so lines of one name are put together without a break: between JSON's tokens
    none is needed."""
    parts: dict[str, list[str]] = {}
    for line in text.split("\n"):
        named = LABELLED.fullmatch(line.removesuffix("\r"))
        if named:
            parts.setdefault(named[1], []).append(named[2] or "")
        elif line.strip():
            return {"": text}
    joined = {label: "".join(lines) for label, lines in parts.items()}
    return joined if any(one.lstrip().startswith("{") for one in joined.values()) else {"": text}


def _decoded(text: str) -> Iterator[Document]:
    """The documents that stand one after the other.  Raises Bad."""
    decoder = json.JSONDecoder(parse_constant=_refuse)
    at = _next(text, 0)
    if not text.startswith(("{", "["), at):
        raise Bad(f"no JSON, but {text[at : at + QUOTED]!r}: {ASK}")
    while at < len(text):
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            raise Bad(f"broken or cut JSON ({str(error)[:100]}): {MIXED}") from error
        try:
            yield msgspec.convert(value, Document)
        except msgspec.ValidationError as error:
            raise Bad(f"no document of `holdfast drift --json` ({error}): {ASK}") from error
        at = _next(text, end)


def _next(text: str, at: int) -> int:
    """The first place from `at` on that is not blank."""
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no JSON")


def _merged(found: list[Found], problems: list[str]) -> dict[str, identity.Identity]:
    """The values of each node; two documents may speak of one node when they agree."""
    known: dict[str, identity.Identity] = {}
    places: dict[str, str] = {}
    for place, document in found:
        changes: dict[str, list[identity.Change]] = {}
        for change in document.changes:
            changes.setdefault(change.node, []).append(
                identity.Change(change.key, change.before, change.after, change.wall_s))
        for node, sources in document.identities.items():
            one = identity.Identity(sources, tuple(changes.get(node, ())))
            if node in known and known[node].sources != sources:
                differs = _first(known[node], one)
                problems.append(f"{place}: says of {node} otherwise than {places[node]} "
                                f"({differs}): leave the older one out")
            known.setdefault(node, one)
            places.setdefault(node, place)
    return known


def _first(one: identity.Identity, other: identity.Identity) -> str:
    """The first value in which two differ."""
    mine, yours = one.values(), other.values()
    for key in sorted({*mine, *yours}):
        if mine.get(key) != yours.get(key):
            return f"{key}: {yours.get(key) or 'none'}, there {mine.get(key) or 'none'}"
    return "not all sources are there"
