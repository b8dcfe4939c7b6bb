"""Network cards: trees of /sys and /proc -> samples -> /metrics text and verdicts.

HOLDFAST_GOLDEN=write writes the golden files anew.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from detectors import judged
from pages import page, same_as_golden

from holdfast.agent.core.model import Readings, readings_of
from holdfast.agent.telemetry.collectors import Health
from holdfast.agent.telemetry.devices import cards
from holdfast.collectors.network import METRICS, NetworkCollector
from holdfast.collectors.rdma import RdmaCollector

from .tree import Tree, efa_node, ib_node, plain_node
from .watch import READ_S, Watch, read, unread, values

GOLDEN = Path(__file__).resolve().parent / "golden"
NODES = {"ib": ib_node, "efa": efa_node, "plain": plain_node}
PORT = "class/infiniband/mlx5_3/ports/1"


BOTH = {one.name: one for one in (*NetworkCollector.metrics, *RdmaCollector.metrics)}.values()


# ------------------------------------------------------------- the page


@pytest.mark.parametrize("kind", list(NODES))
def test_a_node_as_the_page_shows_it(tmp_path, kind):
    samples = read(NODES[kind](tmp_path).roots)
    assert not unread(samples)
    assert {one.name for one in samples} <= set(METRICS)
    text = page(samples, BOTH)
    same_as_golden(GOLDEN / f"{kind}.txt", text)


def test_every_metric_is_declared_by_a_collector_that_reads_it(tmp_path):
    trees = [make(tmp_path / kind) for kind, make in NODES.items()]
    for collector in (NetworkCollector(), RdmaCollector()):
        found = {one.name for tree in trees if not (collector.name == "rdma" and
                 RdmaCollector().here(tree.roots)) for one in collector.collect(tree.roots, 1.0)}
        # No card of these trees counts congestion: the fuzz below and RoCE do.
        assert {one.name for one in collector.metrics} - found <= {"network_congestion_total"}
    assert {one.name for one in (*NetworkCollector.metrics, *RdmaCollector.metrics)} == set(METRICS)


def test_efa_says_nothing_about_its_port_and_counts_at_the_card_or_the_port(tmp_path):
    tree = efa_node(tmp_path, cards=1)
    found = values(read(tree.roots))
    assert not [one for one in found if one[0] == "network_link_up" and "rdmap" in one[1]]
    assert found["network_keep_alives_total", "device=rdmap16s27,port="] == 900
    tree.put("class/infiniband/rdmap16s27/ports/1/hw_counters/keep_alive_rcvd", 7)  # Linux < 5.14
    assert values(read(tree.roots))["network_keep_alives_total", "device=rdmap16s27,port=1"] == 7


def test_roce_follows_its_port_and_shows_congestion(tmp_path):
    tree = Tree(tmp_path)
    slot = tree.slot("0000:1a:00.0", "0x15b3", "0x101d", "mlx5_core")
    tree.infiniband(slot, "mlx5_0", "Ethernet")
    tree.put("class/infiniband/mlx5_0/ports/1/hw_counters/np_cnp_sent", 12)
    found = values(read(tree.roots))
    assert found["network_congestion_total", "device=mlx5_0,port=1,event=np_cnp_sent"] == 12
    (info,) = [subject for name, subject in found if name == "network_info"]
    assert "kind=roce,pci=0000:1a:00.0,driver=mlx5_core" in info


# ------------------------------------------------------------- faults


def port_down(watch: Watch) -> list[str]:
    watch.tree.put(f"{PORT}/state", "1: DOWN")
    watch.tree.put(f"{PORT}/phys_state", "2: Polling")
    watch.tree.put("class/net/ib3/operstate", "down")  # the same card: said once
    watch.tree.add("class/net/ib3/carrier_changes", 1)
    return watch.read()


def no_subnet_manager(watch: Watch) -> list[str]:
    watch.tree.put(f"{PORT}/state", "2: INIT")
    return watch.read()


def interface_down(watch: Watch) -> list[str]:
    watch.tree.put("class/net/eth0/operstate", "down")
    return watch.read()


def switched_off(watch: Watch) -> list[str]:
    watch.tree.put("class/net/eth0/operstate", "down")
    watch.tree.put("class/net/eth0/flags", "0x1002")
    return watch.read()


def flap(watch: Watch) -> list[str]:
    for _ in range(3):  # down and up between two readings, minutes apart
        watch.tree.add(f"{PORT}/counters/link_downed", 1)
        watch.read(10)
    return watch.read()


def interface_flap(watch: Watch) -> list[str]:
    for _ in range(3):
        watch.tree.add("class/net/eth0/carrier_changes", 2)
        watch.read(10)
    return watch.read()


def garbled(watch: Watch) -> list[str]:
    for _ in range(2):
        watch.tree.add(f"{PORT}/counters/symbol_error", 300)
        lines = watch.read()
    return lines


def integrity(watch: Watch) -> list[str]:
    watch.tree.add(f"{PORT}/counters/local_link_integrity_errors", 1)
    return watch.read()


def lanes_lost(watch: Watch) -> list[str]:
    watch.tree.put(f"{PORT}/rate", "100 Gb/sec (1X NDR)")
    return watch.read()


def card_lost(watch: Watch) -> list[str]:
    watch.tree.gone("class/infiniband/mlx5_3")
    watch.tree.gone("class/net/ib3")
    watch.tree.off_the_bus("0000:1d:00.0")
    return watch.read(3)


def queue_stood_still(watch: Watch) -> list[str]:
    watch.tree.add("class/net/eth0/queues/tx-2/tx_timeout", 1)
    return watch.read()


def made_anew(watch: Watch) -> list[str]:
    watch.tree.put("class/net/eth0/ifindex", 77)
    return watch.read()


def broken_packets(watch: Watch) -> list[str]:
    for _ in range(2):
        watch.tree.add("class/net/eth0/statistics/rx_errors", 900)
        watch.tree.add("class/net/eth0/statistics/rx_packets", 30_000)
        lines = watch.read()
    return lines


def tcp_of(watch: Watch, sent: int, again: int) -> list[str]:
    """So many segments in each of four readings."""
    for number in range(1, 5):
        text = (f"Tcp: InSegs OutSegs RetransSegs\n"
                f"Tcp: {number}000000 {20_000_000 + number * sent} {1_000_000 + number * again}\n")
        (watch.tree.proc / "net/snmp").write_text(text)
        lines = watch.read()
    return lines


def tcp_again(watch: Watch) -> list[str]:
    return tcp_of(watch, 6000, 600)


def tcp_hardly_goes(watch: Watch) -> list[str]:
    """As measured on a link that loses 30 % each way: what trains over it stands, and agents and
    their store say hardly a hundred things a second."""
    return tcp_of(watch, 1380, 110)


def tcp_says_little(watch: Watch) -> list[str]:
    return tcp_of(watch, 600, 60)


def efa_dead(watch: Watch) -> list[str]:
    for _ in range(3):
        for card in (16, 17):
            watch.tree.add(f"class/infiniband/rdmap{card}s27/hw_counters/keep_alive_rcvd", 15)
        watch.read()
    for _ in range(5):
        watch.tree.add("class/infiniband/rdmap17s27/hw_counters/keep_alive_rcvd", 15)
        lines = watch.read()
    return lines


def efa_refuses(watch: Watch) -> list[str]:
    watch.tree.add("class/infiniband/rdmap16s27/hw_counters/no_completion_cmds", 1)
    return watch.read()


def efa_peers_silent(watch: Watch) -> list[str]:
    for _ in range(2):
        watch.tree.add("class/infiniband/rdmap16s27/ports/1/hw_counters/"
                       "unresponsive_remote_events", 6000)
        lines = watch.read()
    return lines


IB_FAULTS = (port_down, no_subnet_manager, interface_down, switched_off, flap, interface_flap,
             garbled, integrity, lanes_lost, card_lost, queue_stood_still, made_anew,
             broken_packets, tcp_again, tcp_hardly_goes, tcp_says_little)
EFA_FAULTS = (efa_dead, efa_refuses, efa_peers_silent)


def test_what_is_said_of_each_fault(tmp_path):
    lines = []
    for make, faults in ((ib_node, IB_FAULTS), (efa_node, EFA_FAULTS)):
        for fault in faults:
            watch = Watch(make(tmp_path / fault.__name__, 4))
            assert watch.read(2) == [], "a healthy node has no fault"
            lines += [f"{fault.__name__}:", *(f"  {one}" for one in fault(watch))]
    same_as_golden(GOLDEN / "faults.txt", "\n".join(lines) + "\n")


def test_a_person_who_switches_an_interface_off_makes_no_flap(tmp_path):
    watch = Watch(plain_node(tmp_path))
    for _ in range(4):
        for state, flags in (("down", "0x1002"), ("up", "0x1003")):
            watch.tree.put("class/net/eth0/operstate", state)
            watch.tree.put("class/net/eth0/flags", flags)
            watch.tree.add("class/net/eth0/carrier_changes", 1)
            lines = watch.read(10)
    assert lines == [] and not watch.memory.strikes


def test_a_port_goes_down_with_the_interface_that_a_person_switches_off(tmp_path):
    tree = Tree(tmp_path)
    slot = tree.slot("0000:1a:00.0", "0x15b3", "0x1021", "mlx5_core")
    tree.infiniband(slot, "mlx5_0", "Ethernet")
    tree.interface(slot, "ens1", 3)
    watch, port = Watch(tree), "class/infiniband/mlx5_0/ports/1"
    for _ in range(4):
        for state, flags, number, physical in (("down", "0x1002", "1: DOWN", "3: Disabled"),
                                               ("up", "0x1003", "4: ACTIVE", "5: LinkUp")):
            tree.put("class/net/ens1/operstate", state)
            tree.put("class/net/ens1/flags", flags)
            tree.put(f"{port}/state", number)
            tree.put(f"{port}/phys_state", physical)
            tree.add(f"{port}/counters/link_downed", state == "down")
            lines = watch.read(10)
            assert [one.partition(":")[0] for one in lines] == (
                ["nic_link_down (warn) node/n/nic/mlx5_0"] if state == "down" else [])
    assert not watch.memory.strikes


@pytest.mark.parametrize(("cards", "said"), [(4, 0), (3, 1), (2, 0)])
def test_a_card_that_was_never_there_is_known_by_the_instance_type(tmp_path, cards, said):
    tree = efa_node(tmp_path, cards)
    lines = Watch(tree).read(4)
    assert lines == ["nic_lost (warn) node/n/nic/efa: card efa: 3 of 4 cards that this instance "
                     "type can have are listed"][:said]


def test_a_healthy_link_that_comes_back_clears(tmp_path):
    watch = Watch(ib_node(tmp_path))
    assert port_down(watch)
    for path, value in ((f"{PORT}/state", "4: ACTIVE"), ("class/net/ib3/operstate", "up")):
        watch.tree.put(path, value)
    assert watch.read() == []


def test_a_card_that_is_renamed_is_not_lost_and_one_that_comes_back_clears(tmp_path):
    watch = Watch(efa_node(tmp_path))
    slot = "devices/pci0000:00/0000:11:1b.0"
    watch.tree.gone("class/infiniband/rdmap17s27")
    watch.tree.off_the_bus("0000:11:1b.0", "efa")
    assert watch.read(2) == []
    assert watch.read()[0].startswith("nic_lost (fatal) node/n/nic/rdmap17s27: efa rdmap17s27 at")
    watch.tree.link("bus/pci/drivers/efa/0000:11:1b.0", slot)
    names = f"{slot}/infiniband"
    (watch.tree.sys / names / "rdmap17s27").rename(watch.tree.sys / names / "efa_1")
    watch.tree.link("class/infiniband/efa_1", f"{names}/efa_1")
    assert watch.read() == []


def test_two_ports_that_become_a_bond_are_not_lost(tmp_path):
    """RoCE under a bond: one device, mlx5_bond_0, on the first port's address."""
    tree = Tree(tmp_path)
    slots = [tree.slot(f"0000:1a:00.{port}", "0x15b3", "0x1021", "mlx5_core") for port in (0, 1)]
    for port, slot in enumerate(slots):
        tree.infiniband(slot, f"mlx5_{port}", "Ethernet")
    watch = Watch(tree)
    assert watch.read() == []
    for port in (0, 1):
        tree.gone(f"class/infiniband/mlx5_{port}")
    tree.infiniband(slots[0], "mlx5_bond_0", "Ethernet")
    assert watch.read(5) == []


