"""Builds the recorded node below a test's own folder, and the stand-in for statvfs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from holdfast.collectors.contract import Roots

HERE = Path(__file__).resolve().parent


def build(folder: Path, text: str) -> Roots:
    """`== PATH` lines and what each file holds, as files."""
    for part in text.split("\n== ")[1:]:
        name, _, content = part.partition("\n")
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content + "\n")
    return Roots(proc=str(folder / "proc"), sys=str(folder / "sys"), tools=str(folder / "tools"))


@pytest.fixture
def roots(tmp_path):
    """The node of gpu_node.txt."""
    return build(tmp_path, (HERE / "gpu_node.txt").read_text())


@pytest.fixture
def tool(tmp_path):
    """Makes an executable of that name, which says what a file holds, whatever it is asked."""

    def make(name: str, says: str = "", more: str = "") -> Path:
        folder = tmp_path / "tools"
        folder.mkdir(exist_ok=True)
        file = folder / name
        file.write_text(f"#!/bin/sh\necho \"$@\" >> {folder}/asked\n{more}\ncat {HERE / says}\n")
        file.chmod(0o755)
        return folder / "asked"

    return make


@pytest.fixture(scope="session")
def preload(tmp_path_factory):
    """statvfs.c, compiled."""
    gcc = shutil.which("gcc")
    if gcc is None:
        pytest.skip("gcc is missing (Debian package build-essential): no stand-in for statvfs")
    target = tmp_path_factory.mktemp("statvfs") / "statvfs.so"
    done = subprocess.run(
        [gcc, "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-o", str(target),
         str(HERE / "statvfs.c"), "-ldl"], capture_output=True, text=True, timeout=60, check=False,
    )
    if "No such file or directory" in done.stderr:
        pytest.skip("C headers are missing (Debian package libc6-dev): no stand-in for statvfs")
    assert done.returncode == 0, done.stderr
    return target
