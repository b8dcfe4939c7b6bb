"""bench.kernel_latency ends what it started however it ends, waits for nothing for ever, and fails
where a number is missing or too large."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import LIMIT_S

from bench import common, kernel_latency

ROOT = Path(__file__).resolve().parent.parent
BUSY = """
import time
from bench import common, kernel_latency
common.become_subreaper()
with kernel_latency.busy(1):
    print(*common.descendants(__import__("os").getpid()), flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_no_busy_loop_outlives_the_bench(how: signal.Signals) -> None:
    bench = subprocess.Popen([sys.executable, "-c", BUSY], cwd=ROOT, stdout=subprocess.PIPE)
    assert bench.stdout is not None
    try:
        loop = os.pidfd_open(int(bench.stdout.readline()))
        try:
            bench.send_signal(how)
            assert select.select([loop], [], [], LIMIT_S)[0], "the loop goes on"
        finally:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(loop, signal.SIGKILL)
            os.close(loop)
    finally:
        bench.kill()
        bench.communicate()


def test_a_line_without_a_verdict_ends_the_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_latency, "LIMIT_S", 0.2)
    where = common.Place(tmp_path, {})
    where.log.write_text("verdict 0000:4e:00 12\nverdict 0000:00:00 \nverdict 0000:00")
    agent = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        with open(tmp_path / "kmsg", "wb") as log, pytest.raises(common.Failed, match="0000:00:00"):
            kernel_latency.rounds_of(agent, where, log)
    finally:
        agent.kill()
        agent.wait()


@pytest.mark.parametrize(("row", "code"), [
    ({"ok": True, "latency_s": [0.01] * 60}, 0),
    ({"ok": True, "latency_s": [0.01] * 50 + [0.2] * 10}, 1),
    ({"ok": False, "why": "the agent did not start"}, 1),
])
def test_it_fails_without_a_number_or_with_one_that_is_too_large(
    row: dict[str, Any], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def no_log() -> Iterator[None]:
        yield None

    monkeypatch.setattr(kernel_latency, "kernel_log", no_log)
    monkeypatch.setattr(kernel_latency, "measure", lambda case, log: {"case": case, **row})
    monkeypatch.setattr(common, "become_subreaper", lambda: None)  # of this process
    assert kernel_latency.main(["--cases", "quiet", "--out", str(tmp_path)]) == code
