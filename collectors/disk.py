"""Space, inodes and write protection of local file systems.

Owns what statvfs tells.  Only local types are asked: a network mount can hang its reader for ever,
so those belong to a probe in a child.  Mounts come from the recorded or real /proc.
"""

from __future__ import annotations

import os

from .roots import Roots, read_text
from .sample import NODE_EXPORTER, Metric, NoData, Sample

LOCAL_TYPES = frozenset(("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "overlay", "tmpfs", "f2fs"))
MOUNTS_MAX = 64
SKIP = ("/run/", "/sys/", "/proc/", "/var/lib/docker/", "/var/lib/kubelet/", "/snap/")


class DiskCollector:
    """See the module."""

    name = "disk"
    fast = False
    metrics = (
        Metric("host_filesystem_size_bytes", "gauge", "Size of a file system.",
               ("mount",), True, NODE_EXPORTER),
        Metric("host_filesystem_available_bytes", "gauge",
               "Space that an ordinary user may still fill.", ("mount",), True, NODE_EXPORTER),
        Metric("host_filesystem_inodes", "gauge", "Inodes of a file system.",
               ("mount",), False, NODE_EXPORTER),
        Metric("host_filesystem_free_inodes", "gauge", "Inodes not in use.",
               ("mount",), True, NODE_EXPORTER),
        Metric("host_filesystem_readonly", "gauge", "1 when mounted read-only.",
               ("mount",), True, NODE_EXPORTER),
    )  # fmt: skip

    def collect(self, roots: Roots, boot_s: float) -> list[Sample]:
        """One reading.  NoData without a mount of a local type."""
        found: list[Sample] = []
        for mount, readonly in _mounts(roots):
            try:
                space = os.statvfs(mount)
            except OSError:
                continue  # unmounted between list and read, or not ours to see
            subject = f"mount={mount}"
            for name, value in (
                ("host_filesystem_size_bytes", space.f_blocks * space.f_frsize),
                ("host_filesystem_available_bytes", space.f_bavail * space.f_frsize),
                ("host_filesystem_inodes", space.f_files),
                ("host_filesystem_free_inodes", space.f_ffree),
                ("host_filesystem_readonly", int(readonly)),
            ):
                found.append(Sample(name, subject, float(value), boot_s))
        if not found:
            raise NoData(f"{roots.proc}/self/mounts lists no local file system")
        return found


def _mounts(roots: Roots) -> list[tuple[str, bool]]:
    """(mount point, read-only) of local file systems; the last one mounted on a point counts."""
    seen: dict[str, bool] = {}
    for line in read_text(f"{roots.proc}/self/mounts").splitlines():
        fields = line.split()
        if len(fields) < 4 or fields[2] not in LOCAL_TYPES:
            continue
        mount = fields[1].replace("\\040", " ")
        if not mount.startswith(SKIP) and "," not in mount and len(seen) < MOUNTS_MAX:
            seen[mount] = "ro" in fields[3].split(",")
    return list(seen.items())
