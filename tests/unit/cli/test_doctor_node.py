"""What doctor says of a node's devices and of the orders for the whole node."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from holdfast.agent.cli import doctor, doctor_node, main
from holdfast.agent.cli.doctor_node import (
    HAVE,
    LACK,
    NEED,
    User,
    agents_user,
    neuron_devices,
    node_orders,
    orders,
)
from holdfast.agent.config.load import load

from .test_offline import plain

MINE = os.geteuid(), os.getegid()
NOBODY = 64_000  # owns nothing here


def user(uid: int = NOBODY, *groups: int) -> User:
    return User(f"u{uid}", uid, frozenset(groups))


@pytest.fixture
def dev(tmp_path: Path) -> Path:
    for number in (0, 1, 10):
        (tmp_path / f"neuron{number}").touch()
    (tmp_path / "neuron_rdma").touch(0o600)  # no device of the kind
    return tmp_path


@pytest.mark.parametrize(("mode", "job", "agent", "state"), [
    (0o666, user(), user(), HAVE),  # as the driver's package leaves them
    (0o660, user(), None, NEED),
    (0o660, user(NOBODY, MINE[1]), user(NOBODY, MINE[1]), HAVE),  # as the vendor recommends it
    (0o660, user(NOBODY, MINE[1]), user(), LACK),
    (0o660, user(NOBODY, MINE[1]), None, HAVE),  # no agent's user on this machine
    (0o066, user(MINE[0] or NOBODY), user(), HAVE if MINE[0] == 0 else NEED),  # the owner's part
    (0o606, user(NOBODY, MINE[1]), user(), NEED),  # the group's part, not the others'
    (0o664, user(), user(), NEED),  # reading alone is not enough
    (0o600, user(0), user(0), HAVE),
])
def test_who_may_open_a_neuron_device(
    dev: Path, mode: int, job: User, agent: User | None, state: str
) -> None:
    for number in (0, 1, 10):
        (dev / f"neuron{number}").chmod(mode)
    found = neuron_devices(dev, job, agent)
    assert found.state == state, found
    assert (state == HAVE) == (not found.cost)
    if state == LACK:
        assert agent is not None and f"closed to {agent.name}" in found.said
        assert f"group {MINE[1]}" in found.cost or "udev" in found.cost


def test_one_closed_device_of_many_is_named(dev: Path) -> None:
    for number, mode in ((0, 0o666), (1, 0o600), (10, 0o666)):
        (dev / f"neuron{number}").chmod(mode)
    found = neuron_devices(dev, user(), user())
    assert (found.state, f"{dev}/neuron1 0600" in found.said) == (NEED, True)
    assert "(1 of 3)" in found.cost and "udev" in found.cost
    assert neuron_devices(dev / "none", user(), None).state == HAVE


def test_the_agents_user_is_who_the_launcher_trusts() -> None:
    found = agents_user({"HOLDFAST_AGENT_USER": str(MINE[0])})
    assert found is not None and found.uid == MINE[0] and found.groups
    for name in ("no-such-user-here", "4294967295", "9" * 40):
        assert agents_user({"HOLDFAST_AGENT_USER": name}) is None


def configured(tmp_path: Path, *allow: str, store: str = "") -> Path:
    file = tmp_path / "agent.toml"
    file.write_text(f'[actions]\nallow = [{", ".join(map(repr, allow))}]\n'
                    "alone = true\n"
                    f'socket = "{tmp_path}/node.sock"\n[evidence]\nstore = "{store}"\n')
    return file


def test_node_orders_need_a_socket_a_folder_and_their_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(doctor_node.BY_ITSELF, "reboot_node", "/bin/sh")  # whatever is here
    store, programs = tmp_path / "store", tmp_path / "node.d"
    config = load(configured(tmp_path, "drain_node", "reboot_node", store=str(store))).config
    found = node_orders(config, programs)
    assert (found.state, found.said) == (LACK, f"no socket {tmp_path}/node.sock (and 2 more)")
    for word in ("systemctl enable --now holdfast-node.socket", str(store), "ReadWritePaths=",
                 f"{programs}/drain"):
        assert word in found.cost
    text = plain(doctor.report([found]))
    assert f"{programs}/drain" in text.replace("\n", "").replace(" ", "")  # nothing is cut away
    store.mkdir()
    programs.mkdir()
    (programs / "drain").touch(0o755)
    found = node_orders(config, programs)
    assert found.said == f"no socket {tmp_path}/node.sock" and "ReadWritePaths" not in found.cost
    (tmp_path / "node.sock").touch()  # no socket either
    assert node_orders(config, programs).said == f"no socket {tmp_path}/node.sock"
    (tmp_path / "node.sock").unlink()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{tmp_path}/node.sock")
        assert node_orders(config, programs).state == HAVE
        (programs / "drain").chmod(0o644)
        assert node_orders(config, programs).said == f"no program {programs}/drain"
        store.rmdir()
        store.touch()
        assert node_orders(config, programs).said.startswith("no folder evidence.store")


@pytest.mark.parametrize("rung", ["reboot_node", "reset_gpu"])
def test_what_the_unit_does_by_itself_needs_its_tool_alone(
    rung: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "tool"
    monkeypatch.setitem(doctor_node.BY_ITSELF, rung, str(tool))
    config = load(configured(tmp_path, rung, store=str(tmp_path))).config
    assert f"{tmp_path}/node.d/" in node_orders(config, tmp_path / "node.d").cost
    tool.touch(0o755)
    assert f"{tmp_path}/node.d/" not in node_orders(config, tmp_path / "node.d").cost


def test_nothing_allowed_needs_nothing(tmp_path: Path) -> None:
    for allow in ((), ("remove_lock",)):
        assert orders(str(configured(tmp_path, *allow))).state == HAVE


def test_a_configuration_that_is_refused_says_what_to_change(tmp_path: Path) -> None:
    found = orders(str(configured(tmp_path, "reboot_node")))
    assert found.state == LACK and "evidence.store is empty" in found.cost
    assert orders(str(tmp_path / "none.toml")).state == LACK


def test_a_folder_that_does_not_answer_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "bin/test"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\nexec sleep 600\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(doctor_node, "FOLDER_S", 0.05)
    (found,) = doctor_node._store(str(tmp_path))
    assert found.what == "evidence.store does not answer"


def test_a_reboot_of_a_node_alone_needs_leave_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = configured(tmp_path, "reboot_node", store=str(tmp_path))
    file.write_text(file.read_text().replace("alone = true", "alone = false"))
    found = node_orders(load(file).config, tmp_path / "node.d")
    assert found.said.startswith("actions.alone is not set")
    assert main(["config", "check", "--config", str(file)]) == 0
    assert "reboot_node: this node sees no fleet" in capsys.readouterr().out
