"""The page: written by one, read by another, and nothing that comes from outside is believed."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os

import pytest

from holdfast.worker import page as pages


@pytest.fixture()
def page_fd():
    fd = pages.create()
    yield fd
    os.close(fd)


@contextlib.contextmanager
def mapped(fd):
    """The page as whoever it is handed to has it."""
    reader = pages.readonly(fd)
    try:
        yield pages.map_readonly(reader)
    finally:
        os.close(reader)


def test_a_new_page_reads_as_a_rank_that_has_done_nothing(page_fd):
    with mapped(page_fd) as page:
        view = pages.read_page(page)
    assert (view.rank, view.step, view.phase, view.outcome) == (-1, 0, "unknown", "")
    assert view.groups == () and view.step_seq == () and view.last_step_ns == ()


def test_what_is_written_is_read(page_fd):
    fields = pages.map_fields(page_fd)
    fields[pages.F_RANK], fields[pages.F_STEP] = 3, 41
    fields[pages.F_PHASE] = pages.PHASES.index("data")
    fields[pages.F_LOSS] = pages.bits(-0.25)
    fields[pages.F_GROUPS], fields[pages.F_SEQ + 1] = 1, 77
    fields[pages.F_RING], fields[pages.F_RING + 1], fields[pages.F_STEP_NS] = 40, 70, 5
    with mapped(page_fd) as page:
        view = pages.read_page(page)
    assert (view.rank, view.step, view.phase, view.loss) == (3, 41, "data", -0.25)
    assert view.groups == ((0, 77),)
    assert view.step_seq == ((40, 70),) and view.last_step_ns == (5,)


def test_kinds_of_collectives_are_read_once_they_are_whole(page_fd):
    fields, at = pages.map_fields(page_fd), pages.F_COLLECTIVES + 1
    most = len(pages.COLLECTIVES)
    keys = [pages.collective_key(kind, 2**40, True) for kind in pages.COLLECTIVES]
    assert max(keys) <= pages.KEY_MAX and len(set(keys)) == most <= 16
    fields[at] = pages.collective_key("reduce_scatter", 4096, False)
    fields[at + 1], fields[at + 2], fields[at + 3] = 3, 600, 5
    fields[at + 4], fields[at + 5] = pages.collective_key("send", 2, True), 1
    with mapped(page_fd) as page:
        assert pages.read_page(page).collectives == ()
        fields[pages.F_COLLECTIVES] = 40
        assert pages.read_page(page).collectives == (
            ("reduce_scatter", 4096, False, 3, 600, 5), ("send", 2, True, 1, 0, 0))
        fields[at] = pages.KEY_MAX + 1
        with pytest.raises(ValueError, match="a kind of collectives"):
            pages.read_page(page)
        fields[at], fields[at + 1] = pages.KEY_MAX, pages.COUNT_MAX + 1
        with pytest.raises(ValueError, match="of its collectives"):
            pages.read_page(page)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [(pages.F_MAGIC, 1, "magic"), (pages.F_VERSION, 9, "version 9")],
)
def test_a_foreign_page_is_refused(page_fd, field, value, says):
    pages.map_fields(page_fd)[field] = value
    with mapped(page_fd) as page, pytest.raises(ValueError, match=says):
        pages.read_page(page)


def test_numbers_out_of_range_are_bounded_or_refused_by_name(page_fd):
    fields = pages.map_fields(page_fd)
    for field in (pages.F_PHASE, pages.F_OUTCOME, pages.F_GROUPS, pages.F_RATE, pages.F_CODE):
        fields[field] = (1 << 64) - 1
    with mapped(page_fd) as page:
        view = pages.read_page(page)
        assert view.phase == "unknown" and view.outcome == ""
        assert len(view.groups) == pages.GROUPS and view.rate == 0.0 and view.code == -1
        fields[pages.F_STEP] = (1 << 64) - 1
        with pytest.raises(ValueError, match=r"damaged: its field 6 \(steps\) holds 18446744"):
            pages.read_page(page)


def test_a_page_that_could_shrink_is_never_mapped():
    """A mapping whose file is cut kills its reader with SIGBUS."""
    fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, pages.SIZE)
    with pytest.raises(ValueError, match="F_SEAL_SHRINK"):
        pages.map_readonly(fd)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    with mapped(fd) as page:
        assert isinstance(page, mmap.mmap)
    os.close(fd)


def test_a_page_that_is_no_memfd_or_too_small_is_refused(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"0" * pages.SIZE)
    fd = os.open(path, os.O_RDWR)
    with pytest.raises(ValueError, match="sealed"):
        pages.map_readonly(fd)
    os.close(fd)
    small = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(small, 64)
    fcntl.fcntl(small, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    with pytest.raises(ValueError, match="smaller"):
        pages.map_readonly(small)
    os.close(small)


def test_a_page_is_handed_over_for_reading_alone(page_fd):
    """Neither the descriptor nor what can be opened through it writes into the rank's page."""
    fields = pages.map_fields(page_fd)  # the rank's own mapping, before and after the hand-over
    reader = pages.readonly(page_fd)
    with pytest.raises(PermissionError):
        mmap.mmap(reader, pages.SIZE)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(reader, b"x")
    assert os.fstat(reader).st_mode & 0o777 == 0o600  # another user cannot open it again
    page = pages.map_readonly(reader)
    fields[pages.F_STEP] = 7
    later = pages.map_fields(page_fd)  # a spawned rank maps its page after the hand-over
    later[pages.F_LOSS] = pages.bits(0.5)
    assert (pages.read_page(page).step, pages.read_page(page).loss) == (7, 0.5)
    os.close(reader)


def test_a_page_that_its_reader_could_write_is_refused(page_fd):
    with pytest.raises(ValueError, match="writable: hand over a read-only one"):
        pages.map_readonly(page_fd)


def test_our_own_page_cannot_be_cut(page_fd):
    with pytest.raises(PermissionError):
        os.ftruncate(page_fd, 16)


def test_the_layout_fits_its_page():
    assert pages.FIELDS * 8 <= pages.SIZE
    assert pages.F_BROKEN < pages.F_SEQ
