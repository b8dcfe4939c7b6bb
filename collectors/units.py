"""systemd's units: which of them restart again and again, and which gave up.

Owns one call of `systemctl show` a reading.  Its answer may never come (the manager itself can hang
behind a mount), so it runs in a probe child.  NoData where no systemd runs this machine.
"""

from __future__ import annotations

import os
import shutil
import subprocess

from .contract import SLOW, Metric, NoData, Probed, Roots, Sample
from .sources.files import ODD, is_count

UNITS_MAX = 64  # named
OUTPUT_MAX_BYTES = 4 << 20
TIMEOUT_S = 10.0  # beneath this the agent's own deadline kills the child anyhow
PROPERTIES = "--property=Id,LoadState,UnitFileState,NRestarts,ActiveState"
NEEDED = frozenset(("nvidia-fabricmanager.service",))  # a node may have its hardware or not


class UnitsCollector(Probed):
    """Samples of systemd's restarting and failed units; read in a child."""

    name = "units"
    pace = SLOW
    metrics = (
        Metric("host_unit_restarts_total", "counter",
               "Times that systemd started a unit again by itself; units that never needed it "
               "are left out.", ("unit",), True),
        Metric("host_unit_failed", "gauge", "1 for a unit that failed and is not tried again.",
               ("unit",), True),
        Metric("host_unit_active", "gauge",
               "1 for a unit that hardware here needs and that runs, 0 when it is to run and does "
               "not (nvidia-fabricmanager).", ("unit",), True),
        Metric("host_units", "gauge", "Service units that are loaded."),
    )

    def here(self, roots: Roots) -> str:
        """"" where systemd is the init, else why not."""
        return "" if os.path.isdir(roots.systemd) else "no systemd runs this machine"

    def environ(self, roots: Roots) -> dict[str, str]:
        """Texts in one language."""
        return {"LC_ALL": "C.UTF-8"}

    def collect(self, roots: Roots, boot_s: float) -> list[Sample]:
        """One reading.  NoData without systemctl, OSError when it fails."""
        tool = shutil.which(roots.systemctl or "systemctl")
        if tool is None:
            raise NoData(f"{roots.systemctl or 'systemctl'}: no such program")
        # The pattern matches units in memory, which one that restarts always is.
        command = (tool, "show", "--no-pager", PROPERTIES, "*.service")
        try:
            done = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"systemctl gave no answer within {TIMEOUT_S:g} s") from error
        if done.returncode != 0:
            said = done.stderr[:200].decode("utf-8", "replace").strip()
            raise OSError(f"systemctl show: exit status {done.returncode}: {said}")
        return samples(parse(done.stdout[:OUTPUT_MAX_BYTES]), boot_s)


def parse(output: bytes) -> list[dict[str, str]]:
    """Blocks of `Key=value` lines, an empty line between two; a block without Id is none."""
    found: list[dict[str, str]] = [{}]
    for line in output.decode("utf-8", "replace").splitlines():
        key, equals, value = line.partition("=")
        if not line.strip():
            found.append({})
        elif equals and len(key) < 64:
            found[-1].setdefault(key, value[:256])
    return [one for one in found if one.get("Id")]


def samples(units: list[dict[str, str]], boot_s: float) -> list[Sample]:
    """The busiest restarters and those that failed."""
    restarts: list[tuple[int, str]] = []
    failed: list[str] = []
    needed: list[tuple[str, bool]] = []
    for unit in units:
        name, count = unit["Id"].translate(ODD), unit.get("NRestarts", "")
        if is_count(count) and int(count) > 0:
            restarts.append((int(count), name))
        state = unit.get("ActiveState", "")
        if state == "failed":
            failed.append(name)
        # One that is disabled may run in a container instead; one that is not loaded is not here.
        meant = unit.get("UnitFileState", "").startswith("enabled") or state in ("active", "failed")
        if name in NEEDED and meant and unit.get("LoadState") == "loaded":
            needed.append((name, state == "active"))
    restarts.sort(key=lambda one: (-one[0], one[1]))
    return [
        Sample("host_units", "", float(len(units)), boot_s),
        *(Sample("host_unit_restarts_total", f"unit={name}", float(count), boot_s)
          for count, name in restarts[:UNITS_MAX]),
        *(Sample("host_unit_failed", f"unit={name}", 1.0, boot_s)
          for name in sorted(failed)[:UNITS_MAX]),
        *(Sample("host_unit_active", f"unit={name}", float(runs), boot_s) for name, runs in needed),
    ]
