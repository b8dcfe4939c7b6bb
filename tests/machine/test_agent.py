"""A running agent and a mount that never answers: the fault is on the page, the agent goes on."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request

import pytest
from waiting import wait_for

CONFIG = """
[agent]
node = "n"
slow_s = 1.0
fast_s = 1.0
[collectors]
deadline_s = 1.0
proc = "{folder}/proc"
disable = ["nvidia", "neuron", "compile_cache"]
"""
TABLE = "7 1 0:7 / {folder}/data ro,noatime - nfs4 10.0.0.5:/data rw,hard\n"
STEPS = "holdfast_agent_steps_total "


@pytest.fixture
def page(tmp_path, preload):
    """Starts the agent; returns what reads its /metrics."""
    (tmp_path / "data").mkdir()
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text(TABLE.format(folder=tmp_path))
    (tmp_path / "hangs").write_text(f"{tmp_path}/data\n")
    (tmp_path / "agent.toml").write_text(CONFIG.format(folder=tmp_path))
    agent = subprocess.Popen(
        [sys.executable, "-m", "holdfast.agent", "--config", str(tmp_path / "agent.toml"),
         "--state", str(tmp_path / "s"), "--runtime", str(tmp_path / "r"),
         "--listen", "127.0.0.1:0"], stderr=subprocess.DEVNULL,
        env={**os.environ, "LD_PRELOAD": str(preload), "HOLDFAST_HANGS": str(tmp_path / "hangs")},
    )

    def read() -> str:
        try:
            address = (tmp_path / "r/address").read_text().strip()
            with urllib.request.urlopen(f"{address}/metrics", timeout=5.0) as answer:
                return answer.read().decode()
        except OSError:
            return ""

    try:
        yield read
    finally:
        agent.terminate()
        try:
            assert agent.wait(60) == 0
        finally:
            agent.kill()
            agent.wait()


def until(read, condition):
    return wait_for(lambda: (text := read()) and condition(text) and text, 60.0,
                    lambda: read()[-3000:])


def value(text: str, series: str) -> float:
    return next((float(line.rpartition(" ")[2]) for line in text.splitlines()
                 if line.startswith(series)), -1.0)


def test_a_mount_that_hangs_is_a_fault_of_the_node_and_the_agent_goes_on(page, tmp_path):
    fault = (f'holdfast_fault_active{{fault="mount_hung",severity="degraded",'
             f'subject="node/n/mount{tmp_path}/data"}} 1.0')
    text = until(page, lambda text: fault in text)
    assert value(text, "holdfast_host_mount_waiting_seconds{") >= 10.0
    assert value(text, 'holdfast_collector_up{collector="mounts"}') == 1.0
    assert value(text, "holdfast_probes_stuck") == 0.0
    steps = value(text, STEPS)
    assert steps >= 10.0
    (tmp_path / "hangs").write_text("")
    text = until(page, lambda text: fault not in text)
    assert value(text, STEPS) > steps
    until(page, lambda text: value(text, "holdfast_host_mount_response_seconds{") >= 0.0)
