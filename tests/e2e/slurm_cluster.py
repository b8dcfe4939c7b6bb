"""A real Slurm of four nodes on one host: munged, slurmctld and a slurmd a node, ended by id.

Owns the daemons and their files, below one folder, on free ports of loopback.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

from ports import free_ports
from waiting import wait_for

NODES = tuple(f"node{number}" for number in range(4))
NEEDED = (("slurmctld", "slurmctld"), ("slurmd", "slurmd"), ("sbatch", "slurm-client"),
          ("munged", "munge"))
SBIN = "/usr/sbin:/usr/bin:/sbin:/bin"
FIELD = re.compile(r"(\w+)=(.*?)(?= \w+=|$)")


def missing() -> str:
    """What of Slurm is not installed here, as a reason to skip; "" for nothing."""
    if os.geteuid() != 0:
        return "slurmd wants root"
    for command, package in NEEDED:
        if shutil.which(command, path=SBIN) is None:
            return f"{command} is missing (Debian package {package})"
    return ""


class Cluster:
    """`settings`: further lines of slurm.conf."""

    def __init__(self, folder: Path, settings: Mapping[str, object]) -> None:
        self._folder = folder
        self._settings = settings
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._munge = folder / "munge.socket"
        self.environ = {"PATH": SBIN, "SLURM_CONF": str(folder / "slurm.conf")}

    def start(self) -> None:
        folder = self._folder
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        self._daemon("munged", "--foreground", "--force", f"--socket={self._munge}",
                     f"--key-file={key}", f"--pid-file={folder}/munged.pid",
                     f"--log-file={folder}/munged.log", f"--seed-file={folder}/munged.seed")
        wait_for(self._munge.exists)
        (folder / "slurm.conf").write_text(self._configuration())
        (folder / "cgroup.conf").write_text("")
        self._daemon("slurmctld", "-D")
        for node in NODES:
            (folder / f"spool.{node}").mkdir()
            self._daemon("slurmd", "-D", "-N", node)
        wait_for(self.idle, what=self.logs)

    def _configuration(self) -> str:
        ports = free_ports(1 + len(NODES))
        host, folder = socket.gethostname().split(".")[0], self._folder
        settings: dict[str, object] = {
            "ClusterName": "test", "SlurmctldHost": f"{host}(127.0.0.1)", "SlurmUser": "root",
            "SlurmctldPort": ports[0], "AuthType": "auth/munge",
            "AuthInfo": f"socket={self._munge}", "CredType": "cred/munge",
            "StateSaveLocation": folder / "state", "SlurmdSpoolDir": f"{folder}/spool.%n",
            "SlurmctldPidFile": folder / "slurmctld.pid",
            "SlurmdPidFile": f"{folder}/slurmd.%n.pid",
            "SlurmctldLogFile": folder / "slurmctld.log",
            "SlurmdLogFile": f"{folder}/slurmd.%n.log",
            "ProctrackType": "proctrack/pgid", "TaskPlugin": "task/none", "SwitchType":
            "switch/none", "ReturnToService": 0, "SlurmdTimeout": 12, **self._settings,
        }
        (folder / "state").mkdir()
        lines = [f"{name}={value}" for name, value in settings.items()]
        lines += [f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=1"
                  for node, port in zip(NODES, ports[1:])]
        lines += [f"PartitionName=all Nodes={','.join(NODES)} Default=YES State=UP "
                  "OverSubscribe=NO"]
        return "\n".join(lines) + "\n"

    def _daemon(self, *command: str) -> None:
        log = open(self._folder / "daemons.log", "ab")
        self._daemons.append(subprocess.Popen(
            [shutil.which(command[0], path=SBIN) or command[0], *command[1:]],
            env=self.environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True))
        log.close()

    def say(self, *command: str) -> str:
        """One of Slurm's commands."""
        done = subprocess.run(command, env=self.environ, cwd=self._folder, capture_output=True,
                              text=True, timeout=30, check=False)
        return done.stdout + done.stderr

    def nodes(self) -> dict[str, dict[str, str]]:
        """What `scontrol` says of each node."""
        rows = [dict(FIELD.findall(line)) for line in
                self.say("scontrol", "-o", "show", "node").splitlines()]
        return {one["NodeName"]: one for one in rows if "NodeName" in one}

    def idle(self) -> bool:
        """Whether every node waits for jobs, and answers."""
        return [one["State"] for one in self.nodes().values()] == ["IDLE"] * len(NODES)

    def drained(self) -> dict[str, str]:
        """Node -> reason."""
        return {name: one.get("Reason", "") for name, one in self.nodes().items()
                if "DRAIN" in one["State"]}

    def logs(self) -> str:
        return "\n".join(f"--- {one.name}\n{one.read_text(errors='replace')[-3000:]}"
                         for one in sorted(self._folder.glob("*.log")))

    def stop(self) -> None:
        """Ends the daemons, and what they started: every process that has our slurm.conf."""
        for one in self._daemons:
            one.kill()
            one.wait()
        mine = f"SLURM_CONF={self._folder}/".encode()
        for file in Path("/proc").glob("[0-9]*/environ"):
            try:
                if mine in file.read_bytes():
                    os.kill(int(file.parent.name), signal.SIGKILL)
            except OSError:
                continue  # it has ended
