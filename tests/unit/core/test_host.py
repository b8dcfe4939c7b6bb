"""The host's pathologies by value: readings in, verdicts and incidents out."""

from __future__ import annotations

import msgspec
import pytest
from detectors import judged
from hypothesis import given
from hypothesis import strategies as st

from holdfast.agent.core.detect.host.host import Host
from holdfast.agent.core.detect.host.links import owner
from holdfast.agent.core.model import Ended, Event, Verdict
from holdfast.agent.core.series.window import CounterWindow

from .host_machine import Machine, leaking, ranks, told

RESET = Event("ib", "netdev_watchdog", "queue", "watch", "warn", "eth0: transmit queue 0 timed out",
              fault="nic_error", subject="nic/eth0", cursor=7)


# ------------------------------------------------------------- cores


def test_one_core_in_the_kernel_shows_although_the_mean_is_low() -> None:
    host, machine = Host("a"), Machine(kernel={5: 0.97})
    machine.slow["task_kernel_ratio", "pid=812,name=kubelet,cpu=5"] = 0.96
    assert not told(host, machine, 8)
    (verdict,) = told(host, machine, 6).values()
    assert verdict.fault == "host_core_pinned" and not verdict.act
    assert verdict.subject == "node/a/cpu"
    assert "core 5 spent 97% of the last minute in the kernel" in verdict.reason
    assert "all 8 cores together spent 14%" in verdict.reason
    assert verdict.evidence == (
        ("in kernel", "kubelet (pid 812) 96% of a core, last on core 5"),)
    machine.kernel = {}
    assert not told(host, machine, 4)


@pytest.mark.parametrize("mode", ["softirq", "irq"])
def test_interrupts_count_as_the_kernel_and_a_users_work_does_not(mode: str) -> None:
    host, machine = Host("a"), Machine()
    machine.busy[2] = {"user": 0.0, "system": 0.0, "idle": 0.0, mode: 0.0}
    machine.busy[3] = {"user": 0.0, "system": 0.0, "idle": 0.0}
    found: dict[str, Verdict] = {}
    for _ in range(15):
        machine.busy[2][mode] += 100.0
        machine.busy[3]["user"] += 100.0
        found = told(host, machine)
    (verdict,) = found.values()
    assert verdict.reason.startswith("core 2 spent 95%")


def test_a_burst_and_a_counter_that_goes_back_are_no_pinned_core() -> None:
    host, machine = Host("a"), Machine(kernel={1: 1.0})
    assert not told(host, machine, 9)
    machine.kernel = {}
    assert not told(host, machine, 20)
    machine.kernel = {1: 1.0}
    told(host, machine, 8)
    machine.busy[1] = {"user": 0.0, "system": 0.0, "idle": 0.0}  # taken offline and back
    assert not told(host, machine, 9)
    assert told(host, machine, 6)


# ------------------------------------------------------------- the chain


def test_a_crash_loop_that_leaks_cgroups_and_starves_the_card_names_the_unit_alone() -> None:
    host, machine = Host("a"), Machine(kernel={3: 0.98}, events=())
    machine.slow["task_kernel_ratio", "pid=31,name=kworker/3:1,cpu=3"] = 0.95
    machine.slow["cgroup_dying", "cgroup=/system.slice/ecs.service"] = 60_000.0
    told(host, machine, 3)
    leaking(machine, host, 7)
    machine.events = (msgspec.structs.replace(RESET, boot_s=machine.boot_s),)
    found = leaking(machine, host, 1)
    (verdict,) = found.values()
    assert verdict.subject == "node/a/unit/ecs.service" and verdict.severity == "degraded"
    assert verdict.fault == "unit_crash_loop" and not verdict.act and not verdict.run
    for part in ("unit ecs.service of a crashes again and again (systemd started it 31 times",
                 "beside 240 in use, 31 more", "core 3 spent 98%",
                 "meanwhile network card eth0 was in trouble once",
                 "no run is to blame"):
        assert part in verdict.reason, (part, verdict.reason)
    assert [what for what, _ in verdict.evidence] == [
        "starts", "cgroups", "most below", "core", "in kernel",
        "kernel line", "network card"]
    assert verdict.explains == ("host_cgroup_leak", "host_core_pinned")


