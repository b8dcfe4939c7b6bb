"""Lines of styled words for people: coloured on a terminal, plain when piped, 80 columns wide.

Owns wrapping, tables, the characters that no terminal may be given, the words for seconds and
bytes, and the failure of a command.  A line is a tuple of spans, so that a command's output can be
tested by value; rich is imported only for a terminal.
"""

from __future__ import annotations

import os
import sys
import textwrap
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from holdfast.worker.exits import FAILED

WIDTH = 80
GOOD, BAD, CARE, FAINT, STRONG = "green", "bold red", "yellow", "dim", "bold"
# Of a check's verdict.
STYLES = {"ok": GOOD, "warning": CARE, "critical": BAD, "unknown": CARE}


class Failure(Exception):
    """Ends the command.  The text says what is wrong and what to do about it."""

    def __init__(self, text: str, code: int = FAILED) -> None:
        super().__init__(text)
        self.code = code


class Span(NamedTuple):
    text: str
    style: str = ""


Line = tuple[Span, ...]
Cell = str | Span


def line(*parts: Cell) -> Line:
    return tuple(Span(part) if isinstance(part, str) else part for part in parts)


def harmless(text: str) -> str:
    """The text without characters that move a cursor or hide words: names, reasons and lines of
    logs are other people's, and a terminal obeys them.  One character stays one character."""
    return text if text.isprintable() else "".join(map(_shown, text))


def _shown(character: str) -> str:
    if character == "\t" or unicodedata.category(character) == "Zs":
        return " "
    return character if character.isprintable() else "?"


def plain(lines: Iterable[Line]) -> str:
    return "".join("".join(harmless(span.text) for span in one).rstrip() + "\n" for one in lines)


def show(lines: Iterable[Line]) -> None:
    """Prints to standard output."""
    found = list(lines)
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        sys.stdout.write(plain(found))
        sys.stdout.flush()
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    for one in found:
        console.print(Text.assemble(*((harmless(span.text), span.style) for span in one)))


def print_json(value: Any) -> None:
    """The answer for a program."""
    import json  # needed for --json alone

    print(json.dumps(value, indent=2, sort_keys=True))


def field(name: str, value: Cell, indent: int = 13) -> list[Line]:
    """`name        value`, the value wrapped under itself."""
    span = Span(value) if isinstance(value, str) else value
    rows = wrapped(span.text, WIDTH - indent) or [""]
    head = [line(Span(name.ljust(indent - 1) + " ", FAINT), Span(rows[0], span.style))]
    return head + [line(" " * indent, Span(row, span.style)) for row in rows[1:]]


def wrapped(text: str, width: int) -> list[str]:
    """Broken at blanks alone: paths, names and versions have hyphens, and are copied."""
    return textwrap.wrap(text, width, break_on_hyphens=False)


def failed(text: str, is_tty: bool) -> list[str]:
    """What a command that fails says.  A program reads one line of it; on a terminal a long one is
    wrapped, so that no word is torn."""
    first, *more = (harmless(one) for one in f"holdfast: {text}".split("\n"))
    if not is_tty:
        return [first, *more]
    return [row for one in (first, *more)
            for row in textwrap.wrap(one, WIDTH, subsequent_indent="  ", break_long_words=False,
                                     break_on_hyphens=False, drop_whitespace=True) or [""]]


def table(
    heads: Sequence[str], rows: Sequence[Sequence[Cell]], indent: int = 0, wrap: bool = False
) -> list[Line]:
    """Columns as wide as their widest cell; the last one is cut at the width of the page, or, with
    `wrap`, goes on below itself."""
    cells = [[Span(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
    last = len(heads) - 1
    widths = [
        max([len(head), *(len(row[column].text) for row in cells)])
        for column, head in enumerate(heads)]
    room = max(8, WIDTH - indent - sum(widths[:last]) - 2 * last)

    def fit(row: Sequence[Span]) -> list[Line]:
        before = [
            Span(span.text.ljust(width + 2), span.style)
            for span, width in zip(row[:last], widths, strict=False)]
        end = row[last]
        parts = wrapped(end.text, room) if wrap else [cut(end.text, room)]
        first, *more = parts or [""]
        left = " " * (indent + sum(widths[:last]) + 2 * last)
        return [line(" " * indent, *before, Span(first, end.style)),
                *(line(left, Span(part, end.style)) for part in more)]

    head = [Span(name, FAINT) for name in heads]
    return [one for row in [head, *cells] for one in fit(row)]


def cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(1, width - 1)] + "…"


def paragraphs(text: str, indent: int = 2) -> list[Line]:
    """Prose wrapped anew; indented blocks (commands) stay, their comments within the page."""
    found: list[Line] = []
    for block in text.split("\n\n"):
        if block.startswith("    "):
            found += [line(" " * indent, Span(row[2:])) for row in commented(block.splitlines())]
        else:
            rows = textwrap.wrap(" ".join(block.split()), WIDTH - indent)
            found += [line(" " * indent, row) for row in rows]
        found.append(())
    return found[:-1]


def commented(rows: Sequence[str]) -> list[str]:
    """Commands with what each is for, beside it; where the page ends, the words go on below."""
    if all(len(row) <= WIDTH for row in rows):
        return [*rows]
    parts = [(command.rstrip(), comment.strip())
             for command, _, comment in (row.partition("  # ") for row in rows)]
    column = 2 + max((len(command) for command, comment in parts
                      if comment and len(command) <= WIDTH // 2), default=8)
    found = []
    for command, comment in parts:
        lines = wrapped(comment, WIDTH - column - 4)
        if lines and len(command) + 2 <= column:
            command = f"{command:{column}}# {lines.pop(0)}"
        found += [command, *(f"{'':{column}}# {one}" for one in lines)]
    return found


def seconds(value: float | None) -> str:
    """0.45 s, 12 s, 3 min 20 s, 2 h 5 min; "unknown" for None."""
    if value is None:
        return "unknown"
    if value < 9.95:
        return f"{value:.2f} s" if value < 0.995 else f"{value:.1f} s"
    whole = round(value)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def size(value: float) -> str:
    """Bytes in the unit that people use for memory."""
    for unit in ("bytes", "kB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}"
        value /= 1000
    return f"{value:.1f} GB"


def clock(wall_s: float) -> str:
    """Local time of day, with the date when it was not today."""
    import time

    then = time.localtime(wall_s)
    today = time.localtime()[:3] == then[:3]
    return time.strftime("%H:%M:%S" if today else "%Y-%m-%d %H:%M:%S", then)


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
