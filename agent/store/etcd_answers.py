"""What etcd's gateway says, as values: one struct for all answers, each with the fields it has.

Owns their form, and that of a key and of a long document in a question.  The gateway leaves out
what is false, 0 or empty, says 64-bit numbers as texts and bytes in base64; what has another form
is no etcd's, and refused as a whole.
"""

from __future__ import annotations

import zlib
from base64 import b64encode
from typing import Any

import msgspec

from ..core.model import UNREADABLE

# etcd sends a document to every agent, as JSON: a plan of 16,384 ranks is 360 kB, packed 40.
PACKED_FROM, UNPACKED_MAX = 16 << 10, 16 << 20  # bytes
PACKED = b"\0zlib\0"  # how one begins that is packed; JSON begins otherwise


class KeyValue(msgspec.Struct, frozen=True):
    key: bytes = b""
    value: bytes = b""
    version: int = 0  # 0: deleted
    mod_revision: int = 0


class Header(msgspec.Struct, frozen=True):
    revision: int = 0
    member_id: int = 0


class Range(msgspec.Struct, frozen=True):
    kvs: list[KeyValue] = []


class Response(msgspec.Struct, frozen=True):
    """Of one operation of a transaction."""

    response_range: Range = Range()


class Event(msgspec.Struct, frozen=True):
    kv: KeyValue = KeyValue()
    type: str = "PUT"


class Result(msgspec.Struct, frozen=True):
    """One line of what goes on coming: a lease's renewal, or changes."""

    events: list[Event] = []
    fragment: bool = False  # more of the same revision follows
    canceled: bool = False
    cancel_reason: str = ""
    compact_revision: int = 0
    TTL: int = 0


class Alarm(msgspec.Struct, frozen=True):
    alarm: str = ""


class Answer(msgspec.Struct, frozen=True):
    """Any answer.  `error` is a text, or a struct of the same in what goes on coming."""

    header: Header = Header()
    kvs: list[KeyValue] = []
    more: bool = False
    count: int = 0
    succeeded: bool = False
    responses: list[Response] = []
    result: Result = Result()
    TTL: int = 0
    token: str = ""
    etcdserver: str = ""  # its version
    leader: int = 0
    dbSize: int = 0
    alarms: list[Alarm] = []
    error: Any = None
    message: str = ""
    code: int = 0
    grpc_code: int = 0


def decode(text: bytes) -> Answer:
    """ValueError for what etcd never says."""
    try:
        return msgspec.json.decode(text, type=Answer, strict=False)
    except UNREADABLE as error:
        raise ValueError(str(error)) from error


def error_of(answer: Answer) -> Answer | None:
    """The error in an answer as one with code and message, None where there is none."""
    if isinstance(answer.error, dict):
        try:
            return msgspec.convert(answer.error, Answer, strict=False)
        except msgspec.ValidationError:
            return Answer(message=str(answer.error)[:300])
    return answer if answer.error or answer.code and answer.message else None


def b64(value: bytes) -> str:
    return b64encode(value).decode()


def after(prefix: bytes) -> bytes:
    """The first key behind all that begin with it; the prefix ends in "/"."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


def packed(body: bytes) -> bytes:
    """As the store keeps it; a short one is left as it is, for people who look with etcdctl."""
    if len(body) < PACKED_FROM and not body.startswith(PACKED):
        return body
    return PACKED + zlib.compress(body)


def unpacked(value: bytes) -> bytes:
    """What was packed; whatever is not sound stays as it is, and is no document to its reader."""
    if not value.startswith(PACKED):
        return value
    decoder = zlib.decompressobj()
    try:
        body = decoder.decompress(value[len(PACKED):], UNPACKED_MAX)
    except zlib.error:
        return value
    return body if decoder.eof else value
