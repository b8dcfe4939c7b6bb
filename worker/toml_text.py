"""TOML that a person wrote, read within bounds of time and memory.

tomllib goes over a dotted key once for each of its parts and keeps what it saw: a key of 100,000
parts takes it minutes and dozens of GB.  Such a key is therefore refused before it is read, and the
rest has a limit of the processor's seconds.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from .time_limit import at_most

READ_S = 2.0  # of the processor: 1 MB of sensible keys takes a tenth of it
KEY_PARTS_MAX = 64
# Such a chain within a string is refused as well: no text that a setting takes has one.
# A part of more than 200 characters ends a chain: of such ones a file has too few to matter, and
# escaped quotes without an end would be gone over once for each.
_PART = r"""(?:[\w-]+|"(?:[^"\\\n]|\\.){0,200}"|'[^'\n]*')[ \t]*"""
_LONG_KEY = re.compile(r"(?<![\w-])(?:%s\.[ \t]*){%d}" % (_PART, KEY_PARTS_MAX))


def parse(loads: Callable[[str], dict[str, Any]], text: str | bytes) -> dict[str, Any]:
    """The table that `text` (bytes: UTF-8, with or without a BOM) writes, by `loads` of tomllib,
    which this Python may lack.

    Raises ValueError with what is wrong and where; TooSlow, which is one, after READ_S.  There is
    no limit of time outside the main thread.
    """
    written = text if isinstance(text, str) else text.decode("utf-8-sig")
    try:
        with at_most(READ_S):
            if chain := _LONG_KEY.search(written):
                line = written.count("\n", 0, chain.start()) + 1
                raise ValueError(
                    f"line {line}: a key of more than {KEY_PARTS_MAX} parts: shorten it")
            return loads(written)
    except RecursionError as error:
        raise ValueError(f"tables and lists too deep in one another: {error}") from error
