"""Bounds of the numbers that come from outside, as types.

Owns what a number in a launcher's packet may be.  JSON's integers have no end and Python's follow:
one of 400 digits is decoded without a word and raises where it first meets a float.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

# What a float holds exactly.  Wider than any step, size or sequence number, and far from where
# sums and products of two would leave a float's range.
Whole = Annotated[int, Meta(ge=-(2**53), le=2**53)]
Amount = Annotated[float, Meta(ge=0, le=1e30)]  # of work: floating-point operations of a step
Seconds = Annotated[float, Meta(ge=-1e12, le=1e12)]  # 30,000 years; JSON has no infinity
