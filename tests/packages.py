"""Holdfast's packages as deploy/build.py makes them, once a session, for one Python alone."""

from __future__ import annotations

import atexit
import importlib.util
import shutil
import sys
import tempfile
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SYSTEM_PYTHON = "/usr/bin/python3"  # what the Debian package runs on


class Made(NamedTuple):
    """`wheels` is a folder: ours with those that it needs.  Of this tree's version and of the next
    there is one package each in `debs` and one archive each in `tarballs`."""

    version: str
    next_version: str
    wheels: Path
    sdist: Path
    tree: Path
    debs: tuple[Path, Path]
    tarballs: tuple[Path, Path]


@lru_cache(maxsize=1)
def builder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("holdfast_build", ROOT / "deploy/build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@lru_cache(maxsize=1)
def made() -> Made:
    """Everything, built now.  The next version differs by its number alone."""
    build = builder()
    place = Path(tempfile.mkdtemp(prefix="hf-packages-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    place.chmod(0o755)
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    version = build.project_version()
    next_version = f"{version}.post1"
    wheel, sdist = build.build_wheel(version, place)
    tree = place / "tree"
    tree.mkdir()
    build.make_tree(wheel, [python], "x86_64", tree, keep_wheels=place / "wheels")
    tarball = build.build_tarball(tree, version, "x86_64", None, place)
    deb = build.build_deb(tree, version, [python], "x86_64", place, fast=True)
    following = place / "next"
    shutil.copytree(tree, following, symlinks=True)
    (known,) = following.glob("lib/*/site-packages/holdfast-*.dist-info")
    metadata = known / "METADATA"
    metadata.write_text(metadata.read_text().replace(f"Version: {version}\n",
                                                     f"Version: {next_version}\n", 1))
    known.rename(known.with_name(f"holdfast-{next_version}.dist-info"))
    next_deb = build.build_deb(following, next_version, [python], "x86_64", place, fast=True)
    next_tarball = build.build_tarball(following, next_version, "x86_64", None, place)
    return Made(version, next_version, place / "wheels", sdist, tree, (deb, next_deb),
                (tarball, next_tarball))
