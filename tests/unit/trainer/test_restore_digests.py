"""All ranks compare the digest of all their bytes, after every restore and every transfer."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from holdfast.trainer.checkpoint import restore as restoring
from holdfast.trainer.engines.strategy import Layout, Place
from holdfast.trainer.group import RestoreFailed
from holdfast.trainer.standalone import Assignment

WORLD, LIMIT_S = 2, 30.0
LAYOUT = Layout((Place(), Place(data=1)), data=2)


class Store(dict):
    """Keys that one rank sets and another waits for."""

    def __init__(self):
        super().__init__()
        self.changed = threading.Condition()

    def set(self, key, value):
        with self.changed:
            self[key] = value.encode()
            self.changed.notify_all()

    def get(self, key):
        with self.changed:
            assert self.changed.wait_for(lambda: key in self, LIMIT_S), key
            return self[key]

    def multi_get(self, keys):
        return [self.get(key) for key in keys]


def on_all(body):
    """What `body(rank, group)` came to on each rank: nothing, or its exception."""
    store, met, votes = Store(), threading.Barrier(WORLD, timeout=LIMIT_S), [False] * WORLD
    found = [None] * WORLD

    def one(rank):
        def any_of(mine):
            votes[rank] = mine
            met.wait()
            said = any(votes)
            met.wait()
            return said

        try:
            body(rank, SimpleNamespace(
                rank=rank, world=WORLD, store=store, any=any_of, layout=LAYOUT, shard=0,
                copies=(0, 1)))
        except RestoreFailed as error:
            found[rank] = str(error)
        except Exception as error:  # a thread says it to nobody
            found[rank] = repr(error)
            met.abort()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(WORLD)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    return found


def assignment(rank, kind, step=0):
    return Assignment(2, rank, rank, WORLD, "127.0.0.1", 1, kind, step, 1, "", run="t")


@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("kind", ["fresh", "disk", "snapshot"])
def test_ranks_that_hold_different_bytes_after_a_restore_do_not_train(kind, equal, monkeypatch):
    monkeypatch.setattr(restoring, "_from_disk", lambda *_: 8)
    monkeypatch.setattr(restoring, "_from_snapshot", lambda *_: "")
    held = [restoring.Held(step=3, torn=False) for _ in range(WORLD)]

    def body(rank, group):
        state = SimpleNamespace(
            digest=lambda: "same" if equal else f"of rank {rank}", empty=False)
        restoring.restore(assignment(rank, kind, 8), group, state, held[rank], None, lambda: None,
                           None)

    said = on_all(body)
    assert all((one is None) == equal for one in said), said
    if equal:
        assert [(one.step, one.torn) for one in held] == [(0 if kind == "fresh" else 8, False)] * 2
    else:
        assert all("different bytes" in one for one in said) and all(one.torn for one in held)


@pytest.mark.parametrize(("damaged", "ends_well"), [(0, True), (1, True), (2, False)])
def test_what_arrived_differently_is_sent_again_once_and_never_used(
    damaged, ends_well, monkeypatch
):
    held = [restoring.Held(step=7, torn=False), restoring.Held()]
    sent = [0, 0]

    def transfer(group, state, holders, needy):
        assert (holders, needy) == ([0], [1])
        sent[group.rank] += 1
        arrived_well = group.rank in holders or sent[group.rank] > damaged
        return "whole" if arrived_well else "a flipped bit"

    monkeypatch.setattr(restoring, "_transfer", transfer)

    def body(rank, group):
        restoring.restore(assignment(rank, "survivor", 7), group, SimpleNamespace(empty=False),
                          held[rank], None, None, None)

    said = on_all(body)
    assert sent == [min(damaged + 1, restoring.TRANSFERS)] * 2
    if ends_well:
        assert said == [None, None] and [(h.step, h.torn) for h in held] == [(7, False)] * 2
    else:
        assert all("arrived damaged 2 times" in one for one in said)
        assert [h.torn for h in held] == [False, True]


@pytest.mark.parametrize("planned", [7, 5])
def test_survivors_that_hold_another_step_than_was_planned_are_refused(planned, monkeypatch):
    monkeypatch.setattr(restoring, "_transfer", lambda *_: "x")
    held = [restoring.Held(step=7, torn=False), restoring.Held(step=9, torn=True)]

    def body(rank, group):
        restoring.restore(assignment(rank, "survivor", planned), group,
                          SimpleNamespace(empty=False), held[rank], None, None, None)

    said = on_all(body)
    assert all((one is None) == (planned == 7) for one in said), said
