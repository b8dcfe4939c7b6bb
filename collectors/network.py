"""Network cards and TCP of the node: which cards are here, their interfaces, and retransmits.

Owns the declarations of all network metrics, and reading what the kernel answers out of its memory
at once: who the cards are, interfaces, /proc/net.  It reads neither `carrier` nor `speed`: both
take the lock that a driver in trouble holds for its whole reset.  Whatever may ask a card's
firmware is read in a child (rdma.py).  Interfaces without a device below them (bridges, veth,
tunnels) are no cards.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator

from .contract import NODE_EXPORTER, SLOW, Metric, NoData, Roots, Sample
from .sources.accelerator import plain
from .sources.files import is_count, names_in, text_of

DEVICES_MAX = 64  # of each class; a p5 has 32 cards for EFA and as many interfaces
QUEUES_MAX = 128  # of one interface
FILE_MAX_BYTES = 64  # of a file that holds one number
RDMA, NET = "class/infiniband", "class/net"
PCI = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
EFA, INFINIBAND, ROCE, ETHERNET, IPOIB, OTHER = (
    "efa", "infiniband", "roce", "ethernet", "ipoib", "other",
)
HARDWARE_TYPES = {1: ETHERNET, 32: IPOIB}  # ARPHRD_* of linux/if_arp.h
IFF_UP = 1
# Why a file that was listed gave no number; whatever else goes wrong is `failed`.
REASONS = {
    errno.ENOENT: "vanished", errno.ENODEV: "vanished", errno.ENXIO: "vanished",
    errno.EACCES: "denied", errno.EPERM: "denied",
    errno.EINVAL: "unsupported", errno.EOPNOTSUPP: "unsupported", errno.ENODATA: "unsupported",
}
# EFA cards of an instance type, by AWS's pages; DMI names the type on every Nitro instance.
EFA_CARDS = {
    "trn1.32xlarge": 8, "p4d.24xlarge": 4, "p4de.24xlarge": 4, "p5.48xlarge": 32,
    "p5e.48xlarge": 32, "p5en.48xlarge": 16, "p6-b200.48xlarge": 8,
}
CARD, PORT = ("device",), ("device", "port")
# A family is marked as served by node_exporter when its collectors netclass, infiniband and netstat
# tell all of it.  They know no counters of EFA, so a family with such counters is not marked.
METRICS: dict[str, Metric] = {
    one.name: one
    for one in (
        Metric("network_info", "gauge", "Always 1; which card this is.",
               (*CARD, "kind", "pci", "driver", "firmware"), True),
        Metric("network_cards_expected", "gauge",
               "Cards of this kind that the instance type can have.", ("kind",)),
        Metric("network_link_up", "gauge",
               "1 when the link is up. EFA has none: its port says so whatever happens.",
               PORT, True),
        Metric("network_link_enabled", "gauge",
               "0 when the interface was switched off by hand.", CARD),
        Metric("network_interface_index", "gauge",
               "Number of the interface; another one under the same name: it was made anew.",
               CARD, False, NODE_EXPORTER),
        Metric("network_carrier_changes_total", "counter",
               "Times that the interface lost or found its link.", CARD, True, NODE_EXPORTER),
        Metric("network_transmit_timeouts_total", "counter",
               "Times that a send queue stood still until the driver was told to reset it.",
               CARD, True),
        Metric("network_speed_bytes_per_second", "gauge", "Speed that the link runs at.",
               PORT, False, NODE_EXPORTER),
        Metric("network_port_state", "gauge",
               "1 down, 2 initialised, 3 armed, 4 active, 5 active but deferred.",
               PORT, False, NODE_EXPORTER),
        Metric("network_port_physical_state", "gauge",
               "1 asleep, 2 polling, 3 disabled, 4 training, 5 link up, 6 recovering, 7 testing.",
               PORT, False, NODE_EXPORTER),
        Metric("network_receive_bytes_total", "counter", "Bytes received.", PORT),
        Metric("network_transmit_bytes_total", "counter", "Bytes sent.", PORT),
        Metric("network_receive_packets_total", "counter", "Packets received.", PORT),
        Metric("network_transmit_packets_total", "counter", "Packets sent.", PORT),
        Metric("network_errors_total", "counter",
               "Errors and drops, by the name of the kernel's counter.", (*PORT, "error"), True),
        Metric("network_congestion_total", "counter",
               "Signs of congestion, by the name of the kernel's counter.",
               (*PORT, "event"), False, NODE_EXPORTER),
        Metric("network_transmit_wait_ticks_total", "counter",
               "Ticks of the port in which data waited and could not be sent.",
               PORT, False, NODE_EXPORTER),
        Metric("network_retransmitted_bytes_total", "counter",
               "Bytes that the card sent again by itself.", PORT),
        Metric("network_retransmitted_packets_total", "counter",
               "Packets that the card sent again by itself.", PORT),
        Metric("network_work_requests_total", "counter",
               "Work requests of programs, by operation.", (*PORT, "operation")),
        Metric("network_work_bytes_total", "counter",
               "Bytes moved by work requests, by operation.", (*PORT, "operation")),
        Metric("network_commands_total", "counter",
               "Commands that the driver gave the card, and those that it answered.",
               (*PORT, "state")),
        Metric("network_keep_alives_total", "counter",
               "Signs of life of the card; they stand still when it is dead.", PORT, True),
        Metric("network_unread_files", "gauge",
               "Files that were listed and gave no number in the last reading.",
               ("collector", "reason")),
        Metric("network_tcp_segments_total", "counter",
               "TCP segments of the node, by direction.", ("direction",), True, NODE_EXPORTER),
        Metric("network_tcp_retransmits_total", "counter",
               "TCP segments that were sent again.", (), True, NODE_EXPORTER),
        Metric("network_tcp_events_total", "counter",
               "Unhappy events of TCP, by the kernel's name.", ("event",)),
    )
}
# file of an interface's statistics/ -> (metric, more of the subject)
STATISTICS = {
    "rx_bytes": ("network_receive_bytes_total", ""),
    "tx_bytes": ("network_transmit_bytes_total", ""),
    "rx_packets": ("network_receive_packets_total", ""),
    "tx_packets": ("network_transmit_packets_total", ""),
} | {
    # The finer ones (crc, frame, length) are part of these: the family must add up.
    name: ("network_errors_total", f",error={name}")
    for name in ("rx_errors", "tx_errors", "rx_dropped", "tx_dropped", "rx_missed_errors")
}
TCP = {
    "InSegs": ("network_tcp_segments_total", "direction=in"),
    "OutSegs": ("network_tcp_segments_total", "direction=out"),
    "RetransSegs": ("network_tcp_retransmits_total", ""),
} | {
    name: ("network_tcp_events_total", f"event={name}")
    for name in ("AttemptFails", "EstabResets", "InErrs", "ListenDrops", "TCPAbortOnMemory",
                 "TCPAbortOnTimeout", "TCPBacklogDrop", "TCPLostRetransmit", "TCPSynRetrans",
                 "TCPTimeouts")
}
Reading = tuple[str, str, float]  # name, subject, value


def declared(*names: str) -> tuple[Metric, ...]:
    """The metrics `network_<name>`, for a collector that reads them."""
    return tuple(METRICS[f"network_{name}"] for name in names)


class Files:
    """Small files of one reading, and how many gave no number, by reason."""

    def __init__(self) -> None:
        self.unread = dict.fromkeys(("denied", "failed", "junk", "unsupported", "vanished"), 0)

    def text(self, path: str) -> bytes:
        """The content of a small file without the space around it; b"" when it cannot be read."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                return os.read(fd, FILE_MAX_BYTES).strip()
            finally:
                os.close(fd)
        except OSError as error:
            self.failed(error)
            return b""

    def failed(self, error: OSError) -> None:
        """Counts one file that could not be read."""
        self.unread[REASONS.get(error.errno or 0, "failed")] += 1

    def number(self, path: str) -> int | None:
        """A whole number >= 0 of at most 64 bits; None, and counted, for anything else."""
        said = self.text(path)
        if is_count(text := said.decode("utf-8", "replace")):
            return int(text)
        # "N/A (no PMA)" is the kernel's own word for a counter that the card does not have
        self.unread["unsupported" if said.startswith(b"N/A") else "junk"] += bool(said)
        return None

    def samples(self, collector: str, boot_s: float) -> Iterator[Sample]:
        """The number of failed files by reason, for the page."""
        for reason, count in self.unread.items():
            subject = f"collector={collector},reason={reason}"
            yield Sample("network_unread_files", subject, float(count), boot_s)


