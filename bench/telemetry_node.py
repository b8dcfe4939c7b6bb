"""The node that bench.telemetry watches: 8 GPUs, 8 InfiniBand ports, 192 cores, on any machine.

Owns making it: a driver's library compiled from the tests' stand-in, cards as the tests' own tree
has them, the processes, interrupts and PCI functions of so many cores, drives and mounts.
Everything else in both trees leads to this machine's own, so that a collector which is added later
reads something real.  Values stand still; what a reading costs does not depend on them.  What the
kernel spends on making such a file is not in it: these are files of a disk's cache.
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from .common import ROOT, Failed

GPUS, PORTS, CORES = 8, 8, 192  # of one p5.48xlarge; its network would be 32 EFA devices
STATE = f"driver 550.90.07\ngpus {GPUS}\n"
THREADS, PROCESSES = 1900, 600  # of the kernel, some ten a core, and of users
FILES, MANY_FILES = 20, 400  # that a process has open, and every twentieth
INTERRUPTS = 1000  # rows, of 192 columns: a queue a core of each drive and card
PCI, DRIVES, MODULES = 240, 8, 32  # functions that count errors, NVMe drives, memory modules
KERNEL_THREAD, USER = 0x208040, 0x400100  # PF_* of /proc/PID/stat
STAT = ("{pid} ({name}) S {parent} {pid} {pid} 0 -1 {flags} 100 0 0 0 7 11 0 0 20 0 1 0 {pid} "
        "313344000 38000 18446744073709551615" + " 0" * 12 + " 17 {cpu}" + " 0" * 13 + "\n")
AER = {
    "correctable": ("COR", "RxErr", "BadTLP", "BadDLLP", "Rollover", "Timeout", "NonFatalErr",
                    "CorrIntErr", "HeaderOF"),
    "nonfatal": ("NONFATAL", "Undefined", "DLP", "SDES", "TLP", "FCP", "CmpltTO", "CmpltAbrt",
                 "UnxCmplt", "RxOF", "MalfTLP", "ECRC", "UnsupReq", "ACSViol"),
    "fatal": ("FATAL", "Undefined", "DLP", "SDES", "TLP", "FCP", "CmpltTO", "CmpltAbrt",
              "UnxCmplt", "RxOF", "MalfTLP", "ECRC", "UnsupReq", "ACSViol"),
}
MOUNTS = {"fsx": "lustre", "home": "nfs4"}  # these answer


class Node(NamedTuple):
    """Where it lies."""

    home: Path
    library: Path
    proc: Path
    sys: Path
    state: Path  # the answers of NVML's stand-in

    def environ(self) -> dict[str, str]:
        """What the agent's environment needs, for its children to find the stand-in's state."""
        return {"HOLDFAST_FAKE_NVML": str(self.state)}

    def settings(self, **more: Any) -> dict[str, Any]:
        """The agent's settings as "section.key"; more with __ for the dot."""
        return {
            "agent.fast_s": 1.0, "agent.slow_s": 15.0, "agent.listen": "127.0.0.1:0",
            "collectors.proc": str(self.proc), "collectors.sys": str(self.sys),
            "collectors.nvml": str(self.library),
        } | {key.replace("__", "."): value for key, value in more.items()}


def build(home: Path, cores: int = CORES) -> Node:
    """Makes the node below `home`.  Failed without a C compiler."""
    node = Node(home, home / "lib", home / "proc", home / "sys", home / "nvml.txt")
    node.library.mkdir(parents=True)
    node.state.write_text(STATE)
    _library(node.library)
    pids = {name for name in os.listdir("/proc") if name.isdecimal()}
    _link_all("/proc", node.proc, {"stat", "interrupts", "self"} | pids)
    _link_all("/proc/self", node.proc / "self", {"mountinfo"})
    _cores(node.proc / "stat", cores)
    _interrupts(node.proc / "interrupts", cores)
    _processes(node.proc, cores)
    _mounts(node.proc / "self/mountinfo", home)
    for folder, own in (("", {"bus", "class", "devices"}), ("bus", {"pci"}),
                        ("class", {"infiniband", "net", "nvme"}), ("class/net", set()),
                        ("devices", {"system"}), ("devices/system", {"edac"})):
        _link_all(f"/sys/{folder}", node.sys / folder, own)
    _devices(_standin("network/tree.py").Tree(home, bus="devices/pci0000:ff", recorded=False))
    return node


def config_file(path: Path, settings: dict[str, Any]) -> Path:
    """The settings as the agent's TOML."""
    sections: dict[str, list[str]] = {}
    for key, value in settings.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, []).append(f"{name} = {json.dumps(value)}")
    path.write_text("".join(f"[{section}]\n" + "\n".join(lines) + "\n"
                            for section, lines in sections.items()))
    return path


