"""All ranks compare the digest of all their bytes, after every restore and every transfer."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace

import pytest

from holdfast.trainer.checkpoint import restore as restoring
from holdfast.trainer.checkpoint.format import Problem
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


def at_once(body):
    """What `body(rank, any_of)` came to on each rank: nothing, or its exception.  `any_of` asks all
    ranks, which ask equally often."""
    met, votes, found = threading.Barrier(WORLD, timeout=LIMIT_S), [False] * WORLD, [None] * WORLD

    def one(rank):
        def any_of(mine):
            votes[rank] = mine
            met.wait()
            said = any(votes)
            met.wait()
            return said

        try:
            body(rank, any_of)
        except Exception as error:  # a thread says it to nobody
            found[rank] = error
            if not isinstance(error, RestoreFailed):
                met.abort()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(WORLD)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    return found


def on_all(body):
    """What `body(rank, group)` came to on each rank: nothing, or its exception's words."""
    store = Store()
    found = at_once(lambda rank, any_of: body(rank, SimpleNamespace(
        rank=rank, world=WORLD, store=store, any=any_of, layout=LAYOUT, shard=0, copies=(0, 1),
        tell=lambda what, said: store.set(f"{what}/{rank}", json.dumps(said)))))
    return [str(one) if isinstance(one, RestoreFailed) else one if one is None else repr(one)
            for one in found]


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


@pytest.mark.parametrize("planned", [7, 5, 0, -1])  # -1: whichever they hold
def test_survivors_that_hold_another_step_than_was_planned_are_refused(planned, monkeypatch):
    monkeypatch.setattr(restoring, "_transfer", lambda *_: "x")
    held = [restoring.Held(step=7, torn=False), restoring.Held(step=9, torn=True)]

    def body(rank, group):
        restoring.restore(assignment(rank, "survivor", planned), group,
                          SimpleNamespace(empty=False), held[rank], None, None, None)

    said = on_all(body)
    assert all((one is None) == (planned in (7, -1)) for one in said), said


@pytest.mark.parametrize(("rank", "step", "has"), [
    (restoring.Held(7, torn=False), 7, True), (restoring.Held(7, torn=False), 8, False),
    (restoring.Held(7, torn=False), 6, False), (restoring.Held(7, torn=True), 7, False),
    (restoring.Held(7, torn=False, ready=True), 7, True),
    (restoring.Held(7, torn=False, ready=True), 8, True),  # it can make it
    (restoring.Held(7, torn=False, ready=True), 9, False),
    (restoring.Held(7, torn=False, ready=True), 6, False),
    (restoring.Held(7, torn=False, shard=1, shards=2), 7, False),
])
def test_who_holds_a_step(rank, step, has):
    assert restoring.holds(rank, step, 0, LAYOUT) is has


def test_who_is_a_step_behind_ends_it_with_the_norm_that_its_peer_had(monkeypatch):
    """And nobody takes the gradients of that step for those of another one afterwards."""
    monkeypatch.setattr(restoring, "_transfer", lambda *_: "same")
    held = [restoring.Held(8, torn=False, ready=True, norm=2.5),
            restoring.Held(7, torn=False, ready=True, norm=0.5)]
    ended = []

    def body(rank, group):
        restoring.restore(
            assignment(rank, "survivor", 8), group, SimpleNamespace(empty=False), held[rank], None,
            None, lambda step, norm: ended.append((rank, step, norm)))

    assert on_all(body) == [None, None]
    assert ended == [(1, 7, 2.5)]
    assert [(one.step, one.torn, one.norm, one.ready) for one in held] == [
        (8, False, 2.5, False)] * 2


@pytest.mark.parametrize(("holders", "needy"), [
    ([0], [1]), ([0], [1, 2, 3]), ([0, 3], [1, 2]), ([0, 3], [1, 2, 4, 5, 6]), ([0, 1, 2], [3])])