def test_a_card_in_a_container_and_functions_that_are_taken_away_are_not_lost(tmp_path):
    tree = ib_node(tmp_path, 2)
    virtual = tree.slot("0000:1a:00.2", "0x15b3", "0x101e", "mlx5_core")
    tree.link(f"{virtual}/physfn", "devices/pci0000:00/0000:1a:00.0")
    tree.infiniband(virtual, "mlx5_9")
    watch = Watch(tree)
    assert watch.read() == []
    tree.gone("class/infiniband/mlx5_1")  # rdma-cni moves it into a pod
    tree.gone("class/infiniband/mlx5_9")  # sriov_numvfs=0
    tree.off_the_bus("0000:1a:00.2")
    assert watch.read(5) == [] and list(watch.memory.cards.values()) == ["mlx5_0", "mlx5_1"]


def test_a_lost_card_is_said_once_whatever_was_said_of_its_port(tmp_path):
    watch = Watch(ib_node(tmp_path, 4))
    assert len(port_down(watch)) == len(integrity(watch)) - 1 == 1
    assert [one.partition(" ")[0] for one in card_lost(watch)] == ["nic_lost"]


def test_a_card_of_the_same_name_at_another_address_is_not_lost(tmp_path):
    watch = Watch(ib_node(tmp_path, 4))
    watch.tree.gone("class/infiniband/mlx5_3")
    slot = watch.tree.slot("0000:a1:00.0", "0x15b3", "0x1021", "mlx5_core")
    watch.tree.infiniband(slot, "mlx5_3")
    assert watch.read(5) == []


