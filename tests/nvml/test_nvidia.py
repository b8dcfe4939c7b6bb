"""NVIDIA GPUs: recorded states -> samples -> /metrics text, and calls that never return.

HOLDFAST_GOLDEN=write writes the golden files anew.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest
from detectors import judged
from pages import page, same_as_golden
from waiting import until

from holdfast.agent.config.load import load
from holdfast.agent.core.detect.devices import accelerator, fabric
from holdfast.agent.core.model import RankView, RunView, labels_of, readings_of
from holdfast.agent.metrics import selection as shown
from holdfast.agent.system.child_probe import Helper
from holdfast.agent.telemetry.collectors import Runner
from holdfast.agent.telemetry.devices import devices
from holdfast.collectors import ALL
from holdfast.collectors.contract import Sample
from holdfast.collectors.nvidia import NvidiaCollector

GOLDEN = Path(__file__).resolve().parent / "golden"
OTHERS = tuple(one.name for one in ALL if one.name != "nvidia")
HUNG_S = 3.0  # of a call that never returns: far longer than a busy machine holds a loop up
STATES = ("gpu_lost", "gpu_lost_late", "ecc_storm", "remap_pending", "link_down", "spinning")


def samples_of(answer) -> tuple[Sample, ...]:
    assert "samples" in answer, answer
    return tuple(Sample(*one) for one in answer["samples"])


def test_one_gpu_as_the_page_shows_it(node):
    node.becomes("gpus 1\ngpu 0 pid 4711\n")
    text = page(samples_of(node.read()[0]), NvidiaCollector.metrics)
    same_as_golden(GOLDEN / "one_gpu.txt", text)
    assert "4711" not in text  # a series for each process would churn


@pytest.mark.parametrize("name", ["a100_mig", "pro6000_idle"])
def test_a_real_gpu_that_does_not_tell_all_is_well(node, name):
    """One cut in parts tells no load, one without ECC no errors; an idle one slows its PCIe."""
    recorded = GOLDEN.parent.parent / "recorded"
    node.becomes((recorded / f"nvml/{name}.txt").read_text())
    samples = samples_of(node.read()[0])
    lines = page(samples, NvidiaCollector.metrics).splitlines(keepends=True)
    text = "".join(line for line in lines if not line.startswith("#"))
    same_as_golden(recorded / f"golden/{name}.txt", text)
    assert accelerator.sights(samples)["nvidia", "0"].health == "ok"
    assert not judged(accelerator.Accelerators("n"), samples)


@pytest.mark.parametrize("state", STATES)
def test_what_each_fault_changes_on_an_8_gpu_node(node, state):
    healthy = samples_of(node.read()[0])
    node.becomes(state)
    sick = samples_of(node.read()[0])
    before, after = ({(one.name, one.subject): one.value for one in said}
                     for said in (healthy, sick))
    lines = [f"{labels_of(subject)['device']} of nvidia says nothing more"
             for name, subject in sorted(before.keys() - after.keys())
             if name == "accelerator_power_watts"]
    lines += [f"{name}{{{subject}}} {before.get((name, subject))} -> {value}"
              for (name, subject), value in after.items()
              if before.get((name, subject)) != value]
    sights = accelerator.sights(sick)
    lines += [f"{vendor} {device}: {one.health}: {one.why}"
              for (vendor, device), one in sights.items() if one.health != "ok"]
    verdicts = judged(accelerator.Accelerators("n"), sick)
    lines += [f"{one.fault} ({one.severity}) {one.subject}: {one.reason}" for one in verdicts]
    same_as_golden(GOLDEN / f"{state}.txt", "\n".join(lines) + "\n")


@pytest.mark.parametrize(("said", "why"), [
    ("fabric_state 1", "not_started"), ("fabric_state 2", "in_progress"),
    ("fabric_status 999", "failed"), ("fabric_mask 425", "degraded_bandwidth"),
])
def test_a_device_outside_its_fabric_is_unwell(node, said, why):
    node.becomes(f"gpus 2\ngpu 1 {said}\n")
    sights = accelerator.sights(samples_of(node.read()[0]))
    assert sights["nvidia", "0"].health == "ok"
    assert (sights["nvidia", "1"].health, sights["nvidia", "1"].why) == (
        "warn", f"the fabric reports {why}")


@pytest.mark.parametrize("said", ["fabric_state 1", "fabric_state 2", "fabric_status 999"])
def test_a_device_that_stays_outside_its_fabric_is_a_fault_of_the_node(node, said):
    node.becomes(f"gpus 2\ngpu 1 {said}\n")
    rows, judge = samples_of(node.read()[0]), fabric.Fabric("n")
    assert judged(judge, readings_of(rows)) == []
    late = [one._replace(boot_s=1.0 + fabric.JOIN_S) for one in rows]
    (verdict,) = judged(judge, readings_of(late))
    assert verdict.reason.startswith("1 of 2 GPUs are not in the NVLink fabric")


def test_an_old_driver_costs_only_what_it_does_not_have(libraries, node):
    new = {one.name for one in samples_of(node.read()[0])}
    node.library = libraries["old"]
    node.becomes("old_driver")
    old = {one.name for one in samples_of(node.read()[0])}
    assert new - old == {
        "accelerator_violation_seconds_total", "accelerator_row_remap_banks",
        "accelerator_fabric_state", "accelerator_fabric_fault", "accelerator_recovery_action",
    }
    assert not old - new


def test_a_call_that_is_not_supported_costs_its_readings(node):
    node.becomes("gpus 1\nunsupported nvmlDeviceGetNvLinkErrorCounter\n"
                 "unsupported nvmlDeviceGetPowerUsage\n"
                 "unsupported nvmlDeviceGetMaxClockInfo\n")
    names = [one.name for one in samples_of(node.read()[0])]
    assert names.count("accelerator_link_up") == 18
    assert not {"accelerator_link_errors_total", "accelerator_power_watts"} & set(names)
    assert names.count("accelerator_clock_hertz") == 2
    assert "accelerator_clock_max_hertz" not in names


def test_a_device_that_is_lost_in_mid_run_keeps_its_name(node):
    async def scenario():
        runner, task = start(node)
        await until(lambda: len(runner.samples()) > 1000)
        node.becomes("gpu_lost")
        await until(lambda: 0 < len(runner.samples()) < 1250)
        await stop(task)
        return runner.samples()

    samples = asyncio.run(scenario())
    (verdict,) = judged(accelerator.Accelerators("n"), samples)
    assert verdict.subject == "node/n/gpu/3" and "at 00000000:48:00.0" in verdict.reason
    assert not verdict.act and dict(verdict.evidence)["uuid"].startswith("GPU-")


def test_without_library_or_driver_there_is_no_data(node, tmp_path):
    node.file.unlink()
    assert "absent" in node.read()[0]
    runner = Runner(load(None, {"collectors.proc": (str(tmp_path), "t"),
                                "collectors.sys": (str(tmp_path), "t"),
                                "collectors.disable": (OTHERS, "t")}).config,
                    lambda part, error: pytest.fail(f"{part}: {error}"))

    async def scenario():
        task = asyncio.create_task(runner.run())
        await until(lambda: runner.health()[0].read_s)
        await stop(task)

    asyncio.run(scenario())
    assert runner.health()[0].absent and runner._entries[0].helper is None


# ------------------------------------------------------------- calls that never return


async def stop(task) -> None:
    task.cancel()
    await asyncio.wait([task], timeout=30.0)


def start(node, troubles=None, deadline_s=0.2):
    config = load(None, {
        "collectors.nvml": (str(node.library), "t"), "collectors.deadline_s": (deadline_s, "t"),
        "collectors.disable": (OTHERS, "t"), "agent.tick_s": (0.05, "t"),
        "agent.fast_s": (0.1, "t"), "agent.slow_s": (deadline_s, "t"),
    }).config
    said = troubles if troubles is not None else []
    runner = Runner(config, lambda part, error: said.append(f"{part}: {error}"))
    return runner, asyncio.create_task(runner.run())


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_a_hung_call_is_killed_and_the_next_reading_starts_anew(node):
    troubles: list[str] = []

    async def scenario():
        runner, task = start(node, troubles, HUNG_S)
        await until(lambda: runner.samples())
        pid = runner._entries[0].helper.pid
        node.becomes("hung_call")
        late_s = loop_lag = 0.0
        while runner.health()[0].up:
            begin_s = time.monotonic()
            await asyncio.sleep(0.01)
            late_s = time.monotonic() - begin_s - 0.01
            loop_lag = max(loop_lag, late_s)
        assert f"no answer within {HUNG_S:g} s" in runner.health()[0].error
        assert not runner.samples() and runner.last("nvidia")
        await until(lambda: not alive(pid))
        assert loop_lag < 0.7 * HUNG_S, "the loop waited for the call"
        node.becomes("healthy")
        await until(lambda: runner.samples())
        assert runner._entries[0].helper.pid not in (0, pid) and not runner.stuck_children()
        last = runner._entries[0].helper.pid
        await stop(task)
        await until(lambda: not alive(last))

    asyncio.run(scenario())
    assert any("no answer" in one for one in troubles)


@pytest.mark.parametrize("state", ["idle", "hung_call", "starting"])
def test_nobody_of_ours_has_a_gpu_open_while_it_is_reset(node, state, monkeypatch):
    """Whether its child is between two readings, in one, or just starting."""
    troubles: list[str] = []
    begun, go, real = asyncio.Event(), asyncio.Event(), Helper._start

    async def slow(helper):
        begun.set()
        await go.wait()
        return await real(helper)

    async def scenario():
        if state == "starting":
            monkeypatch.setattr(Helper, "_start", slow)
            asyncio.get_running_loop().call_later(0.2, go.set)
        if state == "hung_call":
            node.becomes(state)
        runner, task = start(node, troubles)
        entry = runner._entries[0]
        await until({"idle": runner.samples, "starting": begun.is_set,
                     "hung_call": lambda: entry.asking and runner.children()}[state])
        pid = entry.helper.pid
        asked, ask = [], runner._ask

        async def counted(*arguments):
            asked.append(runner.children())
            await ask(*arguments)

        runner._ask = counted
        async with runner.without("nvidia"):
            assert not runner.children() and not entry.asking and not (pid and alive(pid))
            # What it read before is not shown as of now, and stands for those who conclude.
            assert not list(runner.samples()) and not runner.health()[0].up
            assert bool(list(runner.known())) == (state == "idle")
            seen, gather = [], runner._gather
            runner._gather = lambda: (seen.append(runner.children()), gather())
            await until(lambda: len(seen) > 3)  # its turn came and was passed over
            assert not any(seen) and not asked
            node.becomes("healthy")
        await until(lambda: asked and runner.health()[0].up and runner.children())
        await stop(task)

    asyncio.run(scenario())
    assert not troubles


def test_a_sick_gpu_stays_sick_while_its_driver_hangs(node):
    mind, known = accelerator.Accelerators("n"), dict[str, str]()

    async def scenario():
        node.becomes("remap_pending")
        runner, task = start(node)

        def faults() -> list[str]:
            return [one.subject for one in judged(mind, runner.known(), known)
                    if one.fault == "row_remap_pending"]

        await until(lambda: faults() == ["node/n/gpu/2"])
        node.becomes("hung_call")
        await until(lambda: "no answer" in runner.health()[0].error)
        assert not runner.samples() and faults() == ["node/n/gpu/2"]
        assert "accelerator_row_remap_pending" in runner.known().silent
        node.becomes("healthy")
        await until(lambda: runner.health()[0].up and faults() == [])
        await stop(task)

    asyncio.run(scenario())


def test_a_child_that_cannot_be_killed_is_left_named_and_not_joined(node, monkeypatch):
    async def scenario():
        runner, task = start(node)
        await until(lambda: runner.samples())
        monkeypatch.setattr("holdfast.agent.system.child_probe.KILL_WAIT_S", 0.05)
        monkeypatch.setattr("asyncio.subprocess.Process.kill", lambda self: None)  # as in state D
        kill, killpg = os.kill, os.killpg
        monkeypatch.setattr("os.killpg", lambda group, number: None)
        node.becomes("hung_call")
        await until(lambda: runner.stuck_children())
        (left,) = runner.stuck_children()
        assert left.name == "nvidia" and alive(left.pid)
        await until(lambda: "hangs in" in runner.health()[0].error)
        assert len(runner.stuck_children()) == 1
        monkeypatch.setattr("os.killpg", killpg)
        node.becomes("healthy")
        kill(left.pid, signal.SIGKILL)
        await until(lambda: runner.samples() and not runner.stuck_children())
        await stop(task)

    asyncio.run(scenario())


def test_a_child_dies_with_its_parent_and_rubbish_costs_itself(node):
    async def scenario():
        runner, task = start(node)
        await until(lambda: runner.samples())
        helper = runner._entries[0].helper
        pid = helper.pid
        os.kill(pid, signal.SIGKILL)  # the child itself
        await until(lambda: helper.pid not in (0, pid) and runner.health()[0].up)
        await stop(task)

    asyncio.run(scenario())


# ------------------------------------------------------------- devices, ranks, verdicts


def test_ranks_are_joined_by_process_and_stale_is_unknown(node):
    node.becomes("gpus 2\ngpu 0 pid 4711\ngpu 1 pid 4712\ngpu 1 remap_pending 1\n")
    samples = samples_of(node.read()[0])
    runs = (RunView("m5", "n", "trainer", 2, ranks=(
        RankView(0, "n", 4711, 1, "running"), RankView(1, "n", 4712, 1, "running"))),)
    good = Runner(load(None, {}).config, lambda part, error: None).health()[0]
    good = good._replace(name="nvidia", up=True, error="")
    shown = devices(good, samples, runs, (), "n", 2.0, 15.0)
    assert [(one["health"], one["ranks"]) for one in shown] == [
        ("ok", [{"run": "m5", "rank": 0}]), ("warn", [{"run": "m5", "rank": 1}])]
    stale = devices(good, samples, runs, (), "n", 100.0, 15.0)
    assert {one["health"] for one in stale} == {"unknown"}
    assert "no reading for 99 s" in stale[0]["why"]
    down = devices(good._replace(up=False, error="no answer"), samples, runs, (), "n", 2.0, 15.0)
    assert down[1]["health"] == "unknown" and "no answer" in down[1]["why"]


def test_finished_runs_leave_the_page_after_ten_minutes():
    recent = shown.Recent()
    view = RunView("m5", "n", "trainer", 1, ranks=(RankView(7, "n", 11, 1, "running"),))
    process = (Sample("accelerator_process", "vendor=nvidia,device=3,pid=11", 1.0, 1.0),)
    recent.see(0.0, (view,), process)
    recent.see(599.0, (), process)
    assert recent.has("m5") and recent.places() == [(("3", "m5", "7"), 1)]
    recent.see(601.0, (), process)
    assert not recent.has("m5") and not recent.places()
