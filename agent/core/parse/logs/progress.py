"""The steps that a training log prints: proof that the job went on after an error.

Owns the forms in which trainers print them, and which roots they went by.  Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from .lines import LINE_MAX, clean
from .signatures import ROOT, Match

HANDLED_STEPS = 3  # different steps that went by after it: it was handled
LINES_MAX = 5000  # of one search
LINE_BACK = 64 << 10  # a progress bar without line ends is one line of any length

# Where a step may stand.  Literals alone, so that the search for them is quick.
_PLACES = re.compile(rb"step|Step|STEP|iter|Iter|ITER|epoch|Epoch|EPOCH|num_update|%\||\]\[")
# `step 10`, `'epoch': 0.02`, ` iteration        5/   78125`, `global_step=500`, and behind the `m`
# of a colour.  Of underscored names only those that count: warmup_steps and its like stand in every
# dump of a configuration.  `Epoch: [0][ 10/5005]`, as torchvision and mmengine print it.
_STEP = re.compile(
    rb"(?i)(?:(?<![a-z_])|(?<=[\d\[]m)|(?<=global_)|(?<=train_)|(?<=training_)|(?<=current_))"
    rb"(?<!nan )(?<!skipped )"  # how many of them there were
    rb"(?:step|iter(?:ation)?|epoch|num_updates?)s?['\" :=\[#/]{1,16}(\d[\d.]{0,12})"
    rb"(?: \[(\d{1,12})/\d)?"  # `Train Epoch: 1 [640/60000 (1%)]`
    rb"|\]\[ {0,8}(\d{1,12})/"
    rb"|%\|[^|\r\n]{0,400}\| {0,8}(\d{1,12})/\d"
)
# `  5%|#    | 50/1000 [`: a bar without a name, or with one of training.  Loading and preparing
# have names of their own, and a rank can go on with them while another is dead.
_BAR_BEGINS = re.compile(
    rb"(?i)(?:(?:\A|[\r\n\]])[: ]{0,8}|\b(?:epoch|train|step|iter)[^|\r\n]{0,40})\d{1,3}\Z"
)
BAR_NAME_MAX = 60


def passed(buffer: bytes, begin: int, limit: int) -> Iterator[tuple[int, int, bytes]]:
    """(begin of the line, its stream, number) of each step in buffer[begin:limit]."""
    start, stream, lines = -1, 0, 0
    for place in _PLACES.finditer(buffer, begin, limit):
        at = place.start()
        found = _STEP.match(buffer, at, limit)
        bar = place[0] == b"%|"
        if found is None or bar and not _BAR_BEGINS.search(buffer[max(0, at - BAR_NAME_MAX) : at]):
            continue
        line = buffer.rfind(b"\n", max(0, at - LINE_BACK), at) + 1
        line = at if line == 0 and at > LINE_BACK else line
        if line != start:
            lines += 1
            if lines > LINES_MAX:
                return
            # Not as the line ends: a bar's last state has lost the prefix that the line began with.
            head = buffer[line : line + LINE_MAX].partition(b"\n")[0].partition(b"\r")[0]
            start, stream = line, clean(head.decode("utf-8", "replace")).stream
        yield start, stream, found[found.lastindex or 0]


class Steps:
    """The steps after each root of one log, by the root's offset."""

    def __init__(self) -> None:
        self._after: dict[int, set[bytes]] = {}

    def handled(self, match: Match) -> bool:
        return match.role == ROOT and len(self._after.get(match.offset, ())) >= HANDLED_STEPS

    def after(self, match: Match) -> int:
        """How many different steps went by."""
        return len(self._after.get(match.offset, ()))

    def keep(self, offsets: set[int]) -> None:
        self._after = {at: steps for at, steps in self._after.items() if at in offsets}

    def look(
        self, roots: Sequence[Match], buffer: bytes, base: int, begin: int, limit: int
    ) -> None:
        """Takes in what buffer[begin:limit] says; `base` is the buffer's place in the log."""
        live = [one for one in roots if not self.handled(one)]
        if not live:
            return
        begin = max(begin, min(one.offset for one in live) - base)
        for start, stream, number in passed(buffer, begin, limit):
            for one in live:
                if one.stream == stream and one.offset < base + start:
                    self._after.setdefault(one.offset, set()).add(number)
            live = [one for one in live if not self.handled(one)]
            if not live:
                return
