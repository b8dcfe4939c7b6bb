"""How each page's alert is caused on purpose, for docs/runbooks.md.

Owns what to type or to do, on a run of one's own (`inject.enabled = true` where its agent is the
node's) or on a node that nobody needs.  tests/test_runbooks.py holds that every page is here, that
the command line takes the commands, and that the kernel's lines are understood as their fault.
"""

from __future__ import annotations

from typing import NamedTuple


class Kernel(NamedTuple):
    """A line of the kernel's, to be written by root: `collectors.kmsg_users = true` has the agent
    believe it.  Whatever `actions.allow` names would be done for it."""

    line: str

    def __str__(self) -> str:
        return f"echo '<3>{self.line}' > /dev/kmsg"


class Nothing(NamedTuple):
    """Why it cannot be caused."""

    reason: str


_XID = "NVRM: Xid (PCI:0000:4e:00): %d, rehearsal"
_BY_FAULT: dict[str, str | Kernel | Nothing] = {
    "accelerator_lost": "echo 1 > /sys/bus/pci/devices/ADDRESS/remove; rescan gives it back",
    "agent_config_bad": "a word too many in agent.toml, then systemctl reload holdfast",
    "budget_spent": "--max-restarts 1, and kill a rank twice by `holdfast inject kill --rank 1`",
    "check_failed": "a path in checks.paths that cannot be written, then two rounds of checks",
    "check_ignored": "start a run there with --ignore-check and the check's name",
    "checkpoint_bad": "flip a byte of the newest checkpoint, then start the run again",
    "checkpoint_failed": "fill the file system of the checkpoints while a run trains",
    "clock_source_slow": "write hpet to clocksource0/current_clocksource below /sys/devices/system",
    "clock_unsynchronised": "systemctl stop chronyd; the kernel says so hours later",
    "collective_mismatch": "a script in which one rank sums a tensor of another size",
    "collective_skipped": "holdfast inject skip-collective --rank 1",
    "collectives_slow": "after some hundred steps, tc qdisc add dev IF root netem delay 20ms",
    "collector_failed": "kill -STOP of the agent's child that asks the devices",
    "compile_lock_stale": "a lock file ten minutes old in the run's compile cache",
    "cpu_machine_check": Kernel("mce: [Hardware Error]: Machine check events logged"),
    "crash_loop": "a script that raises the same error in its first step",
    "disk_space_low": "a file as large as the room that is left",
    "dns_failed": "a name that nobody has in collectors.dns_names",
    "ec2_rebalance_recommended": "AWS Fault Injection Service, on a spot instance",
    "ec2_scheduled_event": Nothing("EC2 alone plans one"),
    "ec2_spot_interruption": "AWS Fault Injection Service, on a spot instance",
    "fabric_manager_down": "systemctl stop nvidia-fabricmanager, with NVSwitches and no run",
    "filesystem_readonly": "mount -o remount,ro of a file system for tests",
    "gpu_application_error": Kernel(_XID % 13),
    "gpu_fell_off_bus": Kernel(_XID % 79),
    "gpu_memory_error": Kernel(_XID % 48),
    "gpu_needs_inspection": Kernel(_XID % 54),
    "gpu_needs_reset": Kernel(_XID % 62),
    "gpu_nvlink_error": Kernel(_XID % 74),
    "graph_recompiled": "a compiled script that gives its model another shape in mid-training",
    "host_cgroup_leak": Nothing("needs a kernel that keeps cgroups after their removal"),
    "host_core_pinned": Nothing("needs a core that the kernel does not leave for a minute"),
    "host_disk_error": Kernel("EXT4-fs error (device nvme1n1): ext4_find_entry:1455: inode #2: "
                              "comm python: reading directory lblock 0"),
    "host_hung_task": Kernel("INFO: task rehearsal:4242 blocked for more than 120 seconds."),
    "host_kernel_crash": Kernel(
        "BUG: unable to handle kernel NULL pointer dereference at 0000000000000008"),
    "host_limit_near": "ulimit -n 1000, and a program that opens 800 files",
    "host_memory_low": "a program that takes all memory but two percent",
    "host_oom": Kernel("Out of memory: Killed process 12345 (rehearsal) total-vm:1048576kB, "
                       "anon-rss:524288kB, file-rss:0kB"),
    "host_shm_full": "fallocate of nine tenths of /dev/shm, and rm afterwards",
    "host_unknown": Nothing("needs a /proc that cannot be read"),
    "host_zombies": "a program that starts 200 children and waits for none",
    "journal_stalled": "fill the file system of the agent's state directory",
    "launcher_lost": "kill -9 of the launcher's pid, which `holdfast status --json` has",
    "log_root_cause": "holdfast inject exception --rank 1",
    "mount_failed": "unexport, on the NFS server, what a test node mounts",
    "mount_hung": "systemctl stop nfs-server, on the server of a test node's mount",
    "mount_slow": "tc qdisc add dev IF root netem delay 2500ms, on that server",
    "neuron_error": Kernel("NEURON_HW_ERR=SRAM_UNCORRECTABLE_ERROR instance-id=i-0 hostname=n0 "
                           "nd-id=0 nc-id=0 serial-num=0 action=TERMINATE_RUNTIME"),
    "neuron_memory_uncorrected": Nothing("needs a Neuron device with broken memory"),
    "nic_error": Kernel("ena 0000:00:05.0 ens5: Keep alive watchdog timeout."),
    "nic_error_rate": Nothing("needs a cable or a card that garbles bits"),
    "nic_flapping": "pull a cable of a test node three times",
    "nic_link_down": "pull a cable of a test node, or shut the switch's port",
    "nic_link_slow": Nothing("needs a link that lost lanes"),
    "nic_lost": "echo 1 > /sys/bus/pci/devices/ADDRESS/remove; rescan gives it back",
    "nic_reset": Nothing("needs a driver that resets its card"),
    "nic_unresponsive": Nothing("needs a card whose firmware hangs"),
    "node_lost": "switch off a node of a run over several",
    "nvme_failing": Nothing("needs a drive that is worn out or broken"),
    "pcie_error": Kernel("pcieport 0000:03:04.0: AER: device recovery failed"),
    "probe_stuck": Nothing("needs a driver that keeps a process in state D"),
    "rank_exited": "holdfast inject exception --rank 1",
    "rank_gil_held": "holdfast inject hold-gil --rank 1 --seconds 600",
    "rank_hung": "holdfast inject stall --rank 1 --seconds 600",
    "rank_killed": "holdfast inject kill --rank 1",
    "rank_oom_killed": "a run below systemd-run --scope -p MemoryMax=, less than its ranks need",
    "rank_stopped": "holdfast inject stop --rank 1",
    "row_remap_failed": Nothing("needs a GPU whose memory has no spare row left"),
    "row_remap_pending": Nothing("needs a GPU that replaces a row of its memory"),
    "run_not_judged": Nothing("needs a defect in Holdfast"),
    "snapshot_off": "a run below systemd-run --scope -p MemoryMax=, little more than it needs",
    "start_refused": "the line of gpu_fell_off_bus, then start a run there",
    "store_lost": "systemctl stop etcd on most of its members",
    "tcp_retransmits_high": "tc qdisc add dev IF root netem loss 15%, while a run exchanges",
    "unit_crash_loop": "systemd-run -p Restart=always -p RestartSec=5 /bin/false",
}
_BY_FLEET_PAGE: dict[str, str | Kernel | Nothing] = {
    "agents_absent": "systemctl stop holdfast on three nodes: training goes on",
    "breaker_open": "the line of gpu_needs_inspection on three nodes",
    "deadline_at_risk": "start a run with --deadline +1h that needs more",
    "detector_precision_low": "of ten incidents of a detector, answer two with --label false",
    "errors_repeat": Nothing("needs a part of an agent that fails again and again"),
    "goodput_low": Nothing("is the sum of an hour of other faults"),
    "no_leader": "take the leader's node out of Prometheus' targets",
    "no_verified_checkpoint": "make the checkpoints' directory read-only for three intervals",
    "paused_long": "holdfast pause --node NODE --for 5h --reason rehearsal",
    "reload_failed": "a word too many in agent.toml, then systemctl reload holdfast",
    "run_node_lost": "switch off the node of a run on one node",
    "run_not_training": 'act = ["ended"] below [detect], then stall a rank for an hour',
    "store_down": "systemctl stop etcd on all of its members",
    "version_skew": "upgrade one node of several, and wait six hours",
    "watchdog": "stop Prometheus: whoever watches the watchdog raises the alarm",
}
REHEARSALS = _BY_FAULT | {f"fleet/{name}": how for name, how in _BY_FLEET_PAGE.items()}


def shown(how: str | Kernel | Nothing) -> str:
    """A cell of the table."""
    if isinstance(how, Nothing):
        return f"none: {how.reason}"
    if isinstance(how, Kernel) or how.startswith("holdfast "):
        return f"`{how}`".replace("|", "\\|")
    return how
