"""The package list of pyproject.toml misses no folder and no data file; links and pins agree."""

from __future__ import annotations

import fnmatch
import re
import tomllib
from pathlib import Path
from typing import Any

import packages

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("agent", "collectors", "dashboards", "runbooks", "trainer", "worker")


def missing_packages(root: Path, setuptools: dict[str, Any]) -> list[str]:
    """Folders with Python files that no package names, and packages without a folder."""
    listed = set(setuptools["packages"])
    found = {
        "holdfast." + path.parent.relative_to(root).as_posix().replace("/", ".")
        for folder in FOLDERS
        for path in (root / folder).rglob("*.py")
    }
    return sorted(listed ^ found)


def missing_data(root: Path, setuptools: dict[str, Any]) -> list[str]:
    """Files beside the code that no pattern of package-data takes into the wheel."""
    patterns = [
        f"{name.removeprefix('holdfast.').replace('.', '/')}/{pattern}"
        for name, found in setuptools["package-data"].items()
        for pattern in found
    ]
    files = [
        path.relative_to(root).as_posix()
        for folder in FOLDERS
        for path in (root / folder).rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    ]
    return [name for name in files if not any(fnmatch.fnmatch(name, one) for one in patterns)]


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_folder_is_a_package_and_every_datum_is_taken_along() -> None:
    setuptools = project()["tool"]["setuptools"]
    assert missing_packages(ROOT, setuptools) == []
    assert missing_data(ROOT, setuptools) == []
    assert setuptools["package-dir"] == {f"holdfast.{name}": name for name in FOLDERS}


def test_the_check_itself_fails_on_a_gap(tmp_path: Path) -> None:
    (tmp_path / "agent/new").mkdir(parents=True)
    (tmp_path / "agent/new/__init__.py").touch()
    (tmp_path / "agent/new/table.toml").touch()
    setuptools = {"packages": ["holdfast.gone"], "package-data": {"holdfast.agent": ["*.toml"]}}
    assert missing_packages(tmp_path, setuptools) == ["holdfast.agent.new", "holdfast.gone"]
    setuptools["package-data"] = {"holdfast.agent.new": ["*.json"]}
    assert missing_data(tmp_path, setuptools) == ["agent/new/table.toml"]


def test_links_for_the_type_checkers_name_every_folder() -> None:
    links = {path.name: path.resolve() for path in (ROOT / ".types/holdfast").iterdir()}
    assert links == {name: ROOT / name for name in FOLDERS}


def test_every_dependency_is_pinned() -> None:
    pins = {
        re.split("==", line)[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    }
    table = project()["project"]
    extras = table["optional-dependencies"]
    wanted = table["dependencies"] + extras["trainer"] + extras["test"]
    names = {re.split("[<>=!~ ]", one)[0].lower() for one in wanted}
    assert names <= pins


def test_the_base_install_needs_no_torch() -> None:
    assert not any(one.startswith("torch") for one in project()["project"]["dependencies"])


def test_the_recipe_of_the_image_names_files_that_are_there() -> None:
    """Over its base it was never built: at least nothing that it copies may be gone."""
    recipe = (ROOT / "deploy/container/Containerfile").read_text()
    copied = [word for line in recipe.splitlines() for word in line.split()[1:-1]
              if line.startswith("COPY ") and "--from" not in line]
    assert copied and all("*" in one or (ROOT / one).exists() for one in copied), copied
    assert '"/opt/holdfast/bin/holdfast"' in recipe and "USER holdfast" in recipe


def test_the_packages_are_for_pythons_that_the_project_runs_on() -> None:
    lowest = project()["project"]["requires-python"].removeprefix(">=")
    assert packages.builder().PYTHONS[0] == lowest
