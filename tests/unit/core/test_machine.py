"""Space and its forecast, remounts, mounts, drives, counters and the clock, as verdicts."""

from __future__ import annotations

import pytest
from detectors import judged

from holdfast.agent.core.detect.host.clock import Clock
from holdfast.agent.core.detect.host.hardware import Hardware
from holdfast.agent.core.detect.host.reach import Reach
from holdfast.agent.core.detect.host.storage import MOUNTS_MAX, Storage, amount
from holdfast.agent.core.detect.registry import NodeWatch
from holdfast.agent.core.model import Now, Observed, Settings, StoreView, readings_of
from holdfast.agent.core.node import Node
from holdfast.agent.core.series.trend import Trend

GB = 1e9


def disk(left, size=1000 * GB, inodes=(0.0, 0.0), readonly=0.0, boot_s=0.0, mount="/data"):
    values = {"size_bytes": size, "available_bytes": left, "inodes": inodes[1],
              "free_inodes": inodes[0], "readonly": readonly}
    return tuple((f"host_filesystem_{name}", f"mount={mount}", value, boot_s)
                 for name, value in values.items())


def said(verdicts):
    assert not any(one.act for one in verdicts)
    return [(one.fault, one.severity, one.reason) for one in verdicts]


# ------------------------------------------------------------- trend


def trend_of(values):
    trend = Trend()
    for minute, value in enumerate(values):
        trend.add(60.0 * minute, float(value))
    return trend


@pytest.mark.parametrize(("values", "a_minute"), [
    (range(6000, 0, -100), 100.0),
    (range(900, 0, -100), 0.0),  # too few
    ([5000] * 60, 0.0),
    (range(0, 6000, 100), 0.0),  # grows
    ([5000 - 1000 * (n % 10 in (7, 8)) for n in range(60)], 0.0),  # written, deleted, written
    ([5000] * 20 + [2000] * 40, 0.0),  # one copy, then nothing
    ([6000 - 100 * n - (3000 if n % 15 == 7 else 0) for n in range(60)], 100.0),
    ([6000 - 50 * n for n in range(20)] + [5000 - 200 * n for n in range(20)]
     + [1000 - 10 * n for n in range(20)], 110.0),  # faster, then slower: between the two
])
def test_only_a_steady_fall_counts(values, a_minute):
    assert trend_of(values).falls_per_s() * 60 == pytest.approx(a_minute, rel=0.05)


def test_a_trend_is_an_hour_long_and_begins_anew_after_a_boot():
    trend = trend_of(range(10_000, 0, -1))
    assert trend.covers_s() == 59 * 60.0
    trend.add(5.0, 3.0)
    assert trend.covers_s() == 0.0 and trend.falls_per_s() == 0.0


def test_readings_between_two_points_are_not_kept():
    trend = Trend()
    for second in range(0, 600, 15):
        trend.add(float(second), 1000.0 - second)
    assert trend.falls_per_s() == pytest.approx(1.0)
    assert trend.covers_s() == 540.0


# ------------------------------------------------------------- space


@pytest.mark.parametrize(("left", "size", "severity"), [
    (11 * GB, 1000 * GB, ""), (9 * GB, 1000 * GB, "warn"), (0.9 * GB, 1000 * GB, "degraded"),
    (3000 * GB, 30_000 * GB, ""),
    (1.1 * GB, 10 * GB, ""), (0.9 * GB, 10 * GB, "warn"), (0.1 * GB, 10 * GB, "degraded"),
    (0.0, 0.0, ""),
])
def test_small_by_share_large_by_amount(left, size, severity):
    found = said(judged(Storage("n"), disk(left, size), []))
    assert [one[1] for one in found] == ([severity] if severity else [])
    assert all(one[0] == "disk_space_low" for one in found)


def test_space_and_inodes_are_one_verdict():
    (one,) = said(judged(Storage("n"), disk(9 * GB, inodes=(900.0, 100_000.0)), []))
    assert one == ("disk_space_low", "degraded",
                   "/data: 9 GB of 1 TB left; 900 of 100000 inodes left")


