"""Which GPUs the ranks of a launcher would take: by their addresses on PCI, as the node has them.

Owns the way from CUDA_VISIBLE_DEVICES to devices.  A number counts among the GPUs that this process
may open: in a job of Slurm's or a container it is not the node's.  Nothing is opened for it: that
would make a driver begin.  NVIDIA's alone; a Neuron core refuses a second process by itself.
"""

from __future__ import annotations

import glob
import os
from typing import List, Mapping, NamedTuple

VISIBLE = "CUDA_VISIBLE_DEVICES"
DEVICES_MAX = 64
READ_MAX = 4096


class Gpu(NamedTuple):
    address: str
    uuid: str
    whole: bool  # not cut into parts (MIG), of which each may be another job's


def taken(environ: Mapping[str, str], nproc: int, root: str = "") -> List[str]:
    """Of the first `nproc` that the environment lets be seen, one a rank.  Where it names none, and
    there are more than ranks, the job may choose any by an argument: none is claimed.  What is no
    whole GPU, as a part of one, is nobody's."""
    known = openable(root)
    listed = environ.get(VISIBLE)
    if listed is None:
        return [one.address for one in known if one.whole] if nproc >= len(known) else []
    found: List[Gpu] = []
    for word in (one.strip() for one in listed.split(",")):
        if word.isdigit():
            same = known[int(word):int(word) + 1]
        else:
            same = [one for one in known if len(word) > 4 and one.uuid.startswith(word)]
        if word == "-1" or word.isdigit() and not same:
            break  # CUDA sees none behind one that is not there
        found += same[:1]
    return [one.address for one in found[:nproc] if one.whole]


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
