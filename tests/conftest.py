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
HARDWARE = re.compile(
    r"\bkernel\b|/dev/kmsg|adjtimex|cgroup|memory controller|file system|^::1: |of its own")
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
