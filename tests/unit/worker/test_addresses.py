"""This node's address for the others: chosen, told to gloo and nccl, and refused if it is none."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from holdfast.worker import addresses, exits
from holdfast.worker.launcher import commands, run_state, spec


def test_what_was_said_goes_before_what_routes():
    def chosen(wanted="", environ=None, toward="", agents=""):
        return addresses.chosen(wanted, environ or {}, toward, agents)

    assert chosen("127.0.0.5", {"HOLDFAST_ADDR": "127.0.0.6"}, "127.0.0.1", "10.0.0.9") == (
        "127.0.0.5")
    assert chosen("", {"HOLDFAST_ADDR": "127.0.0.6"}, "", "10.0.0.9") == "127.0.0.6"
    assert chosen(toward="127.0.0.1", agents="10.0.0.9") == "10.0.0.9"  # others reach no loopback
    assert chosen(toward="no-such-host.invalid", agents="10.0.0.9") == "10.0.0.9"
    with pytest.raises(OSError, match="HOLDFAST_ADDR no-such-host.invalid"):
        chosen(environ={"HOLDFAST_ADDR": "no-such-host.invalid"})


def test_an_endpoint_has_a_host():
    assert [addresses.host_of(text) for text in (
        "node0:29500", "node0", "[fe80::1]:29500", "10.0.0.1:0", "fe80::1", "")] == [
        "node0", "node0", "fe80::1", "10.0.0.1", "fe80::1", ""]


def test_the_interface_of_an_address_is_told_unless_the_user_chose():
    assert addresses.interface_of("127.0.0.1") == "lo"
    assert addresses.interface_of("203.0.113.9") == ""
    told = addresses.interface_environ("eth0", {"GLOO_SOCKET_IFNAME": "eth9"})
    assert told == {"NCCL_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0"}
    assert addresses.interface_environ("", {}) == {}


def welcomed(tmp_path, packet, *argv, **environ):
    """What a launcher of two nodes makes of its agent's welcome."""
    options = spec.parse("run", ["--nnodes", "2", "--run", "r", *argv, "--no-python", "true"], {})
    state, said = run_state.RunState(options, str(tmp_path)), []
    terminal = SimpleNamespace(say=lambda text, *_: said.append(text))
    link = SimpleNamespace(environ=environ, channel=None)
    commands.Commands(state, None, None, link, None, None, terminal).on_packet(
        {"t": "welcome", **packet})
    return state, " ".join(said)


def test_the_choice_is_said(tmp_path):
    state, said = welcomed(tmp_path, {"many_nodes": True, "host": "127.0.0.1"})
    assert (state.exit_code, state.address, state.interface) == (None, "127.0.0.1", "lo")
    assert "127.0.0.1 on lo" in said


@pytest.mark.parametrize(("packet", "argv", "says"), [
    ({}, (), "serves one node"),
    ({"many_nodes": True}, (), "--local-addr or HOLDFAST_ADDR"),
    ({"many_nodes": True, "host": "203.0.113.9"}, (), "Cannot assign"),
    ({"many_nodes": True}, ("--local-addr", "no-such-host.invalid"), "--local-addr no-such"),
])
def test_without_an_address_or_an_agent_for_nodes_nothing_starts(tmp_path, packet, argv, says):
    state, _ = welcomed(tmp_path, packet, *argv)
    assert state.exit_code == exits.CONFIGURATION and says in state.end_reason
