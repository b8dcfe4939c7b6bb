#!/usr/bin/env python3
"""Builds what Holdfast is installed from: wheel, sdist, Debian package, relocatable tarball.

Owns one tree that package and tarball share (docs/decisions/016-packages.md): `lib/pythonX.Y` for
each Python that it serves, filled from wheels alone, and a `bin/holdfast` that finds it wherever it
lies.  Runs with pip and setuptools 77 or later and nothing else of Holdfast's; the network is used
by pip alone, for wheels.  Writes below --to only.
"""

from __future__ import annotations

import argparse
import gzip
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
PYTHONS = ("3.11", "3.12", "3.13")  # Debian 12, Ubuntu 24.04, Debian 13; Amazon Linux has the first
DEBIAN = {"x86_64": "amd64", "aarch64": "arm64"}
# What manylinux wheels of the dependencies are tagged with; glibc 2.28 is in all of these systems.
TAGS = ("manylinux_2_28", "manylinux_2_17", "manylinux2014", "manylinux_2_12", "manylinux_2_5",
        "manylinux1")
TAKEN = ("agent", "collectors", "dashboards", "runbooks", "trainer", "worker", "pyproject.toml",
         "README.md", "LICENSE")
PIP_TIMEOUT_S = 600.0
TOOL_TIMEOUT_S = 300.0
SETUPTOOLS = 77  # as pyproject.toml asks; an older one tells of it in a page of schema
UNITS = ("holdfast.service", "holdfast-node.socket", "holdfast-node@.service",
         "holdfast-accept@.service")
LAUNCHER = """#!/bin/sh
# -I: nothing that a job's PYTHONPATH names comes into Holdfast's own interpreter.
here=$(dirname "$(readlink -f "$0")")
exec "$here/python" -I -m holdfast.agent.cli "$@"
"""


class BuildError(Exception):
    """What was built is not what it should be; the message says what is wrong."""


