"""The node that bench.telemetry watches: 8 GPUs, 8 InfiniBand ports, 192 cores, on any machine.

Owns making it: a driver's library compiled from the tests' stand-in, ports as the kernel shows them
in /sys, and a /proc/stat with more cores than are here.  Everything else in both trees leads to
this machine's own, so that a collector which is added later reads something real.  Values stand
still; what a reading costs does not depend on them.
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from .common import ROOT, Failed

GPUS, PORTS, CORES = 8, 8, 192  # of one p5.48xlarge; its network would be 32 EFA devices
STATE = f"driver 550.90.07\ngpus {GPUS}\n"
COUNTERS = (
    "VL15_dropped", "excessive_buffer_overrun_errors", "link_downed", "link_error_recovery",
    "local_link_integrity_errors", "multicast_rcv_packets", "multicast_xmit_packets",
    "port_rcv_constraint_errors", "port_rcv_data", "port_rcv_errors", "port_rcv_packets",
    "port_rcv_remote_physical_errors", "port_rcv_switch_relay_errors",
    "port_xmit_constraint_errors", "port_xmit_data", "port_xmit_discards", "port_xmit_packets",
    "port_xmit_wait", "symbol_error", "unicast_rcv_packets", "unicast_xmit_packets",
)  # fmt: skip
HW_COUNTERS = (
    "duplicate_request", "implied_nak_seq_err", "lifespan", "local_ack_timeout_err",
    "np_cnp_sent", "np_ecn_marked_roce_packets", "out_of_buffer", "out_of_sequence",
    "packet_seq_err", "req_cqe_error", "req_cqe_flush_error", "req_remote_access_errors",
    "req_remote_invalid_request", "resp_cqe_error", "resp_cqe_flush_error",
    "resp_local_length_error", "resp_remote_access_errors", "rnr_nak_retry_err",
    "roce_adp_retrans", "roce_adp_retrans_to", "roce_slow_restart", "rp_cnp_handled",
    "rp_cnp_ignored", "rx_atomic_requests", "rx_icrc_encapsulated", "rx_read_requests",
    "rx_write_requests",
)  # fmt: skip
CARD = {"fw_ver": "28.39.1002", "hca_type": "MT4129", "board_id": "MT_0000000838",
        "node_type": "1: CA", "node_guid": "a088:c203:0092:5b5e",
        "sys_image_guid": "a088:c203:0092:5b5e"}  # fmt: skip
PORT = {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": "400 Gb/sec (4X NDR)",
        "link_layer": "InfiniBand", "lid": "0x1", "sm_lid": "0x1", "cap_mask": "0xa751e848",
        "has_smi": "0"}  # fmt: skip


class Node(NamedTuple):
    """Where it lies."""

    home: Path
    library: Path
    proc: Path
    sys: Path
    state: Path  # what the stand-in of NVML says

    def environ(self) -> dict[str, str]:
        """What the agent's environment needs, for its children to find the stand-in's state."""
        return {"HOLDFAST_FAKE_NVML": str(self.state)}

    def settings(self, **more: Any) -> dict[str, Any]:
        """The agent's settings as "section.key"; more with __ for the dot."""
        return {
            "agent.fast_s": 1.0, "agent.slow_s": 15.0, "agent.listen": "127.0.0.1:0",
            "collectors.proc": str(self.proc), "collectors.sys": str(self.sys),
            "collectors.nvml": str(self.library),
        } | {key.replace("__", "."): value for key, value in more.items()}  # fmt: skip


def build(home: Path, cores: int = CORES) -> Node:
    """Makes the node below `home`.  Failed without a C compiler."""
    node = Node(home, home / "lib", home / "proc", home / "sys", home / "nvml.txt")
    for folder in (node.library, node.proc, node.sys / "class/infiniband"):
        folder.mkdir(parents=True)
    node.state.write_text(STATE)
    _library(node.library)
    _link_all(Path("/proc"), node.proc, {"stat"})
    _cores(node.proc / "stat", cores)
    _link_all(Path("/sys"), node.sys, {"class"})
    _link_all(Path("/sys/class"), node.sys / "class", {"infiniband"})
    for number in range(PORTS):
        _card(node.sys / "class/infiniband" / f"mlx5_{number}", number)
    return node


def config_file(path: Path, settings: dict[str, Any]) -> Path:
    """The settings as the agent's TOML."""
    sections: dict[str, list[str]] = {}
    for key, value in settings.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, []).append(f"{name} = {json.dumps(value)}")
    path.write_text("".join(f"[{section}]\n" + "\n".join(lines) + "\n"
                            for section, lines in sections.items()))  # fmt: skip
    return path


def _library(folder: Path) -> None:
    path = ROOT / "tests/nvml/nvml_standin.py"
    spec = importlib.util.spec_from_file_location("nvml_standin", path)
    assert spec is not None and spec.loader is not None
    standin = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(standin)
    try:
        standin.compile_library(folder)
    except standin.Missing as error:
        raise Failed(str(error)) from error


def _link_all(real: Path, folder: Path, without: set[str]) -> None:
    """Each entry leads to the real one; processes that start later are not seen."""
    for name in os.listdir(real):
        if name not in without:
            (folder / name).symlink_to(real / name)


def _cores(path: Path, cores: int) -> None:
    """This machine's own lines, its first core's repeated."""
    lines = Path("/proc/stat").read_text().splitlines()
    core = next(line.split(" ", 1)[1] for line in lines if line.startswith("cpu0 "))
    total = next(line for line in lines if line.startswith("cpu "))
    rest = [line for line in lines if not line.startswith("cpu")]
    path.write_text("\n".join([total, *(f"cpu{n} {core}" for n in range(cores)), *rest]) + "\n")


def _card(folder: Path, number: int) -> None:
    files = CARD | {f"ports/1/{name}": value for name, value in PORT.items()}
    files |= {f"ports/1/counters/{name}": str(1000 * number) for name in COUNTERS}
    files |= {f"ports/1/hw_counters/{name}": str(number) for name in HW_COUNTERS}
    files |= {"device/vendor": "0x15b3", "device/device": "0x1021", "device/numa_node": "0"}
    for name, value in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{value}\n")
