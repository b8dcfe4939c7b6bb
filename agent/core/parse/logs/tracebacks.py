"""How a traceback is told from what stands around it: links, prefixes, the exception's line.

Owns the forms of single lines.  What a traceback comes to is scan.py's.  Pure.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from .lines import LINE_MAX, NO_RANK, clean

TRACEBACK = "Traceback (most recent call last)"
IGNORED = "Exception ignored "  # in a finalizer or a callback: the process goes on
# Above a traceback that ends nothing.
LET_GO = ("--- Logging error ---", "COMET ERROR", "Error in atexit._run_exitfuncs",
          "Jax plugin configuration error", "PytestUnraisableExceptionWarning: ")
# In a frame: the process was at its end, and what a clean-up met ends nothing.
AT_ITS_END = (", in _run_finalizers", ", in _exitfunc", ", in _run_exitfuncs")
# What a line with a colon at its end introduces a traceback as, when it says that work goes on.
HANDED_ON = re.compile(
    r"(?i)\b(?:fail(?:ed|ure|s)?|error|exception|unable|could not|cannot|caught)\b"
)
ORIGINAL = "Original " + TRACEBACK  # that of a loader's worker, in its parent's
PREFIX_MAX = 200
NEAR_FRAME = 4000  # bytes: of a frame, its source and the marks under it
BELOW_FRAME = 4  # lines: a frame's source and the marks under it
_FILE = re.compile(  # Python's, and a notebook's of any release
    r'File "(?P<path>[^"]{1,400})", line \d|^File (?P<new>\S{1,400}\.pyx?):\d+, in '
    r"|^(?P<old>\S{1,400}\.pyx?) in \w{1,80}\("
)
# Small classes of the standard library, which are known without a frame above them.
_STANDARD = re.compile(
    r"(?:struct|zlib|binascii|audioop|_?csv|wave|select|mmap|re|copy|_?curses|shutil|aifc|sunau|dbm"
    r"|bz2|locale)\.(?P<last>[Ee]rror|BadZipFile|ReadError)(?:: |$)"
)
_LINK = re.compile(r"(?:During handling of the|The) above exception")
_NAME = re.compile(r"(?P<path>(?:[A-Za-z_]\w*\.)*)_?(?P<last>[A-Za-z]\w*)(?::(?: |$)|$)")
_ENDINGS = ("Error", "Exception", "Interrupt", "Exit", "Timeout", "Expired", "Killed")
_OF_ERRORS = re.compile(r"(?:^|\.)(?:exceptions?|errors?|exc|errors_impl|onnxruntime_\w+)\.$")
_SMALL = tuple(ending.lower() for ending in _ENDINGS)
_CLOCK = re.compile(r"\d{1,2}:\d\d:\d\d(?:[.,]\d+)?|\b\d{10}\.\d+")
_GROUP = "Exception Group "
_RANK = re.compile(r"\brank[ =_:]?(\d{1,6})|^\[\d+,(\d{1,6})\]<|^\[[A-Za-z]\w*?(\d{1,6})\]:")


def link(text: str) -> str | None:
    """What stands before the words that join two exceptions to a chain; None without them."""
    found = _LINK.search(text)
    return text[: found.start()] if found else None


def exception(text: str, framed: bool) -> str:
    """The last part of an exception's class, when the line is its; else nothing.

    Right below a frame any class will do; else it must sound like one.  A small one
    (`struct.error`) is believed with its module and right below a frame alone.
    """
    named = _NAME.match(text.rstrip())
    if named is None:
        return ""
    if standard := _STANDARD.match(text):
        return standard["last"]
    last = named["last"]
    if last[0].isupper():
        sounds = (last.endswith(_ENDINGS) or _OF_ERRORS.search(named["path"]) is not None
                  or (framed and not last.isupper()))
    else:
        sounds = framed and named["path"] != "" and last.endswith(_SMALL)
    return last if sounds else ""


def frame_above(buffer: bytes, start: int) -> str:
    """The file of the frame that the line stands right below; else nothing."""
    end = start - 1
    if b".py" not in buffer[max(0, start - NEAR_FRAME) : start]:  # of most lines all there is
        return ""
    for _ in range(BELOW_FRAME):
        if end <= 0:
            break
        begin = buffer.rfind(b"\n", max(0, end - LINE_MAX), end) + 1
        text = clean(buffer[begin:end].decode("utf-8", "replace")).text
        if found := _FILE.search(text):
            return next(group for group in found.groups() if group)
        if not text[:1].isspace():
            break
        end = begin - 1
    return ""


class Wrap(NamedTuple):
    """What some tool put before every line of one traceback, as it stands before its first."""

    before: str
    key: str  # the same for each line: a clock in it goes on
    rank: int

    def strip(self, text: str) -> str | None:
        """The line without it; None for a line that has another or none."""
        head = text[: len(self.before)]
        if head == self.before or (self.key != self.before and key_of(head) == self.key):
            return text[len(self.before) :]
        return "" if text.rstrip() == self.before.rstrip() else None


def key_of(before: str) -> str:
    return _CLOCK.sub("@", before)


def wrap_of(text: str) -> Wrap | None:
    """What may be a wrapper, from the line that opens a traceback; the next lines tell."""
    before = text[: text.find(TRACEBACK)]
    if before.endswith(_GROUP):  # `  + Exception Group Traceback`, and `  |   File` below it
        before = before.removesuffix(_GROUP)
        before = before[:-2] + "| " if before.endswith("+ ") else before
    if not before.strip() or len(before) > PREFIX_MAX:
        return None
    found = _RANK.search(before)
    rank = int(next(group for group in found.groups() if group)) if found else NO_RANK
    return Wrap(before, key_of(before), rank)
