"""The Debian package under a real systemd: installed, upgraded and taken back with a run alive,
its daemon killed and frozen, the power cut, removed and purged."""

from __future__ import annotations

import sys
from pathlib import Path

from packages import SYSTEM_PYTHON, Made

sys.path.insert(0, str(Path(__file__).parent))

from packaged_systemd import JOB, READY_S, PackagedSystemd

DROP_INS = "/etc/systemd/system/holdfast.service.d"
WATCHDOG = "[Service]\nWatchdogSec=2\nStartLimitIntervalSec=0\n"
ASK = """
import json, sys, tomllib, urllib.request
token = ""
if sys.argv[1] == "with":
    (token,) = tomllib.load(open("/etc/holdfast/tokens", "rb"))
asked = urllib.request.Request(
    "http://127.0.0.1:9855/api/v1/nodes/holdfast-test/pause", b'{"reason": "a test"}',
    {"Authorization": "Bearer " + token} if token else {})
try:
    print(urllib.request.urlopen(asked, timeout=10).status)
except urllib.error.HTTPError as error:
    print(error.code)
"""


def test_a_run_lives_through_everything_that_is_done_to_the_agent(
    machine: PackagedSystemd, packages: Made
) -> None:
    """One machine, for each start takes seconds."""
    own = machine
    first, following = packages.debs
    before = own.upper("holdfast")
    own.install(first)
    assert not own.active() and own.must("holdfast", "--version").split()[1] == packages.version
    assert own.must("stat", "-c", "%a %U", "/etc/holdfast/tokens") == "600 root\n"
    own.must("holdfast", "config", "check")
    (own.shared / "job.py").write_text(JOB)
    (own.shared / "ask.py").write_text(ASK)
    (own.shared / "test.conf").write_text(WATCHDOG)
    own.must("install", "-D", "/shared/test.conf", f"{DROP_INS}/test.conf")
    own.must("systemctl", "daemon-reload")
    own.must("systemctl", "enable", "--now", "holdfast.service")
    own.wait(own.answers, READY_S, "the agent answers")
    # The token is root's; the agent was handed its own copy.
    assert own.must(SYSTEM_PYTHON, "/shared/ask.py", "without") == "401\n"
    assert own.must(SYSTEM_PYTHON, "/shared/ask.py", "with") == "202\n"

    own.must("systemd-run", "--unit=job", "--uid=nobody", "--setenv=HOME=/tmp", "/usr/bin/holdfast",
             "run", "--run", "long", "--python", SYSTEM_PYTHON, "--nproc-per-node", "2",
             "/shared/job.py")
    own.wait(lambda: own.watched() and len(own.ranks()[0]) == 2, READY_S, "the run is watched")
    pids = own.ranks()[0]

    def still_the_same(agent: int) -> None:
        """Another agent, the same ranks, which go on."""
        own.wait(lambda: own.active() and own.agent() not in (0, agent), READY_S, "another agent")
        own.wait(own.watched, READY_S, "the run is watched again")
        rounds = own.ranks()[1]
        own.wait(lambda: own.ranks()[1] > rounds, READY_S, "the ranks go on")
        assert own.ranks()[0] == pids

    for signal in ("KILL", "STOP"):  # dead; and alive, but past the watchdog
        agent = own.agent()
        own.must("kill", f"-{signal}", str(agent))
        still_the_same(agent)
    for deb, version in ((following, packages.next_version), (first, packages.version)):
        agent = own.agent()
        own.install(deb)
        assert own.must("holdfast", "--version").split()[1] == version
        still_the_same(agent)
    # A restart is none that the ranks or a person would notice: nothing was held against them.
    assert own.must("holdfast", "incidents", "--all", "--json").strip() == "[]"

    own.cut()
    own.boot()
    own.wait(own.answers, READY_S, "the agent is up by itself")
    own.must("rm", "/etc/holdfast/tokens")  # and it begins without any, too
    own.must("systemctl", "restart", "holdfast.service")
    own.wait(own.answers, READY_S, "the agent answers without tokens")
    assert "403" in own.inside(SYSTEM_PYTHON, "/shared/ask.py", "without")

    own.must("dpkg", "--remove", "holdfast")
    assert not own.active() and "journal.db" in own.inside("ls", "/var/lib/holdfast")
    assert not (own.top / "upper/opt/holdfast").exists()
    own.must("rm", "-r", DROP_INS)
    own.must("dpkg", "--purge", "holdfast")
    left = [one for one in own.upper("holdfast") if one not in before]
    assert left == [], left
    assert "holdfast" not in own.inside("getent", "passwd")
