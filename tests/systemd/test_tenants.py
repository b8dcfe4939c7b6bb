"""Two users of one node: whatever one's job does, the other's run and the node's health do not
change.  The agent is the package's own, under its unit, and believes nobody's word."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from packages import SYSTEM_PYTHON, Made

sys.path.insert(0, str(Path(__file__).parent))

from packaged_systemd import JOB, READY_S, PackagedSystemd

LOGS_LEAST = 50e6  # bytes a second; a busy machine of two cores wrote twenty times that
AGENT_MAX_BYTES = 96 << 20  # its promise is 64 MB for itself
# What a user who means harm can do without a right that others have not.
HOSTILE = r'''
import json, os, random, re, subprocess, sys, syslog, time

XID = "NVRM: Xid (PCI:0000:4e:00): 79, pid=1, name=x, GPU has fallen off the bus."
if os.environ["RANK"] == "0":
    for line in (XID, "<script>alert(1)</script>", "\x1b[2J\x1b]0;owned\x07", "kernel: " + XID,
                 "mce: [Hardware Error]: Machine check events logged", "\0\xff" * 100):
        print(line, flush=True)
        print(line, file=sys.stderr, flush=True)
        syslog.openlog("kernel", 0, syslog.LOG_KERN)
        syslog.syslog(syslog.LOG_EMERG, line.replace("\0", ""))
    subprocess.run(["sh", "-c", "exec -a 'NVRM: Xid (PCI:0000:4e:00): 79' sleep 0.1"])
    # Its page: the memory that the agent reads, filled with junk by the process whose it is.
    pages = [line.split()[0] for line in open("/proc/self/maps")
             if "memfd:" in line and " rw-s" in line]
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        until_s = time.monotonic() + 3.0
        while pages and time.monotonic() < until_s:
            for one in pages:
                begin, end = (int(part, 16) for part in one.split("-"))
                memory.seek(begin)
                memory.write(os.urandom(end - begin))
            time.sleep(0.01)
    open("/shared/junk", "w").write(str(len(pages)))
else:
    block = (XID + "\n").encode() * 5000
    written, begin_s = 0, time.monotonic()
    while time.monotonic() - begin_s < 3.0:
        written += os.write(1, block)
    open("/shared/flood", "w").write(str(written / (time.monotonic() - begin_s)))
while not os.path.exists("/shared/enough"):
    time.sleep(0.05)
'''
# As that user, beside its job: everything that is not its own to ask.
CALLS = r'''
import http.client, json, socket, subprocess, sys, threading

class Door(http.client.HTTPConnection):
    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect("/run/holdfast/api.sock")

def ask(method, route, body=None):
    door = Door("localhost", timeout=20)
    door.request(method, route, json.dumps(body) if body is not None else None)
    answer = door.getresponse()
    return answer.status, answer.read().decode()

body = {"reason": "<script>mine now</script>", "rank": 0, "fault": "kill"}
verbs = ("restart", "pause", "resume", "drain", "inject", "release", "exclude", "check")
asked = [ask("POST", f"/api/v1/{what}/{verb}", body)[0] for verb in verbs
         for what in ("runs/long", "nodes/holdfast-test")]
asked.append(ask("POST", "/api/v1/alerts", {"alerts": [
    {"status": "firing", "labels": {"run": "long", "holdfast_runbook": "rank_hung"},
     "fingerprint": "f", "startsAt": "2026-01-01T00:00:00Z"}]})[0])
status = json.loads(ask("GET", "/api/v1/status")[1])  # before its budget of requests is spent
flood = set()

def ask_on():  # faster than one connection after the other, wherever the machine is slow
    for _ in range(2000):
        if 429 in flood:
            return
        flood.add(ask("GET", "/api/v1/ledger")[0])

threads = [threading.Thread(target=ask_on) for _ in range(8)]
for one in threads:
    one.start()
for one in threads:
    one.join()
print(json.dumps({
    "asked": asked, "flood": sorted(flood), "status": status,
    "files": [name for name in ("/etc/holdfast/tokens", "/var/lib/holdfast/journal.db")
              if subprocess.run(["cat", name], capture_output=True).returncode == 0]}))
'''


def test_a_hostile_user_changes_nothing_for_another(
    machine: PackagedSystemd, packages: Made
) -> None:
    own = machine
    own.install(packages.debs[0])
    for name, text in (("job.py", JOB), ("hostile.py", HOSTILE), ("calls.py", CALLS)):
        (own.shared / name).write_text(text)
    for user in ("alice", "mallory"):
        own.must("useradd", "--create-home", user)
    own.must("systemctl", "start", "holdfast.service")
    own.wait(own.answers, READY_S, "the agent answers")

    def start(user: str, run: str, script: str) -> None:
        own.must("systemd-run", f"--unit={run}", f"--uid={user}", f"--setenv=HOME=/home/{user}",
                 "/usr/bin/holdfast", "run", "--run", run, "--python", SYSTEM_PYTHON,
                 "--nproc-per-node", "2", f"/shared/{script}")

    start("alice", "long", "job.py")
    own.wait(lambda: own.watched() and len(own.ranks()[0]) == 2, READY_S, "alice's run is watched")
    pids, agent = own.ranks()[0], own.agent()
    start("mallory", "hostile", "hostile.py")
    own.wait(lambda: (own.shared / "flood").exists() and (own.shared / "junk").exists(), READY_S,
             f"the hostile job has done its worst: {own.inside('journalctl', '-u', 'hostile')}")
    assert int((own.shared / "junk").read_text()) >= 1, "it found no page to fill"
    speed = float((own.shared / "flood").read_text())
    calls = own.must("setpriv", "--reuid=mallory", "--regid=mallory", "--init-groups",
                     SYSTEM_PYTHON, "/shared/calls.py")
    told = json.loads(calls)

    # A launcher of mallory's that says it is alice's run.
    taken = own.inside("setpriv", "--reuid=mallory", "--regid=mallory", "--init-groups", "env",
                       "HOME=/home/mallory", "/usr/bin/holdfast", "run", "--run", "long",
                       "--python", SYSTEM_PYTHON, "--no-python", "true")
    assert "code 78" in taken and "run long belongs to alice" in taken, taken
    assert set(told["asked"]) <= {403, 404, 429}, told["asked"]
    assert told["flood"] == [200, 429], "a user's requests have no limit, or none is answered"
    assert told["files"] == []
    assert speed >= LOGS_LEAST, f"logs at {speed / 1e6:.1f} MB/s: no flood that anything withstood"
    (seen,) = [one for one in told["status"]["runs"] if one["run"] == "long"]
    assert seen["log_dir"] == "" and all(rank["where"] == "" for rank in seen["ranks"])

    rounds = own.ranks()[1]
    own.wait(lambda: own.ranks()[1] > rounds + 20, READY_S, "alice's ranks go on")
    assert own.ranks()[0] == pids and own.agent() == agent
    status = own.status()
    (alices,) = [one for one in status["runs"] if one["run"] == "long"]
    assert alices["paused"] in (False, None, ""), alices
    incidents = json.loads(own.must("holdfast", "incidents", "--all", "--json"))
    assert not [one for one in incidents if one["run"] not in ("hostile", "")], incidents
    # What concerns hardware, kernel or node: nothing of it was ever believed.
    of_node = [f"{one['fault']} {one['subject']}" for one in incidents if not one["run"]]
    hardware = ("gpu", "xid", "accelerator", "nic", "memory_error", "machine_check", "pci")
    assert not [one for one in of_node if any(word in one for word in hardware)], of_node
    metrics = own.must(SYSTEM_PYTHON, "-c", "import urllib.request as u; "
                       "print(u.urlopen('http://127.0.0.1:9855/metrics').read().decode())")
    events = [line for line in metrics.splitlines() if line.startswith("holdfast_events_total")]
    assert not [line for line in events if "xid" in line and not line.endswith(" 0")], events
    assert "<script>" not in metrics
    assert status["agent"]["rss_bytes"] < AGENT_MAX_BYTES, status["agent"]
    print(f"logs at {speed / 1e6:.0f} MB/s; the agent has {status['agent']['rss_bytes'] / 1e6:.0f} "
          f"MB; mallory's own incidents: {[one['fault'] for one in incidents]}")


SAID = "it started"
GPU = "/shared/sys/bus/pci/devices/0000:4e:00.0"  # on the bus, and no driver knows it
SICK = f"mkdir -p {GPU} && echo 0x10de > {GPU}/vendor && echo 0x030200 > {GPU}/class"


def run_as(own: PackagedSystemd, user: str, *flags: str) -> tuple[int, str]:
    """Exit status and output of a run of that user's."""
    words = ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups", "env",
             f"HOME=/home/{user}", "/usr/bin/holdfast", "run", "--python", SYSTEM_PYTHON,
             "--no-python", *flags, "/bin/echo", SAID]
    said, _, code = own.inside("sh", "-c", '"$@" 2>&1; echo "=$?"', "sh", *words).rpartition("=")
    return int(code), said


