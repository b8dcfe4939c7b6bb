"""Makes trees of /sys and /proc as a node with network cards has them, for tests and benchmarks.

Owns the layout: where the kernel puts which file and link.  Layout and names are the kernel's
(Linux 6.8); values of InfiniBand and EFA are invented, those of /proc/net were recorded on a
virtual machine with Linux 6.18.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from holdfast.collectors.contract import Roots

RECORDED = Path(__file__).resolve().parent / "recorded"
# counters/ of an mlx5 port, and hw_counters/ of a ConnectX-7 with InfiniBand.
PORT_COUNTERS = (
    "VL15_dropped", "excessive_buffer_overrun_errors", "link_downed", "link_error_recovery",
    "local_link_integrity_errors", "multicast_rcv_packets", "multicast_xmit_packets",
    "port_rcv_constraint_errors", "port_rcv_data", "port_rcv_errors", "port_rcv_packets",
    "port_rcv_remote_physical_errors", "port_rcv_switch_relay_errors",
    "port_xmit_constraint_errors", "port_xmit_data", "port_xmit_discards", "port_xmit_packets",
    "port_xmit_wait", "symbol_error", "unicast_rcv_packets", "unicast_xmit_packets",
)
CARD_COUNTERS = (
    "duplicate_request", "implied_nak_seq_err", "lifespan", "local_ack_timeout_err",
    "out_of_buffer", "out_of_sequence", "packet_seq_err", "req_cqe_error",
    "req_cqe_flush_error", "req_remote_access_errors", "req_remote_invalid_request",
    "resp_cqe_error", "resp_cqe_flush_error", "resp_local_length_error",
    "resp_remote_access_errors", "rnr_nak_retry_err", "rx_atomic_requests", "rx_dct_connect",
    "rx_read_requests", "rx_write_requests",
)
EFA_CARD = (
    "alloc_pd_err", "alloc_ucontext_err", "cmds_err", "completed_cmds", "create_ah_err",
    "create_cq_err", "create_qp_err", "keep_alive_rcvd", "lifespan", "mmap_err",
    "no_completion_cmds", "reg_mr_err", "submitted_cmds",
)
EFA_PORT = (
    "impaired_remote_conn_events", "lifespan", "rdma_read_bytes", "rdma_read_resp_bytes",
    "rdma_read_wr_err", "rdma_read_wrs", "rdma_write_bytes", "rdma_write_recv_bytes",
    "rdma_write_wr_err", "rdma_write_wrs", "recv_bytes", "recv_wrs", "retrans_bytes",
    "retrans_pkts", "retrans_timeout_events", "rx_bytes", "rx_drops", "rx_pkts", "send_bytes",
    "send_wrs", "tx_bytes", "tx_pkts", "unresponsive_remote_events",
)
STATISTICS = (
    "collisions", "multicast", "rx_bytes", "rx_compressed", "rx_crc_errors", "rx_dropped",
    "rx_errors", "rx_fifo_errors", "rx_frame_errors", "rx_length_errors", "rx_missed_errors",
    "rx_nohandler", "rx_over_errors", "rx_packets", "tx_aborted_errors", "tx_bytes",
    "tx_carrier_errors", "tx_compressed", "tx_dropped", "tx_errors", "tx_fifo_errors",
    "tx_heartbeat_errors", "tx_packets", "tx_window_errors",
)
TRAFFIC = {
    "port_rcv_data": 250_000_000, "port_xmit_data": 240_000_000, "port_rcv_packets": 1_000_000,
    "port_xmit_packets": 900_000, "port_xmit_wait": 4096, "lifespan": 10, "keep_alive_rcvd": 900,
    "submitted_cmds": 5000, "completed_cmds": 5000, "rx_bytes": 10**12, "tx_bytes": 9 * 10**11,
    "rx_pkts": 10**9, "tx_pkts": 9 * 10**8, "rx_packets": 10**6, "tx_packets": 9 * 10**5,
    "rdma_write_bytes": 9 * 10**11, "rdma_write_wrs": 10**6, "send_bytes": 10**9, "send_wrs": 10**5,
}


class Tree:
    """One machine.  `put` and `add` change what it says.  Its PCI devices are below `bus`; without
    `recorded` it has no TCP of its own."""

    def __init__(
        self, folder: Path, bus: str = "devices/pci0000:00", recorded: bool = True
    ) -> None:
        self.sys, self.proc, self.bus = folder / "sys", folder / "proc", bus
        if recorded:
            (self.proc / "net").mkdir(parents=True)
            for one in ("snmp", "netstat"):
                shutil.copy(RECORDED / one, self.proc / "net" / one)

    @property
    def roots(self) -> Roots:
        return Roots(proc=str(self.proc), sys=str(self.sys))

    def put(self, path: str, value: object) -> None:
        """Writes one file below sys, as the kernel ends it."""
        file = self.sys / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(value if isinstance(value, bytes) else f"{value}\n".encode())

    def add(self, path: str, amount: int) -> None:
        """Lets a counter grow."""
        self.put(path, int((self.sys / path).read_text()) + amount)

    def link(self, path: str, target: str) -> None:
        """A symbolic link below sys, relative and ending in its target's name as the kernel's."""
        file, place = self.sys / path, self.sys / target
        file.parent.mkdir(parents=True, exist_ok=True)
        place.mkdir(parents=True, exist_ok=True)
        file.symlink_to(f"{os.path.relpath(place.parent, file.parent)}/{place.name}")

    def gone(self, path: str) -> None:
        """Takes a file, a link or a directory away."""
        file = self.sys / path
        shutil.rmtree(file) if file.is_dir() and not file.is_symlink() else file.unlink()

    def off_the_bus(self, address: str, driver: str = "mlx5_core") -> None:
        """A function that is gone, or whose driver gave it up."""
        self.gone(f"bus/pci/drivers/{driver}/{address}")

    def slot(self, address: str, vendor: str, device: str, driver: str) -> str:
        """A PCI function and its driver; its path."""
        slot = f"{self.bus}/{address}"
        self.put(f"{slot}/vendor", vendor)
        self.put(f"{slot}/device", device)
        self.link(f"{slot}/driver", f"bus/pci/drivers/{driver}")
        self.link(f"bus/pci/drivers/{driver}/{address}", slot)
        return slot

    def _counters(self, folder: str, names: tuple[str, ...]) -> None:
        for name in names:
            self.put(f"{folder}/{name}", TRAFFIC.get(name, 0))

    def infiniband(self, slot: str, name: str, layer: str = "InfiniBand") -> None:
        """One RDMA device with one port."""
        place = f"{slot}/infiniband/{name}"
        self.link(f"class/infiniband/{name}", place)
        self.link(f"{place}/device", slot)
        self.put(f"{place}/fw_ver", "28.39.1002")
        for file, value in (("state", "4: ACTIVE"), ("phys_state", "5: LinkUp"),
                            ("rate", "400 Gb/sec (4X NDR)"), ("link_layer", layer)):
            self.put(f"{place}/ports/1/{file}", value)
        self._counters(f"{place}/ports/1/counters", PORT_COUNTERS)
        self._counters(f"{place}/ports/1/hw_counters", CARD_COUNTERS)

    def efa(self, slot: str, name: str) -> None:
        """One EFA device.  Its port says that it is active whatever happens."""
        place = f"{slot}/infiniband/{name}"
        self.link(f"class/infiniband/{name}", place)
        self.link(f"{place}/device", slot)
        self.put(f"{place}/fw_ver", "0.0.0.0")
        for file, value in (("state", "4: ACTIVE"), ("phys_state", "5: LinkUp"),
                            ("rate", "100 Gb/sec (4X EDR)"), ("link_layer", "Unspecified")):
            self.put(f"{place}/ports/1/{file}", value)
        self._counters(f"{place}/hw_counters", EFA_CARD)
        self._counters(f"{place}/ports/1/hw_counters", EFA_PORT)

    def interface(self, slot: str, name: str, index: int, **files: object) -> None:
        """One interface with four send queues on a device."""
        place = f"{slot}/net/{name}"
        self.link(f"class/net/{name}", place)
        self.link(f"{place}/device", slot)
        said: dict[str, object] = {
            "type": 1, "flags": "0x1003", "operstate": "up", "ifindex": index, "carrier": 1,
            "carrier_changes": 2, "speed": 100_000,
        }
        for file, value in (said | files).items():
            self.put(f"{place}/{file}", value)
        self._counters(f"{place}/statistics", STATISTICS)
        for queue in range(4):
            self.put(f"{place}/queues/tx-{queue}/tx_timeout", 0)
            self.put(f"{place}/queues/rx-{queue}/rps_cpus", "0")

    def virtual(self, name: str) -> None:
        """An interface without a device: a bridge, veth, lo."""
        self.link(f"class/net/{name}", f"devices/virtual/net/{name}")
        self.put(f"class/net/{name}/operstate", "unknown")


def ib_node(folder: Path, ports: int = 8) -> Tree:
    """`ports` InfiniBand cards of one port each, an IPoIB interface on each, one for management."""
    tree = Tree(folder)
    for number in range(ports):
        slot = tree.slot(f"0000:{0x1a + number:02x}:00.0", "0x15b3", "0x1021", "mlx5_core")
        tree.infiniband(slot, f"mlx5_{number}")
        tree.interface(slot, f"ib{number}", 10 + number, type=32, speed=400_000)
    tree.interface(tree.slot("0000:05:00.0", "0x8086", "0x1563", "ixgbe"), "eth0", 2, speed=10_000)
    tree.virtual("lo")
    return tree


def efa_node(folder: Path, cards: int = 2) -> Tree:
    """EFA cards without an interface, ENA for everything else, as on EC2."""
    tree = Tree(folder)
    for number in range(cards):
        slot = tree.slot(f"0000:{0x10 + number:02x}:1b.0", "0x1d0f", "0xefa2", "efa")
        tree.efa(slot, f"rdmap{16 + number}s27")
    ena = tree.slot("0000:00:05.0", "0x1d0f", "0xec20", "ena")
    tree.interface(ena, "ens5", 2, speed=-1)
    tree.virtual("lo")
    tree.put("class/dmi/id/product_name", "p4d.24xlarge")  # it can have 4
    return tree


def plain_node(folder: Path) -> Tree:
    """A virtual machine: one interface, no card for RDMA."""
    tree = Tree(folder)
    slot = "devices/pci0000:00/0000:00:03.0/virtio2"
    tree.link(f"{slot}/driver", "bus/virtio/drivers/virtio_net")
    tree.interface(slot, "eth0", 4, carrier_changes=2, speed=-1)
    tree.virtual("lo")
    return tree