def test_cards_are_counted_where_the_kernels_log_may_not_be_read() -> None:
    host, machine = Host("a"), Machine(kernel={3: 0.98})
    for device in ("eth0", "eth1", "eth2"):
        machine.slow["network_transmit_timeouts_total", f"device={device},port="] = 4.0
    leaking(machine, host, 7)
    machine.slow["network_transmit_timeouts_total", "device=eth1,port="] = 6.0
    machine.slow["network_transmit_timeouts_total", "device=eth2,port="] = 5.0
    (verdict,) = leaking(machine, host, 1).values()
    assert "meanwhile network card eth1, eth2 was in trouble 3 times" in verdict.reason


def test_a_crash_loop_beside_an_old_leak_is_not_its_root() -> None:
    host, machine = Host("a"), Machine(kernel={3: 0.98})
    machine.slow["host_memory_cgroups", "state=dying"] = 30_000.0
    found = leaking(machine, host, 8, each=0)
    assert {one.fault for one in found.values()} == {
        "unit_crash_loop", "host_cgroup_leak", "host_core_pinned"}
    loop = found["unit_crash_loop node/a/unit/ecs.service"]
    assert "cgroup" not in loop.reason and loop.severity == "warn" and not loop.explains
    assert found["host_cgroup_leak node/a/cgroups"].severity == "degraded"


def test_a_small_leak_explains_no_core() -> None:
    host, machine = Host("a"), Machine(kernel={3: 0.98})
    machine.slow["host_memory_cgroups", "state=dying"] = 40.0
    found = leaking(machine, host, 8)
    assert set(found) == {"unit_crash_loop node/a/unit/ecs.service", "host_core_pinned node/a/cpu"}
    loop = found["unit_crash_loop node/a/unit/ecs.service"]
    assert "core" not in loop.reason and "leaves memory cgroups behind" in loop.reason


def test_a_handful_of_removed_cgroups_belongs_to_nobody_yet() -> None:
    host, machine = Host("a"), Machine()
    found = leaking(machine, host, 4)
    assert "cgroup" not in found["unit_crash_loop node/a/unit/ecs.service"].reason
    assert "host_cgroup_leak node/a/cgroups" in found
    assert set(leaking(machine, host, 2)) == {"unit_crash_loop node/a/unit/ecs.service"}


def test_some_that_the_kernel_frees_meanwhile_do_not_hide_the_growth() -> None:
    host, machine = Host("a"), Machine()
    leaking(machine, host, 5)
    machine.slow["host_memory_cgroups", "state=dying"] -= 3.0
    (verdict,) = leaking(machine, host, 3).values()
    assert "28 more in that time" in verdict.reason


def test_of_two_that_loop_the_one_below_which_they_lie_is_named() -> None:
    host, machine = Host("a"), Machine()
    machine.slow["cgroup_dying", "cgroup=/system.slice/zz.service"] = 60_000.0
    machine.slow["host_unit_restarts_total", "unit=aa.service"] = 0.0
    for _ in range(40):
        machine.slow["host_unit_restarts_total", "unit=aa.service"] += 2.0
        found = leaking(machine, host, 0)
        key = ("host_unit_restarts_total", "unit=zz.service")
        machine.slow[key] = machine.slow.get(key, 0.0) + 1.0
        held = ("host_memory_cgroups", "state=dying")
        machine.slow[held] = machine.slow.get(held, 68_000.0) + 1.0
        found = told(host, machine, 3)
    root = found["unit_crash_loop node/a/unit/zz.service"]
    assert root.confidence == 0.9 and ("also", "unit aa.service") in root.evidence
    assert not found["unit_crash_loop node/a/unit/aa.service"].explains
    del machine.slow["cgroup_dying", "cgroup=/system.slice/zz.service"]
    doubt = told(host, machine, 3)["unit_crash_loop node/a/unit/aa.service"]
    assert doubt.confidence == 0.6


