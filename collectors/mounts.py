"""Network mounts: whether each one answers, how fast, and how much space it has.

Owns asking servers and FUSE programs, which may never answer.  Runs in a probe child, one thread a
mount: a mount that hangs is named, left, and asked again once it answers; the others go on.
"""

from __future__ import annotations

import errno
import os
from functools import partial

from .contract import SLOW, Metric, NoData, Probed, Roots, Sample
from .disk import SPACE, space_of
from .sources.mountinfo import Mount, mounts, shown
from .sources.questions import Questions

MOUNTS_MAX = 32
# The mount answered, though not to us (a FUSE mount without allow_other), or is gone by now.
NO_FAULT = frozenset((errno.EACCES, errno.EPERM, errno.ENOENT))


class MountsCollector(Probed):
    """Samples `host_mount_*` of network mounts; read in a child, as a server may never answer."""

    name = "mounts"
    pace = SLOW
    metrics = (
        Metric("host_mount_response_seconds", "gauge",
               "How long a network mount took to answer statvfs.", ("mount", "fstype"), True),
        Metric("host_mount_waiting_seconds", "gauge",
               "Age of a question that a network mount has not answered; 0 when it answers.",
               ("mount", "fstype"), True),
        Metric("host_mount_failed", "gauge",
               "1 when a network mount answers with an error.", ("mount", "fstype", "error"), True),
        *SPACE,
    )

    def __init__(self) -> None:
        self._questions: Questions[os.statvfs_result] = Questions()

    def here(self, roots: Roots) -> str:
        """"" with a network mount.  Reads the table alone, no mount."""
        try:
            return "" if _network(roots) else "no network mount"
        except NoData as reason:
            return str(reason)

    def collect(self, roots: Roots, boot_s: float) -> list[Sample]:
        """One reading.  NoData without a network mount."""
        table = {mount.point: mount for mount in _network(roots)}
        if not table:
            raise NoData("no network mount")
        calls = {point: partial(os.statvfs, mount.path) for point, mount in table.items()}
        found: list[Sample] = []
        for point, waited_s, answer in self._questions.round(calls, boot_s):
            mount = table[point]
            subject = f"mount={mount.name},fstype={shown(mount.fstype)}"
            found.append(Sample("host_mount_waiting_seconds", subject, waited_s, boot_s))
            if answer is None:
                continue
            at_s = answer.boot_s
            found.append(Sample("host_mount_response_seconds", subject, answer.took_s, at_s))
            if answer.value is not None:
                found += space_of(mount, answer.value, at_s)
            elif answer.error is not None and answer.error.errno not in NO_FAULT:
                code = errno.errorcode.get(answer.error.errno or 0, "EIO")
                found.append(Sample("host_mount_failed", f"{subject},error={code}", 1.0, at_s))
        return found


def _network(roots: Roots) -> list[Mount]:
    """Each server's or program's file system once, by its shortest path.  When there are too many,
    file systems of programs are left out first: any user may mount those anywhere."""
    found: dict[tuple[str, str], Mount] = {}
    for mount in sorted(mounts(roots), key=lambda one: (len(one.point), one.point)):
        if mount.is_network:
            found.setdefault((mount.device, mount.root), mount)
    ordered = sorted(found.values(), key=lambda one: one.fstype.startswith("fuse"))
    return ordered[:MOUNTS_MAX]

