"""What every test needs of its own process."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator

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

MISSING = " is missing (Debian package "


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With HOLDFAST_NO_SKIP=1 a test fails that is skipped for a package that CI installs: a skip
    there would hide that nothing was checked."""
    report = yield
    if report.skipped and MISSING in str(report.longrepr):
        if os.environ.get("HOLDFAST_NO_SKIP") == "1":
            report.outcome, report.longrepr = "failed", f"not skipped: {report.longrepr}"
    return report
