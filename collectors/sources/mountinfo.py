"""The mount table: what is mounted where, of which type, and whether the file system is read-only.

Owns parsing /proc/self/mountinfo, and how a path of any bytes is shown.  A leaf like contract.py.
Never touches a mount point: a dead server behind it would hold the reader.
"""

from __future__ import annotations

import hashlib
import re
from typing import NamedTuple

from ..contract import Roots
from .files import read_text

MOUNTS_MAX = 4096  # a node with hundreds of pods has a few thousand lines
LOCAL_TYPES = frozenset(("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "overlay", "tmpfs", "f2fs"))
NETWORK_TYPES = frozenset((
    "nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "ceph", "beegfs", "beegfs_nodev", "wekafs",
    "afs", "9p", "virtiofs", "pvfs2", "panfs", "glusterfs", "fuse",  # fuse: without a subtype
))
# Programs of a desktop or of a container's runtime: nothing of a training run lies behind them.
FUSE_OWN = frozenset(("fuse.lxcfs", "fuse.portal", "fuse.gvfsd-fuse", "fuse.fuse-overlayfs"))
# Options of a file system that takes no writes any more.  Since Linux 6.12 an ext4 that gave up
# leaves `rw` as it was, and since 6.15 it shows `emergency_ro`.
READONLY = frozenset(("ro", "emergency_ro", "shutdown"))
SHOWN_MAX = 256  # characters of a path as it is shown; a path may have 4,095 bytes
BYTE = 0xDC00  # Python's surrogate for a byte that is no UTF-8 is this and the byte
OCTAL = re.compile(r"\\([0-7]{3})")


class Mount(NamedTuple):
    """One mount.  `point` may hold bytes that are no UTF-8, as surrogates.  `device` is
    major:minor, equal for all views of one file system; `root` is the folder of it that is seen
    here."""

    point: str
    fstype: str
    device: str
    root: str
    readonly: bool  # the file system itself, not this view of it

    @property
    def path(self) -> bytes:
        """The mount point as the kernel takes it."""
        return self.point.encode("utf-8", "surrogateescape")

    @property
    def name(self) -> str:
        """The mount point as people and labels show it."""
        return shown(self.point)

    @property
    def is_network(self) -> bool:
        """Whether a server or a program answers for it, and may never do so."""
        return self.fstype in NETWORK_TYPES or (
            self.fstype.startswith("fuse.") and self.fstype not in FUSE_OWN)


def mounts(roots: Roots) -> list[Mount]:
    """Every visible mount: of several on one point the last, which hides the others.  Raises NoData
    without the table; a line that cannot be read is left out."""
    found: dict[str, Mount] = {}
    text = read_text(f"{roots.proc}/self/mountinfo", errors="surrogateescape")
    for line in text.split("\n")[:MOUNTS_MAX]:  # a path may hold other ends of lines
        mount = parse(line)
        if mount is not None:
            found.pop(mount.point, None)
            found[mount.point] = mount
    return list(found.values())


def parse(line: str) -> Mount | None:
    """One line: `ID PARENT MAJOR:MINOR ROOT POINT OPTIONS [TAG ...] - TYPE SOURCE SUPER_OPTIONS`.

    OPTIONS are of this view alone: a unit with ProtectSystem=strict sees `ro` everywhere.  What a
    kernel that gave up on a file system changes is SUPER_OPTIONS; of ext4 on Linux 6.12 to 6.14 its
    log alone tells."""
    fields = line.split(" ")
    try:
        dash = fields.index("-", 6)
    except ValueError:
        return None
    if len(fields) < dash + 4 or not fields[4].startswith("/"):
        return None
    point, root = (OCTAL.sub(_character, text) for text in (fields[4], fields[3]))
    if "\0" in point:
        return None  # no path of the kernel's
    readonly = not READONLY.isdisjoint(fields[dash + 3].strip().split(","))
    return Mount(point, fields[dash + 1], fields[2], root, readonly)


def _character(octal: re.Match[str]) -> str:
    byte = int(octal.group(1), 8) & 0xFF
    return chr(byte if byte < 0x80 else BYTE + byte)


def shown(path: str) -> str:
    """A path as one word of printable text without a comma, for a sample's subject is split there.
    Two paths are never shown alike: a byte that is no UTF-8 is `\\xff`, a backslash is two."""
    if path.isascii() and path.isprintable() and "," not in path and "\\" not in path:
        text = path
    else:
        text = "".join(map(_escaped, path))
    if len(text) <= SHOWN_MAX:
        return text
    whole = path.encode("utf-8", "surrogatepass")
    return f"{text[: SHOWN_MAX - 20]}...{hashlib.blake2b(whole, digest_size=8).hexdigest()}"


def _escaped(one: str) -> str:
    number = ord(one)
    if one == "\\":
        return "\\\\"
    if one.isprintable() and one != ",":
        return one
    if number < 0x80 or BYTE + 0x80 <= number <= BYTE + 0xFF:
        return f"\\x{number & 0xFF:02x}"
    return f"\\u{number:04x}" if number <= 0xFFFF else f"\\U{number:08x}"


def is_below(point: str, other: str) -> bool:
    """Whether the way to `point` leads through `other`."""
    return point == other or point.startswith(other.rstrip("/") + "/")
