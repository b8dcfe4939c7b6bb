"""Data from Ray, against Ray itself: `make ray`.  One head of Ray for all of it (on_ray.py)."""

from __future__ import annotations

import pytest
from own_python import RAY, Case

LIMIT_S = 300.0


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """`seen(case)`: what on_ray.py saw in it."""
    with Case(RAY, "on_ray.py", tmp_path_factory.mktemp("ray"), RAY_USAGE_STATS_ENABLED="0") as run:
        def asked(case):
            run.ask(case)
            return run.answer(LIMIT_S)

        yield asked


def test_rows_are_read_by_number_made_once_for_all_ranks_and_again_when_they_are_lost(seen) -> None:
    found = seen("order")
    made, again = found.pop("made"), found.pop("made again")
    assert made[:-1] == [1] * 7 and made[-1] <= 2  # a worker died on its way: Ray tries again
    assert [one - 1 for one in again] == made
    assert found == {"equal": True, "shards": [48, 48, 48, 48, 8], "numbers": True, "x": True,
                     "died": True, "again": True}


def test_a_training_ends_with_the_same_bits_as_from_shards(seen) -> None:
    found = seen("trained")
    assert found["ray"] == found["shards"]


def test_rows_that_are_others_when_they_are_made_again_end_it(seen) -> None:
    assert "ray on_ray:changing/rows-000004.npz has other bytes than the index says: see that " \
        "`dataset` makes the same rows" in seen("changed")


def test_a_worker_that_dies_at_every_try_is_told_as_data(seen) -> None:
    said = seen("dies")
    assert said.startswith("data: ray on_ray:dying/index.json ")
    assert "look at Ray's nodes and workers" in said


def test_what_no_other_try_cures_is_a_sentence_at_once(seen) -> None:
    assert "data: ray on_ray:raising/index.json cannot be fetched: on_ray:raising raised " \
        "ValueError: row 7 has no label" in seen("raises")
    assert "look at Ray's nodes and workers" in seen("nowhere")
