"""Data in shards: found by number, brought from disk or S3, and named when it is not there."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import waiting
from harness import Launcher, Lost

from holdfast.trainer.config import ConfigError, load
from holdfast.trainer.data import Sampler
from holdfast.trainer.feed import fetch, shards

ROWS = (7, 1, 12, 5)


def arrays() -> list[dict[str, np.ndarray]]:
    draw = np.random.RandomState(0)
    made, first = [], 0
    for rows in ROWS:
        x = draw.randn(rows, 8).astype(np.float32)
        number = np.arange(first, first + rows)
        made.append({"x": x, "y": x.sum(1, keepdims=True), "number": number})
        first += rows
    return made


@pytest.fixture
def root(tmp_path) -> Path:
    shards.write(tmp_path / "data", arrays())
    return tmp_path / "data"


def data(root, tmp_path, **more) -> shards.Shards:
    return shards.Shards({"root": str(root), **more}, tmp_path / "work")


def test_a_sample_is_its_number_wherever_it_lies(root, tmp_path) -> None:
    found = data(root, tmp_path, in_memory=1)
    assert len(found) == sum(ROWS)
    order = random.Random(0).sample(range(len(found)), len(found))
    assert found.batch(order)["number"].tolist() == order
    assert len(found._open) == 1  # never more than were asked for
    assert found.place(0) == (0, 0) and found.place(7) == (1, 0) and found.place(24) == (3, 4)


def test_each_sample_once_an_epoch_while_the_world_shrinks_and_grows(root, tmp_path) -> None:
    found, seen = data(root, tmp_path), []
    sampler = Sampler(len(found), 3, 1, 5)  # 25 samples: five steps are an epoch
    for step, world in enumerate((4, 3, 1, 2, 5)):
        for rank in range(world):
            for number in sampler.mine(rank, world):
                seen += found.batch(sampler.indices(step, number))["number"].tolist()
    assert sorted(seen) == list(range(25))


def said(function) -> str:
    with pytest.raises(ConfigError) as caught:
        function()
    return str(caught.value)


def test_what_is_wrong_with_a_shard_is_said_with_its_name(root, tmp_path) -> None:
    def all_of_it():
        found = data(root, tmp_path)
        return found.batch(range(len(found)))

    path = root / "shard-000002.npz"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert f"{path} has other bytes than the index says: put it back" in said(all_of_it)
    path.unlink()
    assert f"data: {path} has vanished (no such file): put it back" in said(all_of_it)
    path.mkdir()
    assert f"{path} cannot be read: Is a directory" in said(all_of_it)
    (root / "index.json").write_text('{"shards": [{"name": "../x", "rows": 1, "nbytes": 1, '
                                     '"digest": ""}]}')
    assert "lists no shards, or one that is empty or elsewhere" in said(all_of_it)
    (root / "index.json").write_text("{")
    assert "is no index of shards" in said(all_of_it)
    (root / "index.json").unlink()
    assert "index.json no such file: put it back" in said(all_of_it)
    assert "data_options.root = ''" in said(lambda: shards.Shards({}, tmp_path))


def test_a_vanished_shard_ends_the_run_as_data_and_nobody_starts_it_again(root, tmp_path) -> None:
    (root / "shard-000002.npz").unlink()
    config = load(None, [
        "model=tiny:Model", "data=holdfast.trainer.feed.shards:Shards", "steps=9", "batch=2",
        f"data_options.root={root}", f"work_dir={tmp_path}", "checkpoint.every=0"])
    with pytest.raises(Lost, match="ConfigError: data: .*shard-000002.npz has vanished"):
        Launcher(config, 2, tmp_path).run(timeout_s=300.0)


# ------------------------------------------------------------------------------------- slow stores


class Error(Exception):
    pass


def brought(answers: list[object], within_s: float = 1e6) -> tuple[dict, list[float]]:
    waits: list[float] = []

    def get(_name: str) -> bytes:
        answer = answers.pop(0)
        if isinstance(answer, str):
            raise Error(answer)
        return bytes(answer)

    to = Path(os.environ["TMPDIR_OF_TEST"]) / "x"
    return fetch.bring(get, str, "x", to, within_s, waits.append), waits


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TMPDIR_OF_TEST", str(tmp_path))


def test_a_slow_store_is_asked_again_each_time_later(tmp_path) -> None:
    answer, waits = brought(["SlowDown"] * 9 + [b"data"])
    assert answer == {"name": "x"} and (tmp_path / "x").read_bytes() == b"data"
    limits = [min(fetch.FIRST_WAIT_S * 2 ** n, fetch.LONGEST_WAIT_S) for n in range(9)]
    assert all(limit / 2 <= wait <= limit for wait, limit in zip(waits, limits, strict=True))
    answer, waits = brought(["503"] * 99, within_s=3.0)
    assert answer["failed"] == "cannot be fetched: 503" and len(waits) < 99
    assert brought(["NoSuchKey"])[0] == {"name": "x", "absent": "NoSuchKey"}
    assert brought(["AccessDenied"]) == ({"name": "x", "failed": "cannot be fetched: AccessDenied"},
                                         [])


# ------------------------------------------------------------------------------------- S3


@pytest.fixture
def s3(root, monkeypatch):
    """moto's server in a process of its own, with the shards in a bucket."""
    boto3 = pytest.importorskip("boto3", reason="boto3 is not installed")
    pytest.importorskip("moto.server", reason="moto is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in (("AWS_ACCESS_KEY_ID", "a"), ("AWS_SECRET_ACCESS_KEY", "b"),
                        ("AWS_DEFAULT_REGION", "us-east-1"),
                        ("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")):
        monkeypatch.setenv(name, value)
    server = subprocess.Popen([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p",
                               str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        def up() -> bool:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                return True
            return False

        waiting.wait_for(up, 120.0)
        client = boto3.client("s3")
        client.create_bucket(Bucket="m5-data")
        for path in root.iterdir():
            client.upload_file(str(path), "m5-data", f"train/{path.name}")
        yield client
    finally:
        server.kill()
        server.wait(10)


def test_shards_come_from_s3_and_a_vanished_one_is_named(s3, root, tmp_path) -> None:
    local = data(root, tmp_path)
    found = data("s3://m5-data/train", tmp_path)
    try:
        assert found.digest == local.digest
        assert found.batch(range(25))["number"].tolist() == list(range(25))
        assert {one.name for one in (tmp_path / "work/shards").iterdir()} == {
            one.name for one in root.iterdir()}
        shutil.rmtree(tmp_path / "work")
        s3.delete_object(Bucket="m5-data", Key="train/shard-000001.npz")
        again = data("s3://m5-data/train", tmp_path)
        text = said(lambda: again.batch([7]))
        assert "data: s3://m5-data/train/shard-000001.npz has vanished (NoSuchKey)" in text
        again._fetcher.close()
    finally:
        found._fetcher.close()


def test_an_s3_that_is_not_there_is_said(tmp_path, monkeypatch) -> None:
    pytest.importorskip("boto3", reason="boto3 is not installed")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    assert "s3://m5/x/index.json cannot be fetched" in said(lambda: data("s3://m5/x", tmp_path))
