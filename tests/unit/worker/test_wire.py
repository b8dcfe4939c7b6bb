"""Packets: whole, bounded, with descriptors, and rubbish is an error and not a crash."""

from __future__ import annotations

import os
import socket

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.worker import wire
from holdfast.worker.launcher import agent_link


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


# what os.fsdecode makes of bytes that are no UTF-8, among anything else
NAMES = st.text(st.one_of(st.integers(0xDC80, 0xDCFF).map(chr), st.characters()), max_size=40)


@given(st.lists(NAMES, max_size=5), NAMES)
def test_a_strict_reader_takes_whatever_a_name_holds(names, key):
    packet = {"t": "x", "names": names, "more": {key: 1}}
    read = msgspec.json.decode(wire.encoded(packet, well_formed=True))
    kept = [name.encode("utf-8", "replace").decode() for name in names]
    assert read["names"] == kept
    assert len(wire.encoded(packet, well_formed=True)) <= wire.size_of(packet)
    assert wire.decode(wire.encoded(packet)) == packet  # ours lead back to the file


def test_the_agents_line_is_the_strict_one(tmp_path):
    path = str(tmp_path / "agent.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(path)
        server.listen(1)
        channel = agent_link.connect(path, {})
        link, _ = server.accept()
        with link:
            assert channel.send({"t": "report", "text": os.fsdecode(b"bad \xff \xf0\x9f\x98\x80")})
            assert msgspec.json.decode(link.recv(4096))["text"] == "bad ? \U0001f600"
        channel.close()


def test_cut_keeps_short_text_and_marks_long():
    assert wire.cut("abc", 3) == "abc"
    assert wire.cut("abcd", 3) == "ab\u2026"
