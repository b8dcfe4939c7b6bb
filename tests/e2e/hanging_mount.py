"""A real file system whose server can be made to hang: as much of FUSE as one file needs.

    python hanging_mount.py FOLDER FLAG

Serves FOLDER/data (four bytes) until killed; while the file FLAG is there nothing is answered, and
what was asked meanwhile is answered when FLAG is gone.  Needs root and /dev/fuse, and nothing else.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import struct
import sys

DATA = b"data"
ROOT, FILE = 1, 2
HEADER = struct.Struct("<IIQQIIII")  # length, operation, unique, node, uid, gid, pid, padding
LOOKUP, FORGET, GETATTR, OPEN, READ, STATFS, RELEASE, FLUSH, INIT = 1, 2, 3, 14, 15, 17, 18, 25, 26
INTERRUPT, BATCH_FORGET = 36, 42
DIRECT_IO = 1  # every read is asked for


def attributes(node: int) -> bytes:
    mode, size = (0o40755, 0) if node == ROOT else (0o100644, len(DATA))
    return struct.pack("<QQQQQQIIIIIIIIII", node, size, 1, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096,
                       0)


def answer(operation: int, node: int, body: bytes) -> bytes | int:
    """The body of an answer, or an errno."""
    if operation == INIT:
        return struct.pack("<IIIIHHIIHHI28x", 7, 31, 4096, 0, 8, 8, 4096, 1, 0, 0, 0)
    if operation == GETATTR:
        return struct.pack("<QII", 0, 0, 0) + attributes(node)
    if operation == LOOKUP:
        if body.rstrip(b"\0") != b"data":
            return errno.ENOENT
        return struct.pack("<QQQQII", FILE, 0, 0, 0, 0, 0) + attributes(FILE)
    if operation == OPEN:
        return struct.pack("<QII", 1, DIRECT_IO, 0)
    if operation == READ:
        (offset,) = struct.unpack_from("<Q", body, 8)
        return DATA[offset:]
    if operation == STATFS:
        return struct.pack("<QQQQQIIII24x", 1000, 900, 900, 100, 90, 4096, 255, 4096, 0)
    return b"" if operation in (RELEASE, FLUSH) else errno.ENOSYS


def main(folder: str, flag: str) -> None:
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"hanging", folder.encode(), b"fuse.hanging", 0, options.encode()):
        sys.exit(f"mount: {os.strerror(ctypes.get_errno())}")
    waiting: list[bytes] = []
    while True:
        if select.select([device], [], [], 0.05)[0]:
            waiting.append(os.read(device, 1 << 17))
        while waiting and not os.path.exists(flag):
            asked = waiting.pop(0)
            length, operation, unique, node, *_ = HEADER.unpack_from(asked)
            if operation in (FORGET, BATCH_FORGET, INTERRUPT):
                continue
            found = answer(operation, node, asked[HEADER.size : length])
            error, body = (-found, b"") if isinstance(found, int) else (0, found)
            try:
                os.write(device, struct.pack("<IiQ", 16 + len(body), error, unique) + body)
            except FileNotFoundError:
                continue  # whoever asked was killed


if __name__ == "__main__":
    main(*sys.argv[1:])
