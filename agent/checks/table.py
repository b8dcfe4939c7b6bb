"""The table of checks: everything that `holdfast check` can find out about a node.

Owns one row a check.  Its function is a few lines in the module that the row names, and is called
in a child (isolate.py); what its numbers mean is said by agent/core/checks/verdict.py.  How one is
added stands in docs/checks.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..core.checks import common_cause
from ..core.checks.verdict import LIMIT_MAX

BEFORE, DURING, AFTER, ON_DEMAND = "before", "during", "after", "on demand"
NODE, DEVICE, GROUP = "node", "device", "group"
TORCH, PATHS, AGENT = "torch", "paths", "agent"
MB, GB = 1 << 20, 1 << 30


class Check(NamedTuple):
    """One check.

    place       "module:function" in this folder.  With TORCH among `needs` it is called in the
                Python that has torch, with its options; else here, with the Facts (facts.py)
    needs       TORCH, PATHS (some to be written to) or AGENT; without it the verdict is unknown,
                or the check is left out where nobody asked for it by name
    when        BEFORE a job, DURING it, AFTER it, or ON_DEMAND alone
    disturbs    whether training on this node becomes slower, or gets no memory, meanwhile
    evidence    what its verdict rests on
    todo        what a person does when it fails
    measures    what it measures, as limits name it
    reads       what else a person may ask of it: path, sizes, ranks
    """

    name: str
    proves: str
    place: str
    scope: str
    deadline_s: float
    evidence: str
    todo: str
    needs: tuple[str, ...] = ()
    when: tuple[str, ...] = (BEFORE, DURING, AFTER)
    disturbs: bool = False
    memory_bytes: int = 1 * GB
    measures: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()


CHECKS: tuple[Check, ...] = (
    Check("incidents", "nothing fatal is known of this node", "gate:incidents", NODE, 2.0,
          "the agent's open incidents",
          "`holdfast incidents` says what was found, `holdfast close` that it is repaired",
          needs=(AGENT,)),
    Check("drift", "drivers, firmware and libraries are those of the other nodes", "gate:drift",
          NODE, 2.0, "what the agents' store knows of each node",
          "`holdfast drift` lists all of it: bring this node to what the others have",
          needs=(AGENT,)),
    Check("devices", "as many accelerators as this machine must have, of that model",
          "gate:devices", NODE, 20.0, "NVML, neuron-ls, amd-smi and the PCI bus against a profile",
          "reboot the node; what is missing then is to be replaced"),
    Check("accelerators", "no accelerator reports memory, clocks, links or PCIe lanes as unwell",
          "gate:accelerators", DEVICE, 20.0, "NVML, neuron-monitor and amd-smi",
          "`holdfast explain row_remap_failed` and its like say what each finding asks for"),
    Check("fabric", "every GPU is in its NVLink fabric", "gate:fabric_state", NODE, 20.0,
          "NVML's fabric state, nvidia-fabricmanager.service",
          "`holdfast explain fabric_manager_down`"),
    Check("network", "no network card is lost, down or slower than it can be", "gate:network",
          NODE, 10.0, "/sys/class/net, /sys/class/infiniband",
          "`holdfast explain nic_link_down`"),
    Check("hardware", "no memory, processor, PCIe device or drive reports failure",
          "gate:hardware", NODE, 10.0, "EDAC, AER and NVMe", "`holdfast explain nvme_failing`"),
    Check("memory", "memory is to be had, and no limit of the host is nearly reached",
          "gate:memory", NODE, 5.0, "/proc/meminfo, /proc/sys",
          "`holdfast explain host_memory_low`: end what an earlier job left behind"),
    Check("disk", "no file system is full or became read-only", "gate:disk", NODE, 10.0,
          "statvfs of every mount", "`holdfast explain disk_space_low`"),
    Check("clock", "the clock is kept, right and fast to read", "gate:clock", NODE, 5.0,
          "adjtimex, the clock source", "`holdfast explain clock_unsynchronised`"),
    Check("paths", "what is written to the checkpoint paths is read back the same",
          "gate:paths", NODE, 15.0, "1 MB written, synced, read back and deleted in each",
          "mount it, or repair the storage: a job would train and keep nothing", needs=(PATHS,),
          reads=("path",)),
    Check("tensor", "each device computes what is known, bit for bit", "device:tensor", DEVICE,
          60.0, "an integer product against the host's, and every product against its own repeat",
          "run it again; a device that differs twice is to be replaced", needs=(TORCH,),
          when=(BEFORE, AFTER), disturbs=True, memory_bytes=8 * GB),
    Check("memory_bandwidth", "each device's memory is as fast as it was",
          "device:memory_bandwidth", DEVICE, 60.0, "copies within a device's memory, median of 3",
          "look for another job on the node, then for throttling", needs=(TORCH,),
          when=(BEFORE, AFTER), disturbs=True, memory_bytes=8 * GB,
          measures=("memory_bandwidth",)),
    Check("gemm", "each device multiplies matrices as fast as it did", "device:gemm", DEVICE,
          60.0, "products of matrices, median of 3",
          "look for another job on the node, then for throttling", needs=(TORCH,),
          when=(BEFORE, AFTER), disturbs=True, memory_bytes=8 * GB,
          measures=("gemm_float32", "gemm_bfloat16")),
    Check("host_copy", "data goes to each device and back, unchanged and as fast as it did",
          "device:host_copy", DEVICE, 60.0, "copies in both directions, median of 3",
          "compare the device's PCIe lanes with its best (check accelerators)", needs=(TORCH,),
          when=(BEFORE, AFTER), disturbs=True, memory_bytes=8 * GB, measures=("host_copy",)),
    Check("collectives", "the node's devices reduce, gather and exchange exactly, and as fast",
          "collectives:collectives", GROUP, 120.0,
          "six operations over local ranks, every element compared",
          "`holdfast check collectives --sizes 1M,64M,1G` shows at which size; then the fabric",
          needs=(TORCH,), when=(BEFORE, AFTER), disturbs=True, memory_bytes=16 * GB,
          measures=("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast",
                    "sendrecv"), reads=("sizes", "ranks")),
    Check("peers", "nodes compute and exchange with each other as they must", "gate:peers", GROUP,
          2.0, "`holdfast check --peers`, kept by each node for itself",
          "`holdfast check --peers NODE,NODE,...`, the same on each of them", when=(ON_DEMAND,),
          disturbs=True, measures=("all_reduce", "all_gather", "reduce_scatter")),
    *(Check(f"dcgm_{level}", f"NVIDIA's own diagnostic finds nothing, level {level}",
            f"vendor:dcgm_{level}", DEVICE, deadline_s, f"dcgmi diag -r {level} --json",
            "what it names says `dcgmi diag`; `holdfast explain gpu_needs_inspection`",
            when=(ON_DEMAND,), disturbs=True, memory_bytes=0)
      for level, deadline_s in ((1, 180.0), (2, 900.0), (3, 3600.0), (4, 10800.0))),
    Check("nccl_tests", "the GPUs exchange what they must, by NVIDIA's nccl-tests",
          "vendor:nccl_tests", GROUP, 900.0, "all_reduce_perf and its like, as far as installed",
          "the size at which it breaks says whether it is latency or a link; then the fabric",
          when=(ON_DEMAND,), disturbs=True, memory_bytes=0,
          measures=("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast",
                    "sendrecv"), reads=("sizes",)),
    Check("nccom_test", "the Neuron cores exchange what they must, by AWS' nccom-test",
          "vendor:nccom_test", GROUP, 3600.0,
          "nccom-test allr, allg, redsct, alltoall and sendrecv, each with --check",
          "`neuron-ls` and `neuron-top` say which device is missing or held", when=(ON_DEMAND,),
          disturbs=True, memory_bytes=0,
          measures=("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "sendrecv"),
          reads=("sizes",)),
    Check("efa_loopback", "each EFA device sends to itself what it must, by libfabric",
          "vendor:efa_loopback", DEVICE, 420.0, "fi_pingpong -p efa -c, every byte compared",
          "`fi_info -p efa`; the security group must let a node reach itself", when=(ON_DEMAND,),
          disturbs=True, memory_bytes=0, measures=("efa_loopback",)),
    Check("rvs", "AMD's own stress test meets its targets", "vendor:rvs", DEVICE, 1800.0,
          "rvs -c gst_single.conf", "`rvs -g` lists the GPUs; run it again on the one that failed",
          when=(ON_DEMAND,), disturbs=True, memory_bytes=0),
)
BY_NAME = {one.name: one for one in CHECKS}


NOT_A_ROUND = common_cause.NOT_A_ROUND
PASSIVE, FULL = "passive", "full"  # words of checks.gate
TORCH_START_S = 120.0  # until torch is imported: a cold one reads 2 GB over a network


def of_gate(words: tuple[str, ...]) -> tuple[str, ...]:
    """The names that checks.gate stands for, in the table's order."""
    return tuple(one.name for one in CHECKS if one.name in words
                 or BEFORE in one.when and (FULL in words or PASSIVE in words and not one.disturbs))


