"""Where collectors read: each place is a setting, so that a recorded tree can stand in for it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from holdfast.agent.config.load import load
from holdfast.agent.telemetry.collectors import Runner
from holdfast.collectors.contract import Roots

ROOT = Path(__file__).resolve().parents[3]


def test_where_collectors_read_is_a_setting():
    """A place in the code itself would be this machine's, whatever tree a test recorded."""
    own = {"disk.py": {"/run/", "/sys/", "/proc/"},  # mounts that are left out
           "nvme_smart.py": {"/dev/"},  # an argument of a program that is a setting
           "contract.py": {"/proc", "/sys", "/dev/kmsg", "/dev/shm",
                        "/run/systemd/system"}}
    place = re.compile(r"/(dev|proc|run|sys)(/\S*)?")
    for file in sorted((ROOT / "collectors").glob("*.py")):
        nodes = list(ast.walk(ast.parse(file.read_text())))
        behind = {id(part) for node in nodes if isinstance(node, ast.JoinedStr)
                  for part in node.values[1:]}  # of a root, in an f-string
        found = {node.value for node in nodes
                 if isinstance(node, ast.Constant) and isinstance(node.value, str)
                 and id(node) not in behind and place.fullmatch(node.value)}
        assert found == own.get(file.name, set()), file.name


def test_every_root_of_the_settings_reaches_the_collectors():
    wanted = Roots(*(f"/{name}" for name in Roots._fields))._replace(
        ec2="127.0.0.1:9", dns_names=("a",), job_caches=())
    names = {name: {"ec2": "ec2_metadata"}.get(name, name) for name in Roots._fields
             if name != "job_caches"}  # which jobs say themselves
    values = {f"collectors.{names[name]}": (value, "test")
              for name, value in wanted._asdict().items() if name in names}
    runner = Runner(load(None, values).config, lambda part, error: None)
    assert runner._roots == wanted
