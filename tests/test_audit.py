"""Nothing that the packages ship is unpinned, of a licence that may not be shipped, or known to be
bad; and the audit that says so can fail."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
AUDIT = runpy.run_path(str(ROOT / "deploy/audit.py"), run_name="audit")
OLD = [{"name": "A.B", "below": "2.0", "ids": ["CVE-1"], "about": "it leaks"}]


def findings(version: str = "2.1", licence: str = "MIT", pin: str = "2.1",
             wants: str = "a-b>=2.0") -> list[str]:
    found = {"a-b": AUDIT["Shipped"]("a-b", version, licence, ())}
    return list(AUDIT["findings"]([Requirement(wants)], found, {"a-b": pin}, OLD))


def test_nothing_is_known_against_what_is_shipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["audit", "--sbom", str(tmp_path / "s/bom.json")])
    code = AUDIT["main"]()
    assert code == 0, capsys.readouterr().out
    bom = json.loads((tmp_path / "s/bom.json").read_text())
    names = {one["name"] for one in bom["components"]}
    assert {"aiohttp", "requests", "urllib3"} <= names, "what dependencies bring is there too"
    known = {one["bom-ref"] for one in bom["components"]}
    assert all(set(one["dependsOn"]) <= known for one in bom["dependencies"])


def test_the_audit_can_fail() -> None:
    assert findings() == []
    assert "constraints.txt pins 2.0" in findings(pin="2.0")[0]
    assert "licence 'GPL-3.0' is not on the list" in findings(licence="GPL-3.0")[0]
    assert "licence 'unknown'" in findings(licence="")[0]
    assert "MIT AND GPL" in findings(licence="MIT AND GPL")[0]
    assert findings(version="1.9", pin="1.9") == ["a-b 1.9: CVE-1: it leaks (mended in 2.0)"]
    assert "pyproject.toml allows 1.5: CVE-1" in findings(wants="a-b>=1.5")[0]
    assert "gives no least version" in findings(wants="a-b")[0]
