"""Mounts whose path is not what a page or a file takes: they are shown, escaped."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
from detectors import judged
from hypothesis import given
from hypothesis import strategies as st
from pages import page, taken_by_prometheus

from holdfast.agent.core.detect.host.reach import Reach
from holdfast.agent.core.detect.host.storage import Storage
from holdfast.agent.core.model import readings_of
from holdfast.collectors import disk, mounts
from holdfast.collectors.__main__ import _answer
from holdfast.collectors.contract import Roots, Sample
from holdfast.collectors.sources import mountinfo

# Names of folders as ext4 and NFS take them, and how each is shown.
NAMES = {
    b"plain": "plain",
    "größe".encode(): "größe",
    b"gr\xf6\xdfe": r"gr\xf6\xdfe",  # as an old Windows server has it: Latin 1
    rb"gr\xf6\xdfe": r"gr\\xf6\\xdfe",  # the same, spelled out: another folder
    "\x85\u202e".encode(): r"\u0085\u202e",  # one ends a line of text, one turns its direction
    b"\x0c,=": r"\x0c\x2c=",
    b"new\nline": r"new\x0aline",
    b"half \xe2\x82": r"half \xe2\x82",
}


def table(folder: Path, fstype: str) -> Roots:
    """Folders of those names, and the table in which the kernel lists them as mounts."""
    rows = []
    for number, name in enumerate(NAMES):
        point = os.fsencode(folder) + b"/m/" + name
        os.makedirs(point)
        for odd in (b"\\", b" ", b"\t", b"\n"):  # what the kernel writes in octal, and nothing else
            point = point.replace(odd, b"\\%03o" % ord(odd))
        rows.append(b"%d 1 8:%d / %s rw - %s x rw" % (number, number, point, fstype.encode()))
    (folder / "self").mkdir()
    (folder / "self/mountinfo").write_bytes(b"\n".join(rows) + b"\n")
    return Roots(proc=str(folder))


def shown_of(samples: list[Sample], name: str) -> list[str]:
    return [dict(part.partition("=")[::2] for part in one.subject.split(","))["mount"]
            for one in samples if one.name == name]


def test_local_file_systems_of_any_name_are_on_the_page(tmp_path: Path) -> None:
    samples = disk.DiskCollector().collect(table(tmp_path, "xfs"), 1.0)
    wanted = [f"{tmp_path}/m/{name}" for name in NAMES.values()]
    assert shown_of(samples, "host_filesystem_size_bytes") == wanted
    text = page(samples, disk.SPACE)
    taken_by_prometheus(text)
    escaped = wanted[2].replace("\\", "\\\\")  # once more by the page, as its format wants it
    assert f'host_filesystem_size_bytes{{mount="{escaped}"}}' in text
    full = [one._replace(value=0.0) if "available" in one.name else one for one in samples]
    verdicts = judged(Storage("a"), readings_of(full), [])
    assert len(verdicts) == len(NAMES) == len({one.subject for one in verdicts})
    assert all(msgspec.json.encode(one) for one in verdicts)


def test_servers_mounts_of_any_name_are_asked_and_judged(tmp_path: Path) -> None:
    collector, roots = mounts.MountsCollector(), table(tmp_path, "nfs4")
    answer = _answer(collector, roots, 1.0)
    samples = [Sample(*one) for one in answer["samples"]]
    wanted = sorted(f"{tmp_path}/m/{name}" for name in NAMES.values())
    assert sorted(shown_of(samples, "host_mount_response_seconds")) == wanted
    assert sorted(shown_of(samples, "host_filesystem_size_bytes")) == wanted
    waits = [one._replace(value=99.0) for one in samples
             if one.name == "host_mount_waiting_seconds"]
    hung = judged(Reach("a"), readings_of(waits))
    assert sorted(one.subject for one in hung) == [f"node/a/mount{one}" for one in wanted]


def test_what_is_shown_is_bounded_and_two_are_never_alike() -> None:
    long = [("/" + "\udcff" * 4000 + str(n)) for n in range(3)]
    found = {mountinfo.shown(one) for one in long}
    assert len(found) == 3 and max(map(len, found)) <= mountinfo.SHOWN_MAX


PATHS = st.binary(max_size=40).map(lambda raw: "/" + raw.decode("utf-8", "surrogateescape"))


@given(PATHS, PATHS)
def test_any_path_is_shown_as_one_word(path: str, other: str) -> None:
    text = mountinfo.shown(path)
    assert text.isprintable() and "," not in text and text.encode()
    assert path == other or text != mountinfo.shown(other)


@given(st.binary(max_size=60))
def test_any_bytes_in_the_table_are_survived(junk: bytes) -> None:
    line = (b"5 1 8:1 / /" + junk + b" rw - xfs /dev/x rw").decode("utf-8", "surrogateescape")
    mount = mountinfo.parse(line)
    assert mount is None or (mount.path.startswith(b"/") and mount.name.encode())
