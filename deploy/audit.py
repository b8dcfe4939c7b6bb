#!/usr/bin/env python3
"""What Holdfast's packages ship, held to pins, licences and known advisories: without a network.

Owns the list of everything that a base install brings with it, and the findings about it.  Reads
installed metadata, pyproject.toml, constraints.txt and advisories.toml; writes an SBOM where asked.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
# Each lets a package be shipped beside Apache-2.0 code unchanged.
LICENCES = {
    "apache 2.0", "apache-2.0", "apache software license", "bsd", "bsd license", "bsd-2-clause",
    "bsd-3-clause", "mit", "mit license", "mozilla public license 2.0 (mpl 2.0)", "mpl-2.0",
    "psf-2.0", "python software foundation license"}


class Shipped(NamedTuple):
    """One distribution as it is installed."""

    name: str
    version: str
    licence: str
    needs: tuple[str, ...]


def needed(lines: Iterable[str]) -> list[Requirement]:
    """Those without an extra, for this Python."""
    found = [Requirement(line) for line in lines]
    return [one for one in found if one.marker is None or one.marker.evaluate({"extra": ""})]


def shipped(direct: Iterable[Requirement]) -> dict[str, Shipped]:
    """Everything below these, by name.  metadata.PackageNotFoundError where one is missing."""
    found: dict[str, Shipped] = {}
    waiting = [one.name for one in direct]
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in found:
            continue
        one = metadata.distribution(name)
        needs = tuple(canonicalize_name(req.name) for req in needed(one.requires or ()))
        found[name] = Shipped(name, one.version, licence_of(one.metadata), needs)
        waiting += needs
    return dict(sorted(found.items()))


def licence_of(said: metadata.PackageMetadata) -> str:
    """By expression, else by classifier, else by the free field where it is one line."""
    declared = (said.get_all("Classifier") or [])
    classified = [one.rpartition(" :: ")[2] for one in declared if one.startswith("License ::")]
    free = said.get("License") or ""
    return (said.get("License-Expression") or " AND ".join(classified)
            or (free if "\n" not in free else ""))


def pins(text: str) -> dict[str, str]:
    """Of constraints.txt."""
    found = re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", text, re.M)
    return {canonicalize_name(name): version for name, version in found}


def known(advisories: list[Mapping[str, Any]], name: str, version: str) -> list[str]:
    return [f"{', '.join(one['ids'])}: {one['about']} (mended in {one['below']})"
            for one in advisories if canonicalize_name(one["name"]) == canonicalize_name(name)
            and Version(version) < Version(one["below"])]


def findings(
    direct: list[Requirement], found: Mapping[str, Shipped], pinned: Mapping[str, str],
    advisories: list[Mapping[str, Any]],
) -> list[str]:
    """One line each; none where all is well."""
    wrong = []
    for one in found.values():
        if pinned.get(one.name) != one.version:
            wrong.append(f"{one.name} {one.version}: constraints.txt pins "
                         f"{pinned.get(one.name, 'nothing')}")
        parts = re.split(r"\s+(?:AND|OR)\s+", one.licence)
        if not one.licence or any(part.lower() not in LICENCES for part in parts):
            wrong.append(f"{one.name}: licence {one.licence or 'unknown'!r} is not on the list")
        wrong += [f"{one.name} {one.version}: {text}"
                  for text in known(advisories, one.name, one.version)]
    for req in direct:
        floors = [spec.version for spec in req.specifier if spec.operator == ">="]
        if not floors:
            wrong.append(f"{req.name}: pyproject.toml gives no least version")
        wrong += [f"{req.name}: pyproject.toml allows {floor}: {text}"
                  for floor in floors for text in known(advisories, req.name, floor)]
    return wrong


def sbom(found: Mapping[str, Shipped], version: str) -> dict[str, Any]:
    """CycloneDX 1.5."""
    def ref(name: str, release: str) -> str:
        return f"pkg:pypi/{name}@{release}"

    return {
        "bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1,
        "metadata": {"component": {
            "type": "application", "name": "holdfast", "version": version,
            "bom-ref": ref("holdfast", version)}},
        "components": [{
            "type": "library", "name": one.name, "version": one.version,
            "purl": ref(one.name, one.version), "bom-ref": ref(one.name, one.version),
            "licenses": [{"license": {"name": one.licence}}]} for one in found.values()],
        "dependencies": [{
            "ref": ref(one.name, one.version),
            "dependsOn": [ref(need, found[need].version) for need in one.needs]}
            for one in found.values()]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sbom", type=Path, metavar="FILE", help="write a CycloneDX list there")
    options = parser.parse_args()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = tomllib.loads((ROOT / "deploy/advisories.toml").read_text())
    direct = needed(project["dependencies"])
    found = shipped(direct)
    for one in found.values():
        print(f"{one.name:22} {one.version:12} {one.licence}")
    wrong = findings(direct, found, pins((ROOT / "constraints.txt").read_text()),
                     listed["advisory"])
    if options.sbom:
        options.sbom.parent.mkdir(parents=True, exist_ok=True)
        options.sbom.write_text(json.dumps(sbom(found, project["version"]), indent=1) + "\n")
    print(f"{len(found)} packages; advisories of {listed['reviewed']}")
    print("\n".join(wrong) or "nothing against them")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
