"""Data from Ray: the same rows by number as from a disk, and what Ray loses is told as data.

By a stand-in for ray (ray_stand_in); `make ray` asks Ray itself (real_ray.py).
"""

from __future__ import annotations

import datetime
import importlib.util
import time
from pathlib import Path

import numpy as np
import pytest

from holdfast.agent.cli import main
from holdfast.trainer.config import ConfigError
from holdfast.trainer.feed.ray_data import RayData
from holdfast.trainer.feed.ray_source import packed

STAND_IN = Path(__file__).with_name("ray_stand_in")
LIMIT_S = 60.0


class World:
    """What the stand-in is told, and what it tells."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.opened = folder, []

    def trouble(self, *names: str) -> None:
        (self.folder / "trouble").write_text("\n".join(names))

    @property
    def actors(self) -> int:
        return len((self.folder / "actors").read_text().split())

    def feed(self, dataset: str, **more) -> RayData:
        found = RayData({"dataset": dataset, "rows": 5, "deadline_s": LIMIT_S, **more},
                        self.folder / "work")
        self.opened.append(found)
        return found

    def said(self, *given, **more) -> str:
        with pytest.raises(ConfigError) as caught:
            self.feed(*given, **more)
        return str(caught.value)

    def forget_copies(self) -> None:
        for copy in (self.folder / "work/shards").iterdir():
            copy.unlink()


@pytest.fixture
def ray(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(STAND_IN))
    monkeypatch.setenv("RAY_STAND_IN", str(tmp_path))
    world = World(tmp_path)
    yield world
    for one in world.opened:
        one._fetcher.close()


def test_rows_are_read_by_number_in_the_datasets_order(ray) -> None:
    found = ray.feed("sets:rows")
    assert [shard.rows for shard in found.shards] == [5, 5, 2]
    wanted = [11, 0, 7, 3, 4, 5]
    assert found.batch(wanted)["number"].tolist() == wanted
    assert ray.actors == 1


def test_pairs_are_held_out_of_the_last_rows(ray) -> None:
    found = ray.feed("sets:pairs", held_out=7)
    assert len(found) == 5 and found.heldout()[0].tolist() == list(range(5, 12))
    assert "held_out = 2: ray sets:rows/" in ray.said("sets:rows", held_out=2)


def test_what_ray_loses_comes_again(ray) -> None:
    ray.trouble("WorkerCrashedError", "ObjectLostError")
    found = ray.feed("sets:rows", in_memory=1)
    ray.trouble("ActorDiedError")
    assert found.batch([11])["number"].tolist() == [11]
    assert ray.actors == 2  # the rows went with it, and were made again


def test_a_client_that_ends_with_its_head_ends_no_rank(ray) -> None:
    found = ray.feed("sets:rows", in_memory=1)
    ray.trouble("exit", "exit")
    assert found.batch([11])["number"].tolist() == [11]
    assert ray.actors == 3


def test_a_client_that_ends_each_time_is_data_behind_the_deadline(ray) -> None:
    ray.trouble("exit", "always")
    # On a busy machine not even the first child ends within the shorter one.
    said = [ray.said("sets:rows", deadline_s=15.0)]
    if "did not come within" in said[0]:
        said.append(ray.said("sets:rows", deadline_s=LIMIT_S))
    assert "is not to be had: the child that fetches ended with 3: look at Ray's" in said[-1], said


def test_what_a_dataset_is_given_stands_in_no_command_line(ray) -> None:
    found = ray.feed("sets:rows", options={"token": "secret-of-the-test"})
    found.soon([0, 5, 11])
    pid = found._fetcher._child.pid
    assert b"secret-of-the-test" not in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_rows_that_are_others_when_they_are_made_again_are_named(ray) -> None:
    found = ray.feed("sets:changing", in_memory=1)
    found.batch([0])
    ray.forget_copies()
    ray.trouble("ActorDiedError")
    with pytest.raises(ConfigError, match="ray sets:changing/rows-000002.npz has other bytes than "
                                          "the index says: see that `dataset` makes the same rows"):
        found.batch([11])


def test_what_ray_never_gets_back_is_data_and_no_accelerator(ray, tmp_path, capsys) -> None:
    ray.trouble("WorkerCrashedError", "always")
    said = ray.said("sets:rows", deadline_s=15.0)
    assert said.startswith("data: ray sets:rows/index.json ")
    assert "within 15 s (WorkerCrashedError: it died unexpectedly): look at Ray's nodes" in said
    (tmp_path / "rank.log").write_text(f"holdfast train: {said}\n")
    assert main(["diagnose", str(tmp_path / "rank.log")]) == 0
    told = capsys.readouterr().out
    assert "trainer_data" in told and "data" in told.lower()


@pytest.mark.parametrize(("dataset", "words"), [
    ("sets:raising", "cannot be fetched: sets:raising raised ValueError: row 7 has no label"),
    ("sets:mapping", "cannot be fetched: sets:mapping raised ValueError: row 7 has no label"),
    ("sets:words", "column 'text' is <U2: rows need numbers"),
    ("sets:empty", "has no rows"),
    ("sets:nothing", "sets has no 'nothing'"),
])
def test_what_no_other_try_cures_is_a_sentence_at_once(ray, dataset, words) -> None:
    begun_s = time.monotonic()
    assert words in ray.said(dataset)
    assert time.monotonic() - begun_s < LIMIT_S / 2


def test_without_a_head_its_address_is_looked_for_until_the_deadline(ray) -> None:
    assert "ConnectionError" in ray.said("sets:rows", address="nowhere", deadline_s=15.0)


def test_settings_are_named(tmp_path) -> None:
    for given, words in (({}, 'data_options.dataset = \'\': set "module:function"'),
                         ({"dataset": "mine:rows", "rows": 0}, "data_options.rows = 0: set at least"
                          " 1"),
                         ({"dataset": "mine:rows", "options": {"since": datetime.date(2026, 1, 1)}},
                          "data_options.options: Object of type date")):
        with pytest.raises(ConfigError) as caught:
            RayData(given, tmp_path)
        assert words in str(caught.value)


def test_without_ray_the_extra_is_named(tmp_path) -> None:
    if importlib.util.find_spec("ray") is None:
        with pytest.raises(ConfigError, match="data: ray mine:rows/index.json is not to be had: no "
                                              r"ray: install holdfast\[ray\]"):
            RayData({"dataset": "mine:rows"}, tmp_path)


def test_columns_are_numbers() -> None:
    with pytest.raises(ValueError, match="column 'a' is object: rows need numbers"):
        packed({"a": np.array(["x", None], dtype=object)})
    assert packed({"a": np.ones(3)}) == packed({"a": np.ones(3)})