def gate_words() -> tuple[str, ...]:
    return (PASSIVE, FULL, *BY_NAME)


def gap_words() -> tuple[str, ...]:
    """What may be made between two generations: the rounds before a job."""
    return tuple(one.name for one in CHECKS if BEFORE in one.when and one.name not in NOT_A_ROUND)


def limit_s(words: tuple[str, ...]) -> float:
    """How long a round of these may take, made twice where something fails."""
    found = [BY_NAME[name] for name in of_gate(words)]
    torch = [one.deadline_s for one in found if TORCH in one.needs]
    slowest_s = max((one.deadline_s for one in found if TORCH not in one.needs), default=0.0)
    return 2 * (slowest_s + sum(torch) + TORCH_START_S * bool(torch)) + 10.0


def limits_of(rows: Iterable[str]) -> dict[str, float]:
    """The rows of checks.limits.  Raises ValueError with what to write."""
    known = [name for one in CHECKS for name in one.measures]
    found = {}
    for row in rows:
        name, sign, value = (part.strip() for part in row.partition(">="))
        try:
            found[name] = float(value)
        except ValueError:
            sign = ""
        if not sign or name not in known or not 0 <= found[name] <= LIMIT_MAX:
            raise ValueError(f"checks.limits: {row!r}: write NAME >= NUMBER, in bytes or "
                             f"operations a second, 0 to {LIMIT_MAX:g}; NAME is one of "
                             f"{', '.join(known)}")
    return found


