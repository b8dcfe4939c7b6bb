"""Who reads: what a run said is for its owner, whatever way another user asks."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys

import msgspec
import pytest
from fakes import FakeLauncher, rank_level, until
from msgspec.structs import replace

from holdfast.agent.core.model import Incident, Verdict
from holdfast.agent.web import visibility

SECRET = "X-Amz-Security-Token=SECRET"
NOBODY = 65534
ASK = """
import encodings.idna, http.client, json, os, socket, sys
uid, folder, address = sys.argv[1:]
os.chdir(folder)  # which the other user may not reach by its path
os.setresuid(int(uid), int(uid), int(uid))
unix = http.client.HTTPConnection("localhost")
unix.sock = socket.socket(socket.AF_UNIX)
unix.sock.connect("api.sock")
said = []
for connection in (unix, http.client.HTTPConnection(address.removeprefix("http://"))):
    for route in ("status", "incidents?all=1", "incidents/demo/1"):
        connection.request("GET", f"/api/v1/{route}")
        answer = connection.getresponse()
        said.append([answer.status, json.loads(answer.read())])
print(json.dumps(said))
"""


async def as_user(uid: int, folder, address: str) -> list:
    """What this user is told over api.sock and over loopback: status, incidents, one incident."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-c", ASK, str(uid), str(folder), address,
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await child.communicate()
    assert child.returncode == 0
    return [answer for status, answer in json.loads(out) if status == 200]


def incident(run: str, opened_wall_s: float = 5.0) -> Incident:
    return Incident(
        id=f"{run}/1", fault="rank_failed", subject=f"run/{run}/rank/0", severity="fatal", run=run,
        generation=1, opened_wall_s=opened_wall_s, opened_boot_s=1.0, reason=SECRET,
        culprit="rank 0", evidence=(("log", SECRET),), timeline=((5.0, f"root: {SECRET}"),),
        would_have=SECRET,
    )


@pytest.mark.skipif(os.getuid() != 0, reason="only root can ask as another user")
def test_another_user_is_not_told_what_a_run_said(agent, tmp_path):
    async def scenario():
        async with agent() as (daemon, node):
            await until(lambda: daemon.launchers.address)
            launcher = FakeLauncher(tmp_path / "run" / "agent.sock", log_dir=f"/home/{SECRET}",
                                    checkpoint_dir=f"/home/{SECRET}")
            launcher.hello()
            ended = {"code": 1, "signal": 0, "error": SECRET}
            said = {"seen": [{"signature": "s", "role": "root", "culprit": "user", "rank": 0,
                              "text": SECRET, "wall_s": 1.0}], "problem": SECRET}
            launcher.levels(
                generation=1, state="running", shutdown=SECRET, compiling=SECRET, logs=said,
                ranks=[rank_level(0, os.getpid(), state="ended", ended=ended)],
                commits=[{"generation": 1, "step": 2, "path": f"/{SECRET}", "world": 2, "bad": "",
                          "verified": True}],
            )
            node.incidents = (incident("demo"),)
            node.extra = {
                "verdicts": (Verdict("log_root", "run/demo", "warn", 1.0, SECRET, run="demo",
                                     evidence=(("line", SECRET),)),),
                "reasons": (("demo", SECRET),),
            }
            daemon.wake("test")
            await until(lambda: daemon.state.snapshot.observed.runs
                        and daemon.state.snapshot.observed.runs[0].ranks
                        and daemon.state.snapshot.decision.verdicts)
            root, other = [await as_user(uid, tmp_path / "run", daemon.launchers.address)
                           for uid in (0, NOBODY)]
            launcher.close()
            return root, other

    root, other = asyncio.run(scenario())
    assert [SECRET in json.dumps(one) for one in root] == [True] * 6
    assert SECRET not in json.dumps(other) and len(other) == 6
    for answer in (other[0], other[3]):
        (run,) = answer["runs"]
        assert run["ranks"][0]["health"] == "fault"
        assert run["ranks"][0]["why"] == visibility.WITHHELD
        assert run["checkpoint"]["step"] == 2


def test_the_owner_is_told_also_when_the_run_is_over_and_its_name_another_users():
    told = [msgspec.to_builtins(replace(incident("job"), id=id)) for id in ("old", "new", "?")]
    owners = {"old": 1001, "new": 1002}
    mine, other, unknown, token = (
        visibility.reader(uid, role, {"job": 1002}.get, owners.get)
        for uid, role in ((1001, ""), (1002, ""), (None, ""), (None, "read"))
    )
    assert [who.may("job") for who in (mine, other, unknown, token)] == [False, True, False, True]
    assert all(who.may("") for who in (mine, other, unknown, token))
    seen = [[one["reason"] == SECRET for one in visibility.incidents(told, who)]
            for who in (mine, other, unknown, token)]
    assert seen == [[True, False, False], [False, True, False], [False] * 3, [True] * 3]


@pytest.mark.parametrize(("family", "host"), [
    (socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_whose_connection_it_is(family, host):
    try:
        server = socket.create_server((host, 0), family=family)
    except OSError as error:
        pytest.skip(f"{host}: {error.strerror}")
    with server:
        client = socket.create_connection(server.getsockname()[:2])
        served, _ = server.accept()
        with client, served:
            assert visibility.peer_uid(served) == os.getuid()
            client.shutdown(socket.SHUT_WR)
            assert served.recv(1) == b""
            assert visibility.peer_uid(served) is None  # no more than what is established counts
    with socket.socket(socket.AF_UNIX) as unconnected:
        assert visibility.peer_uid(unconnected) is None
