"""Where collectors read: the roots of /proc, /sys and the kernel log, so that a recorded tree can
stand in for a machine.  A leaf, like sample.py."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from .contract import NoData

READ_MAX_BYTES = 1 << 20


class Roots(NamedTuple):
    """Directories (and one device, and names) that collectors may read below."""

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
    ec2: str = ""  # HOST:PORT of instance metadata; empty: EC2's own address, on EC2 alone


def read_text(path: str, limit_bytes: int = READ_MAX_BYTES, errors: str = "replace") -> str:
    """At most `limit_bytes` of a file; `errors` is what becomes of bytes that are no UTF-8.  NoData
    when it is not there or may not be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise NoData(f"{path}: {error.strerror}") from error
    try:
        parts, left = [], limit_bytes
        while left > 0 and (part := os.read(fd, min(left, 65536))):  # /proc answers in pieces
            parts.append(part)
            left -= len(part)
        return b"".join(parts).decode("utf-8", errors)
    except OSError as error:
        raise NoData(f"{path}: {error.strerror}") from error
    finally:
        os.close(fd)
