"""The store's documents as a mapping by key, each decoded once for as long as it stands.

Owns the index by kind and the memory of decoded bodies: 2,048 nodes that are looked up one by one
in a list are some 10^7 comparisons a step.  Immutable; a change of some documents shares the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import msgspec

from .time import Value

Body = TypeVar("Body")
# What the decoding of words from outside may raise: bytes that are no UTF-8 are no DecodeError, and
# one document with them, by a terminal of another encoding, would stop every agent that reads it.
UNREADABLE = (msgspec.DecodeError, UnicodeError, RecursionError)


class Doc(Value, frozen=True):
    """A document of the store with its version (0 = absent)."""

    key: str
    version: int
    body: bytes = b""


class Documents:
    """Looked up by key; iterated over as documents, in the order in which they came."""

    __slots__ = ("_absent", "_by_key", "_by_kind", "_decoded", "_kinds")

    def __init__(self, docs: Iterable[Doc] = ()) -> None:
        self._by_key: dict[str, Doc] = {doc.key: doc for doc in docs}
        self._by_kind: dict[str, dict[str, Doc]] | None = None  # kind -> name -> document
        self._kinds: dict[str, tuple[tuple[str, Doc], ...]] = {}  # those asked for
        self._decoded: dict[Any, dict[str, tuple[Doc, Any]]] = {}  # read -> key -> of which, what
        self._absent: dict[tuple[Any, str], Any] = {}  # what is made of no document

    def get(self, key: str) -> Doc:
        """The document, or one of version 0 where the store has none."""
        return self._by_key.get(key) or Doc(key=key, version=0)

    def of(self, kind: str) -> tuple[tuple[str, Doc], ...]:
        """(name, document) of every key `kind/name`."""
        if kind not in self._kinds:
            if self._by_kind is None:
                self._by_kind = {}
                for key, doc in self._by_key.items():
                    head, _, name = key.partition("/")
                    self._by_kind.setdefault(head, {})[name] = doc
            self._kinds[kind] = tuple(self._by_kind.get(kind, {}).items())
        return self._kinds[kind]

    def decoded(self, key: str, read: Callable[[Doc], Body]) -> Body:
        """What `read` makes of the document, or of its absence; asked once for each version."""
        doc = self._by_key.get(key)
        if doc is None:
            if (read, key) not in self._absent:
                self._absent[read, key] = read(Doc(key=key, version=0))
            absent: Body = self._absent[read, key]
            return absent
        if read not in self._decoded:
            self._decoded[read] = {}
        rows = self._decoded[read]
        known = rows.get(key)
        if known is None or known[0] is not doc:
            known = rows[key] = doc, read(doc)
        body: Body = known[1]
        return body

    def changed(self, docs: Mapping[str, Doc | None]) -> Documents:
        """With these instead; None removes one.  What stays decoded stays so."""
        made = Documents()
        # Copies and not loops: of thousands of nodes that come at once each is such a change.
        made._by_key = self._by_key.copy()
        made._decoded = {read: rows.copy() for read, rows in self._decoded.items()}
        heads = {key.partition("/")[0] for key in docs}
        if self._by_kind is not None:
            made._kinds = {head: rows for head, rows in self._kinds.items() if head not in heads}
            made._by_kind = self._by_kind | {
                head: self._by_kind.get(head, {}).copy() for head in heads}
        for key, doc in docs.items():
            for rows in made._decoded.values():
                rows.pop(key, None)
            _put(made._by_key, key, doc)
            if made._by_kind is not None:
                head, _, name = key.partition("/")
                _put(made._by_kind[head], name, doc)
        return made

    def __iter__(self) -> Iterator[Doc]:
        return iter(self._by_key.values())

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, key: object) -> bool:
        return key in self._by_key

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Documents) and self._by_key == other._by_key

    def __hash__(self) -> int:
        return hash(tuple(self._by_key))

    def __repr__(self) -> str:
        return f"Documents({list(self._by_key.values())!r})"


def _put(rows: dict[str, Doc], name: str, doc: Doc | None) -> None:
    if doc is None:
        rows.pop(name, None)
    else:
        rows[name] = doc
