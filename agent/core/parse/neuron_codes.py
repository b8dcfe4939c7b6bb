"""Status codes of the Neuron runtime in text: which one an error or a line names.

Owns the forms in which a code is printed.  What a code means is data (agent/catalog/nrt.toml).  A
code is the process's own word: it is shown, and no node loses its place for it.  Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

ERROR_MAX = 300  # of the error itself, so that its meaning has room behind it
LOOKED_MAX = 2000
NAME = re.compile(r"\bNRT_[A-Z][A-Z0-9_]{2,50}")
NUMBER = re.compile(
    r"\bnrt_\w{1,40}[^\n]{0,80}?\bstatus(?:[ _]code)?\s?[=:]\s?(?P<call>\d{1,4})\b"
    r"|\b(?:Inference|Execution) completed with err(?:or)?: (?P<err>\d{1,4})\b"
)


class Code(NamedTuple):
    """One row of the catalogue."""

    code: int
    name: str
    culprit: str
    retryable: str
    meaning: str
    do: str
    follows: bool = False

    @property
    def said(self) -> str:
        return f"Neuron runtime {self.code} {self.name}: {self.meaning}; {self.do}"


Codes = Mapping[int, Code]
NONE: Codes = {}


def find(codes: Codes, text: str) -> Code | None:
    """The first code that the text names by its name, else by its number."""
    text = text[:LOOKED_MAX]
    if not ("NRT_" in text or "nrt_" in text or "completed with err" in text):
        return None
    names = {one.name: one for one in codes.values()}
    for found in NAME.finditer(text):
        if found.group() in names:
            return names[found.group()]
    match = NUMBER.search(text)
    return codes.get(int(match["call"] or match["err"])) if match else None


def explained(codes: Codes, error: str) -> str:
    """The error with the meaning of the code in it; as it is where it names none."""
    code = find(codes, error)
    return f"{error[:ERROR_MAX]} [{code.said}]" if code else error
