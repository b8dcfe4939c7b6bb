"""What an error is about, when no rule knows what went wrong: the layer whose nouns it names most.

Owns the weighing of words.  They are data (agent/catalog/log_subjects.toml); which lines are errors
is forms.py's.  Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

SURE, FAINT = 2, 1
LEAST = 2  # points that place a line
AHEAD = 1  # of every other layer
LOOKED = 400  # characters: a long line has a word of every layer
PHRASE = 3  # words of the longest entry
_PATH = re.compile(
    r"(?<![\w.])~?/(?!(?:dev|sys|proc|mnt)/)[\w.@+-]+(?:/[\w.@+-]+)+/?"
    r"|(?<![\w./])[\w.@-]+/(?:[\w.@-]+/)+[\w.@-]*|(?<![\w./])[\w@-]+/[\w@-]+\.\w+"
)
_JOINT = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_WORD = re.compile(r"[a-z][a-z0-9]*")
_DIGITS = "0123456789"


class Subjects(NamedTuple):
    """{words: {culprit: points}}"""

    points: Mapping[str, Mapping[str, int]]

    def of(self, text: str) -> str:
        """The culprit, or nothing where no layer is clearly ahead."""
        totals: dict[str, int] = {}
        for entry in self.found(text):
            for culprit, points in self.points[entry].items():
                totals[culprit] = totals.get(culprit, 0) + points
        ranked = sorted(totals.items(), key=lambda one: -one[1])
        if not ranked or ranked[0][1] < LEAST:
            return ""
        second = ranked[1][1] if len(ranked) > 1 else 0
        return ranked[0][0] if ranked[0][1] >= second + AHEAD else ""

    def found(self, text: str) -> set[str]:
        """The entries that stand in the text; a word inside a longer entry is not counted again."""
        words = [word if word in self.points else word.rstrip(_DIGITS) for word in words_of(text)]
        entries: set[str] = set()
        at = 0
        while at < len(words):
            for length in range(PHRASE, 0, -1):
                entry = " ".join(words[at : at + length])
                if entry in self.points and at + length <= len(words):
                    entries.add(entry)
                    at += length
                    break
            else:
                at += 1
        return entries


def words_of(text: str) -> list[str]:
    """Small, names cut at their joints, no digits at the ends, no paths of files."""
    text = _PATH.sub(" ", text[:LOOKED]).replace("I/O", "io")
    return _WORD.findall(_JOINT.sub(" ", text).lower())


NONE = Subjects({})
