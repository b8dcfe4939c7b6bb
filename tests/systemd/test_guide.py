"""The guide of operations, followed command by command from the package's installation to a run
that an alert restarts, with Debian's own Alertmanager."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from packages import SYSTEM_PYTHON, Made

sys.path.insert(0, str(Path(__file__).parent))

from packaged_systemd import READY_S, PackagedSystemd

GUIDE = (Path(__file__).resolve().parents[2] / "docs/operations.md").read_text()
CONFIG, RUNBOOK = "/etc/holdfast/agent.toml", "/etc/holdfast/runbooks/fabric_storm.md"

ALERTMANAGER = "http://localhost:9093"


class Reader:
    """Goes through the guide from top to bottom, and does what it says."""

    def __init__(self, own: PackagedSystemd) -> None:
        self.own, self.rest = own, GUIDE

    def upto(self, heading: str) -> None:
        before, mark, self.rest = self.rest.partition(f"## {heading}\n")
        assert mark, f"the guide has no {heading!r} behind what was done"

    def block(self, start: str) -> str:
        """The next block that begins so, without its comments."""
        found = re.search(rf"^    {re.escape(start)}.*\n(?:    .*\n|\n(?=    ))*", self.rest, re.M)
        assert found, f"the guide has no {start!r} behind what was done"
        self.rest = self.rest[found.end():]
        lines = [re.sub(r"\s+# .*", "", line[4:]) for line in found[0].splitlines()]
        return "\n".join(lines).rstrip() + "\n"

    def run(self, start: str, run: str = "m5") -> list[str]:
        """Does the next block of commands that begins so; what each of them printed."""
        lines = self.block(start).replace("m5", run).splitlines()
        return [self.own.must("sh", "-ec", line) for line in lines if line]

    def write(self, path: str, text: str) -> None:
        """As a person with an editor does: behind what is there."""
        (self.own.shared / "text").write_text(text)
        self.own.must("sh", "-ec", f"mkdir -p $(dirname {path}); cat /shared/text >> {path}")

    def set(self, section: str, line: str) -> None:
        """The same, below a section that is there."""
        self.own.must("sed", "-i", f"s/^\\[{section}\\]$/&\\n{line}/", CONFIG)


def alerts(own: PackagedSystemd) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(
        own.inside("holdfast", "incidents", "--alerts", "--json"))
    return found


def reload(own: PackagedSystemd) -> None:
    """`systemctl reload` only asks for it."""
    def taken() -> int:
        return own.inside("journalctl", "-u", "holdfast", "-o", "cat").count("reloaded;")

    before = taken()
    own.must("systemctl", "reload", "holdfast")
    own.wait(lambda: taken() > before, READY_S, "the configuration is taken")


def test_the_guide_leads_from_the_package_to_a_restart_by_alert(
    machine: PackagedSystemd, packages: Made
) -> None:
    for tool in ("amtool", "promtool", "prometheus-alertmanager"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is missing: see `make packages`")
    own, guide = machine, Reader(machine)
    guide.upto("Week 1: watch")
    assert f"apt install ./dist/holdfast_{packages.version}_amd64.deb\n" in guide.rest
    own.install(packages.debs[0])
    guide.write(CONFIG, guide.block("[agent]"))
    guide.run("holdfast config check\n    systemctl enable")
    own.wait(own.answers, READY_S, "the agent answers")
    guide.run("holdfast dashboards render")
    scraped = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:9858/%s').read())"
    for page in ("metrics", "runbooks/fleet/agents_absent.md"):
        assert own.must(SYSTEM_PYTHON, "-c", scraped % page)

    guide.upto("Week 2: restarts on this node")
    own.must("sed", "-i", "/^act = \\[\\]/d", CONFIG)  # "Take `act = []` out again."
    guide.run("holdfast config check\n    systemctl reload")
    pids = own.start_job("/usr/bin/holdfast")

    guide.upto("Month 1: restarts by alert")
    guide.set("agent", guide.block("listen = ").strip())
    guide.run("holdfast config check\n    systemctl restart")
    own.wait(own.watched, READY_S, "the run is watched again")
    guide.run("install -m 600")
    assert own.must("stat", "-c", "%a %U", "/etc/prometheus/holdfast.token") == "600 prometheus\n"
    # These namespaces have no network that it could find other Alertmanagers in.
    guide.write("/etc/default/prometheus-alertmanager", "ARGS='--cluster.listen-address='\n")
    guide.run("cp /etc/prometheus")
    guide.write(RUNBOOK, guide.block("+++").partition("\nsystemctl")[0] + "\n")
    reload(own)
    assert "restart_ranks" in own.must("holdfast", "explain", "fabric_storm")
    page = own.must(SYSTEM_PYTHON, "-c", scraped % "runbooks/fabric_storm.md")
    assert "Two switches of one row" in page and "ladder" not in page
    own.wait(lambda: "holdfast.token" in own.inside("amtool", f"--alertmanager.url={ALERTMANAGER}",
                                                    "config", "show"), READY_S, "it answers")
    guide.run("amtool --alertmanager", "long")
    own.wait(lambda: alerts(own), READY_S, "the alert came")
    assert own.ranks()[0] == pids, "it is shown alone"

    guide.set("detect", guide.block("[detect]").splitlines()[1])
    own.must("holdfast", "config", "check")
    reload(own)
    guide.run("amtool --alertmanager", "long")
    own.wait(lambda: len(own.ranks()[0]) == 2 and not set(own.ranks()[0]) & set(pids), READY_S,
             "the alert restarts the run")
    assert [one["fault"] for one in json.loads(
        own.must("holdfast", "incidents", "--all", "--json")) if one["run"]] == ["fabric_storm"]
