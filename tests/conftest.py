"""What every test needs of its own process."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Generator
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import settings

# A property is right or wrong however long an example takes: by itself hypothesis fails one that
# takes 200 ms, which a busy machine makes of any.
settings.register_profile("house", deadline=None)
settings.load_profile("house")

# A shell without job control starts what it puts into the background with SIGINT ignored, and a
# child inherits that: tests that press Ctrl-C would wait for ever where CI is started so.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What a machine or its sandbox has or has not: every other skip hides that nothing was checked.
# Version 2 of control groups is none of it (nodes/harness.py says so without the word below): every
# kernel since 4.5 has it, whoever is root can mount it beside version 1, and without it all of
# tests/nodes and tests/systemd would be skipped, and CI stay green with no node ever lost.
HARDWARE = re.compile(
    r"\bkernel\b|/dev/kmsg|adjtimex|cgroup|memory controller|file system|^::1: |of its own")
# What all tests over nodes may take together.  A machine that is slow by half is not their fault:
# in CI they fail at twice that.
NODES, NODES_LIMIT_S = "tests/nodes/", 900.0
Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


def campaign() -> list[str]:
    """Those of campaign.txt."""
    lines = (Path(__file__).parent / "campaign.txt").read_text().splitlines()
    return [name for line in lines if (name := line.partition("#")[0].strip())]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    apart = {f"tests/{name}" for name in campaign()}
    for item in items:
        if not apart.isdisjoint((item.nodeid, item.nodeid.partition("[")[0])):
            item.add_marker("campaign")


def judged(report: Report) -> Report:
    """In CI a test, or a file of them, fails that is skipped for anything but the hardware."""
    if not report.skipped or hasattr(report, "wasxfail") or os.environ.get("CI") != "true":
        return report
    where = report.longrepr
    reason = str(where[2] if isinstance(where, tuple) else where).removeprefix("Skipped: ")
    if not HARDWARE.search(reason):
        report.outcome, report.longrepr = "failed", f"skipped in CI: {reason}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return judged((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return judged((yield))


class TimeOfNodes:
    """How long the tests over nodes took: one after the other, so that the sum is wall time."""

    def __init__(self) -> None:
        self.took_s = 0.0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.nodeid.startswith(NODES) and "campaign" not in report.keywords:
            self.took_s += report.duration

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.took_s > 2 * NODES_LIMIT_S and os.environ.get("CI") == "true":
            session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.took_s:
            late = "too long" if self.took_s > NODES_LIMIT_S else "within"
            terminalreporter.write_line(
                f"{NODES} took {self.took_s:.0f} s, {late}: {NODES_LIMIT_S:.0f} s are for it")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(TimeOfNodes())
