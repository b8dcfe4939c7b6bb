"""The mount table: what is mounted where, of which type, and whether the file system is read-only.

Owns parsing /proc/self/mountinfo.  A leaf like roots.py.  Never touches a mount point: a dead
server behind one holds whoever does.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from .roots import Roots, read_text

MOUNTS_MAX = 4096  # a node with hundreds of pods has a few thousand lines
LOCAL_TYPES = frozenset(("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "overlay", "tmpfs", "f2fs"))
NETWORK_TYPES = frozenset((
    "nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "ceph", "beegfs", "beegfs_nodev", "wekafs",
    "afs", "9p", "virtiofs", "pvfs2", "panfs", "glusterfs", "fuse",  # fuse: without a subtype
))  # fmt: skip
# Programs of a desktop or of a container's runtime: nothing of a training run lies behind them.
FUSE_OWN = frozenset(("fuse.lxcfs", "fuse.portal", "fuse.gvfsd-fuse", "fuse.fuse-overlayfs"))
# What a file system says that takes no writes any more.  ext4 that gave up leaves `rw` as it was
# since Linux 6.12, and says `emergency_ro` since 6.15.
READONLY = frozenset(("ro", "emergency_ro", "shutdown"))
OCTAL = re.compile(r"\\([0-7]{3})")


class Mount(NamedTuple):
    """One mount.  `device` is major:minor, equal for all views of one file system; `root` is the
    folder of it that is seen here."""

    point: str
    fstype: str
    device: str
    root: str
    readonly: bool  # the file system itself, not this view of it

    @property
    def is_network(self) -> bool:
        """Whether a server or a program answers for it, which may not."""
        return self.fstype in NETWORK_TYPES or (
            self.fstype.startswith("fuse.") and self.fstype not in FUSE_OWN
        )


def mounts(roots: Roots) -> list[Mount]:
    """Every mount that is seen: of several on one point the last, which hides the others.  NoData
    without the table; a line that cannot be read is left out."""
    found: dict[str, Mount] = {}
    for line in read_text(f"{roots.proc}/self/mountinfo").splitlines()[:MOUNTS_MAX]:
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
    readonly = not READONLY.isdisjoint(fields[dash + 3].strip().split(","))
    return Mount(point, fields[dash + 1], fields[2], root, readonly)


def _character(octal: re.Match[str]) -> str:
    return chr(int(octal.group(1), 8) & 0xFF)


def is_below(point: str, other: str) -> bool:
    """Whether the way to `point` leads through `other`."""
    return point == other or point.startswith(other.rstrip("/") + "/")