def test_full_soon_is_said_and_stays_until_it_is_well_away():
    storage, minute = Storage("n"), 0

    def fill(minutes, left, gb_a_minute):
        nonlocal minute
        found = []
        for _ in range(minutes):
            left -= gb_a_minute * GB
            minute += 1
            found = said(judged(storage, disk(left, boot_s=60.0 * minute), []))
        return left, found

    left, found = fill(60, 800 * GB, 1.0)
    assert not found  # 740 GB at 1 GB a minute: 12 hours
    left, found = fill(60, left, 2.5)
    assert found == [("disk_space_low", "warn", "/data: full in 236 min if it goes on as in the "
                      "last 59 min")]
    left, found = fill(60, left, 1.7)
    assert len(found) == 1  # 288 min: not within four hours, and not far enough away
    left, found = fill(60, left, 0.5)
    assert not found


def test_inodes_have_a_forecast_of_their_own():
    storage, found = Storage("n"), []
    for minute in range(30):
        inodes = (100_000.0 - 1000.0 * minute, 1_000_000.0)
        found = said(judged(storage, disk(500 * GB, inodes=inodes, boot_s=60.0 * minute), []))
    assert "inodes are used up in 71 min" in found[0][2]


def test_a_mount_that_goes_and_comes_begins_anew():
    storage = Storage("n")
    for minute in range(30):
        judged(storage, disk(GB * (200 - 2 * minute), boot_s=60.0 * minute), [])
    assert judged(storage, disk(140 * GB, boot_s=1800.0), [])
    assert not judged(storage, (), [])
    assert not judged(storage, disk(138 * GB, boot_s=1860.0), [])


@pytest.mark.parametrize(("size", "text"), [
    (0.0, "0 B"), (999.4, "999 B"), (999.6, "1 kB"), (1234567.0, "1.23 MB"), (2.5e9, "2.5 GB"),
    (30e12, "30 TB"),
])
def test_amounts_for_people(size, text):
    assert amount(size) == text


# ------------------------------------------------------------- read-only


def step(node, boot_s, samples, boot_id="b"):
    observed = Observed(samples=readings_of(samples), store=StoreView(up=True))
    return node.step(Now(boot_s, boot_s, boot_id), observed).verdicts


def test_a_remount_is_told_also_after_a_restart_and_not_after_a_boot():
    node = Node("n", Settings(), {})
    both = (*disk(500 * GB), *disk(0.0, 4 * GB, readonly=1.0, mount="/iso"))
    assert not step(node, 1.0, both)
    (one,) = step(node, 2.0, disk(500 * GB, readonly=1.0))
    assert (one.fault, one.subject) == ("filesystem_readonly", "node/n/mount/data")
    assert said([one])[0][1] == "degraded"
    again = Node("n", Settings(), {}, node.memory())
    assert [v.fault for v in step(again, 3.0, disk(500 * GB, readonly=1.0))] == [one.fault]
    assert not step(again, 4.0, disk(500 * GB))
    assert not step(again, 1.0, disk(500 * GB, readonly=1.0), "another")


def test_mounts_that_come_and_go_leave_room_for_new_ones():
    storage, writable = Storage("n"), []
    for number in range(3 * MOUNTS_MAX):
        pod = disk(500 * GB, mount=f"/pods/{number}")
        assert not judged(storage, (*disk(500 * GB), *pod), writable)
        assert len(writable) <= MOUNTS_MAX and f"/pods/{number}" in writable
    assert judged(storage, disk(500 * GB, readonly=1.0), writable)


def test_a_step_over_equal_samples_says_the_same_and_looks_once():
    node, samples = Node("n", Settings(), {}), disk(0.5 * GB)
    first, second = (step(node, boot_s, samples) for boot_s in (1.0, 2.0))
    assert first == second and len(first) == 1
    seat, read = NodeWatch("n", {}).seats["storage"], Observed(samples=readings_of(samples))
    seat.show([tuple(samples)])
    seat.look(read)
    first = seat.verdicts
    seat.look(read)
    assert len(first) == 1 and seat.verdicts is first


# ------------------------------------------------------------- reach


def mount(name, value, boot_s, more=""):
    return ((f"host_mount_{name}", f"mount=/fsx,fstype=lustre{more}", value, boot_s),)


def test_slow_is_three_slow_answers_after_each_other():
    detector = Reach("n")
    for boot_s, took_s, faults in ((1, 3.0, 0), (2, 3.0, 0), (3, 0.1, 0), (4, 9.0, 0), (5, 2.0, 0),
                                   (5, 2.0, 0), (6, 2.5, 1), (7, 0.1, 0)):
        found = judged(detector, mount("response_seconds", took_s, float(boot_s)))
        assert len(found) == faults, boot_s
        if found:
            assert said(found)[0][:2] == ("mount_slow", "warn") and "2.5 s" in found[0].reason