def test_without_systemd_the_place_where_cgroups_are_born_is_named() -> None:
    host, machine = Host("a"), Machine()
    machine.slow["host_memory_cgroups", "state=dying"] = 5000.0
    machine.slow["host_memory_cgroups", "state=in_use"] = 60.0
    told(host, machine, 3)
    found: dict[str, Verdict] = {}
    for births in range(1, 31):
        machine.slow["cgroup_births_total", "cgroup=/kube/pod1,place=/kube"] = float(births)
        machine.slow["host_memory_cgroups", "state=dying"] += 1.0
        found = told(host, machine, 3)
    (verdict,) = found.values()
    assert verdict.subject == "node/a/cgroup/kube" and verdict.confidence == 0.7
    assert "cgroup /kube/pod1" in verdict.reason
    assert "made anew at least 30 times" in verdict.reason


def test_a_job_that_is_itself_the_loop_is_not_cleared() -> None:
    machine = Machine(runs=(ranks("/system.slice/ecs.service/job", "/job"),))
    (verdict,) = leaking(machine, Host("a"), 7).values()
    assert verdict.reason.endswith("; rank 0 of run m5 lives there")


def test_a_few_restarts_and_a_few_removed_cgroups_are_nothing() -> None:
    host, machine = Host("a"), Machine()
    machine.slow |= {("host_units", ""): 9.0, ("host_memory_cgroups", "state=dying"): 900.0,
                     ("host_memory_cgroups", "state=in_use"): 60.0}
    told(host, machine, 3)
    machine.slow["host_unit_restarts_total", "unit=x.service"] = 4.0
    assert not told(host, machine, 6)
    machine.slow["host_unit_restarts_total", "unit=x.service"] = 5.0  # counted from zero
    assert told(host, machine, 3)


def test_restarts_before_the_agents_first_reading_do_not_count() -> None:
    host, machine = Host("a"), Machine()
    machine.slow |= {("host_units", ""): 9.0, ("host_unit_restarts_total", "unit=x.service"): 99.0}
    assert not told(host, machine, 12)


# ------------------------------------------------------------- levels


@pytest.mark.parametrize(("readings", "subject", "severity", "part"), [
    ({("host_open_files", ""): 69.0, ("host_open_files_max", ""): 100.0}, "", "", ""),
    ({("host_open_files", ""): 71.0, ("host_open_files_max", ""): 100.0},
     "node/a/limit/open-files", "warn", "71 of 100 file handles"),
    ({("host_processes", ""): 95.0, ("host_processes_max", ""): 400.0,
      ("host_threads_max", ""): 100.0}, "node/a/limit/tasks", "degraded", "95 of 100 tasks"),
    ({("host_processes", ""): 95.0}, "", "", ""),
    ({("task_open_files_ratio", "pid=101,name=python"): 0.75}, "node/a/limit/open-files/python",
     "warn", "python (pid 101, rank 1 of run m5) has 75%"),
    ({("task_open_files_ratio", f"pid={pid},name=a/b"): 0.9 + pid / 1e3 for pid in range(7)},
     "node/a/limit/open-files/a_b", "degraded", "a/b (pid 3) has 90% of the open files that its "
     "own limit allows; and 3 more"),
    ({("cgroup_tasks_ratio", "cgroup=/job"): 0.95, ("cgroup_tasks_ratio", "cgroup=/x7"): 0.91,
      ("cgroup_tasks_ratio", "cgroup=/y"): 0.2}, "node/a/limit/cgroup-tasks", "warn",
     "limit allows; rank 0 of run m5 lives there; cgroup /x7 has 91%"),
    ({("task_blocked_seconds", "pid=100,name=python,wait=nfs_wait"): 61.0}, "node/a/processes",
     "warn", "python (pid 100, rank 0 of run m5) for 61 s in nfs_wait"),
    ({("task_blocked_seconds", "pid=7,name=cp,wait=?"): 301.0}, "node/a/processes", "degraded",
     "cp (pid 7) for 301 s"),
    ({("host_shm_size_bytes", ""): 2.0**31, ("host_shm_used_bytes", ""): 2.0**31,
      ("host_shm_unlinked_bytes", ""): 2.0**30, ("shm_resident_bytes", "pid=5,name=dl"): 2.0**30},
     "node/a/shm", "degraded", "100% full: 2.0 GiB of 2.0 GiB, 1.0 GiB of it under no name"),
    ({("host_shm_size_bytes", ""): 2.0**31, ("host_shm_used_bytes", ""): 2.0**30}, "", "", ""),
])
def test_levels(readings: dict[tuple[str, str], float], subject: str, severity: str,
                part: str) -> None:
    machine = Machine(slow=readings, runs=(ranks("/job/r0", "/job2"),))
    found = list(told(Host("a"), machine).values())
    assert [(one.subject, one.severity) for one in found] == [(subject, severity)] * bool(subject)
    assert not found or part in found[0].reason