class NetworkCollector:
    """Cards, interfaces and TCP of the node, as far as the kernel answers out of its memory."""

    name = "network"
    pace = SLOW
    metrics = declared(
        "info", "cards_expected", "link_up", "link_enabled", "interface_index",
        "carrier_changes_total", "transmit_timeouts_total", "receive_bytes_total",
        "transmit_bytes_total", "receive_packets_total", "transmit_packets_total", "errors_total",
        "unread_files", "tcp_segments_total", "tcp_retransmits_total", "tcp_events_total",
    )

    def collect(self, roots: Roots, boot_s: float) -> list[Sample]:
        """One reading.  NoData when there is neither a card nor TCP at these roots."""
        files = Files()
        found = [Sample(*one, boot_s) for one in _cards(roots, files)]
        for path, title in (("snmp", "Tcp:"), ("netstat", "TcpExt:")):
            rows = _tcp(text_of(f"{roots.proc}/net/{path}"), title)
            found += [Sample(*one, boot_s) for one in rows]
        if not found:
            raise NoData(f"no network card below {roots.sys}/{NET}, no TCP in {roots.proc}/net")
        return [*found, *files.samples(self.name, boot_s)]


def names(folder: str, most: int = DEVICES_MAX) -> list[str]:
    """What a directory of /sys/class lists, in order; [] without it.  A name that could not stand
    in a subject is left out."""
    return [one for one in names_in(folder) if plain(one) == one][:most]


