"""How collectors read small files and folders of /proc and /sys, and the numbers in them.

Owns the bounds.  `read_text` raises NoData for a file that is absent; the others answer with
nothing, for whoever can go on without it.
"""

from __future__ import annotations

import os

from ..contract import NoData

READ_MAX_BYTES = 1 << 20
COUNT_MAX = 1 << 64
COUNT_DIGITS_MAX = 20  # Python refuses to read 5,000, and float makes 400 infinite
ODD = str.maketrans(",=\n{}\"\\", "_______")  # what a subject cannot hold


def read_text(path: str, limit_bytes: int = READ_MAX_BYTES, errors: str = "replace") -> str:
    """At most `limit_bytes` of a file; `errors` is what becomes of bytes that are no UTF-8.  NoData
    when it is not there or may not be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise NoData(f"{path}: {error.strerror}") from error
    try:
        parts, left = [], limit_bytes
        while left > 0 and (part := os.read(fd, min(left, 65536))):  # /proc answers in pieces
            parts.append(part)
            left -= len(part)
        return b"".join(parts).decode("utf-8", errors)
    except OSError as error:
        raise NoData(f"{path}: {error.strerror}") from error
    finally:
        os.close(fd)


def text_of(path: str, limit_bytes: int = READ_MAX_BYTES) -> str:
    """The same text; "" when the file is not there or may not be read."""
    try:
        return read_text(path, limit_bytes)
    except NoData:
        return ""


def word_of(path: str, limit_bytes: int = 256) -> str:
    """The first line of a small file, fit for a subject; "" without it."""
    line = text_of(path, limit_bytes).partition("\n")[0].strip().replace(",", " ")
    return "".join(c if c.isprintable() else "?" for c in line)


def names_in(folder: str) -> list[str]:
    """What a folder lists, in order; [] when it is not there or may not be listed."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def is_count(text: str) -> bool:
    """Whether it is a whole number of at most 64 bits, and nothing else."""
    is_number = text.isascii() and text.isdecimal() and len(text) <= COUNT_DIGITS_MAX
    return is_number and int(text) < COUNT_MAX


def pids_in(proc: str, most: int) -> list[int]:
    """Numbers of the processes that a /proc lists.  OSError when it cannot be listed."""
    return [int(one) for one in os.listdir(proc) if one.isdecimal()][:most]
