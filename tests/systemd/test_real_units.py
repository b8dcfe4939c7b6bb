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
alone = true
[evidence]
store = "/shared/holdfast"
[collectors]
kmsg = "/shared/kmsg"
"""
LINE = "3,9,1,-;NVRM: Xid (PCI:0000:4e:00): 79, pid=1, name=x, GPU has fallen off the bus.\n"
GPUS = [f"0000:{0x50 + number:02x}:00" for number in range(8)]
STOPPED = "".join(
    f"3,{number},1,-;NVRM: Xid (PCI:{one}): 109, pid=1, name=x, Context Switch Timeout Error\n"
    for number, one in enumerate(GPUS)
)
RESET = """#!/bin/sh
echo "$*" >> /shared/reset
"""
BOOT_S = 90.0
ORDER_S = 120.0  # 15 s of them pass by design before the order


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


def resets(own: OwnSystemd) -> list[str]:
    """Calls of the operator's program, in their order."""
    file = own.shared / "reset"
    return file.read_text().splitlines() if file.exists() else []


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
    wanted = [f"holdfast-test gpu_needs_reset {one}.0" for one in GPUS]
    # Each order leaves the moment that the one before is answered.
    own.wait(lambda: resets(own) == wanted, ORDER_S, f"the GPUs are reset, not {resets(own)}")
    kept = [json.loads(one.read_text()) for one in (own.shared / "holdfast").glob("*.json")]
    assert [one["fault"] for one in kept] == ["gpu_needs_reset"] * len(GPUS)
    for stopped in kept:
        own.wait(lambda name=stopped["id"]: "the GPU was reset" in own.inside(
            "/opt/holdfast/bin/holdfast", "incidents", "--all", name), BOOT_S,
            "its incident is closed")
    with (own.shared / "kmsg").open("a") as log:
        log.write(LINE)  # another GPU, which only a reboot brings back
    own.inside("systemctl", "restart", "holdfast.service")  # a recorded log is read once
    own.wait((own.shared / "verb").exists, ORDER_S, "the order for the node is carried out")
    assert (own.shared / "verb").read_text() == "reboot\n"
    own.process.wait(BOOT_S)
    *done_before, done = map(json.loads, (own.shared / "done").read_text().splitlines())
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert (done["verb"], done["boot_id"]) == ("reboot", boot_id)
    assert [(one["verb"], one["device"]) for one in done_before] == [
        ("reset_gpu", f"{one}.0") for one in GPUS]
    kept = [json.loads(one.read_text()) for one in (own.shared / "holdfast").glob("*.json")]
    assert "gpu_fell_off_bus" in [one["fault"] for one in kept]
