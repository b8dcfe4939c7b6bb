"""docs/cluster.md, followed: its own commands and files on three machines, with other addresses.

What no namespace has is replaced: systemd by the commands that its units would start, a password
that is typed by one that is piped, /etc and /var by folders of the node.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from waiting import wait_for

from .harness import Node, Nodes
from .worlds import CLI, ROOT

PAGE = (ROOT / "docs/cluster.md").read_text()
BLOCKS = ["\n".join(line[4:] for line in block.splitlines())
          for block in re.findall(r"(?:^(?:    .*)?\n)+", PAGE, re.MULTILINE) if "    " in block]
LOOPING = str(Path(__file__).with_name("looping.py"))
PASSWORD = "a-password-of-this-test"


def block(words: str) -> str:
    """The one block of the page that has these words."""
    (found,) = [one.strip("\n") for one in BLOCKS if words in one]
    return found


class Reader:
    """Who follows the page on three machines, in another network and below other folders."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self.members: list[subprocess.Popen[bytes]] = []

    def here(self, node: Node, text: str) -> str:
        for number in range(3):
            text = text.replace(f"10.0.0.{number + 1}", self.nodes[number].address)
        return (text.replace("/etc/", f"{node.home}/etc/").replace("/backup", f"{node.home}/backup")
                .replace("/var/lib/etcd/default", f"{node.home}/etcd"))

    def environ(self, node: Node, more: dict[str, str] | None = None) -> dict[str, str]:
        return {"HOLDFAST_RUNTIME_DIR": "", "PYTHONPATH": str(ROOT / ".types"),
                "HOME": str(node.home), "PATH": f"{node.home}/bin:{os.environ['PATH']}",
                **(more or {})}

    def types(self, node: Node, text: str, more: dict[str, str] | None = None) -> str:
        """What the shell says to these lines; each of them must go well."""
        done = subprocess.run(
            node.words(["sh", "-euc", self.here(node, text)]), cwd=node.home / "etc/etcd",
            env=node.environ(self.environ(node, more)), capture_output=True, text=True, timeout=120,
            input=f"{PASSWORD}\n", check=False)
        assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    # ------------------------------------------------------------- in the page's order

    def prepare(self) -> None:
        for node in self.nodes:
            for name in ("etc/etcd", "etc/holdfast", "backup", "bin", "sys/holdfast"):
                (node.home / name).mkdir(parents=True)
            holdfast = node.home / "bin/holdfast"
            # What is the node's own reads /etc/holdfast/agent.toml by itself.
            holdfast.write_text(
                f'#!/bin/sh\ncase "$1" in agent|config|store) set -- "$@" --config '
                f'{node.home}/etc/holdfast/agent.toml;; esac\nexec {" ".join(CLI)} "$@"\n')
            holdfast.chmod(0o755)
            node.run_folder = str(node.home / "sys")

    def certificates(self) -> None:
        authority, *member = re.split(r"\n(?=openssl req -newkey|printf)", block("CN=m1"))
        first = self.nodes[0]
        self.types(first, authority)
        for number, node in enumerate(self.nodes):
            for name in ("ca.pem", "ca.key"):
                if node is not first:
                    shutil.copy(first.home / "etc/etcd" / name, node.home / "etc/etcd" / name)
            own = "\n".join(member).replace("CN=m1", f"CN=m{number + 1}").replace(
                "10.0.0.1", f"10.0.0.{number + 1}")
            self.types(node, own)
            self.types(node, block("-subj /O=holdfast"))

    def etcd(self) -> None:
        text = re.search(r"<<'END'\n(.*?)\nEND", block("ETCD_NAME"), re.DOTALL)
        assert text
        for number, node in enumerate(self.nodes):
            lines = [line if line.startswith("ETCD_INITIAL_CLUSTER=")
                     else line.replace("10.0.0.1", f"10.0.0.{number + 1}")
                     for line in text[1].replace("ETCD_NAME=m1", f"ETCD_NAME=m{number + 1}")
                     .splitlines()]
            pairs = dict(self.here(node, line).split("=", 1) for line in lines)
            self.members.append(node.start(["etcd"], pairs, output="etcd.out"))
        wait_for(lambda: all("ready to serve" in node.said("etcd.out") for node in self.nodes),
                 60.0, lambda: self.nodes[0].said("etcd.out"))

    def users(self) -> str:
        """The lines that say to whom etcdctl talks."""
        lines = block("etcdctl user add root")
        exports, _, commands = lines.partition("\netcdctl")
        typed = re.sub(r"(user add \w+)", r"\1 --interactive=false", "etcdctl" + commands)
        for line in typed.splitlines():
            self.types(self.nodes[0], f"{exports}\n{line}")
        return exports

    def agents(self) -> None:
        settings, commands = block("[store]"), block("holdfast config check").splitlines()
        for node in self.nodes:
            etc = node.home / "etc/holdfast"
            (etc / "agent.toml").write_text(
                f'[agent]\nnode = "{node.name}"\nlisten = ""\n[checks]\ngate = []\n'
                + self.here(node, settings))
            for name, source in (("etcd-ca.pem", "ca.pem"), ("etcd.pem", "etcd.pem"),
                                 ("etcd.key", "etcd.key")):
                shutil.copy(node.home / "etc/etcd" / source, etc / name)
            (etc / "etcd.password").write_text(PASSWORD + "\n")
            for name in ("etcd.key", "etcd.password"):
                (etc / name).chmod(0o600)
            check, show, start = (line.partition("#")[0].strip() for line in commands)
            self.types(node, check)
            assert start == "systemctl restart holdfast"
            node.start(["holdfast", "agent"], self.environ(node), output="agent.out")
            wait_for((node.home / "sys/holdfast/api.sock").exists,
                     what=lambda node=node: node.said("agent.out"))
            assert "3" in self.types(node, show)


def test_three_bare_machines_become_a_cluster_by_the_page() -> None:
    for tool in ("etcd", "etcdctl", "openssl"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is missing (Debian packages etcd-server, etcd-client, openssl)")
    with Nodes(3) as nodes:
        reader = Reader(nodes)
        reader.prepare()
        reader.certificates()
        reader.etcd()
        exports = reader.users()
        reader.agents()

        words = block("holdfast run --nnodes 3").replace(
            "--nproc-per-node 8", "--nproc-per-node 1 --preload none").replace(
            "train.py", f"{LOOPING} {nodes.home}")
        runs = [node.start(["sh", "-c", words], reader.environ(node), output="run.out")
                for node in nodes]
        wait_for(lambda: len(list(nodes.home.glob("[012].json"))) == 3, 120.0,
                 lambda: "".join(node.said("run.out") + node.said("agent.out") for node in nodes))

        as_root = f"{exports}\nexport ETCDCTL_USER=root:{PASSWORD}\n"
        reader.types(nodes[1], as_root + block("snapshot save"))
        assert list((nodes[1].home / "backup").iterdir())
        (nodes.home / "end").write_text("")
        codes = [run.wait(60) for run in runs]
        assert codes == [0, 0, 0], "".join(node.said("run.out") for node in nodes)
