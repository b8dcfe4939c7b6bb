"""Collectors: one file a source, one method each.  ALL lists those that the agent runs; those in
PROBED may never answer, so each is read in a child of its own (agent/probe.py)."""

from .compile_cache import CompileCacheCollector
from .disk import DiskCollector
from .host import HostCollector
from .network import NetworkCollector
from .neuron import NeuronCollector
from .nvidia import NvidiaCollector
from .rdma import RdmaCollector

PROBED = (NvidiaCollector, NeuronCollector, CompileCacheCollector, RdmaCollector)
ALL = (HostCollector, DiskCollector, NetworkCollector, *PROBED)