def test_what_still_waits_keeps_its_streak():
    detector = Reach("n")
    for boot_s in range(1, 7):  # each question is answered in the reading after the next
        name, value = ("waiting_seconds", 0.5) if boot_s % 2 else ("response_seconds", 4.0)
        found = judged(detector, mount(name, value, float(boot_s)))
    assert [one.fault for one in found] == ["mount_slow"]
    assert judged(detector, mount("waiting_seconds", 0.5, 7.0)) == found
    assert not judged(detector, mount("response_seconds", 0.1, 8.0))
    assert not judged(detector, mount("waiting_seconds", 0.5, 8.5))
    assert not judged(detector, ())  # unmounted
    assert not judged(detector, mount("response_seconds", 4.0, 9.0))


def test_hung_and_failed_mounts_and_drives():
    detector = Reach("n")
    assert not judged(detector, mount("waiting_seconds", 9.0, 1.0))
    assert said(judged(detector, mount("waiting_seconds", 75.0, 2.0))) == [
        ("mount_hung", "degraded",
         "/fsx (lustre) has not answered for 75 s: whoever touches it waits as well")
    ]
    assert said(judged(detector, mount("failed", 1.0, 3.0, ",error=ESTALE"))) == [
        ("mount_failed", "degraded",
         "/fsx (lustre) answers with ESTALE: its server does not know it")
    ]
    drive = (("host_nvme_waiting_seconds", "device=nvme3,question=smart", 20.0, 4.0),)
    assert said(judged(detector, drive)) == [
        ("nvme_failing", "degraded", "nvme3 has not answered for 20 s (smart)")
    ]


def test_a_lookup_that_failed_once_is_no_fault():
    detector, name = Reach("n"), "name=s3.example"
    bad = ("host_dns_failed", f"{name},error=EAI_AGAIN", 1.0)
    for boot_s, failed, faults in ((1.0, True, 0), (2.0, False, 0), (3.0, True, 0), (4.0, True, 1)):
        samples = [("host_dns_lookup_seconds", name, 0.3, boot_s)]
        samples += [(*bad, boot_s)] if failed else []
        assert len(found := judged(detector, tuple(samples))) == faults
    assert found[0].reason == "s3.example does not resolve: no server answered (0.3 s)"


# ------------------------------------------------------------- counters


def memory(error, value, boot_s):
    subject = f"controller=mc0,module=DIMM_A1,error={error}"
    return ("host_memory_errors_total", subject, value, boot_s)


def test_corrected_errors_count_by_rate_uncorrected_by_being_there():
    detector = Hardware("n")
    assert not judged(detector, (memory("corrected", 5000.0, 1.0),))
    assert not judged(detector, (memory("corrected", 5099.0, 15.0),))
    (one,) = said(judged(detector, (memory("corrected", 5100.0, 30.0),)))
    assert one == ("cpu_machine_check", "warn",
                   "mc0/DIMM_A1: 100 corrected errors in the last hours")
    both = (memory("corrected", 5100.0, 45.0), memory("uncorrected", 1.0, 45.0))
    (one,) = judged(detector, both)
    assert one.severity == "fatal" and one.reason.endswith("1 uncorrected errors since the driver "
                                                          "was loaded")
    for hour in range(1, 4):
        last = judged(detector, (memory("corrected", 5100.0, 3600.0 * hour + 60.0),))
    assert not last
    assert not judged(detector, (memory("corrected", 3.0, 3600.0 * 4),))  # the driver began anew


def pcie(severity, value, boot_s, device="0000:17:00.0"):
    total = ("host_pcie_errors_total", f"severity={severity}", value, boot_s)
    subject = f"device={device},severity={severity},error=CmpltTO"
    return (total, ("host_pcie_device_errors_total", subject, value, boot_s)) if value else (total,)


def test_errors_since_the_boot_are_no_fault_and_the_first_later_one_is():
    detector = Hardware("n")
    assert not judged(detector, pcie("fatal", 3.0, 1.0))
    (one,) = said(judged(detector, pcie("fatal", 4.0, 2.0)))
    assert one == ("pcie_error", "fatal",
                   "0000:17:00.0: 1 fatal errors (CmpltTO) in the last hours")
    other = Hardware("n")
    assert not judged(other, pcie("nonfatal", 0.0, 1.0))
    assert [one[1] for one in said(judged(other, pcie("nonfatal", 1.0, 2.0)))] == ["degraded"]


