"""The page of metrics that some samples make, its golden file, and the tool that must take it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from holdfast.agent.core.model import readings_of
from holdfast.agent.metrics import families
from holdfast.collectors.contract import Metric, Sample


def page(samples: Iterable[Sample], declared: Iterable[Metric]) -> str:
    """The families of these samples as the agent serves them."""
    return "".join(families.families(readings_of(samples), declared))


def same_as_golden(file: Path, text: str) -> None:
    """HOLDFAST_GOLDEN=write makes the file anew."""
    if os.environ.get("HOLDFAST_GOLDEN") == "write":
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    assert text == file.read_text()


def taken_by_prometheus(text: str) -> None:
    """`promtool check metrics` finds nothing to say."""
    done = subprocess.run([promtool(), "check", "metrics"], input=text, capture_output=True,
                          text=True, timeout=30, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr


def promtool() -> str:
    """Where it is; the test is skipped without it."""
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is missing (Debian package prometheus): see `make packages`")
    return found
