"""docs/cluster.md, followed: its own commands, as they stand there, on three machines.

A machine has an /etc, a home of root, /run, /var/lib/etcd and /var/backups of its own, and the
page's addresses.  What no namespace has is replaced: systemd, apt and ssh by debian_tools.py, a
password that is typed by one that is piped.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from waiting import wait_for

from .harness import Node, Nodes
from .worlds import CLI, ROOT

PAGE = (ROOT / "docs/cluster.md").read_text()
BLOCKS = ["\n".join(line[4:] for line in block.splitlines())
          for block in re.findall(r"(?:^(?:    .*)?\n)+", PAGE, re.MULTILINE) if "    " in block]
LOOPING = str(Path(__file__).with_name("looping.py"))
TOOLS = str(Path(__file__).with_name("debian_tools.py"))
PASSWORD = "a-password-of-this-test"
OWN_FOLDERS = ("etc", "root", "var/lib/etcd", "var/backups")
ALL_HEALTHY = 3


def block(words: str) -> str:
    """The one block of the page that has these words."""
    (found,) = [one.strip("\n") for one in BLOCKS if words in one]
    return found


def needed() -> None:
    for tool in ("curl", "etcd", "etcdctl", "openssl"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is missing (Debian packages curl, etcd-client, etcd-server, "
                        "openssl)")
    try:
        pwd.getpwnam("etcd")
    except KeyError:
        pytest.skip("no user etcd (Debian package etcd-server)")
    if not Path("/lib/systemd/system/etcd.service").exists():
        pytest.skip("no unit of etcd (Debian package etcd-server)")


class Reader:
    """Who follows the page."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        for node in nodes:
            for name in (*OWN_FOLDERS[1:], "bin", "sys"):
                (node.home / name).mkdir(parents=True)
            self._bare(node.home)
            for tool in ("systemctl", "apt-get", "scp"):
                self._tool(node, tool, f"{sys.executable} {TOOLS} {nodes.home} {tool}")
            state = f"HOLDFAST_RUNTIME_DIR= HOLDFAST_STATE_DIR={node.home}/state"
            self._tool(node, "holdfast", f"env PYTHONPATH={ROOT}/.types {state} {' '.join(CLI)}")
            node.run_folder = str(node.home / "sys")

    def _bare(self, home: Path) -> None:
        """/etc with the users that the two packages make, and nothing that a reader has done."""
        etc = home / "etc"
        shutil.copytree("/etc", etc, symlinks=True)
        for name in ("etcd", "holdfast"):
            shutil.rmtree(etc / name, ignore_errors=True)
        (etc / "default/etcd").write_text("## etcd(1) daemon options\n")
        for name, line in (("passwd", "holdfast:x:990:990::/nonexistent:/usr/sbin/nologin"),
                           ("group", "holdfast:x:990:")):
            kept = [one for one in (etc / name).read_text().splitlines()
                    if not one.startswith("holdfast:")]
            (etc / name).write_text("\n".join([*kept, line, ""]))

    def _tool(self, node: Node, name: str, command: str) -> None:
        file = node.home / "bin" / name
        file.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        file.chmod(0o755)

    def words(self, node: Node, *command: str) -> list[str]:
        """A command that sees the machine's own folders; the mounts end with it."""
        mounts = []
        if (python := Path(sys.base_prefix)).is_relative_to("/root"):
            (node.home / "root" / python.relative_to("/root")).mkdir(parents=True, exist_ok=True)
            mounts += [f"mount --bind {python} {node.home}{python}"]
        mounts += [f"mount --rbind {node.home}/{name} /{name}" for name in OWN_FOLDERS]
        return ["sh", "-c", f'{"; ".join(["set -e", *mounts])}; cd /root; exec "$@"', "machine",
                *command]

    def environ(self, node: Node) -> dict[str, str]:
        return {"HOME": "/root", "PATH": f"{node.home}/bin:{os.environ['PATH']}"}

    def tries(self, node: Node, text: str) -> subprocess.CompletedProcess[str]:
        """What the shell says to these lines; it ends with the first that fails."""
        return subprocess.run(
            node.words(self.words(node, "sh", "-euc", text)), cwd="/",
            env=node.environ(self.environ(node)), capture_output=True, text=True, timeout=150,
            input=f"{PASSWORD}\n", check=False)

    def types(self, node: Node, text: str) -> str:
        done = self.tries(node, text)
        assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def on_each(self, text: str) -> None:
        """Typed on all machines at once, each with its name and address."""
        with ThreadPoolExecutor(len(self.nodes.all)) as hands:
            list(hands.map(lambda node: self.types(node, own(node, text)), self.nodes))

    # ------------------------------------------------------------- in the page's order

    def certificates(self) -> None:
        self.types(self.nodes[0], block("mkdir -m 700 ~/holdfast-ca"))
        self.types(self.nodes[0], "cd ~/holdfast-ca\n" + block("scp -r"))

    def etcd(self) -> str:
        """The lines that say to whom etcdctl talks."""
        self.on_each(block("ETCD_NAME"))
        self.on_each(block("systemctl restart etcd"))
        proof = block("etcdctl member list")
        said = self.types(self.nodes[0], proof)
        assert said.count("is healthy") == said.count(", started,") == ALL_HEALTHY, said
        said = self.types(self.nodes[0], block("leader_changes_seen_total"))
        assert re.fullmatch(r"etcd_server_leader_changes_seen_total [1-9]\s*", said), said
        return proof.partition("\netcdctl")[0]

    def users(self, exports: str) -> None:
        for line in block("etcdctl user add root").splitlines():
            typed = re.sub(r"(user add \w+)", r"\1 --interactive=false", line)
            self.types(self.nodes[0], f"{exports}\n{typed}")

    def agents(self) -> None:
        for node in self.nodes:
            self.types(node, block("/etc/holdfast/etcd.password\n"))
            (node.home / "etc/holdfast/agent.toml").write_text(
                f'[agent]\nnode = "{node.name}"\nlisten = ""\n[checks]\ngate = []\n'
                + block("[store]"))
            key = (node.home / "etc/holdfast/etcd.key").stat()
            assert (key.st_mode & 0o777, key.st_uid) == (0o600, 990)
            said = self.types(node, block("holdfast config check"))
            assert all(f"10.0.0.{number}:2379  3." in said for number in (1, 2, 3)), said


