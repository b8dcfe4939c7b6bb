"""What a node is made of: a recorded tree -> samples -> the node's document -> the API."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import aiohttp
import msgspec
import pytest
from fakes import FakeLauncher, until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pages import page, same_as_golden

from holdfast.agent.cli.drift_files import compared
from holdfast.agent.core.model import Plan, Resume, StoreWrite
from holdfast.agent.core.nodes.identity import Identity
from holdfast.collectors import identity
from holdfast.collectors.contract import NoData, Roots
from holdfast.collectors.identity import IdentityCollector

DPKG = """Package: libnccl2
Status: install ok installed
Architecture: amd64
Version: 2.21.5-1+cuda12.4

Package: libnccl-ofi
Status: deinstall ok config-files
Version: 1.9.0

Package: nvidia-fabricmanager-535
Status: install ok installed
Version: 1:535.161.08-1
Description: of no interest
 Version: 9
"""
EFA = """# EFA installer version: 1.34.0
# Packages installed:
efa-config_1.17_all libfabric-aws-bin_1.22.0amzn1.0_amd64 libnccl-ofi_1.11.0-1_amd64
"""
TREE = {
    "proc/sys/kernel/osrelease": "6.8.0-1016-aws\n",
    "proc/cpuinfo": "processor\t: 0\nmodel name\t: AMD EPYC 7R13, 48 cores\n"
                    "microcode\t: 0xa0011d5\n",
    "sys/class/dmi/id/sys_vendor": "Amazon EC2\n",
    "sys/class/dmi/id/product_name": "p5.48xlarge\n",
    "sys/class/dmi/id/bios_version": "1.0\n",
    "sys/module/nvidia/version": "535.161.08\n",
    "sys/module/efa/version": "2.13.0g\n",
    "sys/class/infiniband/rdmap0s6/fw_ver": "0.0.0.0\n",
    "sys/class/infiniband/rdmap1s6/fw_ver": "0.0.0.0\n",
    "sys/class/infiniband/rdmap2s6/fw_ver": "\n",
    "sys/class/nvme/nvme0/firmware_rev": "0\n",
    "sys/class/nvme/nvme0/model": "Amazon EC2 NVMe Instance Storage\n",
    "etc/os-release": 'NAME="Ubuntu"\nPRETTY_NAME="Ubuntu 22.04.5 LTS"\n',
    "usr/lib/x86_64-linux-gnu/libnccl.so.2.21.5": "",
    "usr/lib/x86_64-linux-gnu/libnccl.so.2": "",
    "usr/lib64/libnccl.so.2.18.3": "",
    "usr/lib64/libnccl.so.old.3.4": "",
    "usr/local/cuda/version.json": '{"cuda": {"name": "CUDA SDK", "version": "12.4.1"}}',
    "opt/aws/neuron/lib/libnrt.so.2.22.19.0": "",
    "opt/amazon/efa_installed_packages": EFA,
    "var/lib/dpkg/status": DPKG,
}


@pytest.fixture
def roots(tmp_path):
    for path, text in TREE.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    device = tmp_path / "sys/class/infiniband/rdmap0s6/device"
    device.mkdir()
    (device / "driver").symlink_to("../../../../module/efa")
    folder = str(tmp_path)
    return Roots(proc=f"{folder}/proc", sys=f"{folder}/sys", root=folder)


def test_a_node_as_the_page_shows_it(roots, monkeypatch):
    monkeypatch.setattr(identity.platform, "machine", lambda: "x86_64")
    text = page(IdentityCollector().collect(roots, 1.0), IdentityCollector.metrics)
    same_as_golden(Path(__file__).parent / "recorded/identity.txt", text)


def versions(samples) -> set[str]:
    return {one.subject for one in samples if one.name != "host_info"}


def test_it_is_read_seldom_and_then_anew(roots, tmp_path):
    collector = IdentityCollector()
    first = collector.collect(roots, 1.0)
    (tmp_path / "sys/module/nvidia/version").write_text("550.54.15\n")
    (tmp_path / "var/lib/dpkg/status").write_text(DPKG.replace("2.21.5", "2.26.2"))
    assert collector.collect(roots, 2.0) is first
    collector._due_s = 0.0
    later = versions(collector.collect(roots, 3.0))
    assert "component=nvidia_driver,version=550.54.15" in later
    assert "component=nccl,version=2.26.2" in later


def test_each_missing_file_costs_its_own_row(roots, tmp_path):
    whole = versions(IdentityCollector().collect(roots, 1.0))
    (tmp_path / "sys/module/nvidia/version").unlink()
    less = versions(IdentityCollector().collect(roots, 1.0))
    assert whole - less == {"component=nvidia_driver,version=535.161.08"}
    for path in TREE:
        if path != "proc/sys/kernel/osrelease":
            (tmp_path / path).unlink(missing_ok=True)
    (only,) = IdentityCollector().collect(roots, 1.0)
    assert only.name == "host_info" and "kernel=6.8.0-1016-aws" in only.subject
    (tmp_path / "proc/sys/kernel/osrelease").unlink()
    with pytest.raises(NoData):
        IdentityCollector().collect(roots, 1.0)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40,
          deadline=None)
@given(st.sampled_from(sorted(set(TREE) - {"proc/sys/kernel/osrelease"})),
       st.binary(max_size=200) | st.just(b"Package: libnccl2\nStatus: \nVersion: 1\n" * 9)
       | st.just(b"Package: libnccl2\nStatus: a\nVersion: " + b"9" * 9000)
       | st.just(b"[" * 50000))
def test_no_file_is_too_strange(roots, tmp_path, path, content):
    before = (tmp_path / path).read_bytes()
    (tmp_path / path).write_bytes(content)
    try:
        samples = IdentityCollector().collect(roots, 1.0)
    finally:
        (tmp_path / path).write_bytes(before)
    for one in samples:
        count = one.subject.count("=")
        assert one.subject.count(",") == count - 1 and len(one.subject) < 700


# ------------------------------------------------------------- the API


def doc(**software: str) -> bytes:
    values = {f"software.{key}": value for key, value in software.items()}
    return msgspec.json.encode(Identity({"node": values}))


def test_drift_is_asked_of_a_run_or_of_every_known_node(agent, tmp_path):
    async def scenario():
        async with agent() as (daemon, node):
            for name, driver in (("node-a", "535"), ("node-b", "550"), ("node-c", "535")):
                body = doc(driver=driver, nccl="2.21.5")
                await daemon.store.put(StoreWrite(f"identity/{name}", 0, body))
            await daemon.store.put(StoreWrite("identity/node-d", 0, b"{half"))
            plan = Plan("demo", 1, ("node-a", "node-b", "node-d"), (), Resume("fresh"), "")
            node.extra = {"plans": (plan,)}
            launcher = FakeLauncher(tmp_path / "run" / "agent.sock")
            launcher.hello()
            launcher.levels(generation=1, state="running")
            await until(lambda: daemon.launchers.address and node.seen and node.seen[-1].runs, 20.0)
            await until(lambda: len(daemon.state.snapshot.observed.store.docs) == 4)
            async with aiohttp.ClientSession(daemon.launchers.address) as client:
                async with client.get("/api/v1/drift") as answer:
                    every = await answer.json()
                async with client.get("/api/v1/drift?run=demo") as answer:
                    run = await answer.json()
                async with client.get("/api/v1/drift?run=other") as answer:
                    assert answer.status == 404
            launcher.close()
            return every, run

    every, run = asyncio.run(scenario())
    assert every["nodes"] == ["node-a", "node-b", "node-c"] and every["compared"] == 2
    (one,) = every["differences"]
    assert (one["key"], one["most"], one["agree"], one["of"]) == ("software.driver", "535", 2, 3)
    assert one["nodes"] == [["node-b", "550"]]
    assert run["nodes"] == ["node-a", "node-b", "node-d"] and run["unknown"] == ["node-d"]
    assert run["differences"][0]["agree"] == 0, "one against one is no majority"
    assert run["values"]["software.driver"] == "535" and json.dumps(run)
    assert every["identities"]["node-b"] == {
        "node": {"software.driver": "550", "software.nccl": "2.21.5"}
    }
    assert sorted(run["identities"]) == ["node-a", "node-b"]
    file = tmp_path / "both.json"
    file.write_text(json.dumps(run) + json.dumps(every))
    beside = json.loads(json.dumps(compared([str(file)])))
    assert beside["differences"] == every["differences"] and beside["unknown"] == ["node-d"]
