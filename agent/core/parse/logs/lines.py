"""One line of a training log without its wrapping: whose it is, when it was, what it says.

Owns colours, rank prefixes and timestamps, and nothing about faults.  Pure: text in, values out;
every pattern runs over at most LINE_MAX characters, so that a line of any length costs the same.
"""

from __future__ import annotations

import re
from typing import NamedTuple

LINE_MAX = 4096  # characters of a line that are looked at
LOOK_BACK = 16 << 10  # bytes in which a line without a time finds one before it
NO_RANK = -1
PREFIXES_MAX = 6

_ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]{0,256}(?:\x07|\x1b\\)|[@-_])")
# Wrappers in front of what the program said, each tried at the line's begin, again and again.
_TAG = re.compile(r"\[(?:rank|default|trainer|worker)[ _]?(?P<rank>\d{1,6})\]:? ?")
_LABEL = re.compile(r"(?P<rank>\d{1,5}): ")  # srun --label
_RAY = re.compile(r"\((?:[\w.]+ )?pid=\d+(?:, ip=[\d.]+)?\) ?")
_CRI = re.compile(r"std(?:out|err) [FP] ")  # a container runtime's own log file
# 2026-11-20, 2026-Nov-20 (Neuron's runtime), 11/20/2026 or Nov 20 (syslog; the month is taken off
# in other tongues, too, but not understood), perhaps behind the name of the library that logs.
_CLOCK = re.compile(
    r"(?:\[[A-Za-z]\w{0,30}\] )?[\[(]?(?:"
    r"\d{4}[-/](?P<mon>\d\d|[A-Z][a-z]{2})[-/](?P<day>\d\d)|(?P<us_mon>\d\d)/(?P<us_day>\d\d)/\d{4}"
    r"|(?P<sys_mon>[A-Z][a-z]{2}|\d{1,2}\u6708|[^\W\d_]{3,5}\.?) (?P<sys_day>[ \d]\d)"
    r")[T ](?P<h>\d\d):(?P<m>\d\d):(?P<s>\d\d(?:[.,]\d+)?)"
    r"(?:Z|[+-]\d\d:?\d\d)?[\])]?(?: ?[:|-])? ?"
)
# glog's, as PyTorch's C++ and torchrun print it; the letter is the severity, there is no year.
_GLOG = re.compile(
    r"\[?[IWEF](?P<mon>\d\d)(?P<day>\d\d) (?P<h>\d\d):(?P<m>\d\d):(?P<s>\d\d(?:\.\d+)?)"
)
_RANK = re.compile(r"\[(?:PG [^\]]{0,120}?)?[Rr]ank (?P<rank>\d{1,6})\]|^Rank (?P<of>\d{1,6})[: ]")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_MONTH_DAYS = (0, 31, 60, 91, 121, 152, 182, 213, 244, 274, 305, 335)  # of a leap year
DAY_S = 86_400.0
YEAR_S = 366 * DAY_S


class Clean(NamedTuple):
    """`stream` is what tells interleaved ranks apart; `rank` the best that the line says."""

    text: str  # indentation kept
    stream: int  # from a prefix; NO_RANK without one
    rank: int  # global rank where the line names one, else the stream
    time_s: float | None  # seconds into a leap year: glog writes no year


def clean(line: str) -> Clean:
    """A line as its program wrote it.  Never raises."""
    text = line[:LINE_MAX]
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    text = text.rsplit("\r", 1)[-1] if "\r" in text.rstrip("\r") else text.rstrip("\r")
    text = text.replace("\x00", "")
    stream, time_s = NO_RANK, None
    for _ in range(PREFIXES_MAX):
        if match := _TAG.match(text):
            stream = int(match["rank"])
        elif match := _CLOCK.match(text):
            time_s = _seconds(match) if time_s is None else time_s
        elif stream == NO_RANK and (match := _LABEL.match(text)):
            stream = int(match["rank"])
        elif match := _RAY.match(text) or _CRI.match(text):
            pass
        else:
            break
        text = text[match.end() :]
    if found := _GLOG.match(text):  # stays in the text: the file and line behind it are evidence
        time_s = _seconds(found)
    named = _RANK.search(text, 0, 512) if "ank " in text else None
    rank = int(named["rank"] or named["of"]) if named else stream
    return Clean(text, stream, rank, time_s)


def _seconds(match: re.Match[str]) -> float | None:
    text, day_text = (group for group in match.groups()[:-3] if group)  # of one form
    day = int(day_text)
    month = int(text) if text.isdigit() else _MONTHS.index(text) + 1 if text in _MONTHS else 0
    if not (1 <= month <= 12 and 1 <= day <= 31):
        return None
    clock_s = int(match["h"]) * 3600 + int(match["m"]) * 60
    days = _MONTH_DAYS[month - 1] + day - 1
    return days * DAY_S + clock_s + float(match["s"].replace(",", "."))


def around_new_year(times_s: list[float]) -> float:
    """Times before this one belong to the year after (0: all are of one year)."""
    if times_s and max(times_s) - min(times_s) > YEAR_S / 2:
        return YEAR_S / 2
    return 0.0


def line_at(buffer: bytes, start: int) -> str:
    end = buffer.find(b"\n", start, start + LINE_MAX)
    return buffer[start : end if end >= 0 else start + LINE_MAX].decode("utf-8", "replace")


class Ruler:
    """Number and time of lines of one log, mostly asked for from its begin to its end: then each
    byte is looked at once, however many lines are asked for."""

    def __init__(self) -> None:
        self._ends = 0  # of lines before the buffer
        self._counted = (0, 0)  # a place in the log, and the ends of lines before it
        self._clock: tuple[int, int, float | None] = (0, 0, None)  # searched up to; found where

    def cut(self, buffer: bytes, nbytes: int) -> None:
        """The buffer loses so many bytes at its begin."""
        self._ends += buffer.count(b"\n", 0, nbytes)

    def number(self, buffer: bytes, base: int, at: int) -> int:
        """Of the line that begins there, from 1; `base` is the buffer's place in the log."""
        place, ends = self._counted
        if not base <= place <= base + at:
            place, ends = base, self._ends
        ends += buffer.count(b"\n", place - base, at)
        self._counted = (base + at, ends)
        return ends + 1

    def time_before(self, buffer: bytes, base: int, at: int) -> float | None:
        """Of the nearest line before this one that has one, within LOOK_BACK: a lower bound."""
        low = max(0, at - LOOK_BACK)
        searched, found, time_s = self._clock
        if base + low <= searched <= base + at:
            first = searched - base
        else:
            first, time_s = (buffer.find(b"\n", low - 1, at) + 1 or at) if low else 0, None
        end = at
        while end > first:
            begin = max(first, buffer.rfind(b"\n", first, end - 1) + 1)
            line = buffer[begin:end]
            own_s = clean(line.decode("utf-8", "replace")).time_s if line.count(b":") > 1 else None
            if own_s is not None:
                found, time_s = base + begin, own_s
                break
            end = begin
        if found < base + low:
            time_s = None
        self._clock = (base + at, found, time_s)
        return time_s