def _standin(path: str) -> ModuleType:
    """A stand-in from the tests, imported by its path."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / "tests" / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _library(folder: Path) -> None:
    standin = _standin("nvml/nvml_standin.py")
    try:
        standin.compile_library(folder)
    except standin.Missing as error:
        raise Failed(str(error)) from error


def _link_all(real: str, folder: Path, without: set[str]) -> None:
    """A folder in which each entry leads to the real one; those that come later are not seen."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in os.listdir(real):
        if name not in without:
            (folder / name).symlink_to(f"{real}/{name}")


def _cores(path: Path, cores: int) -> None:
    """This machine's own lines, its first core's repeated."""
    lines = Path("/proc/stat").read_text().splitlines()
    core = next(line.split(" ", 1)[1] for line in lines if line.startswith("cpu0 "))
    total = next(line for line in lines if line.startswith("cpu "))
    rest = [line for line in lines if not line.startswith("cpu")]
    path.write_text("\n".join([total, *(f"cpu{n} {core}" for n in range(cores)), *rest]) + "\n")


def _interrupts(path: Path, cores: int) -> None:
    """A row a queue of drives and cards, and below them those that a processor raises itself."""
    def row(head: str, count: int, what: str) -> str:
        return f"{head:>5}" + f" {count:10d}" * cores + f"  {what}\n"

    with path.open("w") as file:
        file.write("      " + "".join(f" {'CPU' + str(n):>10}" for n in range(cores)) + "\n")
        for number in range(INTERRUPTS):
            file.write(row(f"{100 + number}:", 1000, f"IR-PCI-MSI {number}-edge      queue"))
        for head in ("NMI:", "LOC:", "RES:", "TRM:", "THR:", "DFR:", "MCE:", "MCP:"):
            file.write(row(head, 0 if head in ("THR:", "DFR:", "MCE:") else 7, "of the processor"))


def _processes(proc: Path, cores: int) -> None:
    """All asleep.  The size of `fd` is how many files are open, as the kernel has it since 6.2."""
    limits = Path("/proc/self/limits").read_text()
    for pid in range(2, 2 + THREADS + PROCESSES):
        kernel = pid < 2 + THREADS
        folder = proc / str(pid)
        folder.mkdir()
        (folder / "stat").write_text(STAT.format(
            pid=pid, name=f"kworker/{pid % cores}:0" if kernel else "python3",
            parent=2 if kernel else 1, flags=KERNEL_THREAD if kernel else USER, cpu=pid % cores,
        ))
        if not kernel:
            (folder / "fd").write_text("." * (FILES if pid % 20 else MANY_FILES))
            (folder / "limits").write_text(limits)


def _mounts(path: Path, home: Path) -> None:
    """This machine's own, and two whose server answers."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    for number, (name, fstype) in enumerate(MOUNTS.items(), 9000):
        point = home / "mounts" / name
        point.mkdir(parents=True)
        lines.append(f"{number} 1 0:{number} / {point} rw - {fstype} server:/{name} rw")
    path.write_text("\n".join(lines) + "\n")


def _devices(tree: Any) -> None:
    """PCI functions with their counts of errors, cards with a port and an IPoIB interface each on
    the first of them, drives, and memory modules."""
    for number in range(PCI):
        address = f"0000:{number // 8:02x}:{number % 8:02x}.0"
        card = number < PORTS
        slot = tree.slot(address, "0x15b3" if card else "0x1022", "0x1021",
                         "mlx5_core" if card else "pcieport")
        tree.link(f"bus/pci/devices/{address}", slot)
        for severity, (total, *errors) in AER.items():
            lines = [*(f"{error} 0" for error in errors), f"TOTAL_ERR_{total} 0"]
            tree.put(f"{slot}/aer_dev_{severity}", "\n".join(lines))
        if card:
            tree.infiniband(slot, f"mlx5_{number}")
            tree.interface(slot, f"ib{number}", 100 + number, type=32, speed=400_000)
    for number in range(DRIVES):
        drive = f"class/nvme/nvme{number}"
        for file, value in (("model", "Instance Storage"), ("serial", f"AWS{number}"),
                            ("firmware_rev", "0"), ("state", "live"),
                            ("hwmon1/temp1_label", "Composite"), ("hwmon1/temp1_input", "41850"),
                            ("hwmon1/temp1_crit", "84850"), ("hwmon1/temp1_alarm", "0")):
            tree.put(f"{drive}/{file}", value)
    for number in range(MODULES):
        module = f"devices/system/edac/mc/mc{number // 8}/dimm{number % 8}"
        for file, value in (("dimm_label", f"DIMM{number}"), ("dimm_ce_count", 0),
                            ("dimm_ue_count", 0)):
            tree.put(f"{module}/{file}", value)