def test_zombies_and_want_of_memory_must_last() -> None:
    machine = Machine(slow={
        ("host_zombies", ""): 1200.0, ("task_zombies", "pid=9,name=sh"): 1100.0,
        ("host_memory_total_bytes", ""): 100.0 * 2**30,
        ("host_memory_available_bytes", ""): 2.0 * 2**30,
        ("cgroup_memory_ratio", "cgroup=/job"): 0.97,
        ("cgroup_memory_ratio", "cgroup=/other"): 0.99,
        ("cgroup_memory_max_bytes", "cgroup=/job"): 4.0 * 2**30,
    }, runs=(ranks("/job"),))
    host = Host("a")
    assert not told(host, machine, 9)
    found = told(host, machine, 1)
    assert set(found) == {"host_zombies node/a/zombies", "host_memory_low node/a/memory",
                          "host_memory_low node/a/cgroups"}
    assert "1100 of them are sh (pid 9)'s" in found["host_zombies node/a/zombies"].reason
    assert "2.0 GiB of 100.0 GiB are left" in found["host_memory_low node/a/memory"].reason
    limited = found["host_memory_low node/a/cgroups"].reason
    assert "; cgroup /other uses 99%" in limited
    assert "97% of its limit of 4.0 GiB" in limited and "rank 0 of run m5 lives there" in limited
    machine.slow["host_zombies", ""] = 3.0
    machine.slow["cgroup_memory_ratio", "cgroup=/job"] = 0.5
    machine.slow["cgroup_memory_ratio", "cgroup=/other"] = 0.5
    told(host, machine, 3)
    machine.slow["host_zombies", ""] = 1200.0
    assert set(told(host, machine, 3)) == {"host_memory_low node/a/memory"}


def test_pressure_of_memory_by_its_rate() -> None:
    host, machine = Host("a"), Machine()
    for total_s in range(0, 60, 3):
        machine.slow["host_pressure_seconds_total", "resource=memory,kind=full"] = total_s * 1.0
        found = told(host, machine, 3)
    (verdict,) = found.values()
    assert verdict.severity == "warn" and "waited for memory in 20%" in verdict.reason


def test_a_moment_of_pressure_is_no_minute_of_it() -> None:
    """As beside ranks that load, when the agent has just begun."""
    machine, stall = Machine(), ("host_pressure_seconds_total", "resource=memory,kind=full")
    host, machine.slow[stall] = Host("a"), 0.0
    told(host, machine, 3)
    machine.slow[stall] = 9.0
    assert told(host, machine, 3) == {}


