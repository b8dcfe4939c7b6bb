"""A node's root unit for tests: processes as systemd starts them, and verbs that only note.

Nothing here can touch the machine, whatever is wrong in the code: every verb is a program of the
test's that notes its call, and systemd's own reboot and the driver's own reset are /bin/false, in
each child as well.
"""

from __future__ import annotations

import json
import socket
import sqlite3
import subprocess
import sys
import threading

import pytest

from holdfast.agent.actions import root_helper
from holdfast.agent.actions.root_helper import Place
from holdfast.agent.config.load import load
from holdfast.agent.config.runbooks import load_runbooks
from holdfast.agent.core.model import Effect, Incident, NodeOrder
from holdfast.agent.core.node import Node

SYSTEMDS_REBOOT = root_helper.REBOOT  # before the fixture of conftest.py takes it away
DRIVERS_RESET = root_helper.RESET
# The unit in a process of its own, as systemd starts it, with no way to the machine's reboot.
SAFE_UNIT = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("node_unit", {root_helper.__file__!r})
unit = importlib.util.module_from_spec(spec)
sys.modules["node_unit"] = unit
spec.loader.exec_module(unit)
assert unit.REBOOT == {SYSTEMDS_REBOOT!r}
assert unit.RESET == {DRIVERS_RESET!r}
unit.REBOOT = unit.RESET = ("/bin/false",)
sys.exit(unit.main(sys.argv[1:]))
"""
INCIDENT = Incident("i1", "gpu_fell_off_bus", "node/node-a/gpu/0000:4e:00", "fatal", "", 0, 1.0,
                    1.0, "XID 79", "GPU 3")
REBOOT = Effect("7/node/node-a/reboot_node/1", "reboot_node", "node/node-a", "XID 79", 30.0,
                NodeOrder("reboot", "node-a", "i1", "XID 79"), outlives_node=True,
                fault="gpu_fell_off_bus")
RESET = Effect("7/node/node-a/reset_gpu/1", "reset_gpu", "node/node-a", "XID 79", 80.0,
               NodeOrder("reset_gpu", "node-a", "i1", "XID 79", "0000:4e:00.0"),
               outlives_node=True, fault="gpu_needs_reset")


@pytest.fixture
def commands(tmp_path):
    """A folder with a program for each verb, which notes how it was called."""
    folder = tmp_path / "node.d"
    folder.mkdir(mode=0o755)
    for verb in root_helper.VERBS:
        program = folder / verb
        program.write_text(f'#!/bin/sh\necho "{verb} $*" >> {tmp_path}/called\n')
        program.chmod(0o755)
    return folder


@pytest.fixture
def place(tmp_path, commands):
    return Place(commands, tmp_path / "state", "node-a", "b1", 1000.0)


def order(**changed) -> bytes:
    fields = {"verb": "reboot", "id": "1/x/1", "node": "node-a", "boot_id": "b1", "wall_s": 1000.0,
              "fault": "gpu_fell_off_bus"} | changed
    return json.dumps(fields).encode() + b"\n"


def reset(device="0000:4e:00.0", **changed) -> bytes:
    return order(**{"verb": "reset_gpu", "device": device} | changed)


def called(tmp_path) -> list[str]:
    file = tmp_path / "called"
    return file.read_text().splitlines() if file.exists() else []


class Unit:
    """What systemd does with holdfast-node.socket: a process for each connection."""

    def __init__(self, tmp_path, answers: bool = True) -> None:
        self.path, self.state = tmp_path / "n.sock", tmp_path / "state"
        self.answers = answers
        self.intents: list[int] = []  # in the journal, each time somebody knocks
        self.held: list[socket.socket] = []
        self.command = [sys.executable, "-I", "-c", SAFE_UNIT, "--node", "node-a", "--commands",
                        str(tmp_path / "node.d"), "--state", str(tmp_path / "unit")]
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.bind(str(self.path))
        self.socket.listen(4)
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def _serve(self) -> None:
        while True:
            try:
                came, _ = self.socket.accept()
            except OSError:
                return
            with sqlite3.connect(self.state / "journal.db") as database:
                rows = database.execute("SELECT ok FROM intents WHERE kind IN "
                                        "('reboot_node', 'reset_gpu')")
                self.intents.append(len(rows.fetchall()))
            database.close()
            if self.answers:
                subprocess.run(self.command, stdin=came, stdout=came, stderr=subprocess.DEVNULL,
                               timeout=30, check=False)
                came.close()
            else:
                self.held.append(came)

    def close(self) -> None:
        self.socket.shutdown(socket.SHUT_RDWR)
        self.thread.join(10.0)
        for one in (self.socket, *self.held):
            one.close()


@pytest.fixture
def unit(tmp_path, commands):
    made = Unit(tmp_path)
    yield made
    made.close()


HEADER = "Num       RefCount Protocol Flags    Type St Inode Path\n"


def empty_proc(proc) -> None:
    """A /proc of no other agent, which hides nobody."""
    if not (proc / "net/unix").exists():
        for folder in ("net", "1"):
            (proc / folder).mkdir(parents=True, exist_ok=True)
        (proc / "net/unix").write_text(HEADER)
        (proc / "1/stat").write_text("1 (init) S 0 " + "0 " * 40)


def options(tmp_path, **more):
    empty_proc(tmp_path / "proc")
    return {"actions__socket": str(tmp_path / "n.sock"), "actions__allow": ("reboot_node",),
            "actions__alone": True,
            "evidence__store": str(tmp_path / "kept"),
            # The machine's own would show the agents of other tests as somebody's runs.
            "collectors__proc": str(tmp_path / "proc")} | more


def core(tmp_path, **more):
    """The real one, under these options."""
    told = options(tmp_path, **more)
    given = {key.replace("__", "."): (one, "test") for key, one in told.items()}
    return Node("node-a", load(None, given).config.core_settings(), load_runbooks())