def unread(checks: Iterable[Check], given: Iterable[str]) -> str:
    """The first of these that none of the checks reads, in words; "" where each is read."""
    read = {word for one in checks for word in one.reads}
    for word in given:
        if word not in read:
            names = ", ".join(one.name for one in CHECKS if word in one.reads)
            return f"--{word}: none of these checks reads it; {names} would"
    return ""


def compiled(checks: Iterable[Check]) -> tuple[Check, ...]:
    """Those with a graph that XLA devices compile.  Raises ValueError for none."""
    found = tuple(one for one in checks if one.place.startswith("device:"))
    if not found:
        names = ", ".join(one.name for one in CHECKS if one.place.startswith("device:"))
        raise ValueError(f"--warm: none of these is compiled; {names} are")
    return found


def chosen(names: tuple[str, ...]) -> tuple[Check, ...]:
    """The checks of these names, in their order; without any, those that are made before a job.
    Raises ValueError that names the nearest for one that is not known."""
    unknown = [one for one in names if one not in BY_NAME]
    if unknown:
        import difflib  # needed for errors alone

        near = difflib.get_close_matches(unknown[0], BY_NAME, 1)
        meant = f"did you mean {near[0]}?" if near else f"there are {', '.join(BY_NAME)}"
        raise ValueError(f"there is no check {unknown[0]!r}: {meant}")
    if names:
        return tuple(BY_NAME[one] for one in dict.fromkeys(names))
    return tuple(one for one in CHECKS if BEFORE in one.when)
