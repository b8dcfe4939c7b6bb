"""What anybody may write into the store, or a damaged disk hand out, stops no agent: it reads as
absent, or is refused with a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.agent.core.checks import node_tests
from holdfast.agent.core.model import Doc
from holdfast.agent.core.nodes import check_reports, fleet_baseline, identity
from holdfast.agent.core.run import members
from holdfast.agent.daemon.daemon import generation_of
from holdfast.agent.daemon.parts.peers import read_place
from holdfast.agent.peers import remembered
from holdfast.agent.store.base import StoreError
from holdfast.agent.store.etcd_leases import Holder, holder_of
from holdfast.agent.store.identity import id_of, read_known

BODIES = {
    "another encoding": b'{"node": "k\xf6ln", "reason": "\xff", "id": "\xff", "node_id": "\xff", '
                        b'"sources": {"\xff": {}}}',
    "half of a letter": b'{"node": "k\xc3", "id": "\xc3", "node_id": "\xc3", '
                        b'"sources": {"k\xc3": {}}}',
    "cut off": b'{"node": "a',
    "endless": b"[" * 100_000,
    "another kind": b"[1, {}, null]",
    "no JSON": b"\x00\x01",
}
ABSENT = {
    members.read_plan: None, members.read_node: members.NodeDoc(), identity.read: None,
    node_tests.read: (), check_reports.read: {}, fleet_baseline.read: {},
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
def test_a_document_that_cannot_be_read_is_none(body: bytes, tmp_path: Path) -> None:
    for read, absent in ABSENT.items():
        assert read(Doc("a/b", 1, body)) == absent, read
    assert holder_of(body) == Holder() and read_place(body) is None
    assert id_of(body) == "" and generation_of(body) == 0
    file = tmp_path / "kept.json"
    file.write_bytes(body)
    assert remembered.read(file, "main", "") == remembered.Remembered()
    with pytest.raises(StoreError, match="remove the file"):
        read_known(file)
