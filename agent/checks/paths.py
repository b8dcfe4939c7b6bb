"""Whether what is written to a path is read back the same: `python -m holdfast.agent.checks.paths`.

Owns that one question.  Asked by the check `paths`, and by a run's launcher as the run's own user
before its first start; in a child in both cases, since a mount may never answer.
"""

from __future__ import annotations

import json
import os
import secrets
import sys

PATH_BYTES = 1 << 20


def written_and_read(path: str) -> str:
    """Why what was written there is not read back; "" when it is."""
    data, name = os.urandom(PATH_BYTES), os.path.join(path, f".holdfast-{secrets.token_hex(8)}")
    try:
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        return f"nothing can be written: {error.strerror}"
    try:
        os.unlink(name)  # a check that is killed leaves nothing behind
        if os.write(descriptor, data) != len(data):
            return "it takes no 1 MB"
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)  # what is read comes from there
        if os.pread(descriptor, len(data), 0) != data:
            return "what is read back is not what was written"
        return ""
    except OSError as error:
        return error.strerror or str(error)
    finally:
        os.close(descriptor)


def nearest(path: str) -> str:
    """The folder in which this one is, or would be made."""
    path = os.path.abspath(path)
    while not os.path.lexists(path) and path != "/":
        path = os.path.dirname(path)
    return path


def main(words: list[str]) -> None:
    """`[--new DIR] PATH ...`: DIR may have yet to be made by the job."""
    new, paths = (words[1], words[2:]) if words[:1] == ["--new"] else ("", words)
    rows = [[path, written_and_read(nearest(path) if path == new else path)] for path in paths]
    print(json.dumps(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
