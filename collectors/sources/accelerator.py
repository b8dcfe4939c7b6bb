"""The metrics and labels that accelerators of every vendor have in common.

Owns one declaration a metric, so that the page has one family whoever read it.  A device is named
by its vendor and its index there; its run is joined by accelerator_run_info.  Sample
`accelerator_process` (subject vendor, device, pid) is declared nowhere on purpose: it names ranks,
and a series for each process would churn.
"""

from __future__ import annotations

from ..contract import DCGM_EXPORTER, Metric

DEVICE = ("vendor", "device")
METRICS: dict[str, Metric] = {
    one.name: one
    for one in (
        Metric("accelerator_info", "gauge", "Always 1; which device this is.",
               (*DEVICE, "name", "uuid", "pci", "driver"), True),
        Metric("accelerator_firmware_info", "gauge", "Always 1; the firmware of the device.",
               (*DEVICE, "component", "version"), True),
        Metric("accelerator_devices", "gauge", "Devices that answer.", ("vendor",), True),
        Metric("accelerator_lost", "gauge", "1 when the driver says that the device is lost.",
               DEVICE, True),
        Metric("accelerator_utilization_ratio", "gauge",
               "Share of time in which a kernel ran, whether or not it computed.",
               DEVICE, True, DCGM_EXPORTER),
        Metric("accelerator_memory_utilization_ratio", "gauge",
               "Share of time in which device memory was read or written.",
               DEVICE, False, DCGM_EXPORTER),
        Metric("accelerator_busy_at_idle_power", "gauge",
               "1 when fully utilised at near-idle power: what a hung collective looks like.",
               DEVICE, True),
        Metric("accelerator_memory_total_bytes", "gauge", "Device memory.", DEVICE),
        Metric("accelerator_memory_used_bytes", "gauge", "Device memory in use.",
               DEVICE, True, DCGM_EXPORTER),
        Metric("accelerator_memory_free_bytes", "gauge", "Device memory not in use.",
               DEVICE, False, DCGM_EXPORTER),
        Metric("accelerator_power_watts", "gauge", "Power drawn.", DEVICE, True, DCGM_EXPORTER),
        Metric("accelerator_power_limit_watts", "gauge", "Power limit in force.", DEVICE),
        Metric("accelerator_energy_joules_total", "counter",
               "Energy used since the driver was loaded.", DEVICE, False, DCGM_EXPORTER),
        Metric("accelerator_temperature_celsius", "gauge", "Temperature by sensor.",
               (*DEVICE, "sensor"), True, DCGM_EXPORTER),
        Metric("accelerator_temperature_limit_celsius", "gauge",
               "Temperature at which the device slows down or shuts down.", (*DEVICE, "limit")),
        Metric("accelerator_clock_hertz", "gauge", "Clock by domain.",
               (*DEVICE, "domain"), False, DCGM_EXPORTER),
        Metric("accelerator_clock_max_hertz", "gauge", "Highest clock by domain.",
               (*DEVICE, "domain")),
        Metric("accelerator_throttled", "gauge", "1 when clocks are held down for this reason.",
               (*DEVICE, "reason")),
        Metric("accelerator_violation_seconds_total", "counter",
               "Time in which clocks were held down, by policy.", (*DEVICE, "policy")),
        Metric("accelerator_ecc_errors_total", "counter",
               "Memory errors; volatile: since the driver was loaded, aggregate: in its life.",
               (*DEVICE, "error", "period"), True),
        Metric("accelerator_remapped_rows", "gauge", "Rows of memory replaced by spare ones.",
               (*DEVICE, "cause"), False, DCGM_EXPORTER),
        Metric("accelerator_row_remap_pending", "gauge",
               "1 when rows are to be remapped at the next reset.", DEVICE, True),
        Metric("accelerator_row_remap_failed", "gauge",
               "1 when a row could not be remapped: the device is to be replaced.",
               DEVICE, True, DCGM_EXPORTER),
        Metric("accelerator_row_remap_banks", "gauge",
               "Banks of memory by how many spare rows they have left.",
               (*DEVICE, "availability")),
        Metric("accelerator_retired_pages", "gauge", "Pages taken out of use, by cause.",
               (*DEVICE, "cause")),
        Metric("accelerator_retired_pages_pending", "gauge",
               "1 when pages are to be taken out of use at the next reset.", DEVICE),
        Metric("accelerator_link_up", "gauge", "1 when the link to other devices is up.",
               (*DEVICE, "link")),
        Metric("accelerator_link_errors_total", "counter", "Errors of the link, by kind.",
               (*DEVICE, "link", "kind")),
        Metric("accelerator_pcie_generation", "gauge",
               "PCIe generation now; an idle device lowers it.", DEVICE),
        Metric("accelerator_pcie_generation_max", "gauge", "PCIe generation at best.", DEVICE),
        Metric("accelerator_pcie_width", "gauge", "PCIe lanes in use.", DEVICE),
        Metric("accelerator_pcie_width_max", "gauge", "PCIe lanes at best.", DEVICE),
        Metric("accelerator_pcie_replays_total", "counter", "PCIe packets sent again.",
               DEVICE, False, DCGM_EXPORTER),
        Metric("accelerator_fabric_state", "gauge",
               "0 not supported, 1 not started, 2 in progress, 3 completed.", DEVICE),
        Metric("accelerator_fabric_fault", "gauge", "1 when the fabric reports this fault.",
               (*DEVICE, "fault")),
        Metric("accelerator_recovery_action", "gauge",
               "1 for what the driver asks for to bring the device back.",
               (*DEVICE, "action"), True),
        Metric("accelerator_processes", "gauge", "Processes that compute on the device.", DEVICE),
        Metric("accelerator_core_utilization_ratio", "gauge",
               "Share of time in which a core computed; cores not in use are left out.",
               (*DEVICE, "core")),
        Metric("accelerator_flops_per_second", "gauge",
               "Floating-point operations as the runtime counts them.", DEVICE),
        Metric("accelerator_ecc_events_total", "counter",
               "Memory errors in the vendor's own classes.", (*DEVICE, "event")),
        Metric("accelerator_power_utilization_ratio", "gauge",
               "Power drawn as a share of the most.", DEVICE),
        Metric("accelerator_core_status_total", "counter",
               "Executions on the device's cores, by how the driver saw them end.",
               (*DEVICE, "status")),
        Metric("accelerator_executions_total", "counter",
               "Executions by how the runtimes saw them end, since the agent began to watch.",
               ("vendor", "status")),
        Metric("accelerator_execution_errors_total", "counter",
               "Errors of executions by kind, since the agent began to watch.",
               ("vendor", "error"), True),
        Metric("accelerator_execution_latency_seconds", "gauge",
               "Latency of an execution in the slowest runtime.", ("vendor", "percentile")),
        Metric("accelerator_unreadable_reports_total", "counter",
               "Groups of the vendor's reports that said that they could not be read.",
               ("vendor", "group")),
        Metric("accelerator_monitor_up", "gauge",
               "1 when the vendor's monitoring tool speaks.", ("vendor",), True),
        Metric("accelerator_monitor_restarts_total", "counter",
               "Times that the vendor's monitoring tool died or fell silent.", ("vendor",)),
        Metric("accelerator_monitor_rejected_total", "counter",
               "Pieces of its stream that were no report.", ("vendor",)),
    )
}


def declared(*names: str) -> tuple[Metric, ...]:
    """The metrics `accelerator_<name>`, for a collector that reads them."""
    return tuple(METRICS[f"accelerator_{name}"] for name in names)


def plain(value: object) -> str:
    """A value fit for a subject: bounded, without separators."""
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    return "".join(" " if c in ",=" or not c.isprintable() else c for c in text)[:96]
