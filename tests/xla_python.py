"""A Python of its own with torch_xla 2.9, which wants torch 2.9: named, or made once and kept.

HOLDFAST_TEST_XLA_PYTHON names one.  Else one is made below .xla-venv, where CI runs and 20 GB are
free: two minutes and 7 GB.  `make xla-python` makes it anywhere.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PLACE = ROOT / ".xla-venv"
FREE_BYTES = 20 << 30
MAKE_S = 900.0
PACKAGES = (("torch==2.9.1", "torch_xla==2.9.0"),
            ("-c", str(ROOT / "constraints.txt"), "numpy", "xxhash", "tokenizers"))


@lru_cache(maxsize=1)
def xla_python() -> str:
    """Skips the test, with a line, where there is none."""
    named = os.environ.get("HOLDFAST_TEST_XLA_PYTHON", "")
    if named:
        return named
    if not (PLACE / "made").exists():
        if os.environ.get("CI") != "true":
            pytest.skip("HOLDFAST_TEST_XLA_PYTHON names no Python of its own with torch_xla 2.9: "
                        "`make xla-python` makes one")
        if problem := make():
            pytest.skip(f"no Python of its own with torch_xla 2.9: {problem}")
    return str(PLACE / "bin/python")


def make() -> str:
    """Why it cannot be made; "" when it is there.  One process makes it, others wait for that."""
    if shutil.disk_usage(ROOT).free < FREE_BYTES:
        return f"less than {FREE_BYTES >> 30} GB are free here"
    PLACE.mkdir(exist_ok=True)
    with open(PLACE / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (PLACE / "made").exists():
            return ""
        python = str(PLACE / "bin/python")
        steps = [[sys.executable, "-m", "venv", str(PLACE)]]
        steps += [[python, "-m", "pip", "install", "-q", *words] for words in PACKAGES]
        for step in steps:
            try:
                done = subprocess.run(step, capture_output=True, text=True, timeout=MAKE_S,
                                      check=False)
            except subprocess.TimeoutExpired:
                return f"{' '.join(step[1:5])} took longer than {MAKE_S:.0f} s"
            if done.returncode:
                return (done.stderr.strip().splitlines() or ["pip failed"])[-1][:200]
        (PLACE / "made").touch()
        return ""


if __name__ == "__main__":
    sys.exit(make())
