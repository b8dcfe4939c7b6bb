"""What this node is made of: machine, kernel, drivers, libraries and firmware, with versions.

Owns the files in which versions stand.  Reads small local files only, and those seldom: nothing
here changes while a job runs, but one node that was installed otherwise than its peers costs weeks.
A file that is missing costs its own row; what a job carries in its own environment is not seen.
"""

from __future__ import annotations

import json
import os
import platform
import re
import time
from collections.abc import Callable, Iterator

from .contract import SLOW, Metric, Roots, Sample
from .sources.accelerator import plain
from .sources.files import names_in, read_text, text_of

EVERY_S = 600.0  # a driver may be replaced on a running machine
ENTRIES_MAX = 4096  # of one directory
LIBRARIES_MAX = 4  # versions of one library beside each other
DEVICES_MAX = 128
SMALL_BYTES, TEXT_BYTES = 4096, 1 << 16
PACKAGES_MAX_BYTES = 32 << 20  # dpkg's list; a large machine has 5 MB

# module of the kernel -> component
MODULES = {
    "nvidia": "nvidia_driver", "neuron": "neuron_driver", "amdgpu": "amdgpu_driver",
    "efa": "efa_driver", "ena": "ena_driver", "mlx5_core": "mlx5_driver", "gdrdrv": "gdrcopy",
    "nvidia_fs": "gpudirect_storage", "lustre": "lustre_client",
}
# component -> library, whose file name ends in its version, and folders to look in
LIBRARIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "nccl": ("libnccl.so", ("usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64",
                            "usr/local/lib", "opt/nccl/build/lib")),
    "rccl": ("librccl.so", ("opt/rocm/lib",)),
    "neuron_runtime": ("libnrt.so", ("opt/aws/neuron/lib",)),
    "neuron_collectives": ("libnccom.so", ("opt/aws/neuron/lib",)),
}
# package of Debian -> component
PACKAGES = {
    "libnccl2": "nccl", "libnccl-ofi": "ofi_nccl", "aws-ofi-nccl": "ofi_nccl",
    "libfabric-aws-bin": "libfabric", "libfabric1": "libfabric", "rccl": "rccl",
    "aws-neuronx-runtime-lib": "neuron_runtime", "aws-neuronx-collectives": "neuron_collectives",
    "aws-neuronx-tools": "neuron_tools", "datacenter-gpu-manager": "dcgm",
    "cuda-toolkit": "cuda", "rocm-core": "rocm",
}
FABRIC_MANAGER = "nvidia-fabricmanager"  # the package's name goes on with the driver's branch
# What the installer of EFA leaves behind lists packages as NAME_VERSION or NAME-VERSION.
EFA_LIST = "opt/amazon/efa_installed_packages"
EFA_PATTERNS = {
    "efa_installer": re.compile(r"EFA installer version:\s*([A-Za-z0-9.]{1,32})"),
    "libfabric": re.compile(r"(?:^|\s)libfabric1?-aws(?:-bin)?[_-](\d[A-Za-z0-9.]{0,31})"),
    "ofi_nccl": re.compile(r"(?:^|\s)(?:libnccl-ofi|aws-ofi-nccl)[_-](\d[A-Za-z0-9.]{0,31})"),
}
NUMBERS = re.compile(r"\d{1,6}(\.\d{1,6})+\Z")
Row = tuple[str, str, str]  # metric, component, version


class IdentityCollector:
    """Info metrics with the versions of this node's parts, read anew every ten minutes."""

    name = "identity"
    pace = SLOW
    metrics = (
        Metric("host_info", "gauge", "Always 1; the machine, its kernel and its system.",
               ("vendor", "product", "cpu", "arch", "kernel", "os"), True),
        Metric("software_info", "gauge", "Always 1; a driver or library of the node's own.",
               ("component", "version"), True),
        Metric("firmware_info", "gauge", "Always 1; the firmware of a kind of part.",
               ("component", "version"), True),
    )

    def __init__(self) -> None:
        self._due_s = 0.0  # CLOCK_MONOTONIC
        self._samples: list[Sample] = []
        self._listed: tuple[int, int] = (0, 0)  # dpkg's list when it was read: time, size
        self._packages: list[Row] = []

    def collect(self, roots: Roots, boot_s: float) -> list[Sample]:
        """Everything known, read anew every ten minutes.  NoData without a kernel to ask."""
        if time.monotonic() < self._due_s:
            return self._samples
        subject = ",".join(f"{key}={plain(value)}" for key, value in _host(roots).items())
        found = [Sample("host_info", subject, 1.0, boot_s)]
        parts: tuple[Callable[[Roots], Iterator[Row]], ...] = (
            _modules, _libraries, _toolkits, _efa, self._debian, _machine_firmware, _nic_firmware,
            _nvme_firmware)
        rows: dict[Row, None] = {}
        for part in parts:
            rows |= dict.fromkeys(part(roots))
        for metric, component, version in sorted(rows):
            labels = f"component={plain(component)},version={plain(version)}"
            found.append(Sample(metric, labels, 1.0, boot_s))
        self._samples, self._due_s = found, time.monotonic() + EVERY_S
        return found

    def _debian(self, roots: Roots) -> Iterator[Row]:
        """Packages of interest from dpkg's list, which is read again only when it changed."""
        path = f"{roots.root}/var/lib/dpkg/status"
        try:
            stat = os.stat(path)
        except OSError:
            return
        listed = (stat.st_mtime_ns, stat.st_size)
        if listed != self._listed:
            self._packages = list(_packages(path))
            self._listed = listed
        yield from self._packages


