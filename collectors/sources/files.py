"""How collectors read a small file of /proc or /sys: bounded, whole; NoData when it is absent."""

from __future__ import annotations

import os

from ..contract import NoData

READ_MAX_BYTES = 1 << 20


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