def interfaces(roots: Roots) -> list[str]:
    """Interfaces that have a device below them.  Any number of others may stand beside them: a
    node of containers has hundreds of veth."""
    root = f"{roots.sys}/{NET}"
    listed = (one for one in names(root, 4096) if os.path.exists(f"{root}/{one}/device"))
    return [one for one, _ in zip(listed, range(DEVICES_MAX))]


def rdma_kind(folder: str, files: Files) -> str:
    """What a device of /sys/class/infiniband is: EFA by its PCI numbers, else by its link."""
    if os.path.exists(f"{folder}/device/vendor"):
        vendor, device = (files.text(f"{folder}/device/{one}") for one in ("vendor", "device"))
        if vendor == b"0x1d0f" and device.startswith(b"0xefa"):
            return EFA
    ports = names(f"{folder}/ports", 1)
    layer = files.text(f"{folder}/ports/{ports[0]}/link_layer") if ports else b""
    return {b"InfiniBand": INFINIBAND, b"Ethernet": ROCE}.get(layer, OTHER)


def _cards(roots: Roots, files: Files) -> Iterator[Reading]:
    product = f"{roots.sys}/class/dmi/id/product_name"
    kind = files.text(product).decode("ascii", "replace") if os.path.exists(product) else ""
    if kind in EFA_CARDS:
        yield "network_cards_expected", f"kind={EFA}", float(EFA_CARDS[kind])
    for device in names(f"{roots.sys}/{RDMA}"):
        folder = f"{roots.sys}/{RDMA}/{device}"
        firmware = plain(files.text(f"{folder}/fw_ver"))
        yield _info(folder, device, rdma_kind(folder, files), firmware)
    for device in interfaces(roots):
        folder = f"{roots.sys}/{NET}/{device}"
        hardware = files.number(f"{folder}/type")
        yield _info(folder, device, HARDWARE_TYPES.get(hardware or 0, OTHER), "")
        yield from _interface(folder, device, files)


def _info(folder: str, device: str, kind: str, firmware: str) -> Reading:
    below, driver = (_link(f"{folder}/{one}") for one in ("device", "device/driver"))
    pci = below if PCI.fullmatch(below) else ""
    words = f"device={device},kind={kind},pci={pci},driver={plain(driver)},firmware={firmware}"
    return "network_info", words, 1.0


def _link(path: str) -> str:
    """Last part of what a symbolic link names; "" without it."""
    try:
        return os.path.basename(os.readlink(path))
    except OSError:
        return ""


def _interface(folder: str, device: str, files: Files) -> Iterator[Reading]:
    subject, port = f"device={device}", f"device={device},port="
    flags = files.text(f"{folder}/flags")
    if re.fullmatch(rb"0x[0-9a-f]{1,8}", flags):
        yield "network_link_enabled", subject, float(int(flags, 16) & IFF_UP)
    state = files.text(f"{folder}/operstate")
    if state and state != b"unknown":  # "unknown" is neither up nor down
        yield "network_link_up", port, float(state == b"up")
    for file, name in (("ifindex", "network_interface_index"),
                       ("carrier_changes", "network_carrier_changes_total")):
        if (value := files.number(f"{folder}/{file}")) is not None:
            yield name, subject, float(value)
    for file, (name, more) in STATISTICS.items():
        if (value := files.number(f"{folder}/statistics/{file}")) is not None:
            yield name, port + more, float(value)
    queues = [one for one in names(f"{folder}/queues", 2 * QUEUES_MAX) if one.startswith("tx-")]
    queues = [f"{folder}/queues/{one}/tx_timeout" for one in queues[:QUEUES_MAX]]
    said = [files.number(one) for one in queues if os.path.exists(queues[0])]
    known = [one for one in said if one is not None]
    if known:
        yield "network_transmit_timeouts_total", subject, float(sum(known))


def _tcp(text: str, title: str) -> Iterator[Reading]:
    """Two lines that begin with `title`: the names, then their values."""
    rows = [line.split() for line in text.splitlines() if line.startswith(title)]
    if len(rows) < 2:
        return
    for name, value in zip(*rows[:2]):
        if name in TCP and is_count(value):
            yield *TCP[name], float(value)
