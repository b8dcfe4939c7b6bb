"""A crash loop that leaves cgroups behind, and a kill for memory, made for real below our own
cgroup and cleaned up again; skipped with a line where no cgroup can be made."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from detectors import judged

from holdfast.agent.core.detect.host.host import Host
from holdfast.agent.core.model import Ended, RankView, RunView, Verdict
from holdfast.agent.system import procfs
from holdfast.collectors import cgroups
from holdfast.collectors.cgroups import CgroupsCollector
from holdfast.collectors.contract import NoData, Roots

TRIES = 25
CRASH = "echo $$ > {cgroup}/cgroup.procs && head -c 65536 /dev/zero > {file} && exec sh -c 'exit 1'"


@pytest.fixture
def subtree() -> Iterator[Path]:
    """A cgroup below our own, gone again afterwards."""
    try:
        tree = cgroups.find(Roots())
    except NoData as reason:
        pytest.skip(f"no cgroups here: {reason}")
    own = Path(tree.base + procfs.memory_cgroup(os.getpid()))
    place = own / f"holdfast-test-{os.getpid()}"
    try:
        place.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made below {own}: {error.strerror}")
    try:
        if not (place / tree.usage).exists():
            pytest.skip(f"the memory controller is not on below {own}")
        yield place
    finally:
        for folder in sorted(place.rglob("*/"), key=lambda one: -len(one.parts)):
            if folder.is_dir():
                remove(folder)
        remove(place)


def remove(folder: Path) -> None:
    """Once the last process in it is gone."""
    deadline_s = time.monotonic() + 30.0
    while folder.exists():
        try:
            folder.rmdir()
        except OSError:
            if time.monotonic() > deadline_s:
                raise


def test_a_real_crash_loop_that_leaks_cgroups_is_named(subtree: Path, tmp_path: Path) -> None:
    """Each start writes a file and dies in its own cgroup; the file's pages keep that cgroup in the
    kernel after its directory is gone.  Only the clock is the test's: a start every 15 s."""
    unit = subtree / "leaky.service"
    unit.mkdir()
    collector, host, boot_s = CgroupsCollector(), Host("a"), 1000.0

    def read() -> list[Verdict]:
        samples = tuple(collector.collect(Roots(), boot_s))
        if not any(one.subject == "state=dying" for one in samples):
            pytest.skip("this machine does not say how many removed cgroups it holds")
        return judged(host, samples)

    read()
    for number in range(TRIES):
        place = unit / f"try-{number}"
        place.mkdir()
        script = CRASH.format(cgroup=place, file=tmp_path / f"leak-{number}")
        done = subprocess.run(["sh", "-c", script], timeout=30, check=False)
        assert done.returncode == 1
        boot_s += 15.0
        read()
        remove(place)
    boot_s += 15.0
    verdicts = read()
    below = cgroups._dying(cgroups._stat(f"{subtree}/cgroup.stat"))
    for file in tmp_path.glob("leak-*"):
        file.unlink()  # the kernel lets go of the cgroups with their last page
    if cgroups.find(Roots()).version == 2:  # version 1 counts those of the whole machine alone
        assert below >= 0.8 * TRIES
    (verdict,) = [one for one in verdicts if one.fault == "unit_crash_loop"]
    assert verdict.subject == "node/a/unit/leaky.service"
    assert "leaves memory cgroups behind" in verdict.reason


EATER = """
import os
with open({procs!r}, "w") as file:
    file.write(str(os.getpid()))
kept = [bytearray(os.urandom(1 << 20)) for _ in range(48)]
"""


def test_a_real_kill_for_memory_names_cgroup_limit_and_rank(subtree: Path) -> None:
    """A process in a cgroup of 24 MiB asks for twice as much; it is a rank of a run."""
    limit = cgroups.find(Roots()).limit
    place = subtree / "job"
    place.mkdir()
    try:
        (place / limit).write_text(str(24 << 20))
        swap = place / "memory.swap.max"
        (swap if swap.exists() else place / "memory.swappiness").write_text("0")
    except OSError as error:
        pytest.skip(f"no limit can be set below {subtree}: {error.strerror}")
    collector, host = CgroupsCollector(), Host("a")

    def read(boot_s: float, *ranks: RankView) -> list[Verdict]:
        view = RunView("m5", "a", "trainer", 1, ranks=ranks)
        samples = tuple(collector.collect(Roots(), boot_s))
        assert any(one.subject.endswith("/job") for one in samples), "the walk passes it by"
        return judged(host, samples, runs=(view,))

    assert read(1000.0) == []
    code = EATER.format(procs=str(place / "cgroup.procs"))
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    try:
        home = f"/{place.relative_to(cgroups.find(Roots()).base)}"
        read(1001.0, RankView(3, "a", process.pid, 1, "running", cgroup=home))
        code_of_death = process.wait(30)
    finally:
        process.kill()
        process.wait(10)
    assert code_of_death == -9, "the kernel let it live"
    ended = Ended(137, signal=9, boot_s=1002.0)
    found = read(1015.0, RankView(3, "a", process.pid, 1, "ended", ended=ended))
    (verdict,) = [one for one in found if one.fault == "host_oom"]
    assert verdict.subject == f"node/a/cgroup{cgroups.place_of(home)}".rstrip("/")
    assert f"cgroup {home} (limit 24 MiB)" in verdict.reason
    assert verdict.reason.endswith(" where rank 3 of run m5 ended by SIGKILL")
