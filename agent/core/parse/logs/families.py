"""Which family an error belongs to, by the finite vocabularies of the libraries that print it.

Owns the looking-up: the first row whose words stand in the text, else the class of the exception.
The rows are data (agent/catalog/log_families.toml); which lines are errors is forms.py's.  Pure.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator
from typing import NamedTuple

from .subjects import NONE, Subjects

HARMLESS = "harmless"  # a role of families alone: such a line is no error, whatever its words
TEXT_MAX = 1000  # characters of a line, and of what its message goes on with
DIGITS = b"0123456789"  # lines are searched without them
PIECE = 3  # characters; no word is shorter
GATE_LEAST = 3  # a bare number is searched in lines that sound bad alone
_NAME = re.compile(r"(?<!\w)[A-Za-z]\w{3,80}")
REMEMBERED = 4096  # texts whose family is known already
_RELEASE = re.compile(r"/python3\.\d{1,2}/")  # Python's own modules, told from the job's


class Family(NamedTuple):
    """One row of the catalogue: words in small letters, one of which must be there."""

    id: str
    role: str
    category: str
    culprit: str
    retryable: str
    words: tuple[str, ...]
    pattern: str = ""  # searched as well, without regard to case
    names: tuple[str, ...] = ()  # whole identifiers, as libraries spell their codes
    classes: tuple[str, ...] = ()  # of exceptions, when no text decides
    frames: tuple[str, ...] = ()  # pieces of the innermost frame's path, when no text decides
    raises: tuple[str, ...] = ()  # classes that mean it when raised there
    weak: bool = False
    ends: bool = False  # its line ends a process, traceback or not
    loud: bool = False  # not believed in a line of no level that does not sound bad
    warned: bool = False  # believed in a warning, too
    noticed: bool = False  # believed at any level: a notice that the process is to end
    retried: bool = False  # believed although the line says that it is tried again
    until: str = ""  # a later line with it shows that it went well
    lasting: bool = False  # a value of each step: the last one counts, group `bad` says it is wrong
    note: str = ""


class Families:
    """The rows in order; compiles a pattern when its words are met for the first time."""

    def __init__(
        self, rows: tuple[Family, ...], gates: tuple[bytes, ...], finished: str = "",
        subjects: Subjects = NONE,
    ) -> None:
        self.rows, self.subjects = rows, subjects
        self.finished = finished  # a later line that says that all went well
        self.gates = gates + tuple(_ungated(rows, gates))
        self.notices = tuple(word for row in rows if row.noticed for word in row.words)
        self.lasting = tuple(row for row in rows if row.lasting)
        self._texts = tuple(row for row in rows if row.words and not row.lasting)
        self._pieces = _by_piece(self._texts)
        self._names = {name: row for row in rows for name in row.names}
        self._frames = tuple((piece, row) for row in rows for piece in row.frames)
        self._classes = {name: row for row in rows for name in row.classes}
        self._compiled: dict[str, re.Pattern[str]] = {}
        self._known: dict[tuple[str, bool], Family | None] = {}

    def by_text(self, text: str, ends: bool = False) -> Family | None:
        """The first row that knows the text; the same text is looked up once.  What `ends` a
        process is not harmless."""
        text = text[:TEXT_MAX]
        if (text, ends) not in self._known:
            if len(self._known) >= REMEMBERED:
                self._known.clear()
            self._known[text, ends] = self._look(text, ends)
        return self._known[text, ends]

    @property
    def classes(self) -> Collection[str]:
        return self._classes.keys()

    def by_class(self, name: str) -> Family | None:
        return self._classes.get(name)

    def by_frame(self, path: str, name: str = "") -> Family | None:
        """By the library in whose file an exception of that class was raised, or of any class."""
        path = _RELEASE.sub("/python3/", path.replace("\\", "/"))
        return next((row for piece, row in self._frames
                     if piece in path and (not name or name in row.raises)), None)

    def pattern(self, row: Family) -> re.Pattern[str]:
        return self.compiled(row.pattern)

    def compiled(self, pattern: str) -> re.Pattern[str]:
        if pattern not in self._compiled:
            self._compiled[pattern] = re.compile(pattern, re.IGNORECASE | re.MULTILINE)
        return self._compiled[pattern]

    def _look(self, text: str, ends: bool) -> Family | None:
        rows = [self._texts[index] for index in self._spoken_of(text.lower())]
        if not ends and (row := self._first(rows, text, harmless=True)):
            return row
        for name in _NAME.findall(text):
            if name in self._names:
                return self._names[name]
        return self._first(rows, text, harmless=False)

    def _spoken_of(self, small: str) -> list[int]:
        """The rows, in order, of which a word stands in the text."""
        found: set[int] = set()
        pieces = {small[at : at + PIECE] for at in range(len(small) - PIECE + 1)}
        for piece in pieces & self._pieces.keys():
            for index, word in self._pieces[piece]:
                if index not in found and word in small:
                    found.add(index)
        return sorted(found)

    def _first(self, rows: list[Family], text: str, harmless: bool) -> Family | None:
        for row in rows:
            if (row.role == HARMLESS) != harmless:
                continue
            if not row.pattern or self.pattern(row).search(text):
                return row
        return None


def _by_piece(rows: tuple[Family, ...]) -> dict[str, list[tuple[int, str]]]:
    """Each word under the rarest of its pieces: thousands of words are not searched one by one."""
    pieces = {word: [word[at : at + PIECE] for at in range(len(word) - PIECE + 1)]
              for row in rows for word in row.words}
    counts = Counter(piece for many in pieces.values() for piece in set(many))
    found: dict[str, list[tuple[int, str]]] = {}
    for index, row in enumerate(rows):
        for word in row.words:
            found.setdefault(min(pieces[word], key=counts.__getitem__), []).append((index, word))
    return found


def _ungated(rows: tuple[Family, ...], gates: tuple[bytes, ...]) -> Iterator[bytes]:
    """Words that no gate is a piece of, so that a line with one is looked at."""
    words = {word.encode().translate(None, DIGITS)
             for row in rows if not row.lasting for word in row.words}
    words |= {name.lower().encode().translate(None, DIGITS) for row in rows for name in row.names}
    known = re.compile(b"|".join(map(re.escape, gates)) or b"(?!)")  # five times as fast as `in`
    for word in sorted(words):
        if len(word) >= GATE_LEAST and known.search(word) is None:
            yield word