def test_a_sick_node_refuses_whoever_has_not_said_for_himself_that_he_starts_all_the_same(
    machine: PackagedSystemd, packages: Made
) -> None:
    own = machine
    own.install(packages.debs[0])
    for user in ("alice", "mallory"):
        own.must("useradd", "--create-home", user)
    config = '[collectors]\nsys = "/shared/sys"\n'
    own.must("sh", "-c", f"{SICK} && printf '{config}' > /etc/holdfast/agent.toml")
    own.must("systemctl", "start", "holdfast.service")
    own.wait(own.answers, READY_S, "the agent answers")

    code, said = run_as(own, "alice")
    assert code == 75 and SAID not in said, said
    for words in ("starts no run: check devices: ", "1 NVIDIA GPUs are on the PCI bus",
                  "--ignore-check devices --reason TEXT"):
        assert words in said, said
    code, said = run_as(own, "alice", "--run", "told", "--ignore-check", "devices", "--reason",
                        "it needs no GPU")
    assert code == 0 and SAID in said, said
    for user in ("mallory", "alice"):  # nobody's word holds for another's run, or for a later one
        code, said = run_as(own, user)
        assert code == 75 and SAID not in said and "check devices" in said, (user, said)

    uid = own.must("id", "-u", "alice").strip()
    incidents = json.loads(own.must("holdfast", "incidents", "--all", "--json"))
    (ignored,) = [one for one in incidents if one["fault"] == "check_ignored"]
    assert ignored["run"] == "told" and "check devices" in ignored["reason"]
    assert f"uid {uid} asked for that: it needs no GPU" in ignored["reason"], ignored
    own.must("systemctl", "stop", "holdfast.service")
    kept = own.must(SYSTEM_PYTHON, "-c", "import sqlite3; print(sqlite3.connect("
                    "'file:/var/lib/holdfast/journal.db?mode=ro', uri=True).execute("
                    f"\"SELECT uid FROM owners WHERE id = '{ignored['id']}'\").fetchall())")
    assert kept.strip() == f"[({uid},)]", kept  # and it outlives the agent

    own.must("sh", "-c", "rm -r /shared/sys/bus")
    own.must("systemctl", "start", "holdfast.service")
    own.wait(own.answers, READY_S, "the agent answers again")
    code, said = run_as(own, "mallory")
    assert code == 0 and SAID in said, said
