"""Opens files that people wrote: without waiting, and only where they are regular files.

Owns one opening.  A FIFO, a device or a folder in the place of a file must end in an error and
never in a wait.  A link is followed unless asked otherwise: a mounted ConfigMap is made of links.
"""

from __future__ import annotations

import os
import stat

NO_FILE = "is no regular file: nothing else is read here"


def open_regular(path: str | os.PathLike[str], *, follow: bool = True) -> int:
    """A descriptor for reading.  OSError where it cannot be opened, ValueError for no file."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    if not stat.S_ISREG(os.stat(path, follow_symlinks=follow).st_mode):
        raise ValueError(NO_FILE)  # some devices act when they are opened
    descriptor = os.open(path, flags if follow else flags | os.O_NOFOLLOW)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(NO_FILE)
    return descriptor


def read_regular(
    path: str | os.PathLike[str], limit: int, *, follow: bool = True
) -> bytes:
    """The whole file.  OSError, or ValueError for what is no file or longer than `limit`."""
    with open(open_regular(path, follow=follow), "rb") as file:
        text = file.read(limit + 1)
    if len(text) > limit:
        raise ValueError(f"longer than {limit} bytes")
    return text