@pytest.mark.parametrize(("cgroup", "unit"), [
    ("/system.slice/slurmd.service/job_7/step_0", "unit/slurmd.service"),
    ("/user.slice/user-1000.slice/user@1000.service/app.slice/slurmd.service",
     "unit/user@1000.service"),
    ("/kubepods/pod7", "cgroup/kubepods/pod7"),
])
def test_a_name_below_a_user_s_own_unit_blames_no_other(cgroup: str, unit: str) -> None:
    assert owner(cgroup) == unit


def test_a_kill_for_memory_names_the_cgroup_and_the_rank_that_died() -> None:
    killed = Ended(137, signal=9, boot_s=1010.0)
    machine = Machine(slow={
        ("host_memory_cgroups", "state=in_use"): 10.0,
        ("cgroup_memory_max_bytes", "cgroup=/job"): 2.0**32,
    }, runs=(ranks("/job/r0", "/other/r1"),))
    host = Host("a")
    told(host, machine, 3)
    machine.slow["cgroup_oom_kills_total", "cgroup=/job,place=/"] = 1.0
    (alive,) = told(host, machine, 3).values()
    assert alive.fault == "host_oom" and alive.subject == "node/a/cgroup"
    assert alive.evidence == (("cgroup /job", "1 killed"),)
    assert alive.reason.endswith("rank 0 of run m5 lives there")
    machine.runs = (ranks("", "", state="ended", ended=killed),)
    (dead,) = told(host, machine, 3).values()
    assert "a process of cgroup /job (limit 4.0 GiB)" in dead.reason
    assert dead.reason.endswith("where rank 0 of run m5 ended by SIGKILL")
    machine.slow["cgroup_oom_kills_total", "cgroup=/job2,place=/"] = 2.0
    (both,) = told(host, machine, 3).values()
    assert both.subject == alive.subject and "; 2 processes of cgroup /job2" in both.reason
    assert told(host, machine, 130) == {}


# ------------------------------------------------------------- bounds


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 1e9), st.floats(0, 1e12)), max_size=200))
def test_windows_never_grow_nor_invent(rows: list[tuple[int, float, float]]) -> None:
    windows = CounterWindow(60.0, 5.0, 2)
    for key, boot_s, value in rows:
        windows.add(key, boot_s, value)
        grown = windows.grown(key)
        assert grown.amount >= 0.0 and 0.0 <= grown.seconds <= 75.0
        assert len(windows.keys()) <= 2


def test_a_window_begins_anew_when_its_counter_goes_back() -> None:
    counts, levels = CounterWindow(60.0, 5.0, 2), CounterWindow(60.0, 5.0, 2, falls=True)
    for boot_s, value in ((10.0, 50.0), (20.0, 60.0), (30.0, 7.0), (40.0, 9.0)):
        counts.add("x", boot_s, value)
        levels.add("x", boot_s, value)
    assert counts.grown("x")[:2] == (2.0, 10.0) and levels.grown("x")[:2] == (-41.0, 30.0)


def test_windows_keep_few_readings() -> None:
    windows = CounterWindow(600.0, 15.0, 4)
    for second in range(5000):
        windows.add("x", float(second), float(second))
    assert windows.grown("x").per_s == 1.0 and 600.0 <= windows.grown("x").seconds <= 630.0
    assert len(windows._rows["x"]) < 90


@given(st.lists(st.tuples(
    st.sampled_from(["host_zombies", "task_blocked_seconds", "host_memory_cgroups",
                     "cgroup_oom_kills_total", "host_cpu_seconds_total",
                     "host_unit_restarts_total", "cgroup_births_total",
                     "host_shm_size_bytes", "task_kernel_ratio"]),
    st.text(alphabet="abcdp=,/ui1", max_size=12), st.floats(0, 1e18), st.floats(0, 1e6),
), max_size=40))
def test_any_subject_is_survived(rows: list[tuple[str, str, float, float]]) -> None:
    host = Host("a")
    for end in range(0, len(rows), 7):
        judged(host, rows[: end + 7])
