"""A machine of the test's own for the package, and the packages for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from packages import SYSTEM_PYTHON, Made, made

sys.path.insert(0, str(Path(__file__).parent))

from own_systemd import Cannot
from packaged_systemd import PackagedSystemd


@pytest.fixture(scope="session")
def packages() -> Made:
    if not Path(SYSTEM_PYTHON).exists():
        pytest.skip(f"{SYSTEM_PYTHON} is missing: no distribution of its own")
    return made()


@pytest.fixture
def machine(tmp_path: Path, packages: Made) -> Iterator[PackagedSystemd]:
    try:
        made = PackagedSystemd(tmp_path, packages.debs[0].parent)
    except Cannot as reason:
        pytest.skip(str(reason))
    try:
        yield made
    finally:
        if made.cgroup.exists():
            made.close()
    assert str(tmp_path) not in Path("/proc/self/mounts").read_text()
