"""Ports of real InfiniBand, RoCE, iWARP and EFA cards as their machines said them: what becomes of
each on the page, and what is concluded.  HOLDFAST_GOLDEN=write makes the golden files anew.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from network.tree import Tree
from network.watch import Watch, read, unread, values
from pages import page, same_as_golden

from holdfast.collectors.network import METRICS

HERE = Path(__file__).resolve().parent
NODES = {
    name: [row.split(" ", 1) for row in rows.splitlines()]
    for name, _, rows in (
        part.partition("\n") for part in (HERE / "infiniband.txt").read_text().split("## ")[1:]
    )
}


def recorded(folder: Path, name: str) -> Tree:
    tree = Tree(folder, recorded=False)
    for path, said in NODES[name]:
        tree.put(f"class/infiniband/{path}", said)
    return tree


@pytest.mark.parametrize("name", list(NODES))
def test_a_recorded_node_as_the_page_shows_it(tmp_path, name):
    samples = read(recorded(tmp_path, name).roots)
    refused = [one for one in unread(samples) if "junk" in one or "denied" in one]
    assert not refused
    lines = page(samples, METRICS.values()).splitlines(keepends=True)
    text = "".join(one for one in lines if not one.startswith("#") and "unread_files" not in one)
    same_as_golden(HERE / f"golden/{name}.txt", text)


def test_every_kind_is_told_apart(tmp_path):
    kinds = {}
    for name in NODES:
        samples = read(recorded(tmp_path / name, name).roots)
        kinds[name] = {one.subject.split(",")[1] for one in samples if one.name == "network_info"}
    assert kinds == {
        "connectx_and_omnipath": {"kind=infiniband"}, "h100_ndr": {"kind=infiniband", "kind=roce"},
        "a100_hdr": {"kind=infiniband", "kind=roce"}, "h100_two_down": {"kind=roce"},
        "roce_congested": {"kind=roce"}, "iwarp_no_pma": {"kind=other"},
        "efa_one_message": {"kind=efa"}, "efa_p4d": {"kind=efa"}, "efa_g4dn": {"kind=efa"},
    }


def test_data_is_counted_in_words_by_the_port_and_in_bytes_by_efa(tmp_path):
    ports = values(read(recorded(tmp_path / "ib", "connectx_and_omnipath").roots))
    assert ports["network_receive_bytes_total", "device=hfi1_0,port=1"] == 345091702026 * 4
    efa = values(read(recorded(tmp_path / "efa", "efa_p4d").roots))
    assert efa["network_receive_bytes_total", "device=rdmap144s27,port=1"] == 85466418782288


def test_efa_counts_one_message_of_two_bytes(tmp_path):
    found = values(read(recorded(tmp_path, "efa_one_message").roots))
    port = "device=efa_0,port=1"
    assert found["network_work_requests_total", f"{port},operation=send"] == 1
    assert found["network_work_bytes_total", f"{port},operation=send"] == 2
    assert found["network_transmit_packets_total", port] == 1
    assert found["network_transmit_bytes_total", port] == 2
    assert found["network_commands_total", f"{port},state=submitted"] == 108
    assert found["network_commands_total", f"{port},state=completed"] == 105
    assert not [one for one in found if one[0] == "network_link_up"]


def test_counters_that_a_card_does_not_have_are_no_junk_and_no_zero(tmp_path):
    samples = read(recorded(tmp_path, "iwarp_no_pma").roots)
    assert unread(samples)["collector=rdma,reason=unsupported"] == 8
    assert not [one for one in samples if "port=1" in one.subject]


def test_a_speed_in_brackets_is_not_the_speed(tmp_path):
    """A bond of BlueField runs at 200 Gb/s over two lanes; its unit is in the same line."""
    found = values(read(recorded(tmp_path, "h100_ndr").roots))
    name = "network_speed_bytes_per_second"
    assert found[name, "device=mlx5_0,port=1"] == 400e9 / 8
    assert found[name, "device=mlx5_bond_0,port=1"] == 200e9 / 8


def test_ports_that_were_down_from_the_start_are_counted_and_accused_of_nothing(tmp_path):
    watch = Watch(recorded(tmp_path, "h100_two_down"))
    found = values(watch.samples)
    down = {one[1] for one, value in found.items() if one[0] == "network_link_up" and not value}
    assert down == {"device=mlx5_5,port=1", "device=mlx5_11,port=1"}
    assert watch.read(4) == []


def test_a_port_that_goes_down_as_the_recorded_ones_is_down_and_not_slow(tmp_path):
    """A port that is down says 40 Gb/s: one of 400 would look like one that lost its speed."""
    tree = recorded(tmp_path, "h100_two_down")
    watch = Watch(tree)
    assert watch.read() == []
    for file in ("state", "phys_state", "rate"):
        text = (tree.sys / f"class/infiniband/mlx5_11/ports/1/{file}").read_text().strip()
        tree.put(f"class/infiniband/mlx5_6/ports/1/{file}", text)
    (said,) = watch.read()
    assert "mlx5_6" in said and "polling" in said and "slow" not in said, said


def test_counters_that_have_reached_their_end_accuse_nobody(tmp_path):
    """link_downed of a port has 8 bits and stands at 255 for ever, its overruns 4 and 15."""
    watch = Watch(recorded(tmp_path, "h100_ndr"))
    found = values(watch.samples)
    port = "device=mlx5_1,port=1"
    assert found["network_errors_total", f"{port},error=link_downed"] == 255
    assert found["network_errors_total", f"{port},error=excessive_buffer_overrun_errors"] == 15
    assert watch.read(4) == []


@pytest.mark.parametrize("name", list(NODES))
def test_what_stands_still_accuses_nobody(tmp_path, name):
    """Millions of congestion signs, thousands of errors: what counts is growth."""
    assert Watch(recorded(tmp_path, name)).read(3) == []
