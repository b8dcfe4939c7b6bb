"""Packets: whole, bounded, with descriptors, and rubbish is an error and not a crash."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.worker import wire


@pytest.fixture()
def ends():
    ours, theirs = wire.pair()
    yield ours, theirs
    ours.close()
    theirs.close()


def test_a_packet_arrives_whole_with_its_descriptors(ends):
    ours, theirs = ends
    reader, writer = os.pipe()
    assert ours.send({"t": "page", "rank": 1}, [writer])
    packet, fds = theirs.receive()
    assert packet == {"t": "page", "rank": 1}
    os.write(fds[0], b"x")
    assert os.read(reader, 1) == b"x"
    wire.close_all([reader, writer, *fds])


def test_a_closed_peer_is_none_and_sending_to_it_is_false(ends):
    ours, theirs = ends
    theirs.close()
    assert ours.receive() == (None, [])
    assert ours.send({"t": "x"}) is False


def test_a_peer_that_does_not_read_never_blocks_the_sender(ends):
    ours, _ = ends
    sent = [ours.send({"t": "x", "text": "y" * 30_000}) for _ in range(100)]
    assert sent[0] is True and sent[-1] is False


def test_too_long_a_packet_is_refused_by_the_sender(ends):
    with pytest.raises(ValueError, match="bytes"):
        ends[0].send({"t": "x", "text": "y" * wire.LIMIT_BYTES})


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"{", "Expecting"),
        (b"\"\xc3(\"", "JSON"),
        (b"[1]", "object"),
        (b'{"t": 1}', "string"),
        (b"[" * 50_000, "JSON"),
        (b"x" * (wire.LIMIT_BYTES + 1), "longer"),
    ],
)
def test_rubbish_is_a_value_error(data, says):
    with pytest.raises(ValueError, match=says):
        wire.decode(data)


def test_descriptors_of_a_refused_packet_are_closed(ends):
    ours, theirs = ends
    reader, writer = os.pipe()
    import array
    import socket

    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [writer]))]
    ours.sock.sendmsg([b"not json"], rights)
    os.close(writer)
    with pytest.raises(ValueError):
        theirs.receive()
    assert os.read(reader, 1) == b""  # the last writing end is gone
    os.close(reader)


@given(st.binary(max_size=300))
def test_no_bytes_at_all_crash_the_reader(data):
    try:
        packet = wire.decode(data)
    except ValueError:
        return
    assert isinstance(packet["t"], str)


def test_cut_keeps_short_text_and_marks_long():
    assert wire.cut("abc", 3) == "abc"
    assert wire.cut("abcd", 3) == "ab\u2026"
