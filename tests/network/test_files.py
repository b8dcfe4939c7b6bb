"""Network cards: files that vanish, may not be read, or hold what is no number."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.collectors.contract import NoData, Roots, Sample
from holdfast.collectors.network import METRICS, NetworkCollector
from holdfast.collectors.rdma import RdmaCollector

from .tree import ib_node, plain_node
from .watch import Watch, read, unread, values

PORT = "class/infiniband/mlx5_3/ports/1"


def test_a_file_that_vanishes_costs_itself(tmp_path):
    tree = ib_node(tmp_path)
    whole = values(read(tree.roots))
    tree.gone(f"{PORT}/counters/symbol_error")
    (tree.sys / f"{PORT}/counters/symbol_error").symlink_to("nowhere")  # listed, and not there
    samples = read(tree.roots)
    gone = whole.keys() - values(samples).keys()
    assert gone == {("network_errors_total", "device=mlx5_3,port=1,error=symbol_error")}
    assert unread(samples) == {"collector=rdma,reason=vanished": 1.0}


@contextlib.contextmanager
def as_nobody():
    """Root may read everything: be somebody else for a moment."""
    root = os.geteuid() == 0
    if root:
        try:
            os.seteuid(65534)
        except OSError as error:  # a user namespace without nobody
            pytest.skip(f"cannot be somebody else here: {error}")
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def test_permission_denied_is_counted_and_costs_itself():
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        tree = ib_node(Path(name) / "node", ports=1)
        port = tree.sys / "class/infiniband/mlx5_0/ports/1"
        (port / "counters/symbol_error").chmod(0)
        (port / "hw_counters").chmod(0)
        with as_nobody():
            samples = read(tree.roots)
        (port / "hw_counters").chmod(0o755)
        assert unread(samples) == {"collector=rdma,reason=denied": 2.0}
        found = values(samples)
        assert ("network_errors_total", "device=mlx5_0,port=1,error=link_downed") in found
        assert not [one for one in found if "error=rnr_nak_retry_err" in one[1]]


@pytest.mark.parametrize("junk", [
    b"", b"-1\n", b"(no PMA)\n", b"n/a\n", b"1e9\n", b"18446744073709551616\n", b"\xff\xfe\x00",
    b"9" * 99, "\u0663\n".encode(), b"0x10\n", b"1 2\n",
])
def test_what_is_no_number_is_no_reading(tmp_path, junk):
    tree = ib_node(tmp_path, ports=1)
    tree.put("class/infiniband/mlx5_0/ports/1/counters/symbol_error", junk)
    tree.put("class/infiniband/mlx5_0/ports/1/state", junk)
    tree.put("class/infiniband/mlx5_0/ports/1/rate", junk)
    tree.put("class/net/eth0/speed", junk)
    tree.put("class/net/eth0/operstate", junk)
    samples = read(tree.roots)
    found = values(samples)
    assert ("network_errors_total", "device=mlx5_0,port=1,error=symbol_error") not in found
    assert ("network_link_up", "device=mlx5_0,port=1") not in found
    assert unread(samples) == ({"collector=rdma,reason=junk": 1.0} if junk else {})


@pytest.mark.parametrize("speed", [-1, 0, 10_000_001, 4_294_967_295])
def test_a_driver_that_does_not_know_says_neither_speed_nor_link(tmp_path, speed):
    tree = ib_node(tmp_path, ports=1)
    tree.put("class/net/eth0/speed", speed)  # all ones of 32 bits: SPEED_UNKNOWN of old drivers
    tree.put("class/net/ib0/operstate", "unknown")
    found = values(read(tree.roots))
    assert ("network_speed_bytes_per_second", "device=eth0,port=") not in found
    assert ("network_speed_bytes_per_second", "device=mlx5_0,port=1") in found
    links = {subject for name, subject in found if name == "network_link_up"}
    assert links == {"device=eth0,port=", "device=mlx5_0,port=1"}


FILES = ("class/infiniband/mlx5_0/ports/1/state", "class/infiniband/mlx5_0/ports/1/rate",
         "class/infiniband/mlx5_0/ports/1/phys_state", "class/infiniband/mlx5_0/fw_ver",
         "class/infiniband/mlx5_0/ports/1/hw_counters/np_cnp_sent", "class/net/eth0/flags",
         "class/net/eth0/type", "class/net/eth0/speed", "class/net/eth0/carrier_changes",
         "class/net/eth0/queues/tx-0/tx_timeout", "../proc/net/snmp",
         "../proc/net/netstat")


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    return ib_node(tmp_path_factory.mktemp("strange"), ports=1)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(FILES), st.binary(max_size=80) | st.sampled_from(
    [b"1" * 1_000_000, b"Tcp:\nTcp:\n", b"Tcp: OutSegs\nTcp: -1\nTcp: x", b"4:", b"NaN Gb/sec",
     b"0x", b"99999 Gb/sec x", b"device=x,port=y"])))
def test_no_file_is_too_strange(tree, contents):
    watch = Watch(tree)
    for path, content in contents.items():
        tree.put(path, content)  # what an earlier example wrote may stay
    watch.read()
    assert all(math.isfinite(one.value) and one.value >= 0 for one in watch.samples)
    assert all(one.name in METRICS for one in watch.samples)
    infos = [one.subject for one in watch.samples if one.name == "network_info"]
    assert all(one.count(",") == 4 and one.count("=") == 5 for one in infos)


def test_many_devices_are_bounded_and_strange_names_left_out(tmp_path):
    tree = plain_node(tmp_path)
    for number in range(200):
        tree.link(f"class/net/nic{number}/device", "devices/pci0000:00/0000:00:03.0")
        tree.virtual(f"veth{number}")
    tree.link("class/net/a,b=c/device", "devices/pci0000:00/0000:00:03.0")
    infos = [one.subject for one in read(tree.roots) if one.name == "network_info"]
    assert len(infos) == 64 and not [one for one in infos if "veth" in one]
    assert all(one.count(",") == 4 and one.count("=") == 5 for one in infos)


def test_without_cards_and_proc_there_is_no_data(tmp_path):
    roots = Roots(proc=str(tmp_path), sys=str(tmp_path))
    with pytest.raises(NoData, match="no network card"):
        NetworkCollector().collect(roots, 1.0)
    with pytest.raises(NoData, match="no InfiniBand"):
        RdmaCollector().collect(roots, 1.0)
    assert RdmaCollector().here(roots) and not RdmaCollector().here(ib_node(tmp_path / "n").roots)


def test_ports_are_read_in_a_child(tmp_path):
    roots = ib_node(tmp_path, ports=2).roots
    done = subprocess.run(
        [sys.executable, "-m", "holdfast.collectors", "rdma", json.dumps(roots)],
        input="1.0\n2.0\n", capture_output=True, text=True, timeout=30, check=True,
    )
    first, second = (json.loads(line) for line in done.stdout.splitlines())
    assert first["dropped"] == 0
    expected = RdmaCollector().collect(roots, 2.0)
    assert [Sample(*one) for one in second["samples"]] == expected
