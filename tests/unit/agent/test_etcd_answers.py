"""What a long document is in etcd: small, and the same when it comes back."""

from __future__ import annotations

import asyncio
import json
import zlib

import pytest
from etcd_servers import etcd
from hypothesis import given
from hypothesis import strategies as st
from test_etcd_faults import following, opened
from waiting import until

from holdfast.agent.core.model import StoreWrite
from holdfast.agent.store import etcd_answers
from holdfast.agent.store.etcd_answers import PACKED, PACKED_FROM, packed, unpacked

PLAN = json.dumps([[rank, f"node-{rank // 8:05d}"] for rank in range(4096)]).encode()


@given(st.binary(max_size=300), st.integers(0, 2 * PACKED_FROM), st.booleans())
def test_every_document_comes_back_as_it_was(body, more, marked):
    document = PACKED * marked + body + bytes(more)
    assert unpacked(packed(document)) == document


def test_a_short_one_stays_legible_and_a_long_one_is_a_fraction():
    assert packed(PLAN[:100]) == PLAN[:100]
    assert len(packed(PLAN)) < len(PLAN) / 5


@pytest.mark.parametrize("value", [
    PACKED, PACKED + b"no stream", packed(PLAN)[:-1], PACKED + zlib.compress(b"x" * 5000)])
def test_what_is_cut_broken_or_swells_beyond_bounds_stays_as_it_is(value, monkeypatch):
    monkeypatch.setattr(etcd_answers, "UNPACKED_MAX", 4096)
    assert unpacked(value) == value


def test_a_plan_of_many_ranks_is_small_in_the_store_and_whole_for_everybody(tmp_path):
    async def scenario(cluster):
        first, other = opened(tmp_path, cluster), opened(tmp_path, cluster, "b")
        async with following(first, other):
            assert await first.put(StoreWrite("run/m5", 0, PLAN)) == 1
            await until(lambda: other.view().docs.get("run/m5").body == PLAN)  # by its watch
            assert (await other.read("run/m5")).body == PLAN
            assert await other.put(StoreWrite("run/m5", 1, PLAN + b" ")) == 2
            late = opened(tmp_path, cluster, "c")
            await late.refresh()
            assert late.view().docs.get("run/m5").body == PLAN + b" "
            await late.close()
        assert len(cluster.ctl("get", "/holdfast/main/run/m5", "--write-out=json")) < len(PLAN) / 3

    with etcd(tmp_path / "etcd", 1) as cluster:
        asyncio.run(asyncio.wait_for(scenario(cluster), 180.0))