def test_an_interface_that_is_given_away_is_forgotten(tmp_path):
    watch = Watch(ib_node(tmp_path, 4))
    assert interface_down(watch)
    watch.tree.gone("class/net/eth0")
    assert watch.read() == [] and "eth0/" not in watch.memory.up
    watch.tree.link("class/net/eth0", "devices/pci0000:00/0000:05:00.0/net/eth0")
    assert watch.read() == [], "it was never up since it came back"


def test_a_storm_is_shown_for_ten_minutes_after_it(tmp_path):
    watch = Watch(ib_node(tmp_path, 4))
    assert garbled(watch)
    assert len(watch.read(39)) == 1
    assert watch.read() == []


def test_a_wrap_and_a_reset_are_no_storm(tmp_path):
    watch = Watch(ib_node(tmp_path))
    timeouts, symbols = f"{PORT}/hw_counters/local_ack_timeout_err", f"{PORT}/counters/symbol_error"
    watch.tree.put(timeouts, (1 << 32) - 4)
    watch.tree.put(symbols, 60_000)
    assert watch.read(2) == []
    for wrapped, anew in ((4, 100), (10, 50), (14, 20)):  # loaded anew before each reading
        watch.tree.put(timeouts, wrapped)
        watch.tree.put(symbols, anew)
        assert watch.read() == []


