"""Who the peers are, by list, file and Slurm, and which of them a node is."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from holdfast.agent.peers import hosts
from holdfast.agent.peers.hosts import Peer

A_AND_B = [Peer("a", "10.0.0.1"), Peer("b", "10.0.0.2")]


@pytest.mark.parametrize(("text", "names"), [
    ("a,b", ["a", "b"]),
    ("gpu[1-3,07],login", ["gpu1", "gpu2", "gpu3", "gpu07", "login"]),
    ("n[008-011]", ["n008", "n009", "n010", "n011"]),
    ("r[1-2]-ib , x=10.0.0.1", ["r1-ib", "r2-ib", "x=10.0.0.1"]),
])
def test_a_list_is_read_as_slurm_writes_it(text: str, names: list[str]) -> None:
    assert hosts.expand(text) == names


@pytest.mark.parametrize("text", [
    "a[1-", "a[1-2", "a]", "", ",", "a,,b", "a[2-1]", "a[x]", "a[1-99999999999]", "a[1][2]", "[",
    "a[]", "a[1-2],,", "é" * 5 + "[",
])
def test_what_is_no_list_is_a_sentence(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no name|is no range"):
        hosts.expand(text)


def test_a_list_of_millions_ends_early() -> None:
    assert len(hosts.expand(",".join(["a[1-4096]"] * 1000))) <= 2 * hosts.PEERS_MAX
    with pytest.raises(ValueError, match="4096 are the most"):
        hosts.peers("a[1-4096],b[1-4096]", "", {})


def test_peers_are_named_once_and_have_addresses(tmp_path: Path) -> None:
    assert hosts.peers("a=10.0.0.1,b=10.0.0.2", "", {}) == A_AND_B
    file = tmp_path / "hosts"
    file.write_text("# the job's\na=10.0.0.1 slots=8\n\nb=10.0.0.2:8 # second\n".replace(":8", ""))
    assert hosts.peers("", str(file), {}) == A_AND_B
    file.write_text("\ufeffa=10.0.0.1\nb=10.0.0.2\n")  # as Windows writes it
    assert hosts.peers("", str(file), {}) == A_AND_B
    slurm = {"SLURM_JOB_NODELIST": "localhost,127.0.0.1"}
    assert [one.name for one in hosts.peers("slurm", "", slurm)] == ["localhost", "127.0.0.1"]
    for words, said in (("a=1.1.1.1,a=1.1.1.1", "a named twice"), ("a=1.1.1.1", "needs two"),
                        ("a b,c", "is no node"), ("no-such-host.invalid,b=1.1.1.1", "no address")):
        with pytest.raises(ValueError, match=said):
            hosts.peers(words, "", {})
    with pytest.raises(ValueError, match="SLURM_JOB_NODELIST"):
        hosts.peers("slurm", "", {})
    with pytest.raises(ValueError, match="--hostfile"):
        hosts.peers("", str(tmp_path / "none"), {})
    with pytest.raises(ValueError, match="--hostfile"):
        hosts.peers("", "/dev/zero", {})


def test_a_node_finds_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "b.example")
    assert hosts.own(A_AND_B, "", {}, False) == 1
    assert hosts.own(A_AND_B, "a", {}, False) == 0
    assert hosts.own(A_AND_B, "", {"SLURM_NODEID": "0"}, True) == 0
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    assert hosts.own([Peer("x", "127.0.0.1"), Peer("y", "203.0.113.1")], "", {}, False) == 0
    with pytest.raises(ValueError, match="--as NAME"):
        hosts.own(A_AND_B, "", {}, False)
    with pytest.raises(ValueError, match="none of a, b"):
        hosts.own(A_AND_B, "c", {}, False)