def test_a_source_that_is_read_late_or_not_for_a_while_raises_nothing():
    detector = Hardware("n")
    assert not judged(detector, pcie("corrected", 0.0, 1.0))
    errors = ("host_nvme_media_errors_total", "device=nvme0", 900.0, 9.0)
    assert not judged(detector, (errors,))
    assert not judged(detector, ())
    assert not judged(detector, (errors[:3] + (30.0,),))
    (one,) = said(judged(detector, (errors[:2] + (901.0, 45.0),)))
    assert one == ("nvme_failing", "degraded", "nvme0: 1 new media errors in the last hours")


def test_machine_checks_and_what_only_warns_of_heat():
    detector = Hardware("n")
    for boot_s, value in ((1.0, 3.0), (2.0, 5.0)):
        found = said(judged(detector, tuple(
            ("host_machine_checks_total", f"kind={kind}", value, boot_s)
            for kind in ("exception", "thermal", "threshold")
        )))
    assert found == [("cpu_machine_check", "degraded",
                      "machine check: 2 machine checks (exception) in the last hours")]


@pytest.mark.parametrize(("name", "more", "value", "severity"), [
    ("critical_warning", "warning=media_readonly", 1.0, "fatal"),
    ("critical_warning", "warning=spare_low", 1.0, "degraded"),
    ("critical_warning", "warning=spare_low", 0.0, ""),
    ("live", "state=dead", 0.0, "fatal"), ("live", "state=resetting", 0.0, "degraded"),
    ("live", "state=live", 1.0, ""), ("used_ratio", "", 1.04, "warn"), ("used_ratio", "", 0.9, ""),
    ("temperature_alarm", "sensor=Composite", 1.0, "warn"),
])
def test_what_a_drive_says_of_itself(name, more, value, severity):
    subject = f"device=nvme1,{more}" if more else "device=nvme1"
    found = judged(Hardware("n"), ((f"host_nvme_{name}", subject, value, 1.0),))
    assert [one.severity for one in found] == ([severity] if severity else [])
    assert all((one.fault, one.subject) == ("nvme_failing", "node/n/drive/nvme1") for one in found)


# ------------------------------------------------------------- clock


def clock(synchronized, boot_s, offset_s=0.0, max_error_s=0.01):
    values = {"synchronized": synchronized, "offset_seconds": offset_s,
              "max_error_seconds": max_error_s}
    return tuple((f"host_clock_{name}", "", value, boot_s) for name, value in values.items())


def test_a_clock_that_nobody_keeps_is_told_after_five_minutes():
    detector = Clock("n")
    assert not judged(detector, clock(0.0, 10.0, max_error_s=16.0))
    assert not judged(detector, clock(0.0, 309.0, max_error_s=16.0))
    (one,) = said(judged(detector, clock(0.0, 310.0, max_error_s=16.0)))
    assert one == ("clock_unsynchronised", "warn",
                   "the clock is kept by nobody since 5 min and off by up to 16.0 s")
    assert not judged(detector, clock(1.0, 320.0))
    assert not judged(detector, clock(0.0, 330.0))


@pytest.mark.parametrize(("offset_s", "max_error_s", "why"), [
    (0.09, 0.9, ""), (0.25, 0.01, "is 0.25 s behind"), (-3.0, 0.01, "is 3.00 s ahead"),
    (0.0, 1.1, ""), (0.0, 3.5, "may be off by 3.5 s"),
])
def test_a_clock_that_is_kept_badly(offset_s, max_error_s, why):
    found = judged(Clock("n"), clock(1.0, 10.0, offset_s, max_error_s))
    assert [one.reason for one in found] == ([f"the clock {why}"] if why else [])


@pytest.mark.parametrize(("source", "faults"), [("tsc", 0), ("kvm-clock", 0), ("hpet", 1)])
def test_a_slow_source(source, faults):
    samples = (("host_clock_source_info", f"source={source}", 1.0, 1.0),)
    assert [one.fault for one in judged(Clock("n"), samples)] == ["clock_source_slow"] * faults
