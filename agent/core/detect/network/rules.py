"""Which counters of a network card may not grow, and how fast: data of network.py.

Owns the limits: NVSentinel's for InfiniBand and RoCE, the EKS node agent's for EFA.
"""

from __future__ import annotations

from typing import NamedTuple

from ...model import DEGRADED, FATAL


class Rule(NamedTuple):
    """A counter that grows faster than `per_s` (0: at all) is a fault."""

    name: str
    what: str  # its label `error` or `event`
    per_s: float
    why: str
    fault: str = "nic_error_rate"
    severity: str = DEGRADED


RULES = (
    Rule("errors_total", "symbol_error", 10.0, "bits are garbled: cable, transceiver or dirt"),
    Rule("errors_total", "link_error_recovery", 5 / 60, "the link was retrained"),
    Rule("errors_total", "port_rcv_errors", 10.0, "packets came in broken"),
    Rule("errors_total", "port_xmit_discards", 100.0, "packets were thrown away unsent"),
    Rule("errors_total", "local_link_integrity_errors", 0.0, "the physical link broke its limit"),
    Rule("errors_total", "excessive_buffer_overrun_errors", 0.0, "the port's buffers overran"),
    Rule("errors_total", "local_ack_timeout_err", 1.0, "peers did not acknowledge in time"),
    Rule("errors_total", "rnr_nak_retry_err", 0.0, "a peer was never ready to receive"),
    Rule("congestion_total", "roce_slow_restart", 10.0, "connections start again slowly"),
    Rule("errors_total", "rx_drops", 100.0, "the card drops what it receives"),
    Rule("errors_total", "rdma_write_wr_err", 100.0, "remote writes fail"),
    Rule("errors_total", "rdma_read_wr_err", 100.0, "remote reads fail"),
    Rule("errors_total", "unresponsive_remote_events", 100.0,
         "peers do not answer: look at them first"),
    Rule("errors_total", "impaired_remote_conn_events", 100.0, "connections are throttled"),
    Rule("errors_total", "retrans_timeout_events", 100.0, "paths time out and are changed"),
    Rule("retransmitted_packets_total", "", 1000.0, "packets are sent again"),
    Rule("retransmitted_bytes_total", "", 1_000_000.0, "bytes are sent again"),
    Rule("errors_total", "no_completion_cmds", 0.0, "the card did not answer a command",
         "nic_unresponsive", FATAL),
)
