"""What holds for all tests: no time for a property, and no skip that CI does not see."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

TESTS = Path(__file__).resolve().parent
SKIPS = """
import pytest

def test_it():
    pytest.skip("{} is missing (Debian package {}): nothing is checked")
"""


def test_no_property_is_held_to_a_time() -> None:
    assert settings.default is not None and settings.default.deadline is None


@pytest.mark.parametrize(("set_to", "outcome"), [("1", "1 failed"), ("0", "1 skipped")])
def test_a_missing_package_fails_in_ci_and_nowhere_else(
    set_to: str, outcome: str, tmp_path: Path
) -> None:
    file = tmp_path / "test_skips.py"
    file.write_text(SKIPS.format("x", "y"))
    environ = {**os.environ, "HOLDFAST_NO_SKIP": set_to, "PYTHONPATH": str(TESTS)}
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "conftest", str(file)],
                          cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60,
                          check=False)
    assert outcome in done.stdout, done.stdout + done.stderr


def test_each_package_that_a_skip_names_is_installed_by_make() -> None:
    listed = {line.split()[0] for line in (TESTS / "debian-packages.txt").read_text().splitlines()
              if not line.startswith("#")}
    named = {name for file in TESTS.rglob("*.py")
             for name in re.findall(r"is missing \(Debian package ([\w-]+)\)", file.read_text())}
    assert named - {"libc6-dev"} <= listed  # build-essential brings the headers of C
