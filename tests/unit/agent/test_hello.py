"""What a launcher asks for in its first packet is what the core sees of the run."""

from __future__ import annotations

import json
import os

import msgspec
import pytest
from fakes import serve

from holdfast.agent.launchers import protocol
from holdfast.agent.launchers.run_session import RunSession
from holdfast.worker.launcher import levels, spec
from holdfast.worker.launcher.run_state import RunState


def hello(tmp_path, *argv):
    script = tmp_path / "train.py"
    script.write_text("")
    state = RunState(spec.parse("run", [*argv, str(script)], {}), str(tmp_path))
    packet = levels.hello_of(state, 0, {})
    packet.pop("t")
    return msgspec.convert(json.loads(json.dumps(packet)), protocol.Hello)


def test_what_a_run_asks_of_its_world_reaches_the_core(tmp_path):
    asked = hello(tmp_path, "--nnodes", "2:4", "--run", "r", "--nproc-per-node", "3",
                  "--unit", "2", "--allow-mixed", "--gang-limit", "90", "--node-rank", "3")
    view = RunSession(asked, 1, 0, 0.0).view("n", 1.0, {})
    assert (view.run, view.nproc, view.nnodes_min, view.nnodes_max) == ("r", 3, 2, 4)
    assert (view.unit, view.mixed, view.gang_limit_s) == (2, True, 90.0)
    assert view.node_rank == 3
    assert protocol.refusal(asked, many_nodes=True) == ""
    wrong = msgspec.structs.replace(asked, unit=5)
    assert "--unit 5 of 4 nodes" in protocol.refusal(wrong, many_nodes=True)


@pytest.mark.parametrize(("run", "says"), [
    ("", ("this node's agent has one for this node alone", "under [store]",
          "HOLDFAST_RUNTIME_DIR=FOLDER")),
    ("demo", ("name one of them with --rdzv-endpoint HOST:PORT", "HOLDFAST_CONFIG")),
])
def test_an_agent_without_a_store_of_all_nodes_says_what_would_give_the_run_one(
    agent, tmp_path, run, says
):
    """A node's own advised --rdzv-endpoint, which it does not read, where it was given too."""
    async def scenario(daemon, node, launch):
        launcher = launch(run="demo", nnodes=2, nnodes_min=2)
        launcher.hello()
        error = (await launcher.receive("error"))["error"]
        assert all(one in error for one in says), error
        launcher.close()

    serve(scenario, agent, tmp_path, private=bool(run), run=run)


def test_a_user_without_a_name_is_said_by_number(tmp_path, monkeypatch):
    """In many containers a job runs under any uid."""
    monkeypatch.setattr(os, "getuid", lambda: 3_999_999_999)
    assert hello(tmp_path, "--run", "r").user == "uid 3999999999"


def test_the_gpus_that_its_ranks_take_reach_the_core(tmp_path, monkeypatch):
    asked = []

    def taken(environ, nproc):
        asked.append(nproc)
        return ["0000:%02x:00.0" % number for number in range(90)]

    monkeypatch.setattr(levels.devices, "taken", taken)
    view = RunSession(hello(tmp_path, "--nproc-per-node", "3"), 1, 0, 0.0).view("n", 1.0, {})
    assert view.devices[:2] == ("0000:00:00.0", "0000:01:00.0") and len(view.devices) == 64
    assert asked == [3]
