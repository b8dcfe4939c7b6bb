"""The shipped units under a real systemd, which is the test's own and ends with it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from own_systemd import Cannot, OwnSystemd

AGENT = """
[actions]
allow = ["reboot_node", "reset_gpu"]
[evidence]
store = "/shared/holdfast"
[collectors]
kmsg = "/shared/kmsg"
"""
LINE = "3,5,1,-;NVRM: Xid (PCI:0000:4e:00): 79, pid=1, name=x, GPU has fallen off the bus.\n"
STOPPED = "3,4,1,-;NVRM: Xid (PCI:0000:5e:00): 109, pid=1, name=x, Context Switch Timeout Error\n"
RESET = """#!/bin/sh
echo "$*" > /shared/new && mv /shared/new /shared/reset
"""
BOOT_S = 30.0
ORDER_S = 60.0  # 15 s of them pass by design before the order


def settings() -> list[str]:
    """What a systemd that is not held would raise for the whole machine."""
    return [Path(f"/proc/sys/fs/{name}").read_text() for name in ("file-max", "nr_open")]


@pytest.fixture
def own(tmp_path: Path) -> Iterator[OwnSystemd]:
    before, name = settings(), os.uname().nodename
    try:
        made = OwnSystemd(tmp_path, AGENT, STOPPED, {"reset_gpu": RESET})
    except Cannot as reason:
        pytest.skip(str(reason))
    try:
        yield made
    finally:
        made.close()
    assert settings() == before and os.uname().nodename == name and not made.cgroup.exists()
    assert str(tmp_path) not in Path("/proc/self/mounts").read_text()


def is_active(own: OwnSystemd, unit: str) -> bool:
    return own.inside("systemctl", "is-active", unit) == "active\n"


def test_the_units_run_and_an_order_ends_their_systemd_and_nothing_else(own: OwnSystemd) -> None:
    """One start, for it takes 20 s: a line of the kernel's is there from the beginning."""
    own.wait(lambda: is_active(own, "holdfast.service"), BOOT_S, "the agent is ready")
    assert is_active(own, "holdfast-node.socket")

    def up() -> set[str]:
        said = own.inside("/opt/holdfast/bin/holdfast", "status", "--json")
        if not said.startswith("["):
            return set()  # it does not answer people yet
        (node,) = json.loads(said)
        return {one["name"] for one in node["collectors"] if one["up"]}

    # Under the filter, the mounts and the capability of the unit.
    wanted = {"host", "disk", "identity", "clock", "tasks", "cgroups", "shared_memory"}
    own.wait(lambda: wanted <= up(), BOOT_S, f"{wanted} are read")
    own.wait((own.shared / "reset").exists, ORDER_S, "the GPU is reset")
    assert (own.shared / "reset").read_text() == "holdfast-test gpu_needs_reset 0000:5e:00.0\n"
    kept = own.shared / "holdfast"
    (stopped,) = [json.loads(one.read_text()) for one in kept.glob("*.json")]
    assert stopped["fault"] == "gpu_needs_reset"
    own.wait(lambda: "the GPU was reset" in own.inside(
        "/opt/holdfast/bin/holdfast", "incidents", "--all", stopped["id"]), BOOT_S,
        "its incident is closed")  # fmt: skip
    with (own.shared / "kmsg").open("a") as log:
        log.write(LINE)  # another GPU, which only a reboot brings back
    own.inside("systemctl", "restart", "holdfast.service")  # a recorded log is read once
    own.wait((own.shared / "verb").exists, ORDER_S, "the order for the node is carried out")
    assert (own.shared / "verb").read_text() == "reboot\n"
    own.process.wait(30.0)
    reset, done = map(json.loads, (own.shared / "done").read_text().splitlines())
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert (done["verb"], done["boot_id"]) == ("reboot", boot_id)
    assert (reset["verb"], reset["device"]) == ("reset_gpu", "0000:5e:00.0")
    kept = [json.loads(one.read_text()) for one in (own.shared / "holdfast").glob("*.json")]
    assert "gpu_fell_off_bus" in [one["fault"] for one in kept]
