"""Every collector that reads files, on a made machine whose files are damaged at random.

What is read is the recorded nodes of the other tests, so that a seed finds the same everywhere.  It
decides which readings are cut, junk, or fail.  A reading may be missing then, and nothing else may:
no crash, and no value that is no number.
"""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from machine.conftest import build
from network.tree import ib_node

from holdfast.agent.telemetry.collectors import Reply
from holdfast.collectors import ALL, shared_memory
from holdfast.collectors.__main__ import _answer
from holdfast.collectors.contract import Roots

TESTS = Path(__file__).resolve().parents[2]
TOOLS = ("nvidia", "neuron", "amd", "nvme_smart", "dns", "units", "ec2", "pci")  # read no file
FILES = [one for one in ALL if one.name not in TOOLS]
STAT = ("{pid} ({name}) {state} 1 1 1 0 -1 64 0 0 0 0 5 9 0 0 20 0 1 0 100 0 0 18446744073709551615"
        + " 0" * 12 + " 17 1 0 0 0 0 0\n")
STATUS = "Name:\tx\nRssShmem:\t2048 kB\nvoluntary_ctxt_switches:\t5\n"
JUNK = ("", "\n", "-1\n", "nan", "inf", "1e999", "\x00\x01", "max", "9" * 5000, "٣", "0x10", ":",
        "a b c d e f g h i j k l m n o p q r s t u v w x y z", "1,2", "-", "\ufffd" * 9, "= = =",
        "1 " * 4000)
CRASH = re.compile(r"\w*(Error|Exception): ")


ERRORS = (errno.EACCES, errno.EIO, errno.ENODEV, errno.EINVAL)


@pytest.fixture(scope="module")
def roots(tmp_path_factory) -> Roots:
    """Cards, drives, mounts, counted errors, processes and a compile cache."""
    folder = tmp_path_factory.mktemp("machine")
    tree = ib_node(folder, ports=2)
    for part in ("proc", "sys"):
        shutil.copytree(TESTS / "golden/nodes/host" / part, folder / part, dirs_exist_ok=True)
    build(folder, (TESTS / "machine/gpu_node.txt").read_text())
    tree.put("class/dmi/id/product_name", "PowerEdge XE9680")
    for pid, state in ((7, "S"), (8, "D"), (9, "Z")):
        place = tree.proc / str(pid)
        place.mkdir()
        (place / "stat").write_text(STAT.format(pid=pid, name="neuronx-cc", state=state))
        (place / "status").write_text(STATUS)
        (place / "cmdline").write_bytes(b"neuronx-cc\0compile\0")
    (tree.proc / "sys/kernel/osrelease").write_text("6.8.0-45-generic\n")
    for file, text in (("cgroup.controllers", "cpu memory pids"),
                       ("cgroup.stat", "nr_dying_descendants 7"),
                       ("job/memory.max", "1000000"), ("job/memory.current", "900000"),
                       ("job/memory.stat", "inactive_file 10"),
                       ("job/memory.events.local", "oom_kill 2")):
        tree.put(f"fs/cgroup/{file}", text)
    (folder / "cache").mkdir()
    (folder / "cache/model.lock").touch()
    (folder / "shm").mkdir()
    return tree.roots._replace(compile_cache=str(folder / "cache"), root=str(folder),
                               shm=str(folder / "shm"))


class Damage:
    """`os.read` of a machine whose files are not what they were; others' are left alone."""

    def __init__(self, seed: int, roots: Roots) -> None:
        self.seed, self.below, self.read = seed, str(roots.root), os.read
        self.times: Counter[str] = Counter()
        self.done = 0

    def __call__(self, fd: int, most: int) -> bytes:
        data, path = self.read(fd, most), os.readlink(f"/proc/self/fd/{fd}")
        if not data or not path.startswith(self.below):
            return data
        self.times[path] += 1  # threads read in any order: each file has its own chance
        name = path.removeprefix(self.below)
        chance = random.Random(f"{self.seed} {name} {self.times[path]}")
        if chance.random() < 0.5:
            return data
        self.done += 1
        if chance.random() < 0.2:
            raise OSError(chance.choice(ERRORS), "damaged")
        at, until = sorted(chance.randrange(len(data) + 1) for _ in range(2))
        return (data[:at] + chance.choice(JUNK).encode() + data[until:])[:most]


@pytest.mark.parametrize("make", FILES, ids=lambda one: one.name)
def test_a_damaged_file_costs_readings_and_no_more(make, roots, monkeypatch):
    monkeypatch.setattr(shared_memory, "NEAR", 0.0)  # so that it reads who holds it
    assert _answer(make(), roots, 100.0).get("samples"), "nothing to be damaged"
    done = 0
    for seed in range(40):
        with monkeypatch.context() as patch:
            damage = Damage(seed, roots)
            patch.setattr(os, "read", damage)
            collector = make()
            for boot_s in (100.0, 101.0):
                answer = _answer(collector, roots, boot_s)
                said = str(answer.get("error", ""))
                assert not CRASH.match(said), (seed, said)
                msgspec.json.decode(msgspec.json.encode(answer), type=Reply)
            done += damage.done
    assert done > 20, "hardly anything was damaged"
