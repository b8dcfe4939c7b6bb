"""The Debian package under a real systemd: installed, upgraded and taken back with a run alive,
its daemon killed and frozen, the power cut, removed and purged; then the tarball, as root, on the
same machine, which has no route to anywhere."""

from __future__ import annotations

import sys
from pathlib import Path

from packages import SYSTEM_PYTHON, Made

sys.path.insert(0, str(Path(__file__).parent))

from packaged_systemd import READY_S, PackagedSystemd

DROP_INS = "/etc/systemd/system/holdfast.service.d"
WANTED = "/etc/systemd/system/multi-user.target.wants"
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


METRICS = """
import urllib.request
print(urllib.request.urlopen("http://127.0.0.1:9855/metrics", timeout=10).read().decode())
"""
THEIRS = "#!/bin/sh\necho another\n"


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
    (own.shared / "ask.py").write_text(ASK)
    (own.shared / "test.conf").write_text(WATCHDOG)
    own.must("install", "-D", "/shared/test.conf", f"{DROP_INS}/test.conf")
    own.must("systemctl", "daemon-reload")
    own.must("systemctl", "enable", "--now", "holdfast.service")
    own.wait(own.answers, READY_S, "the agent answers")
    # The token is root's; the agent was handed its own copy.
    assert own.must(SYSTEM_PYTHON, "/shared/ask.py", "without") == "401\n"
    assert own.must(SYSTEM_PYTHON, "/shared/ask.py", "with") == "202\n"

    pids = own.start_job("/usr/bin/holdfast")
    for signal in ("KILL", "STOP"):  # dead; and alive, but past the watchdog
        agent = own.agent()
        own.must("kill", f"-{signal}", str(agent))
        own.goes_on(agent, pids)
    for deb, version in ((following, packages.next_version), (first, packages.version)):
        agent = own.agent()
        own.install(deb)
        assert own.must("holdfast", "--version").split()[1] == version
        own.goes_on(agent, pids)
    # A restart is none that the ranks or a person would notice: nothing was held against them.
    assert own.must("holdfast", "incidents", "--all", "--json").strip() == "[]"

    own.cut()
    own.boot()
    own.wait(own.answers, READY_S, "the agent is up by itself")
    own.must("rm", "/etc/holdfast/tokens")  # and it begins without any, too
    own.must("systemctl", "restart", "holdfast.service")
    own.wait(own.answers, READY_S, "the agent answers without tokens")
    assert "403" in own.inside(SYSTEM_PYTHON, "/shared/ask.py", "without")

    own.must("systemctl", "enable", "holdfast-accept@daemon")
    own.must("dpkg", "--remove", "holdfast")
    assert "accept" not in own.inside("ls", WANTED), "it would be started at each boot, in vain"
    assert not own.active() and "journal.db" in own.inside("ls", "/var/lib/holdfast")
    assert not (own.top / "upper/opt/holdfast").exists()
    own.must("rm", "-r", DROP_INS)
    own.must("dpkg", "--purge", "holdfast")
    left = [one for one in own.upper("holdfast") if one not in before]
    assert left == [], left
    assert "holdfast" not in own.inside("getent", "passwd")

    goes_through_the_tarballs_life(own, packages)
    left = [one for one in own.upper("holdfast", "hf-other") if one not in before]
    assert left == [], left


def goes_through_the_tarballs_life(own: PackagedSystemd, packages: Made) -> None:
    """Installed, upgraded and taken back with a run alive, moved, removed, purged."""
    assert own.inside("ip", "route") == ""
    for tarball in packages.tarballs:
        own.must("tar", "-xzf", f"/mnt/{tarball.name}", "-C", "/tmp")
    first, following = (f"/tmp/{one.name.removesuffix('.tar.gz')}/install.sh"
                        for one in packages.tarballs)
    (own.shared / "theirs").write_text(THEIRS)
    own.must("install", "/shared/theirs", "/usr/local/bin/holdfast")
    assert "cannot name /opt/a b" in own.inside(first, "--prefix", "/opt/a b")
    # A Python in a folder of root's alone: the agent's own user could not run it.
    own.must("sh", "-ec", f"umask 077; mkdir /var/own; ln -s {SYSTEM_PYTHON} /var/own/python3")
    assert "for every user" in own.inside(first, "--python", "/var/own/python3")
    own.must(first)
    assert own.must("cat", "/usr/local/bin/holdfast") == THEIRS  # a command of somebody else's
    own.must("rm", "/usr/local/bin/holdfast")
    assert own.must(first) == (
        f"installed holdfast {packages.version} in /opt/holdfast; start it with: "
        "systemctl enable --now holdfast\n")
    assert not own.active() and own.must("holdfast", "--version").split()[1] == packages.version
    assert own.must("stat", "-c", "%a %U", "/etc/holdfast/tokens") == "600 root\n"
    own.must("holdfast", "config", "check")
    own.must("systemctl", "enable", "--now", "holdfast.service", "holdfast-node.socket")
    own.wait(own.answers, READY_S, "the agent answers")
    assert own.must("systemctl", "show", "-P", "User", "holdfast.service") == "holdfast\n"
    assert own.must(SYSTEM_PYTHON, "/shared/ask.py", "without") == "401\n"
    assert own.must(SYSTEM_PYTHON, "/shared/ask.py", "with") == "202\n"
    (built,) = [one for one in own.must(SYSTEM_PYTHON, "-c", METRICS).splitlines()
                if one.startswith("holdfast_build_info{")]
    assert f'version="{packages.version}"' in built

    pids = own.start_job("/usr/local/bin/holdfast")
    for script, version in ((following, packages.next_version), (first, packages.version)):
        agent = own.agent()
        own.must(script)
        assert own.must("holdfast", "--version").split()[1] == version
        own.goes_on(agent, pids)
    agent = own.agent()
    own.must(first, "--prefix", "/opt/hf-other")  # moved: the units are those of the new place
    own.goes_on(agent, pids)
    agent = own.agent()
    own.must(first, "--uninstall")
    assert own.active() and own.agent() == agent and "No such" in own.inside("ls", "/opt/holdfast")
    assert "another installation" in own.inside(first, "--uninstall", "--purge")
    assert own.must("ls", "/etc/holdfast/tokens", "/usr/local/bin/holdfast")
    (own.shared / "enough").touch()
    own.wait(lambda: own.inside("systemctl", "is-active", "job") != "active\n", READY_S,
             "the run has ended")

    own.must("systemctl", "enable", "holdfast-accept@daemon")
    own.must(first, "--uninstall", "--prefix", "/opt/hf-other")
    assert "accept" not in own.inside("ls", WANTED)
    assert not own.active() and "journal.db" in own.must("ls", "/var/lib/holdfast")
    assert "No files found" in own.inside("systemctl", "cat", "holdfast.service")
    own.must(first, "--uninstall", "--purge", "--prefix", "/opt/hf-other")  # removed already
    assert "holdfast" not in own.inside("sh", "-c", "getent passwd; getent group; ls /run")
