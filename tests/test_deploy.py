"""The unit file is what systemd takes without a word, and stays as tight as it was."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

UNIT = Path(__file__).resolve().parent.parent / "deploy/systemd/holdfast.service"


def analyze(tmp_path: Path, text: str, *command: str) -> subprocess.CompletedProcess[str]:
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("systemd-analyze is missing (Debian package systemd)")
    file = tmp_path / "holdfast.service"
    # verify wants the program to exist; where it is installed is the packager's choice
    file.write_text(text.replace("/opt/holdfast/bin/holdfast", "/bin/true"))
    return subprocess.run(
        [tool, *command, str(file)], capture_output=True, text=True, timeout=60, check=False
    )


def test_systemd_takes_the_unit_without_a_word(tmp_path: Path) -> None:
    # It returns 0 even for a key it does not know: any word on stderr counts.
    assert analyze(tmp_path, UNIT.read_text(), "verify").stderr == ""
    misspelt = UNIT.read_text().replace("WatchdogSec", "WatchdogSeconds")
    assert "WatchdogSeconds" in analyze(tmp_path, misspelt, "verify").stderr


def test_the_unit_stays_tight(tmp_path: Path) -> None:
    tight = ("security", "--offline=true", "--threshold=30")
    assert analyze(tmp_path, UNIT.read_text(), *tight).returncode == 0
    loose = UNIT.read_text().replace("ProtectSystem=strict", "").replace("CapabilityBounding", "X-")
    assert analyze(tmp_path, loose, *tight).returncode != 0
