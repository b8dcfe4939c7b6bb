"""Junk for tests: what files, tools and people may say, in the shapes that parsers meet."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st

FAST = settings(max_examples=60, deadline=None)
FEW = settings(max_examples=25, deadline=None)
NUMBERS = st.one_of(st.integers(-(1 << 70), 1 << 70), st.floats(), st.just(0))
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=8)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner,
                                                                max_size=4),
    max_leaves=8,
)
JUNK = st.one_of(
    st.binary(max_size=60), NUMBERS.map(lambda one: f"{one}\n".encode()),
    st.sampled_from([b"", b"\n", b"-1\n", b"nan\n", b"inf\n", b"1e999\n", b"\x00" * 40, b"max\n",
                     b"9" * 5000, b" ", b"0x10\n", "٣\n".encode(), b"1,2,3,4,nan\n", b"\xff\xfe1\n",
                     b"x" * (1 << 20)]),
)
DEEP = b"[" * 100_000
NESTED = b'{"x":' + DEEP


def mutated(value, draw):
    """The same shape with some of its leaves and branches exchanged for anything."""
    if draw(st.integers(0, 19)) == 0:
        return draw(JSON)
    if isinstance(value, dict):
        return {key: mutated(one, draw) for key, one in value.items()}
    if isinstance(value, list):
        return [mutated(one, draw) for one in value[:3]]
    return value


def absurd(value, draw):
    """The same shape and types, with numbers and texts that no honest process says."""
    if isinstance(value, dict):
        return {key: one if key == "t" else absurd(one, draw) for key, one in value.items()}
    if isinstance(value, list):
        return [absurd(one, draw) for one in value]
    if draw(st.integers(0, 3)):
        return value
    if isinstance(value, str):
        words = ["", "running", "parked", "ended", "done", "bad_checkpoint", "/", "x" * 600]
        return draw(st.sampled_from(words) | st.text(max_size=5))
    if isinstance(value, float):
        return draw(st.sampled_from([0.0, -1.0, 1e308, -1e308, 1e-308]))
    return draw(st.sampled_from([0, -1, 1, 2, 1 << 31, (1 << 63) - 1, -(1 << 63), 10**18]))
