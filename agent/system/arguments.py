"""Command lines: bounds of numbers, and what was meant by a word that nobody knows.

Owns both for every command of Holdfast's own interpreter; the launcher's parser runs in the job's.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from typing import Any, NoReturn

PROG = "holdfast"


def number(kind: Callable[[str], float], least: float, most: float) -> Callable[[str], float]:
    """A converter for argparse: a finite number within its bounds, or what to give."""

    def convert(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text[:40]!r}: give {least} to {most}")
        return value

    return convert


SPAN = re.compile(r"(\d{1,6}(?:\.\d{1,3})?)(s|m|h|d)")
SPAN_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
SPAN_MAX_S = 30 * 86400.0


def span(text: str) -> float:
    """Seconds of 90s, 30m, 2h or 3d, for argparse."""
    found = SPAN.fullmatch(text.strip())
    seconds = float(found[1]) * SPAN_S[found[2]] if found else 0.0
    if not 0.0 < seconds <= SPAN_MAX_S:
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: give 90s, 30m, 2h or 3d, up to 30d")
    return seconds


class Parser(argparse.ArgumentParser):
    """One that knows what was meant."""

    def error(self, message: str) -> NoReturn:
        super().error(message + self._meant(message))

    def parse_known_args(self, *given: Any, **named: Any) -> Any:
        """An unknown flag is refused by the parser of the command, which knows its flags: argparse
        leaves it to the topmost."""
        found, rest = super().parse_known_args(*given, **named)
        if rest and self.prog != PROG:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return found, rest

    def _meant(self, message: str) -> str:
        import difflib  # needed for errors alone

        wrong = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if wrong:
            given, known = [wrong[1]], re.findall(r"[\w-]+", wrong[2])
        else:
            _, _, rest = message.partition("unrecognized arguments: ")
            given = [word.partition("=")[0] for word in rest.split() if word[0] == "-"]
            known = list(self._option_string_actions)
        near = [one for word in given for one in difflib.get_close_matches(word, known, 1)]
        return f"; did you mean {' '.join(near)}?" if near else ""
