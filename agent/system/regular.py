"""Opens files that people wrote: without waiting, and only where they are regular files.

Owns one opening.  A FIFO, a device or a folder in the place of a file must end in an error and
never in a wait.  A link is followed unless asked otherwise: a mounted ConfigMap is made of links.
"""

from __future__ import annotations

import errno
import os
import stat


class NotRegular(ValueError):
    """A FIFO, a device or a socket, where a file should be."""

    def __init__(self) -> None:
        super().__init__("is no regular file: nothing else is read here")


def open_regular(path: str | os.PathLike[str], *, follow: bool = True) -> int:
    """A descriptor for reading.  OSError where it cannot be opened, or NotRegular."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    mode = os.stat(path, follow_symlinks=follow).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise NotRegular  # some devices act when they are opened
    descriptor = os.open(path, flags if follow else flags | os.O_NOFOLLOW)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotRegular
    return descriptor


def check_regular(path: str | os.PathLike[str], limit: int) -> None:
    """For a file that a library opens by its name.  OSError, or ValueError as read_regular."""
    descriptor = open_regular(path)
    try:
        if os.fstat(descriptor).st_size > limit:
            raise ValueError(f"longer than {limit} bytes")
    finally:
        os.close(descriptor)


def read_regular(path: str | os.PathLike[str], limit: int, *, follow: bool = True) -> bytes:
    """The whole file.  OSError, or ValueError for what is no file or longer than `limit`."""
    with open(open_regular(path, follow=follow), "rb") as file:
        text = file.read(limit + 1)
    if len(text) > limit:
        raise ValueError(f"longer than {limit} bytes")
    return text
