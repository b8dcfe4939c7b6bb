"""What a collector is: where it reads, how often, what it declares and what it hands out.

Owns Roots, Pace, Metric, Sample, LogLine and NoData, the vocabulary between the machine and
everything that decides.  A leaf: it imports nothing of Holdfast and does no I/O.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple, Protocol


class NoData(Exception):
    """The source is not on this machine, or may not be read.  Expected; never an error."""


class Sample(NamedTuple):
    """One reading of one quantity of one subject.

    name     metric name without the `holdfast_` prefix, base unit last (`host_load_average`,
             `host_memory_available_bytes`)
    subject  what was read: "" for the node, else `key=value[,key=value]` (`cpu=3`, `mount=/data`)
    value    the reading in the unit that the name ends in
    boot_s   CLOCK_BOOTTIME seconds at which it was read
    """

    name: str
    subject: str
    value: float
    boot_s: float


def legible(text: str) -> str:
    """Text that any file, page and packet takes.  Names from the machine are bytes; those that are
    no UTF-8 come as lone surrogates, which fail only where the text is written down."""
    if text.isascii():
        return text
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    except UnicodeEncodeError:  # surrogates that stand for no byte, as JSON may hold them
        return text.encode("utf-8", "replace").decode()


def sound(read: list[Sample], metrics: tuple[Metric, ...]) -> list[Sample]:
    """The samples of a reading that may go on: finite numbers, not below zero unless the metric is
    `signed`, with legible subjects, since the core's memory, its journal and its pages take nothing
    else.  All are looked at together first: one reading may have 1,500."""
    values = list(map(itemgetter(2), read))
    good = math.isfinite(sum(values)) and min(values, default=0.0) >= 0.0
    if good and "".join(map(itemgetter(1), read)).isascii():
        return read
    signed = {metric.name for metric in metrics if metric.signed}
    return [one._replace(subject=legible(one.subject)) for one in read
            if math.isfinite(one.value) and (one.value >= 0.0 or one.name in signed)]


class LogLine(NamedTuple):
    """One line of a log, with the cursor by which its source finds it again."""

    source: str
    cursor: int
    boot_s: float
    text: str


NODE_EXPORTER, DCGM_EXPORTER = EXPORTERS = ("node_exporter", "dcgm-exporter")


class Pace(NamedTuple):
    """How often a collector is read: at every `every`-th reading of the fast or of the slow set,
    and no more often than each `least_s` seconds, however short the set's interval is."""

    fast: bool
    every: int = 1
    least_s: float = 0.0


FAST, SLOW = Pace(fast=True), Pace(fast=False)


class Metric(NamedTuple):
    """A collector's declaration of one metric: its name as in Sample, kind and help text.

    minimal    stays on the page with agent.metrics = "minimal": what an alert or a summary of
               many nodes needs
    signed     may be below zero
    served_by  the exporter whose default settings tell the same, or "": many nodes run it anyway,
               and then one of the two is storage for nothing
    """

    name: str
    kind: str  # "gauge" | "counter"
    help: str
    labels: tuple[str, ...] = ()
    minimal: bool = False
    served_by: str = ""  # one of EXPORTERS
    signed: bool = False


class Roots(NamedTuple):
    """Directories (and one device, and names) that collectors may read below: a recorded tree can
    stand in for a machine."""

    proc: str = "/proc"
    sys: str = "/sys"
    kmsg: str = "/dev/kmsg"
    nvml: str = ""  # directory of libnvidia-ml.so.1; empty: where the loader looks by itself
    neuron: str = "/opt/aws/neuron/bin"  # directory of neuron-monitor and neuron-ls
    compile_cache: str = "/var/tmp/neuron-compile-cache"
    tools: str = ""  # directory of smartctl and nvme; empty: the usual ones
    dns_names: Sequence[str] = ()  # what the network's names service has to know
    rocm: str = "/opt/rocm/bin"  # directory of amd-smi
    root: str = ""  # what stands before /etc, /opt, /usr and /var; empty: nothing
    systemd: str = "/run/systemd/system"  # there exactly where systemd is the machine's init
    systemctl: str = ""  # the program; empty: the one on the PATH
    shm: str = "/dev/shm"
    job_caches: Sequence[str] = ()  # compile caches that jobs here were given
    ec2: str = ""  # HOST:PORT of instance metadata; empty: EC2's own address, on EC2 alone


class Collector(Protocol):
    """One source: its name, its metrics, and one method that reads."""

    @property
    def name(self) -> str: ...

    @property
    def pace(self) -> Pace: ...

    @property
    def metrics(self) -> tuple[Metric, ...]: ...

    def collect(self, roots: Roots, boot_s: float) -> list[Sample]: ...


class Probed:
    """Base of a collector whose source may never answer, so that it is read in a child."""

    follows_jobs = False  # its source comes and goes with the jobs of the node

    def here(self, roots: Roots) -> str:
        """"" when the source may be here, else why not; cheap, and read by the agent itself."""
        raise NotImplementedError

    def environ(self, roots: Roots) -> Mapping[str, str]:
        """Environment that its child needs beyond the agent's own."""
        return {}
