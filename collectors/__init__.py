"""The list of all collectors: one file a source, one method each.

ALL lists those that the agent runs.  A collector in PROBED asks a source that may never answer, so
it is read in a child of its own (agent/system/child_probe.py)."""

from .amd import AmdCollector
from .cgroups import CgroupsCollector
from .clock import ClockCollector
from .compile_cache import CompileCacheCollector
from .cpu import CpuCollector
from .disk import DiskCollector
from .dns import DnsCollector
from .ec2 import Ec2Collector
from .hardware_errors import HardwareErrorsCollector
from .host import HostCollector
from .identity import IdentityCollector
from .mounts import MountsCollector
from .network import NetworkCollector
from .neuron import NeuronCollector
from .nvidia import NvidiaCollector
from .nvme import NvmeCollector
from .nvme_smart import NvmeSmartCollector
from .pci import PciCollector
from .rdma import RdmaCollector
from .shared_memory import SharedMemoryCollector
from .tasks import TasksCollector
from .units import UnitsCollector

PROBED = (NvidiaCollector, NeuronCollector, CompileCacheCollector, AmdCollector, RdmaCollector,
          MountsCollector, NvmeCollector, NvmeSmartCollector, DnsCollector, UnitsCollector,
          Ec2Collector)
ALL = (HostCollector, CpuCollector, DiskCollector, IdentityCollector, ClockCollector,
       HardwareErrorsCollector, PciCollector, NetworkCollector, TasksCollector, CgroupsCollector,
       SharedMemoryCollector, *PROBED)
