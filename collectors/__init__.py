"""Collectors: one file a source, one method each.  ALL lists those that the agent runs."""

from .disk import DiskCollector
from .host import HostCollector

ALL = (HostCollector, DiskCollector)