def own(node: Node, text: str) -> str:
    """The one line in which the machines differ."""
    number = node.number + 1
    return text.replace("name=m1 address=10.0.0.1", f"name=m{number} address=10.0.0.{number}")


@contextmanager
def machines(count: int) -> Iterator[Reader]:
    needed()
    nodes = Nodes(count)
    for node in nodes:
        node.address = f"10.0.0.{node.number + 1}"
    with nodes:
        yield Reader(nodes)


def test_three_bare_machines_become_a_cluster_by_the_page() -> None:
    with machines(3) as reader:
        nodes = reader.nodes
        reader.certificates()
        exports = reader.etcd()
        reader.users(exports)
        reader.agents()

        words = block("holdfast run --nnodes 3").replace(
            "--nproc-per-node 8", "--nproc-per-node 1 --preload none").replace(
            "train.py", f"{LOOPING} {nodes.home}")
        runs = [node.start(reader.words(node, "sh", "-c", words), reader.environ(node),
                           output="run.out") for node in nodes]
        wait_for(lambda: len(list(nodes.home.glob("[012].json"))) == 3, 120.0,
                 lambda: "".join(node.said("run.out") + node.said("sys/holdfast.out")
                                 for node in nodes))

        as_root = f"{exports}\nexport ETCDCTL_USER=root:{PASSWORD}\n"
        reader.types(nodes[1], as_root + block("snapshot save"))
        assert list((nodes[1].home / "var/backups").glob("etcd-*.db"))
        (nodes.home / "end").write_text("")
        codes = [run.wait(60) for run in runs]
        assert codes == [0, 0, 0], "".join(node.said("run.out") for node in nodes)


def test_without_one_of_its_steps_the_page_makes_no_cluster() -> None:
    """So that the machines of this test are as strict as Debian's."""
    with machines(3) as reader:
        reader.certificates()
        install, start = block("ETCD_NAME"), block("systemctl restart etcd")
        proof = block("etcdctl member list")
        kept = install.replace("systemctl stop etcd\nrm -rf /var/lib/etcd/default\n", "")
        assert kept != install
        node = reader.nodes[0]

        reader.types(node, kept)
        reader.types(node, "systemctl enable --now etcd")
        alone = reader.tries(node, proof)  # it runs on as it was, without TLS
        assert alone.returncode and "is healthy" not in alone.stdout
        reader.types(node, start)  # at once: nobody is waited for
        alone = reader.tries(node, proof)
        assert alone.stdout.count(", started,") == 1, alone.stdout

        reader.types(node, "systemctl stop etcd\nrm -rf /var/lib/etcd/default\n"
                           "chown root:root /etc/etcd/member.key")
        unreadable = reader.tries(node, start)
        assert unreadable.returncode and "permission denied" in unreadable.stderr

        other = reader.nodes[1]
        no_folder = install.replace("install -d -m 755 /etc/etcd\n", "")
        failed = reader.tries(other, own(other, no_folder))
        assert failed.returncode and "/etc/etcd/" in failed.stderr
