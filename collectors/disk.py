"""Space, inodes and write protection of local file systems.

Owns what statvfs tells of them.  Only local types are asked here: a network mount can hang its
reader for ever, so those are read in a child (mounts.py), and a local file system whose path leads
through a network mount is left out.  Several views of one file system count once.  An overlay is a
view of the disk below it, and counts only as the root of a container or a live system.
"""

from __future__ import annotations

import os

from .contract import NODE_EXPORTER, SLOW, Metric, NoData, Roots, Sample
from .sources.mountinfo import LOCAL_TYPES, Mount, is_below, mounts

FILESYSTEMS_MAX = 64
CONTAINERS = "/containers/storage/"  # of podman and CRI-O, wherever a user keeps it
SKIP = ("/run/", "/sys/", "/proc/", "/var/lib/docker/", "/var/lib/kubelet/", "/snap/")
SPACE = (
    Metric("host_filesystem_size_bytes", "gauge", "Size of a file system.",
           ("mount",), True, NODE_EXPORTER),
    Metric("host_filesystem_available_bytes", "gauge",
           "Space that an ordinary user may still fill.", ("mount",), True, NODE_EXPORTER),
    Metric("host_filesystem_inodes", "gauge", "Inodes of a file system.",
           ("mount",), False, NODE_EXPORTER),
    Metric("host_filesystem_free_inodes", "gauge", "Inodes not in use.",
           ("mount",), True, NODE_EXPORTER),
    Metric("host_filesystem_readonly", "gauge",
           "1 when the file system itself is read-only; a read-only view of it does not count.",
           ("mount",), True, NODE_EXPORTER),
)


class DiskCollector:
    """Space, inodes and write protection of each local file system."""

    name = "disk"
    pace = SLOW
    metrics = SPACE

    def collect(self, roots: Roots, boot_s: float) -> list[Sample]:
        """One reading.  NoData without a mount of a local type."""
        found: list[Sample] = []
        for mount in local(mounts(roots)):
            try:
                space = os.statvfs(mount.path)
            except OSError:
                continue  # unmounted between list and read, or not ours to see
            found += space_of(mount, space, boot_s)
        if not found:
            raise NoData(f"{roots.proc}/self/mountinfo lists no local file system")
        return found


def space_of(mount: Mount, space: os.statvfs_result, boot_s: float) -> list[Sample]:
    """The samples of SPACE."""
    subject = f"mount={mount.name}"
    values = (
        space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize,
        space.f_files, space.f_ffree, int(mount.readonly))
    return [
        Sample(metric.name, subject, float(value), boot_s)
        for metric, value in zip(SPACE, values, strict=True)]


def local(table: list[Mount]) -> list[Mount]:
    """Local file systems, each once: by the view of its root that has the shortest path."""
    # Without the root: where that is a network mount, the agent itself comes from it as well.
    network = [mount.point for mount in table if mount.is_network and mount.point != "/"]
    best: dict[str, Mount] = {}
    for mount in table:
        point = mount.point
        if (
            mount.fstype not in LOCAL_TYPES or point.startswith(SKIP)
            or CONTAINERS in point or (mount.fstype == "overlay" and point != "/")
            or any(is_below(point, other) for other in network)
        ):
            continue
        before = best.get(mount.device)
        if before is None or _rank(mount) < _rank(before):
            best[mount.device] = mount
    return list(best.values())[:FILESYSTEMS_MAX]


def _rank(mount: Mount) -> tuple[bool, int]:
    return mount.root != "/", len(mount.point)
