"""Disks, drives, error counters and the clock: a recorded node -> samples -> /metrics text.

HOLDFAST_GOLDEN=write writes the golden files anew.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pages import page, same_as_golden

from holdfast.agent.checks import gate
from holdfast.agent.checks.facts import Facts
from holdfast.agent.cli import doctor
from holdfast.agent.core.detect.registry import of_node
from holdfast.collectors import ALL, PROBED, clock, disk, hardware_errors, mounts, nvme_smart
from holdfast.collectors.clock import ClockCollector, State, Timex, state_of
from holdfast.collectors.contract import NoData, Roots
from holdfast.collectors.hardware_errors import HardwareErrorsCollector
from holdfast.collectors.mounts import MountsCollector
from holdfast.collectors.nvme import NvmeCollector
from holdfast.collectors.nvme_smart import NvmeSmartCollector
from holdfast.collectors.pci import PciCollector
from holdfast.collectors.sources import mountinfo

HERE = Path(__file__).resolve().parent
OF_HOST = ("storage", "reach", "hardware", "clock", "fabric")


def as_recorded(collector, samples) -> None:
    declared = {metric.name for metric in collector.metrics}
    assert {one.name for one in samples} <= declared
    of_host = tuple(name for kind in of_node()
                    if kind.name in OF_HOST for name in kind.reads)
    assert any(name.startswith(of_host) for name in declared), "no detector sees any of it"
    text = page(samples, collector.metrics)
    same_as_golden(HERE / "golden" / f"{collector.name}.txt", text)


# ------------------------------------------------------------- the table of mounts


def test_local_file_systems_once_each_and_none_behind_a_server(roots):
    table = mountinfo.mounts(roots)
    assert {mount.point: mount.readonly for mount in disk.local(table)} == {
        "/": False, "/dev/shm": False, "/data": False, "/old data": True, "/with,comma": False,
    }
    assert sorted(mount.point for mount in table if mount.is_network) == [
        "/buckets/train", "/fsx", "/scratch",
    ]


def test_a_root_on_a_server_hides_no_local_file_system():
    lines = ("1 0 0:9 / / rw - nfs 10.0.0.5:/root rw", "2 1 8:1 / /data rw - xfs /dev/sda1 rw")
    table = [mount for mount in map(mountinfo.parse, lines) if mount is not None]
    assert [mount.point for mount in disk.local(table)] == ["/data"]


def test_what_containers_see_is_no_file_system_of_the_node():
    store = "/var/lib/containers/storage"
    lines = (
        "1 0 8:1 / / rw - ext4 /dev/sda1 rw",
        f"2 1 0:40 / {store}/overlay/3f2a/merged rw - overlay overlay rw,lowerdir=a,upperdir=b",
        f"3 1 0:41 / {store}/overlay-containers/3f2a/userdata/shm rw - tmpfs shm rw,size=64000k",
        "4 1 0:42 / /home/u/.local/share/containers/storage/overlay-containers/9/userdata/shm rw "
        "- tmpfs shm rw",
        "5 1 0:43 / /var/lib/containerd/x/rootfs rw - overlay overlay rw",
        "6 1 8:2 / /var/lib/containers rw - xfs /dev/sdb1 rw",
    )
    table = [mount for mount in map(mountinfo.parse, lines) if mount is not None]
    assert [mount.point for mount in disk.local(table)] == ["/", "/var/lib/containers"]
    root = mountinfo.parse("1 0 0:40 / / rw - overlay overlay rw")
    assert root is not None and disk.local([root]) == [root]


@pytest.mark.parametrize(("options", "readonly"), [
    ("rw,relatime", False), ("ro,relatime", True), ("rw,emergency_ro,shutdown", True),
    ("rw,errors=remount-ro", False),
])
def test_what_takes_no_writes_any_more(options, readonly):
    mount = mountinfo.parse(f"2 1 8:1 / /data rw - ext4 /dev/sda1 {options}")
    assert mount is not None and mount.readonly is readonly


@given(st.one_of(st.text(), st.text("0123456789 /-:\\,row\t", max_size=80)))
def test_no_line_of_the_table_is_too_odd(line):
    mount = mountinfo.parse(line)
    assert mount is None or mount.point


def test_space_of_this_machine_is_what_statvfs_says():
    try:
        samples = disk.DiskCollector().collect(Roots(), 5.0)
    except NoData:
        pytest.skip("no local file system in this sandbox")
    by_key = {(one.name, one.subject): one.value for one in samples}
    for (name, subject), size in by_key.items():
        if name == "host_filesystem_size_bytes":
            space = os.statvfs(subject.removeprefix("mount="))
            assert size == space.f_blocks * space.f_frsize
            assert by_key["host_filesystem_available_bytes", subject] <= size


# ------------------------------------------------------------- counters of errors


def test_error_counters_of_the_recorded_node(roots):
    collector = HardwareErrorsCollector()
    as_recorded(collector, collector.collect(roots, 1.0))


def test_devices_are_looked_at_in_turns_and_all_the_first_time(tmp_path):
    folder = tmp_path / "bus/pci/devices"
    roots, collector = Roots(proc=str(tmp_path), sys=str(tmp_path)), HardwareErrorsCollector()

    def write(device, count):
        (folder / device).mkdir(parents=True, exist_ok=True)
        (folder / device / "aer_dev_correctable").write_text(f"RxErr {count}\nTOTAL {count}\n")

    def total(boot_s):
        found = collector.collect(roots, boot_s)
        looked = {one.boot_s for one in found if one.name == "host_pcie_device_errors_total"}
        return next(one.value for one in found if "corrected" == one.subject[9:]), looked

    for device in "abcdef":
        write(device, 1)
    assert total(1.0) == (6.0, {1.0})
    for device in "abcdef":
        write(device, 10)
    seen = [total(2.0 + turn)[0] for turn in range(4)]
    assert seen == [24.0, 33.0, 42.0, 60.0]
    assert total(9.0)[1] == {3.0, 4.0, 5.0, 9.0}
    write("g", 5)
    assert total(10.0)[0] == 65.0  # a new one is looked at at once
    for file in (folder / "a").iterdir():
        file.unlink()
    (folder / "a").rmdir()
    assert total(11.0)[0] == 55.0


def test_a_machine_without_counters_is_no_data(tmp_path):
    with pytest.raises(NoData, match="virtual machine"):
        HardwareErrorsCollector().collect(Roots(proc=str(tmp_path), sys=str(tmp_path)), 1.0)


@pytest.mark.parametrize("rubbish", [
    b"", b"\xff\x00\xfe" * 400, b"MCE: " + b"9" * 100_000, b"RxErr", b"1\n" * 9999,
    b"RxErr 1e9\nx -1\n\xd9\xa3 \xd9\xa3\n",
])
def test_rubbish_in_counters_is_left_out(tmp_path, rubbish):
    for name in ("proc/interrupts", "sys/bus/pci/devices/a/aer_dev_correctable",
                 "sys/devices/system/edac/mc/mc0/ce_count",
                 "sys/devices/system/edac/mc/mc0/dimm0/dimm_label"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(rubbish)
    roots = Roots(proc=str(tmp_path / "proc"), sys=str(tmp_path / "sys"))
    found = HardwareErrorsCollector().collect(roots, 1.0)
    named = {one.name for one in found if one.value > 0.0}
    assert not named & {"host_pcie_device_errors_total", "host_machine_checks_total"}
    page(found, HardwareErrorsCollector.metrics)


@given(st.binary(max_size=300))
def test_no_counter_file_is_too_odd(tmp_path_factory, content):
    file = tmp_path_factory.getbasetemp() / "aer"
    file.write_bytes(content)
    counts = hardware_errors._counts(str(file))
    assert counts is not None and all(one >= 0.0 for one in counts.values())


# ------------------------------------------------------------- drives


def test_drives_of_the_recorded_node(roots):
    collector = NvmeCollector()
    assert collector.here(roots) == ""
    samples = [one._replace(value=0.0) if one.name == "host_nvme_waiting_seconds" else one
               for one in collector.collect(roots, 1.0)]
    as_recorded(collector, samples)


def test_smart_names_what_is_missing(roots, tool, tmp_path):
    collector = NvmeSmartCollector()
    assert "neither smartctl nor nvme is installed" in collector.here(roots)
    tool("nvme", "nvme_cli.json")
    assert collector.here(roots) == ""
    (tmp_path / "proc/self/status").write_text("CapEff:\t0000000400000000\n")
    assert "needs CAP_SYS_ADMIN" in collector.here(roots)
    assert "no NVMe drive" in collector.here(roots._replace(sys=str(tmp_path)))
    with pytest.raises(NoData, match="CAP_SYS_ADMIN"):
        collector.collect(roots, 1.0)


def settled(collector, roots, boot_s):
    """A reading in which every question is answered: the tools take a moment to start."""
    deadline_s = time.monotonic() + 20.0
    while True:
        samples = collector.collect(roots, boot_s)
        waits = [one.value for one in samples if one.name == "host_nvme_waiting_seconds"]
        if not any(waits) or time.monotonic() > deadline_s:
            return samples


@pytest.mark.parametrize(("name", "says"), [("smartctl", "smartctl.json"),
                                            ("nvme", "nvme_cli.json")])
def test_smart_by_either_tool(roots, tool, name, says):
    asked = tool(name, says)
    samples = settled(NvmeSmartCollector(), roots, 1.0)
    said = {one.name: one.value for one in samples if one.subject == "device=nvme0"}
    wanted = {
        "smartctl": (0.09, 0.1, 1.04, 2.0, 17.0, 3.0), "nvme": (1.0, 0.1, 0.01, 0.0, 17.0, 3.0),
    }[name]
    assert tuple(round(value, 9) for value in said.values()) == wanted
    warned = {one.subject for one in samples
              if one.name == "host_nvme_critical_warning" and one.value}
    given = {f"device={drive},warning={word}" for drive in ("nvme0", "nvme10")
             for word in ("spare_low", "reliability")}
    assert warned == (given if name == "smartctl" else set())
    assert asked.read_text().count("/dev/nvme10") == 1


def test_smart_is_asked_seldom_and_keeps_the_time_of_its_answer(roots, tool):
    asked, collector = tool("nvme", "nvme_cli.json"), NvmeSmartCollector()
    settled(collector, roots, 1.0)
    later = collector.collect(roots, 200.0)
    assert {one.boot_s for one in later if one.name == "host_nvme_used_ratio"} == {1.0}
    assert len(asked.read_text().splitlines()) == 2
    settled(collector, roots, 302.0)
    assert len(asked.read_text().splitlines()) == 4


def test_a_tool_that_is_refused_says_why(roots, tool, tmp_path):
    said = {"smartctl": {"messages": [{"string": "open of /dev/nvme0 failed: Permission denied"}]}}
    (tmp_path / "refused.json").write_text(json.dumps(said))
    tool("smartctl", str(tmp_path / "refused.json"))
    with pytest.raises(NoData, match="Permission denied"):
        settled(NvmeSmartCollector(), roots, 1.0)


def test_a_tool_that_is_late_or_talks_without_end_is_ended(tmp_path):
    ended = tmp_path / "by itself"
    with pytest.raises(TimeoutError, match=r"within 0\.2 s"):
        nvme_smart.run_tool(("sh", "-c", 'sleep 60; touch "$1"', "late", str(ended)), 0.2)
    assert not ended.exists()
    with pytest.raises(OSError, match="longer than"):
        nvme_smart.run_tool(("yes",), 20.0)
    with pytest.raises(FileNotFoundError):
        nvme_smart.run_tool(("/nonexistent/nvme",), 1.0)


ODD = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(
        ("critical_warning", "temperature", "avail_spare", "percentage_used", "value", "smartctl",
         "messages", "string", "error", "nvme_smart_health_information_log")), inner, max_size=4),
)


@given(st.one_of(st.binary(max_size=200), ODD.map(lambda one: json.dumps(one).encode())))
def test_no_answer_of_a_tool_is_too_odd(output):
    readings, why = nvme_smart.parse(output)
    assert bool(readings) != bool(why)
    assert all(0.0 <= value < float("inf") for _, _, value in readings)


def test_what_is_no_count_costs_itself_alone():
    said = (b'{"critical_warning": {"value": 300}, "temperature": 1, "media_errors": Infinity, '
            b'"avail_spare": NaN, "percent_used": -1, "unsafe_shutdowns": true, '
            b'"spare_thresh": null, "num_err_log_entries": "17"}')
    assert nvme_smart.parse(said) == ([("host_nvme_error_log_entries_total", "", 17.0)], "")


def test_half_an_answer_and_one_without_end():
    whole = (HERE / "smartctl.json").read_bytes()
    assert nvme_smart.parse(whole[: len(whole) // 2]) == ([], "no JSON")
    assert nvme_smart.parse(b"[" * 200_000) == ([], "no JSON")


def test_users_own_mounts_take_no_servers_mount_out_of_sight(tmp_path):
    """Whoever may mount a FUSE program chooses its path, and shorter ones came first."""
    rows = [f"{n} 1 0:{n} / /a{n} rw - fuse.x x rw" for n in range(100, 100 + mounts.MOUNTS_MAX)]
    rows += [f"{n} 1 0:{n} / /shared/of/everybody/{n} rw - nfs4 s:/x rw" for n in (7, 8)]
    (tmp_path / "self").mkdir()
    (tmp_path / "self/mountinfo").write_text("\n".join(rows))
    seen = [mount.fstype for mount in mounts._network(Roots(proc=str(tmp_path)))]
    assert seen[:2] == ["nfs4", "nfs4"] and len(seen) == mounts.MOUNTS_MAX


# ------------------------------------------------------------- clock


def test_the_clock_of_the_recorded_node(roots):
    collector = ClockCollector(lambda: State(True, -2.5e-5, 0.0009, 1.2e-5))
    as_recorded(collector, collector.collect(roots, 1.0))


def test_a_sandbox_that_refuses_is_told(roots):
    def refused():
        raise NoData("adjtimex: Operation not permitted")

    with pytest.raises(NoData, match="not permitted"):
        ClockCollector(refused).collect(roots, 1.0)


@pytest.mark.parametrize(("status", "result", "synchronized", "offset_s"), [
    (0x2001, 0, True, -0.25), (0x0001, 0, True, -250.0), (0x2040, 5, False, -0.25),
    (0x0000, 5, False, -250.0), (0x0040, 0, False, -250.0),
])
def test_what_the_kernel_says_in_seconds(status, result, synchronized, offset_s):
    timex = Timex(offset=-250_000_000, maxerror=16_000_000, esterror=1000, status=status)
    assert state_of(timex, result) == State(synchronized, offset_s, 16.0, 0.001)


def test_this_machines_kernel_answers():
    try:
        state = clock.ask_kernel()
    except NoData as reason:
        pytest.skip(str(reason))
    assert state.max_error_s >= 0.0 and abs(state.offset_s) < 3600.0


def test_doctor_names_what_smart_and_the_clock_lack(roots, tool, tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "Roots", lambda: roots)
    tool("nvme", "nvme_cli.json")
    assert doctor.drives({}).state == doctor.HAVE
    (tmp_path / "proc/self/status").write_text("CapEff:\t0\n")
    assert "CAP_SYS_ADMIN" in doctor.drives({}).said
    for synchronized, state in ((True, doctor.HAVE), (False, doctor.LACK)):
        monkeypatch.setattr(clock, "ask_kernel", lambda kept=synchronized: State(kept, 0, 0.01, 0))
        assert doctor.time_service({}).state == state


@pytest.mark.parametrize(("kept", "said"), [
    (True, "the clock is kept"), (False, "no time service keeps it now: after a boot that takes "
                                         "minutes, and later the agent warns")])
def test_the_check_of_the_clock_says_what_doctor_says(roots, monkeypatch, kept, said):
    """One look cannot tell a boot from a service that is missing: it is no warning yet."""
    monkeypatch.setattr(clock, "ask_kernel", lambda: State(kept, 0, 0.01, 0))
    found = gate.clock(Facts("node-a", roots))
    assert (found.said, found.warning, found.unknown) == (said, (), ())


# ------------------------------------------------------------- all of them


def test_on_a_machine_without_anything_each_is_absent_and_says_why(tmp_path):
    roots = Roots(proc=str(tmp_path), sys=str(tmp_path), compile_cache=str(tmp_path / "none"))
    for make in PROBED:
        if make in (MountsCollector, NvmeCollector, NvmeSmartCollector) or make.name == "dns":
            assert make().here(roots), make.name
            with pytest.raises(NoData):
                make().collect(roots, 1.0)
    assert len({make.name for make in ALL}) == len(ALL)


# ------------------------------------------------------------- the PCI bus


def test_switches_are_counted_by_their_driver(tmp_path):
    drivers = tmp_path / "bus/pci/drivers"
    for driver, devices in (("nvidia", 2), ("nvidia-nvswitch", 4), ("pcieport", 9)):
        for number in range(devices):
            (drivers / driver / f"0000:{number:02x}:00.0").mkdir(parents=True)
        (drivers / driver / "bind").touch()
    found = {one.name: one.value for one in PciCollector().collect(Roots(sys=str(tmp_path)), 1.0)
             if one.name != "pci_bound"}
    assert found == {"host_pci_devices": 6.0, "host_pci_nvswitches": 4.0}
