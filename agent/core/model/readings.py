"""What the collectors read last, by name, so that each detector looks at its own and nothing else.

Owns the index.  A collector that does not answer leaves what it read last: nobody has seen that it
is otherwise.  Its names are in `silent`, for whoever would act on it or take its silence for good
news.  A large node has 3,400 readings: the 1,500 of its cores are new every second,
those of its devices every 15 s, and whoever walked them all for ten of them would be the largest
part of what watching costs.  Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, groupby
from operator import is_, itemgetter

Reading = tuple[str, str, float, float]  # collectors.contract.Sample
Rows = tuple[Reading, ...]
Named = Mapping[str, Rows]


class Readings:
    """Immutable.  The readings of a name are the very same tuple until its collector was read
    again, so that equal ones are told from newer ones without a look at each."""

    __slots__ = ("_named", "silent")

    def __init__(self, parts: Iterable[Named] = (), silent: frozenset[str] = frozenset()) -> None:
        """`parts`: one for each collector, as by_name makes them; several may share a name.
        `silent`: the names that a collector does not answer for now, or did not yet."""
        named: dict[str, Rows] = {}
        for part in parts:
            shared = named.keys() & part.keys()
            named |= {**part, **{name: named[name] + part[name] for name in shared}}
        self._named = named
        self.silent = silent

    def of(self, name: str) -> Rows:
        """The readings of one name."""
        return self._named.get(name, ())

    def under(self, *beginnings: str) -> Rows:
        """The readings of all names that begin so."""
        return tuple(chain.from_iterable(self.parts(lambda name: name.startswith(beginnings))))

    def parts(self, wanted: Callable[[str], bool]) -> list[Rows]:
        """The readings of each name that is wanted."""
        return [rows for name, rows in self._named.items() if wanted(name)]

    def names(self) -> Iterable[str]:
        return self._named.keys()

    def named(self) -> Iterable[tuple[str, Rows]]:
        """The readings of each name."""
        return self._named.items()

    def __iter__(self) -> Iterator[Reading]:
        return chain.from_iterable(self._named.values())

    def __len__(self) -> int:
        return sum(map(len, self._named.values()))


class Selection:
    """The readings that somebody looks at: `of` gives the very same tuple until one of them is
    newer, or another comes or goes."""

    def __init__(self, wanted: Callable[[str], bool] = bool) -> None:
        """`wanted`: whether a name is one of theirs."""
        self._wanted = wanted
        self._parts: list[Rows] = []
        self._rows: Rows = ()

    def of(self, readings: Readings) -> Rows:
        """In the order of the collectors."""
        return self.joined(readings.parts(self._wanted))

    def joined(self, parts: list[Rows]) -> Rows:
        """The same of parts that were picked already."""
        if len(parts) != len(self._parts) or not all(map(is_, parts, self._parts)):
            self._parts = parts
            rows = tuple(chain.from_iterable(parts))
            self._rows = self._rows if rows == self._rows else rows
        return self._rows


def labels_of(subject: str) -> dict[str, str]:
    """The labels of a reading's subject, `key=value,key=value`."""
    return dict(part.partition("=")[::2] for part in subject.split(",") if part)


def by_name(readings: Iterable[Reading]) -> dict[str, Rows]:
    """One collector's readings, in their order; its names may come mixed."""
    named: dict[str, list[Reading]] = {}
    for name, group in groupby(readings, itemgetter(0)):
        named.setdefault(name, []).extend(group)
    return {name: tuple(rows) for name, rows in named.items()}


def readings_of(readings: Iterable[Reading], silent: Iterable[str] = ()) -> Readings:
    """Readings as if one collector had read them all."""
    return Readings((by_name(readings),), frozenset(silent))