def test_what_is_not_read_stays_as_it_was(tmp_path):
    """The child that reads ports failed: its samples are missing, the cards are listed."""
    watch = Watch(ib_node(tmp_path))
    before = port_down(watch)
    watch.boot_s += READ_S
    samples = tuple(NetworkCollector().collect(watch.tree.roots, watch.boot_s))
    after = judged(watch.networks, readings_of(samples), watch.memory)
    assert [one.subject for one in after] == ["node/n/nic/mlx5_3"] and len(before) == 1
    assert judged(watch.networks, Readings(), watch.memory) == after


# ------------------------------------------------------------- status


def test_status_names_cards_their_health_and_the_lost_one(tmp_path):
    watch = Watch(ib_node(tmp_path, ports=4))
    watch.tree.gone("class/infiniband/mlx5_2")
    watch.tree.off_the_bus("0000:1c:00.0")
    port_down(watch)
    watch.read(3)
    health = Health("network", True, False, "", 0.0, 1.0)
    last = tuple(NetworkCollector().collect(watch.tree.roots, watch.boot_s))
    verdicts = tuple(watch.verdicts)
    rows = cards(health, last, verdicts, "n", watch.boot_s + 1.0, READ_S)
    unwell = {one["device"]: (one["health"], one["why"]) for one in rows if one["health"] != "ok"}
    assert unwell == {
        "mlx5_3": ("degraded", "its link is down (polling: nothing answers at the other end); "
                   "it was up in this boot"),
        "mlx5_2": ("fatal", "it is not on the PCI bus any more, or no driver has it"),
    }
    listed = [one["device"] for one in rows]
    # ib2 stands for itself, since its card is gone; mlx5_2 is lost.
    assert listed == ["mlx5_0", "mlx5_1", "mlx5_3", "eth0", "ib2", "mlx5_2"]
    assert {one["kind"] for one in rows} == {"network"}
    late = cards(health, last, verdicts, "n", watch.boot_s + 100.0, READ_S)
    assert {one["health"] for one in late} == {"unknown", "degraded", "fatal"}
    assert [one["why"] for one in late if one["device"] == "eth0"] == ["no reading for 100 s"]
