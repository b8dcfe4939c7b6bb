"""docs/cluster.md, followed: its own commands and files on three machines, with other addresses.

What no namespace has is replaced: systemd and apt by programs that do with etcd what Debian's
package and its unit do, scp by a copy, a password that is typed by one that is piped, the agent's
user by root, /etc and /var by folders of the node.
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


# As Debian's etcd-server 3.4: the unit's environment, then its file of defaults, as the user etcd;
# the package begins it at once, with no defaults, and whoever is told to begin again ends it first.
SYSTEMCTL = """#!/bin/sh
here={home}
case "$*" in
    "stop etcd") begins= ;;
    "enable etcd") exit 0 ;;
    "restart --no-block etcd" | "start etcd") begins=yes ;;
    *) echo "systemctl $*: nobody does that here" >&2; exit 1 ;;
esac
if [ -f $here/etcd.pid ]; then
    if [ "$*" = "start etcd" ]; then exit 0; fi
    kill "$(cat $here/etcd.pid)"
    while kill -0 "$(cat $here/etcd.pid)" 2> /dev/null; do sleep 0.05; done
    rm $here/etcd.pid
fi
[ -n "$begins" ] || exit 0
set -a
ETCD_NAME=$(hostname)
ETCD_DATA_DIR=$here/var/lib/etcd/default
if [ -f $here/etc/default/etcd ]; then . $here/etc/default/etcd; fi
set +a
setsid setpriv --reuid etcd --regid etcd --clear-groups etcd >> $here/etcd.out 2>&1 < /dev/null &
echo $! > $here/etcd.pid
"""
APT_GET = """#!/bin/sh
mkdir -p {home}/var/lib {home}/etc/default
install -d -o etcd -g etcd -m 700 {home}/var/lib/etcd
systemctl start etcd
until grep -q "ready to serve" {home}/etcd.out; do sleep 0.05; done
"""
SCP = """#!/bin/sh
# FILE... ADDRESS:FOLDER
for last; do :; done
case "$last" in
{cases}
esac
while [ $# -gt 1 ]; do cp "$1" "$to"; shift; done
"""


class Reader:
    """Who follows the page on three machines, in another network and below other folders."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes

    def here(self, node: Node, text: str) -> str:
        for number in range(3):
            text = text.replace(f"10.0.0.{number + 1}", self.nodes[number].address)
        text = re.sub(r"(?<![\w.])(/etc/|/var/lib/etcd)", rf"{node.home}\1", text)
        return text.replace("/backup", f"{node.home}/backup").replace(
            "-o holdfast -g holdfast ", "")

    def environ(self, node: Node, more: dict[str, str] | None = None) -> dict[str, str]:
        return {"HOLDFAST_RUNTIME_DIR": "", "PYTHONPATH": str(ROOT / ".types"),
                "HOME": str(node.home), "PATH": f"{node.home}/bin:{os.environ['PATH']}",
                **(more or {})}

    def types(self, node: Node, text: str, more: dict[str, str] | None = None) -> str:
        """What the shell says to these lines; each of them must go well."""
        done = subprocess.run(
            node.words(["sh", "-euc", self.here(node, text)]), cwd=node.home,
            env=node.environ(self.environ(node, more)), capture_output=True, text=True, timeout=120,
            input=f"{PASSWORD}\n", check=False)
        assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def types_on_each(self, text: str) -> None:
        """With the member's own name and address, but in the line that is of all members."""
        for number, node in enumerate(self.nodes):
            self.types(node, "\n".join(
                line if line.startswith("ETCD_INITIAL_CLUSTER=") else re.sub(
                    r"\bm1\b", f"m{number + 1}", line).replace("10.0.0.1", f"10.0.0.{number + 1}")
                for line in text.splitlines()))

    # ------------------------------------------------------------- in the page's order

    def prepare(self) -> None:
        # The members' own user gets at their folders below the machine's temporary one.
        self.nodes.home.chmod(0o711)
        cases = "\n".join(
            f"    {node.address}:*) to={node.home}/${{last#*{node.home.parent}/n?/}};;"
            for node in self.nodes)
        for node in self.nodes:
            for name in ("etc/holdfast", "backup", "bin", "sys/holdfast"):
                (node.home / name).mkdir(parents=True)
            holdfast = node.home / "bin/holdfast"
            # What is the node's own reads /etc/holdfast/agent.toml by itself.
            holdfast.write_text(
                f'#!/bin/sh\ncase "$1" in agent|config|store) set -- "$@" --config '
                f'{node.home}/etc/holdfast/agent.toml;; esac\nexec {" ".join(CLI)} "$@"\n')
            for name, text in (("systemctl", SYSTEMCTL), ("apt-get", APT_GET), ("scp", SCP)):
                (node.home / "bin" / name).write_text(
                    text.replace("{home}", str(node.home)).replace("{cases}", cases))
            for program in (node.home / "bin").iterdir():
                program.chmod(0o755)
            node.run_folder = str(node.home / "sys")

    def certificates(self) -> None:
        self.types(self.nodes[0], block("-subj /CN=holdfast-etcd"))
        self.types_on_each(block("-subj /CN=m1"))
        self.types(self.nodes[0], block("-subj /O=holdfast"))

    def etcd(self) -> str:
        """The lines that say to whom etcdctl talks."""
        self.types_on_each(block("ETCD_NAME"))
        wait_for(lambda: all("ready to serve" in node.said("etcd.out").partition(
            "m1=https")[2] for node in self.nodes), 60.0, lambda: self.nodes[0].said("etcd.out"))
        exports, _, health = block("etcdctl endpoint health").rpartition("\n")
        said = self.types(self.nodes[0], f"{exports}\n{health}")
        assert said.count("is healthy") == 3, said
        return exports

    def users(self, exports: str) -> None:
        typed = re.sub(r"(user add \w+)", r"\1 --interactive=false", block("etcdctl user add root"))
        for line in typed.splitlines():
            self.types(self.nodes[0], f"{exports}\n{line}")

    def agents(self) -> None:
        settings, commands = block("[store]"), block("holdfast config check").splitlines()
        for node in self.nodes:
            etc = node.home / "etc/holdfast"
            (etc / "agent.toml").write_text(
                f'[agent]\nnode = "{node.name}"\nlisten = ""\n[checks]\ngate = []\n'
                + self.here(node, settings))
            for name in ("ca.pem", "agent.pem", "agent.key"):
                if node is not self.nodes[0]:
                    shutil.copy(self.nodes[0].home / "etc/etcd" / name, node.home / "etc/etcd")
            self.types(node, f"cd /etc/etcd\n{block('install -o holdfast')}")
            assert (etc / "etcd.password").read_text() == PASSWORD + "\n"
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
        reader.types_on_each(block("apt-get install -y etcd-server"))
        reader.certificates()
        exports = reader.etcd()
        reader.users(exports)
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