def test_every_newcomer_gets_all_of_the_state_from_one_who_sends_it(holders, needy, monkeypatch):
    sent, got, waited = set(), set(), []
    for rank in (*holders, *needy):
        monkeypatch.setattr(restoring, "dist", SimpleNamespace(
            isend=lambda chunk, to, tag, rank=rank: sent.add((rank, to, tag)) or SimpleNamespace(
                wait=lambda: waited.append((rank, to, tag))),
            irecv=lambda chunk, source, tag, rank=rank: got.add((source, rank, tag))))
        state = SimpleNamespace(data=SimpleNamespace(chunk=range), digest=lambda: "whole",
                                digest_while=lambda coming: "arrived")
        digest = restoring._transfer(SimpleNamespace(rank=rank), state, holders, needy)
        assert digest == ("whole" if rank in holders else "arrived")
    assert sent == got and len(got) == len(needy) * restoring.CHUNKS
    assert set(waited) == sent and len(waited) == len(sent), "nothing is changed that still travels"
    loads = [sum(source == rank for source, _, _ in got) for rank in holders]
    assert max(loads) - min(loads) <= restoring.CHUNKS


def test_a_damaged_checkpoint_that_is_passed_over_is_moved_away_and_told(monkeypatch):
    bad = [(SimpleNamespace(path=f"/c/step-{step}"), Problem(f"step-{step}", "no digest"))
           for step in (9, 8)]
    told, moved = [], []
    monkeypatch.setattr(restoring.files, "newest_valid", lambda root: ((1, 7, "/c/step-7"), bad))
    monkeypatch.setattr(restoring.files, "quarantine",
                        lambda path, why: moved.append((str(path), why)) or f"{path}.bad")
    elastic = SimpleNamespace(report=lambda *what: told.append(what))
    group = SimpleNamespace(rank=0, store=Store())
    assert restoring._newest(group, "/c", elastic) == ("disk", 7, "/c/step-7")
    assert moved == [("/c/step-9", "no digest"), ("/c/step-8", "no digest")]
    assert told == [("checkpoint_bad", f"/c/step-{step}: step-{step}: no digest; moved to "
                     f"/c/step-{step}.bad") for step in (9, 8)]


def test_a_run_without_an_agent_whose_checkpoints_are_all_bad_does_not_begin_at_step_0(tmp_path):
    """Nor the next try, which finds none but in the quarantine."""
    elastic = SimpleNamespace(report=lambda *what: None)
    group = SimpleNamespace(rank=0, store=Store())
    assert restoring._newest(group, tmp_path, elastic) == ("fresh", 0, "")
    for step in range(5):
        path = tmp_path / f"step-{step:09d}.gen-1"
        path.mkdir()
        (path / "COMMIT").write_text("of another")
    for name in ("step-0+4[.]gen-1.*", "step-0+[.]gen-1.*"):
        group = SimpleNamespace(rank=0, store=Store())
        for rank in (0, 1):
            group.rank = rank
            words = f"begin at step 0 .*; put aside as bad: .*/{name} and 4 more"
            with pytest.raises(restoring.BadCheckpoint, match=words):
                restoring._newest(group, tmp_path, elastic)
        assert [one.name for one in tmp_path.iterdir()] == ["quarantine"]
    assert restoring._newest(
        SimpleNamespace(rank=0, store=Store()), tmp_path / "empty", elastic) == ("fresh", 0, "")


def test_nor_does_one_whose_bad_checkpoints_cannot_be_moved(monkeypatch, tmp_path):
    path = tmp_path / "step-000000003.gen-1"
    path.mkdir()
    (path / "COMMIT").write_text("of another")

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(restoring.files, "quarantine", refuse)
    elastic = SimpleNamespace(report=lambda *what: None)
    with pytest.raises(restoring.BadCheckpoint, match="put aside as bad: .*/step-000000003.gen-1$"):
        restoring._newest(SimpleNamespace(rank=0, store=Store()), tmp_path, elastic)
    assert path.is_dir()