def command(words: Sequence[str], timeout_s: float, **options: object) -> str:
    """A tool's output.  BuildError with its last words when it fails."""
    done = subprocess.run([*words], capture_output=True, text=True, timeout=timeout_s, check=False,
                          stdin=subprocess.DEVNULL, **options)  # type: ignore[call-overload]
    if done.returncode:
        raise BuildError(f"{words[0]} ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
    return str(done.stdout)


def project_version() -> str:
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


def check_setuptools() -> None:
    """BuildError where this Python has none, as new venvs of 3.12 do, or one that is too old."""
    try:
        found = metadata.version("setuptools")
    except metadata.PackageNotFoundError:
        found = "none"
    major = found.partition(".")[0]
    if not major.isdecimal() or int(major) < SETUPTOOLS:
        raise BuildError(
            f"setuptools {SETUPTOOLS} or later is needed, {sys.executable} has {found}: "
            f"{sys.executable} -m pip install 'setuptools>={SETUPTOOLS}'")


def served(pythons: Sequence[str]) -> list[str]:
    """In their order, each once.  BuildError for a gap: a Debian package can only say from which to
    which Python it is for, and would be installed beside the one that it lacks."""
    found = sorted({*pythons}, key=PYTHONS.index)
    first, last = PYTHONS.index(found[0]), PYTHONS.index(found[-1])
    missing = [one for one in PYTHONS[first:last] if one not in found]
    if missing:
        raise BuildError(f"--python: {' and '.join(missing)} between {found[0]} and {found[-1]} is "
                         "missing: add it, or leave one of them out")
    return found


def say(what: str) -> None:
    print(f"build: {what}", file=sys.stderr, flush=True)


def build_wheel(version: str, to: Path) -> tuple[Path, Path]:
    """(wheel, sdist).  The wheel is made from the unpacked sdist, so that both hold the same."""
    to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="holdfast-build-") as name:
        copy = Path(name) / "source"
        copy.mkdir()
        for one in TAKEN:
            taken, there = ROOT / one, copy / one
            if taken.is_dir():
                shutil.copytree(taken, there, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(taken, there)
        settings = copy / "pyproject.toml"
        settings.write_text(settings.read_text().replace(
            f'version = "{project_version()}"', f'version = "{version}"', 1))
        sdist = to / _backend(copy, "sdist", to)
        unpacked = Path(name) / "unpacked"
        with tarfile.open(sdist) as archive:
            # Debian 12's Python has no such filter, and does not look at this.
            archive.extraction_filter = getattr(tarfile, "data_filter", None)
            archive.extractall(unpacked)
        (inside,) = unpacked.iterdir()
        return to / _backend(inside, "wheel", to), sdist


def _backend(source: Path, kind: str, to: Path) -> str:
    """The name of what setuptools made."""
    code = ("import sys, setuptools.build_meta as b; "
            "print(getattr(b, 'build_' + sys.argv[1])(sys.argv[2]))")
    said = command([sys.executable, "-c", code, kind, str(to.resolve())], TOOL_TIMEOUT_S,
                   cwd=source)
    return said.strip().splitlines()[-1]


def make_tree(
    wheel: Path, pythons: Sequence[str], arch: str, to: Path, keep_wheels: Path | None = None
) -> None:
    """What lies below /opt/holdfast, or wherever it is unpacked."""
    for python in pythons:
        site, wheels = to / f"lib/python{python}/site-packages", to / f"wheels-{python}"
        pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
        tags = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
        tags += [word for tag in TAGS for word in ("--platform", f"{tag}_{arch}")]
        command([*pip, "download", *tags, "-c", str(ROOT / "constraints.txt"), "-d", str(wheels),
                 str(wheel)], PIP_TIMEOUT_S)
        command([*pip, "install", *tags, "--no-compile", "--no-deps", "--no-index", "--target",
                 str(site), *map(str, wheels.glob("*.whl"))], PIP_TIMEOUT_S)
        if keep_wheels is not None:
            shutil.copytree(wheels, keep_wheels, dirs_exist_ok=True)
        shutil.rmtree(wheels)
        spy = site / "bin/py-spy"  # a program by itself: the evidence child calls it
        (to / "bin").mkdir(exist_ok=True)
        if spy.exists():
            spy.replace(to / "bin/py-spy")
        shutil.rmtree(site / "bin", ignore_errors=True)
    (to / "bin/holdfast").write_text(LAUNCHER)
    for program in (to / "bin").iterdir():
        program.chmod(0o755)


def build_deb(
    tree: Path, version: str, pythons: Sequence[str], arch: str, to: Path, fast: bool = False
) -> Path:
    """holdfast_VERSION_ARCH.deb; `fast`: larger, made in a moment."""
    with tempfile.TemporaryDirectory(prefix="holdfast-deb-") as name:
        root = Path(name)
        root.chmod(0o755)
        shutil.copytree(tree, root / "opt/holdfast", symlinks=True)
        (root / "opt/holdfast/bin/python").symlink_to("/usr/bin/python3")
        (root / "opt/holdfast/pyvenv.cfg").write_text(
            "home = /usr/bin\ninclude-system-site-packages = false\n")
        put(root / "usr/bin/holdfast", link="/opt/holdfast/bin/holdfast")
        for unit in UNITS:
            put(root / "lib/systemd/system" / unit, DEPLOY / "systemd" / unit)
        put(root / "usr/lib/sysusers.d/holdfast.conf", DEPLOY / "systemd/holdfast.sysusers")
        put(root / "usr/lib/tmpfiles.d/holdfast.conf", DEPLOY / "systemd/holdfast.tmpfiles")
        put(root / "etc/holdfast/agent.toml", DEPLOY / "agent.toml")
        put(root / "usr/share/doc/holdfast/copyright", ROOT / "LICENSE")
        (root / "DEBIAN").mkdir()
        low, _, high = pythons[0], *pythons[-1].split(".")
        for file in (DEPLOY / "debian").iterdir():
            text = file.read_text()
            for key, value in (("@VERSION@", version), ("@ARCH@", DEBIAN[arch]), ("@LOW@", low),
                               ("@HIGH@", f"3.{int(high) + 1}"), ("@SIZE@", str(size_kb(root)))):
                text = text.replace(key, value)
            there = root / "DEBIAN" / file.name
            there.write_text(text)
            there.chmod(0o755 if file.name in ("postinst", "prerm", "postrm") else 0o644)
        open_to_all(root)
        made = to / f"holdfast_{version}_{DEBIAN[arch]}.deb"
        packed = ("-Zgzip", "-z1") if fast else ("-Zxz", "-z6")
        command(["dpkg-deb", "--root-owner-group", *packed, "--build", str(root), str(made)],
                TOOL_TIMEOUT_S)
    return made


def build_tarball(tree: Path, version: str, arch: str, python: Path | None, to: Path) -> Path:
    """holdfast-VERSION-linux-ARCH.tar.gz, with the interpreter below `python` when one is given."""
    name = f"holdfast-{version}-linux-{arch}"
    made = to / f"{name}.tar.gz"
    with tempfile.TemporaryDirectory(prefix="holdfast-tar-") as place:
        root = Path(place) / name
        shutil.copytree(tree, root / "tree", symlinks=True)
        put(root / "install.sh", DEPLOY / "tarball/install.sh", mode=0o755)
        for file in (DEPLOY / "systemd").iterdir():
            put(root / "systemd" / file.name, file)
        put(root / "agent.toml", DEPLOY / "agent.toml")
        put(root / "LICENSE", ROOT / "LICENSE")
        (root / "VERSION").write_text(version + "\n")
        if python is not None:
            take_python(python, root / "tree/python")
        open_to_all(root)
        with open(made, "wb") as raw, gzip.GzipFile("", "wb", 6, raw, 0) as packed:
            with tarfile.open(fileobj=packed, mode="w") as archive:
                archive.add(root, name, filter=_roots)
    return made


def take_python(prefix: Path, to: Path) -> None:
    """An interpreter that runs where it lies: its programs and library, without what tests it."""
    left_out = shutil.ignore_patterns("__pycache__", "test", "tests", "idlelib", "tkinter", "*.a",
                                      "site-packages", "config-*", "ensurepip", "share", "include")
    shutil.copytree(prefix, to, symlinks=True, ignore=left_out)


def _roots(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    member.mtime = 0
    return member


def put(to: Path, source: Path | None = None, link: str = "", mode: int = 0o644) -> None:
    """One file, with the folders above it."""
    to.parent.mkdir(parents=True, exist_ok=True)
    if source is None:
        to.symlink_to(link)
        return
    shutil.copyfile(source, to)
    to.chmod(mode)


def open_to_all(root: Path) -> None:
    """Rights that do not depend on who built it."""
    for folder, folders, files in os.walk(root):
        for name in folders + files:
            path = Path(folder, name)
            if not path.is_symlink():
                path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)


def size_kb(root: Path) -> int:
    return sum(one.lstat().st_size for one in root.rglob("*") if one.is_file()) // 1024


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("what", nargs="+", choices=("wheel", "deb", "tarball"),
                        help="wheel and sdist are made in any case")
    parser.add_argument("--to", type=Path, default=ROOT / "dist", metavar="DIR",
                        help="where they go (default: %(default)s)")
    parser.add_argument("--version", default=project_version(), help="default: %(default)s")
    parser.add_argument("--python", action="append", choices=PYTHONS, metavar="X.Y",
                        help="have package and tarball serve this one; may be given again "
                             f"(default: {', '.join(PYTHONS)})")
    parser.add_argument("--arch", default="x86_64", choices=tuple(DEBIAN),
                        help="of package and tarball (default: %(default)s)")
    parser.add_argument("--take-python", type=Path, metavar="DIR",
                        help="put the interpreter of this prefix into the tarball, for hosts "
                             "without one; it must run wherever it lies")
    given = parser.parse_args(arguments)
    try:
        pythons = served(given.python or PYTHONS)
        check_setuptools()
        say("wheel and sdist")
        wheel, sdist = build_wheel(given.version, given.to)
        made = [wheel, sdist]
        with tempfile.TemporaryDirectory(prefix="holdfast-tree-") as place:
            if {"deb", "tarball"} & set(given.what):
                tree = Path(place) / "tree"
                tree.mkdir()
                say(f"what it needs, for Python {', '.join(pythons)}: a minute or more")
                make_tree(wheel, pythons, given.arch, tree)
            if "deb" in given.what:
                say("Debian package")
                made.append(build_deb(tree, given.version, pythons, given.arch, given.to))
            if "tarball" in given.what:
                say("tarball")
                made.append(build_tarball(
                    tree, given.version, given.arch, given.take_python, given.to))
    except (BuildError, OSError, subprocess.TimeoutExpired) as error:
        print(f"build: {error}", file=sys.stderr)
        return 1
    for path in made:
        print(f"{path}  {path.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
