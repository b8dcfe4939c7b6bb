"""The subject of a verdict, an incident, an effect or a document, as one type.

Owns the grammar `kind/name/part`, which journal, metrics and the API show as text.  What stands
behind the name is its kind's own: a path may have slashes, and begin with one.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

RUN, NODE, STORE, LEASE, INCIDENT = "run", "node", "store", "lease", "incident"
RANK = "rank"
ADDRESS = "address"  # kind of the documents that say where each agent listens
FLEET = "fleet"
SUBJECTS_MAX = 4096  # remembered: each step says those of its nodes, runs and ranks again


class Subject(NamedTuple):
    """`run/m5/rank/1`, `node/a/gpu/3`, `store/run/m5`, `store`; the text is `str(subject)`."""

    kind: str
    name: str = ""
    part: str = ""  # behind the name

    def __str__(self) -> str:
        text = f"{self.kind}/{self.name}" if self.name else self.kind
        return f"{text}/{self.part}" if self.part else text

    @property
    def run(self) -> str:
        """The run that it is about or within; "" for every other kind."""
        return self.name if self.kind == RUN else ""

    @property
    def node(self) -> str:
        """The same of a node."""
        return self.name if self.kind == NODE else ""

    @property
    def rank(self) -> int:
        """The rank's number; -1 for none."""
        word, _, number = self.part.partition("/")
        return int(number) if word == RANK and number.isdecimal() else -1


@lru_cache(maxsize=SUBJECTS_MAX)
def subject_of(text: str) -> Subject:
    """Any text: what has no such parts has empty ones."""
    kind, _, rest = text.partition("/")
    name, _, part = rest.partition("/")
    return Subject(kind, name, part)


@lru_cache(maxsize=SUBJECTS_MAX)
def run_subject(run: str, part: str = "") -> str:
    return str(Subject(RUN, run, part))


def rank_subject(run: str, rank: int) -> str:
    """The run's own where no rank is named (-1)."""
    return run_subject(run, f"{RANK}/{rank}" if rank >= 0 else "")


@lru_cache(maxsize=SUBJECTS_MAX)
def node_subject(node: str, part: str = "") -> str:
    return str(Subject(NODE, node, part))
