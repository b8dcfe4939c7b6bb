"""Which GPUs the ranks of a launcher would take: by their addresses on PCI, as the node has them.

Owns the way from CUDA_VISIBLE_DEVICES, and AMD's variables, to devices.  A number counts among the
GPUs that this process may open: in a job of Slurm's or a container it is not the node's.  Nothing
is opened for it: that would make a driver begin.  A Neuron core refuses a second process by itself.
"""

from __future__ import annotations

import glob
import os
from typing import List, Mapping, NamedTuple

VISIBLE, ROCR, HIP = "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"
KFD = "/sys/class/kfd/kfd/topology/nodes/*/properties"
DEVICES_MAX = 64
READ_MAX = 4096


class Gpu(NamedTuple):
    address: str
    uuid: str
    whole: bool  # not cut into parts (MIG, AMD's partitions), of which each may be another job's


def taken(environ: Mapping[str, str], nproc: int, root: str = "") -> List[str]:
    """Of the first `nproc` that the environment lets be seen, one a rank.  Where it names none, and
    there are more than ranks, the job may choose any by an argument: none is claimed.  What is no
    whole GPU, as a part of one, is nobody's."""
    seen = openable(root)
    lists = [environ.get(VISIBLE)]
    if not seen:  # ROCr's list is of the node's, HIP's of what that one left; HIP reads CUDA's too
        seen = openable_amd(root)
        lists = [environ.get(ROCR), environ.get(HIP, environ.get(VISIBLE))]
    if all(listed is None for listed in lists):
        return [one.address for one in seen if one.whole] if nproc >= len(seen) else []
    for listed in lists:
        seen = seen if listed is None else chosen(listed, seen)
    return [one.address for one in seen[:nproc] if one.whole]


def chosen(listed: str, known: List[Gpu]) -> List[Gpu]:
    """Those that a driver's list names, up to the first that is not there."""
    found: List[Gpu] = []
    for word in (one.strip() for one in listed.split(",")):
        if word.isdigit():
            same = known[int(word):int(word) + 1]
        else:
            same = [one for one in known if len(word) > 4 and one.uuid.startswith(word)]
        if word == "-1" or word.isdigit() and not same:
            break  # CUDA sees none behind one that is not there
        found += same[:1]
    return found


def openable(root: str = "") -> List[Gpu]:
    """Each GPU that this process may open, in the order of their addresses."""
    found = []
    for path in sorted(glob.glob(root + "/proc/driver/nvidia/gpus/*/information"))[:DEVICES_MAX]:
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                lines = file.read(READ_MAX).splitlines()
        except OSError:
            continue
        rows = (line.partition(":") for line in lines)
        fields = {key.strip(): text.strip() for key, _, text in rows}
        minor = fields.get("Device Minor", "")
        # A cgroup's list of devices, and a container's, counts for this question as for opening.
        if minor.isdigit() and os.access("%s/dev/nvidia%s" % (root, minor), os.R_OK | os.W_OK):
            address = os.path.basename(os.path.dirname(path))
            parts = "%s/proc/driver/nvidia/capabilities/gpu%s/mig/gi*" % (root, minor)
            found.append(Gpu(address, fields.get("GPU UUID", ""), not glob.glob(parts)))
    return found


def openable_amd(root: str = "") -> List[Gpu]:
    """The same of AMD's, in the order in which ROCr counts them: that of the kernel's nodes."""
    found: List[Gpu] = []
    for path in sorted(glob.glob(root + KFD), key=_node_number)[:2 * DEVICES_MAX]:
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                rows = (line.split() for line in file.read(READ_MAX).splitlines())
                fields = {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdigit()}
        except OSError:
            continue
        minor = fields.get("drm_render_minor", 0)
        device = "%s/dev/dri/renderD%d" % (root, minor)
        if not fields.get("simd_count") or not minor or not os.access(device, os.R_OK | os.W_OK):
            continue  # processors are nodes as well
        at = fields.get("location_id", 0)
        address = "%04x:%02x:%02x.%x" % (
            fields.get("domain", 0), at >> 8 & 0xFF, at >> 3 & 0x1F, at & 7)
        found.append(Gpu(address, "GPU-%016x" % fields.get("unique_id", 0), True))
    addresses = [one.address for one in found]
    return [one._replace(whole=addresses.count(one.address) == 1) for one in found[:DEVICES_MAX]]


def _node_number(path: str) -> int:
    name = os.path.basename(os.path.dirname(path))
    return int(name) if name.isdigit() else 0
