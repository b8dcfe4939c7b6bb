"""InfiniBand, RoCE and EFA ports, and the speed of every link, from sysfs.

Owns which file of a port becomes which sample.  Runs in a probe child only: a counter of a port is
a command to the card's firmware, and `speed` waits for the lock that a driver in trouble holds.  An
EFA port reports to be active whatever happens, so its state is not read; its keep-alives and
counters are judged instead.  A counter that this driver does not have is absent, not zero.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from .contract import SLOW, NoData, Probed, Roots, Sample
from .network import EFA, NET, OTHER, RDMA, Files, Reading, declared, interfaces, names, rdma_kind

PORTS_MAX = 8  # of one device
FILES_MAX = 512  # of one directory of counters
ACTIVE = (4, 5)
SPEED_MAX_MBIT = 10_000_000
WORD_BYTES = 4.0  # port_*_data count 4-byte words
Row = tuple[str, str, float]  # name without `network_`, more of the subject, factor

# Of counters/: the port itself, the same on every InfiniBand and RoCE card.
PORT_ERRORS = (
    "symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors",
    "port_rcv_remote_physical_errors", "port_rcv_switch_relay_errors", "port_xmit_discards",
    "port_xmit_constraint_errors", "port_rcv_constraint_errors", "local_link_integrity_errors",
    "excessive_buffer_overrun_errors", "VL15_dropped",
)
# Of hw_counters/ of mlx5 and its like.
CARD_ERRORS = (
    "out_of_sequence", "packet_seq_err", "local_ack_timeout_err", "rnr_nak_retry_err",
    "out_of_buffer", "implied_nak_seq_err", "duplicate_request", "req_cqe_error",
    "resp_cqe_error", "req_remote_access_errors", "resp_local_length_error",
    "rx_icrc_encapsulated", "roce_adp_retrans_to",
)
CONGESTION = (
    "np_cnp_sent", "np_ecn_marked_roce_packets", "rp_cnp_handled", "rp_cnp_ignored",
    "roce_adp_retrans", "roce_slow_restart",
)
EFA_ERRORS = (
    "rx_drops", "rdma_read_wr_err", "rdma_write_wr_err", "retrans_timeout_events",
    "impaired_remote_conn_events", "unresponsive_remote_events", "no_completion_cmds", "cmds_err",
    "alloc_pd_err", "alloc_ucontext_err", "create_ah_err", "create_cq_err", "create_qp_err",
    "mmap_err", "reg_mr_err",
)
COUNTERS: dict[str, Row] = {
    "port_rcv_data": ("receive_bytes_total", "", WORD_BYTES),
    "port_xmit_data": ("transmit_bytes_total", "", WORD_BYTES),
    "port_rcv_packets": ("receive_packets_total", "", 1.0),
    "port_xmit_packets": ("transmit_packets_total", "", 1.0),
    "port_xmit_wait": ("transmit_wait_ticks_total", "", 1.0),
    "rx_bytes": ("receive_bytes_total", "", 1.0), "tx_bytes": ("transmit_bytes_total", "", 1.0),
    "rx_pkts": ("receive_packets_total", "", 1.0), "tx_pkts": ("transmit_packets_total", "", 1.0),
    "retrans_bytes": ("retransmitted_bytes_total", "", 1.0),
    "retrans_pkts": ("retransmitted_packets_total", "", 1.0),
    "keep_alive_rcvd": ("keep_alives_total", "", 1.0),
    "submitted_cmds": ("commands_total", ",state=submitted", 1.0),
    "completed_cmds": ("commands_total", ",state=completed", 1.0),
    "rdma_read_resp_bytes": ("work_bytes_total", ",operation=rdma_read_resp", 1.0),
    "rdma_write_recv_bytes": ("work_bytes_total", ",operation=rdma_write_recv", 1.0),
} | {
    f"{one}_{unit}": (f"work_{name}_total", f",operation={one}", 1.0)
    for one in ("send", "recv", "rdma_read", "rdma_write")
    for unit, name in (("wrs", "requests"), ("bytes", "bytes"))
} | {
    one: ("errors_total", f",error={one}", 1.0)
    for one in (*PORT_ERRORS, *CARD_ERRORS, *EFA_ERRORS)
} | {one: ("congestion_total", f",event={one}", 1.0) for one in CONGESTION}


class RdmaCollector(Probed):
    """Counters of every RDMA port and the speed of every link; read in a child."""

    name = "rdma"
    pace = SLOW
    metrics = declared(
        "link_up", "port_state", "port_physical_state", "speed_bytes_per_second",
        "receive_bytes_total", "transmit_bytes_total", "receive_packets_total",
        "transmit_packets_total", "errors_total", "congestion_total", "transmit_wait_ticks_total",
        "retransmitted_bytes_total", "retransmitted_packets_total", "work_requests_total",
        "work_bytes_total", "commands_total", "keep_alives_total", "unread_files",
    )

    def here(self, roots: Roots) -> str:
        """"" with a device of this class, else why not; one listing."""
        return "" if names(f"{roots.sys}/{RDMA}", 1) else "no InfiniBand, RoCE or EFA device"

    def collect(self, roots: Roots, boot_s: float) -> list[Sample]:
        """One reading.  NoData without a device."""
        files = Files()
        devices = names(f"{roots.sys}/{RDMA}")
        if not devices:
            raise NoData(self.here(roots))
        found: list[Sample] = []
        for device in devices:
            rows = _device(f"{roots.sys}/{RDMA}/{device}", device, files)
            found += [Sample(*one, boot_s) for one in rows]
        for device in interfaces(roots):
            rows = _interface_speed(f"{roots.sys}/{NET}/{device}", device, files)
            found += [Sample(*one, boot_s) for one in rows]
        return [*found, *files.samples(self.name, boot_s)]


def _device(folder: str, device: str, files: Files) -> Iterator[Reading]:
    kind = rdma_kind(folder, files)
    # EFA's commands and keep-alives belong to the card since Linux 5.14, before that to its port.
    yield from _counters(f"{folder}/hw_counters", f"device={device},port=", files)
    for port in names(f"{folder}/ports", PORTS_MAX):
        subject = f"device={device},port={port}"
        place = f"{folder}/ports/{port}"
        yield from _state(place, subject, kind, files)
        if kind != EFA:
            yield from _counters(f"{place}/counters", subject, files)
        yield from _counters(f"{place}/hw_counters", subject, files)


def _state(place: str, subject: str, kind: str, files: Files) -> Iterator[Reading]:
    if kind not in (EFA, OTHER):
        for file, name in (("state", "port_state"), ("phys_state", "port_physical_state")):
            number, _, word = files.text(f"{place}/{file}").partition(b":")  # "4: ACTIVE"
            if word and number.isdigit() and len(number) < 3:
                yield f"network_{name}", subject, float(number)
                if file == "state":
                    yield "network_link_up", subject, float(int(number) in ACTIVE)
    said, _, unit = files.text(f"{place}/rate").partition(b" ")  # "400 Gb/sec (4X NDR)"
    whole, _, tenths = said.partition(b".")
    if unit.startswith(b"Gb/sec") and whole.isdigit() and len(whole) < 6:
        gigabit = int(whole) + (int(tenths[:1]) / 10 if tenths[:1].isdigit() else 0.0)
        yield "network_speed_bytes_per_second", subject, gigabit * 1e9 / 8


def _counters(folder: str, subject: str, files: Files) -> Iterator[Reading]:
    """The counters of one directory that are known by name; none without the directory."""
    try:
        listed = sorted(os.listdir(folder))[:FILES_MAX]
    except FileNotFoundError:
        return  # most cards have only one of the three directories
    except OSError as error:
        return files.failed(error)
    for file in listed:
        row = COUNTERS.get(file)
        if row is not None and (value := files.number(f"{folder}/{file}")) is not None:
            yield f"network_{row[0]}", subject + row[1], value * row[2]


def _interface_speed(folder: str, device: str, files: Files) -> Iterator[Reading]:
    """-1 is a driver's way to say that it does not know; a link that is down refuses."""
    said = files.text(f"{folder}/speed") if files.text(f"{folder}/operstate") == b"up" else b""
    if said.isdigit() and len(said) <= 10 and 0 < int(said) <= SPEED_MAX_MBIT:
        yield "network_speed_bytes_per_second", f"device={device},port=", int(said) * 1e6 / 8
