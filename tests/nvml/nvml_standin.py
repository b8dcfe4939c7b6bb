"""Compiles the stand-in for libnvidia-ml.so.1; needs neither pytest nor anything of ours."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent


class Missing(RuntimeError):
    """What this machine lacks to compile it, and the Debian package that has it."""


def compile_library(folder: Path, *flags: str) -> Path:
    """Makes libnvidia-ml.so.1 in `folder`, and returns the folder.  -DOLD_DRIVER: one that knows
    less.  Raises Missing."""
    gcc = shutil.which("gcc")
    if gcc is None:
        raise Missing("gcc is missing (Debian package build-essential): no stand-in for NVML")
    headers = subprocess.run([gcc, "-E", "-"], input="#include <stdio.h>\n", text=True,
                             capture_output=True, timeout=60, check=False)
    if headers.returncode != 0:
        raise Missing("C headers are missing (Debian package libc6-dev): no stand-in for NVML")
    subprocess.run(
        [gcc, "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", *flags,
         "-Wl,-soname,libnvidia-ml.so.1",  # as NVIDIA's: the name under which it counts as loaded
         "-o", str(folder / "libnvidia-ml.so.1"), str(HERE / "nvml.c")], check=True, timeout=60,
    )
    return folder
