"""Real etcd servers on loopback for tests: started, killed, frozen, and ended with the test.

Owns the processes of one small cluster and its ports.  Timers are a fiftieth of etcd's own, so that
a lost leader costs a test fractions of a second.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from ports import free_ports
from waiting import wait_for

HEARTBEAT_MS, ELECTION_MS = "20", "200"


class Member:
    """One server of the cluster, its data and its log."""

    def __init__(
        self, directory: Path, name: str, client: int, peer: int, scheme: str = "http"
    ) -> None:
        self.directory, self.name, self.client, self.peer = directory, name, client, peer
        self.scheme = scheme
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.client}"

    def start(self, members: list[Member], options: tuple[str, ...]) -> None:
        own, peer = f"{self.scheme}://{self.address}", f"http://127.0.0.1:{self.peer}"
        cluster = ",".join(f"{one.name}=http://127.0.0.1:{one.peer}" for one in members)
        command = [
            "etcd", "--name", self.name, "--data-dir", str(self.directory / self.name),
            "--listen-client-urls", own, "--advertise-client-urls", own,
            "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
            "--initial-cluster", cluster, "--initial-cluster-token", self.directory.name,
            "--heartbeat-interval", HEARTBEAT_MS, "--election-timeout", ELECTION_MS, *options]
        environ = {key: value for key, value in os.environ.items() if not key.startswith("ETCD")}
        with open(self.directory / f"{self.name}.log", "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environ)

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def ask(self, path: str, body: dict | None = None) -> dict:
        """The gateway's answer; {} where there is none."""
        data = json.dumps(body or {}).encode()
        try:
            with urllib.request.urlopen(f"http://{self.address}{path}", data, 1.0) as answer:
                return json.load(answer)
        except (OSError, urllib.error.URLError, ValueError):
            return {}


class Etcd:
    """A cluster.  `url` is what store.url takes."""

    def __init__(
        self, directory: Path, count: int = 3, options: tuple[str, ...] = (), scheme: str = "http"
    ) -> None:
        ports = free_ports(2 * count)
        self.members = [
            Member(directory, f"m{index}", ports[2 * index], ports[2 * index + 1], scheme)
            for index in range(count)]
        self.options, self.directory = options, directory

    @property
    def url(self) -> str:
        return "etcd://" + ",".join(one.address for one in self.members)

    def start(self, *members: Member) -> None:
        for member in members or self.members:
            member.start(self.members, self.options)

    def wait(self) -> None:
        """Until every living member has a leader and answers."""
        wait_for(lambda: all(one.ask("/v3/maintenance/status").get("leader")
                             for one in self.members if one.process is not None),
                 what=lambda: (self.directory / "m0.log").read_text()[-2000:])

    def leader(self) -> Member:
        def found() -> Member | None:
            for member in self.members:
                said = member.ask("/v3/maintenance/status") if member.process else {}
                if said and said.get("leader") == said["header"]["member_id"]:
                    return member
            return None

        return wait_for(found)

    def ctl(self, *arguments: str) -> str:
        command = ["etcdctl", "--endpoints", ",".join(m.address for m in self.members), *arguments]
        environ = os.environ | {"ETCDCTL_API": "3"}
        return subprocess.run(command, env=environ, check=True, capture_output=True, text=True,
                              timeout=20).stdout

    def end(self) -> None:
        for member in self.members:
            if member.process is not None:
                member.signal(signal.SIGCONT)
            member.kill()


@contextmanager
def etcd(
    directory: Path, count: int = 3, options: tuple[str, ...] = (), scheme: str = "http"
) -> Iterator[Etcd]:
    """A running cluster; everything of it is gone afterwards.  With https whoever uses it waits for
    its leader."""
    if shutil.which("etcd") is None:
        pytest.skip("etcd is not installed: apt-get install etcd-server")
    directory.mkdir(parents=True, exist_ok=True)
    cluster = Etcd(directory, count, options, scheme)
    try:
        cluster.start()
        if scheme == "http":
            cluster.wait()
        yield cluster
    finally:
        cluster.end()