def _word(path: str) -> str:
    """A small file's first line; "" when there is no such file."""
    return text_of(path, SMALL_BYTES).partition("\n")[0].strip()


def _host(roots: Roots) -> dict[str, str]:
    """Labels of host_info.  NoData when not even the kernel's release can be read."""
    kernel = read_text(f"{roots.proc}/sys/kernel/osrelease", SMALL_BYTES).strip()
    dmi = f"{roots.sys}/class/dmi/id"
    system = ""
    for path in ("etc/os-release", "usr/lib/os-release"):
        found = _assigned(text_of(f"{roots.root}/{path}", TEXT_BYTES), "PRETTY_NAME")
        system = system or found
    return {
        "vendor": _word(f"{dmi}/sys_vendor"), "product": _word(f"{dmi}/product_name"),
        "cpu": _of_processor(roots, "model name"), "arch": platform.machine(), "kernel": kernel,
        "os": system}


def _assigned(text: str, key: str) -> str:
    """The value of KEY="value"."""
    rows = (line.partition("=")[2] for line in text.splitlines() if line.startswith(f"{key}="))
    return next(rows, "").strip().strip("\"'")


def _of_processor(roots: Roots, key: str) -> str:
    """What the first processor says of itself."""
    for line in text_of(f"{roots.proc}/cpuinfo", TEXT_BYTES).splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""


def _modules(roots: Roots) -> Iterator[Row]:
    """Drivers built outside the kernel say their version; those within have the kernel's."""
    for module, component in MODULES.items():
        if version := _word(f"{roots.sys}/module/{module}/version"):
            yield "software_info", component, version


def _libraries(roots: Roots) -> Iterator[Row]:
    for component, (library, folders) in LIBRARIES.items():
        endings = {
            name.removeprefix(f"{library}.")
            for folder in folders
            for name in names_in(f"{roots.root}/{folder}")[:ENTRIES_MAX]
            if name.startswith(f"{library}.")}
        for version in sorted(one for one in endings if NUMBERS.match(one))[:LIBRARIES_MAX]:
            yield "software_info", component, version


def _toolkits(roots: Roots) -> Iterator[Row]:
    try:
        path = f"{roots.root}/usr/local/cuda/version.json"
        said = json.loads(text_of(path, TEXT_BYTES) or "null")
    except (ValueError, RecursionError):
        said = None
    cuda = said.get("cuda") if isinstance(said, dict) else None
    version = cuda.get("version") if isinstance(cuda, dict) else None
    if isinstance(version, str):
        yield "software_info", "cuda", version
    if version := _word(f"{roots.root}/opt/rocm/.info/version"):
        yield "software_info", "rocm", upstream(version)


def _efa(roots: Roots) -> Iterator[Row]:
    text = text_of(f"{roots.root}/{EFA_LIST}", TEXT_BYTES)
    for component, pattern in EFA_PATTERNS.items():
        if match := pattern.search(text):
            yield "software_info", component, match[1]


def upstream(version: str) -> str:
    """A package's version without its epoch and the packager's own number, comparable with the
    version in a file's name: 1:2.21.5-1+cuda12.4 is 2.21.5."""
    return version.partition(":")[2].partition("-")[0] if ":" in version \
        else version.partition("-")[0]


def _packages(path: str) -> Iterator[Row]:
    """Installed packages of interest; a list beyond the limit is read as far as that."""
    name, installed, left = "", False, PACKAGES_MAX_BYTES
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            while left > 0 and (line := file.readline(SMALL_BYTES)):
                left -= len(line)
                if line.startswith("Package: "):
                    name, installed = line[9:].strip(), False
                elif line.startswith("Status: "):
                    installed = line.split()[-1] == "installed"
                elif line.startswith("Version: ") and installed:
                    component = PACKAGES.get(name, "")
                    if name.startswith(FABRIC_MANAGER):
                        component = "fabric_manager"
                    if component:
                        yield "software_info", component, upstream(line[9:].strip())
    except OSError:
        return


def _machine_firmware(roots: Roots) -> Iterator[Row]:
    if version := _word(f"{roots.sys}/class/dmi/id/bios_version"):
        yield "firmware_info", "bios", version
    if version := _of_processor(roots, "microcode"):
        yield "firmware_info", "microcode", version


def _nic_firmware(roots: Roots) -> Iterator[Row]:
    """Of EFA, InfiniBand and RoCE devices; equal ones are one row."""
    root = f"{roots.sys}/class/infiniband"
    for device in names_in(root)[:DEVICES_MAX]:
        version = _word(f"{root}/{device}/fw_ver")
        if version:
            driver = os.path.basename(os.path.realpath(f"{root}/{device}/device/driver"))
            kind = driver if os.path.exists(f"{root}/{device}/device/driver") else "nic"
            yield "firmware_info", kind, version


def _nvme_firmware(roots: Roots) -> Iterator[Row]:
    root = f"{roots.sys}/class/nvme"
    for device in names_in(root)[:DEVICES_MAX]:
        version = _word(f"{root}/{device}/firmware_rev")
        if version:
            yield "firmware_info", f"nvme {_word(f'{root}/{device}/model')}".strip(), version
