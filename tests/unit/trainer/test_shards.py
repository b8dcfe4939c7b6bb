"""Data in shards: found by number, brought from disk or S3, and named when it is not there."""

from __future__ import annotations

import contextlib
import http.server
import os
import random
import resource
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import waiting
from harness import Launcher, Lost
from ports import free_port

from holdfast.agent.cli import main
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


def test_ranks_that_see_other_data_do_not_train_together(tmp_path) -> None:
    config = load(None, [
        "model=tiny:Model", "data=tiny:Own", "steps=3", "batch=2", f"work_dir={tmp_path}",
        "checkpoint.every=0"])
    with pytest.raises(Lost, match="ConfigError: data: rank . sees data of digest .*changed as"):
        Launcher(config, 2, tmp_path).run(timeout_s=300.0)


def test_a_step_asks_ahead_for_the_next_one_and_never_past_the_last(tmp_path) -> None:
    config = load(None, [
        "model=tiny:Model", "data=tiny:Ahead", "steps=4", "batch=2", "micro_batches=4",
        f"work_dir={tmp_path}", f"data_options.log={tmp_path / 'ahead'}", "checkpoint.every=0"])
    Launcher(config, 2, tmp_path).run(timeout_s=300.0)
    sampler, wanted = Sampler(40, 0, 2, 4), []
    for rank in range(2):
        for step in range(1, 4):
            wanted.append(str([index for number in sampler.mine(rank, 2)
                               for index in sampler.indices(step, number)]))
    assert sorted((tmp_path / "ahead").read_text().splitlines()) == sorted(wanted)


# ------------------------------------------------------------------------------------- held out


@pytest.fixture
def pairs(tmp_path) -> Path:
    """40 pairs in shards of 10; what is in a pair is its number."""
    number = np.arange(40, dtype=np.float32).repeat(16).reshape(40, 16)
    shards.write(tmp_path / "pairs", [
        {"query": number[first : first + 10], "document": -number[first : first + 10]}
        for first in range(0, 40, 10)])
    return tmp_path / "pairs"


def test_the_last_samples_are_held_out_and_never_trained_on(pairs, tmp_path) -> None:
    whole, found = data(pairs, tmp_path), data(pairs, tmp_path, held_out=13, in_memory=1)
    assert (len(whole), len(found)) == (40, 27) and not hasattr(whole, "heldout")
    queries, documents = found.heldout()
    assert queries[:, 0].tolist() == list(range(27, 40)) and torch.equal(documents, -queries)
    sampler = Sampler(len(found), 3, 3, 3)
    seen = [index for step in range(6) for number in range(3)
            for index in sampler.indices(step, number)]
    assert set(found.batch(seen)["query"][:, 0].tolist()) == set(range(27))
    # What is trained on is other data.
    digests = {data(pairs, tmp_path, held_out=count).digest for count in (0, 12, 13)}
    assert len(digests) == 3 and whole.digest in digests and found.digest in digests


def test_what_cannot_be_held_out_is_a_sentence(pairs, root, tmp_path) -> None:
    assert "data_options.held_out = 40: " in said(lambda: data(pairs, tmp_path, held_out=40))
    text = said(lambda: data(root, tmp_path, held_out=2))
    assert "shard-000003.npz has number, x, y, and no query and no document: name the" in text
    rows = [np.zeros((2, width), np.float32) for width in (3, 4)]
    shards.write(tmp_path / "odd", [{"query": one, "document": one} for one in rows])
    text = said(lambda: data(tmp_path / "odd", tmp_path, held_out=3))
    assert "data_options.held_out = 3: " in text and "same shape" in text


def test_a_run_on_shards_is_evaluated_and_can_be_judged(pairs, tmp_path) -> None:
    kept = []
    for seed in (0, 1):
        config = load(None, [
            "model=paired:Encoder", "data=holdfast.trainer.feed.shards:Shards", "steps=2",
            "batch=4", f"data_options.root={pairs}", "data_options.held_out=13", f"seed={seed}",
            f"work_dir={tmp_path / str(seed)}", "checkpoint.every=0"])
        (tmp_path / str(seed)).mkdir()
        results = Launcher(config, 2, tmp_path / str(seed)).run(timeout_s=300.0)
        assert {"mrr_at_10", "recall_at_10"} == results[0].evaluation.keys()
        kept.append(str(config.checkpoint_dir))
    assert main(["parity", *kept]) == 3  # 13 pairs


# ------------------------------------------------------------------------------------- slow stores


def brought(answers: list[object], within_s: float = 1e6) -> tuple[dict, list[float], dict]:
    waits, kept = list[float](), dict[str, bytes]()

    def get(_name: str) -> bytes:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return fetch.bring(get, kept.__setitem__, "x", "c", within_s, waits.append), waits, kept


def test_a_slow_store_is_asked_again_each_time_later() -> None:
    answer, waits, kept = brought([fetch.Slow("SlowDown")] * 9 + [b"data"])
    assert answer == {"copy": "c"} and kept == {"c": b"data"}
    limits = [min(fetch.FIRST_WAIT_S * 2 ** n, fetch.LONGEST_WAIT_S) for n in range(9)]
    assert all(limit / 2 <= wait <= limit for wait, limit in zip(waits, limits, strict=True))
    answer, waits, _ = brought([fetch.Slow("503")] * 99, within_s=3.0)
    assert "within 3 s (503): look at the network" in answer["failed"] and len(waits) < 99
    assert brought([fetch.Absent("NoSuchKey")])[0] == {"copy": "c", "absent": "NoSuchKey"}
    answer, waits, _ = brought([ValueError("AccessDenied")])
    assert "cannot be fetched: AccessDenied: set data_options.root" in answer["failed"]
    assert waits == []


def test_the_copy_read_longest_ago_goes_first_and_none_that_is_wanted(tmp_path) -> None:
    copies = fetch.Copies(tmp_path, 40)
    for age, name in enumerate("abcd"):
        copies.keep(name, bytes(10))
        os.utime(tmp_path / name, (1000 + age, 1000 + age))
    (tmp_path / ".e.1.tmp").write_bytes(bytes(10))  # which another rank writes
    os.utime(tmp_path / "a")  # it was read just now
    copies.wanted = frozenset("b")
    copies.keep("e", bytes(20))
    assert {one.name for one in tmp_path.iterdir()} == {"a", "b", "e", ".e.1.tmp"}
    copies.wanted = frozenset("abe")
    copies.keep("f", bytes(20))  # the bound gives way to what is needed
    assert {one.name for one in tmp_path.iterdir()} == {"a", "b", "e", "f", ".e.1.tmp"}
    os.utime(tmp_path / ".e.1.tmp", (1000, 1000))  # whoever wrote it was ended
    fetch.Copies(tmp_path, 20).evict(0)
    assert {one.name for one in tmp_path.iterdir()} == {"f"}


# ------------------------------------------------------------------------------------- S3


@pytest.fixture
def s3(root, monkeypatch):
    """moto's server in a process of its own, with the shards in a bucket."""
    boto3 = pytest.importorskip("boto3", reason="boto3 is not installed")
    pytest.importorskip("moto.server", reason="moto is not installed")
    port = free_port()
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
            one.copy for one in found.shards}
        shutil.rmtree(tmp_path / "work")
        s3.delete_object(Bucket="m5-data", Key="train/shard-000001.npz")
        again = data("s3://m5-data/train", tmp_path)
        text = said(lambda: again.batch([7]))
        assert "data: s3://m5-data/train/shard-000001.npz has vanished (NoSuchKey)" in text
        again._fetcher.close()
    finally:
        found._fetcher.close()


def test_old_copies_stand_in_for_no_other_data_set(s3, root, tmp_path) -> None:
    """Nor for the same one, once it was written anew; a damaged copy is brought again."""
    def numbers(where: str) -> list[int]:
        found = data(where, tmp_path)
        try:
            return found.batch(range(len(found)))["number"].tolist()
        finally:
            found._fetcher.close()

    def put(bucket: str, rows: range) -> None:
        shutil.rmtree(root)
        shards.write(root, [{"number": np.asarray(rows)}])
        for path in root.iterdir():
            s3.upload_file(str(path), bucket, f"train/{path.name}")

    assert numbers("s3://m5-data/train") == list(range(25))
    s3.create_bucket(Bucket="other")
    put("other", range(100, 103))
    assert numbers("s3://other/train") == [100, 101, 102]
    put("m5-data", range(200, 206))
    assert numbers("s3://m5-data/train") == list(range(200, 206))
    for path in (tmp_path / "work/shards").iterdir():
        path.write_bytes(b"damaged")
    assert numbers("s3://m5-data/train") == list(range(200, 206))


def test_copies_stay_below_their_bound(s3, root, tmp_path) -> None:
    largest = max(path.stat().st_size for path in root.iterdir())
    found = data("s3://m5-data/train", tmp_path, in_memory=1, local_gb=2 * largest / 1e9)
    try:
        for _ in range(2):
            for first in (0, 7, 8, 20):
                assert found.batch([first])["number"].tolist() == [first]
                kept = list((tmp_path / "work/shards").iterdir())
                assert sum(one.stat().st_size for one in kept) <= 2 * largest
    finally:
        found._fetcher.close()


# ------------------------------------------------------------------------ networks and full disks


class Hurt(http.server.BaseHTTPRequestHandler):
    """Serves a folder as a bucket `b`; the first answers to each key are hurt, one by one."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        server, name = self.server, self.path.removeprefix("/b/").split("?")[0]
        server.asked.append(name)
        hurt = server.hurts.get(name, [])
        how = hurt.pop(0) if hurt else ""
        if how == "hang":
            server.ended.wait(60)
        if how in ("hang", "close"):
            self.close_connection = True
            return
        path = server.folder / name
        body = path.read_bytes() if path.exists() else b""
        self.send_response({"503": 503}.get(how, 200 if body else 404))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if how == "half" else body)
        self.close_connection = how == "half"

    def log_message(self, *_words: object) -> None: ...


@pytest.fixture
def hurt(root, monkeypatch):
    pytest.importorskip("boto3", reason="boto3 is not installed")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hurt)
    server.folder, server.hurts, server.asked = root, {}, []
    server.ended = threading.Event()
    for name, value in (("AWS_ACCESS_KEY_ID", "a"), ("AWS_SECRET_ACCESS_KEY", "b"),
                        ("AWS_DEFAULT_REGION", "us-east-1"),
                        ("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")):
        monkeypatch.setenv(name, value)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.ended.set()
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_network_that_fails_for_a_while_is_waited_for(hurt, tmp_path) -> None:
    """A connection that is closed, half an answer, a server that has no time."""
    hurt.hurts = {"index.json": ["close", "503"], "shard-000002.npz": ["half", "close"]}
    found = data("s3://b", tmp_path)
    try:
        assert found.batch(range(25))["number"].tolist() == list(range(25))
        assert hurt.asked.count("index.json") >= 3 and hurt.asked.count("shard-000002.npz") >= 3
    finally:
        found._fetcher.close()


def test_what_a_network_does_is_told_by_its_type(hurt, monkeypatch) -> None:
    hurt.hurts = {"index.json": ["hang", "hang"], "shard-000000.npz": ["half"]}
    hasty, patient = fetch.s3_get("s3://b", read_s=0.2), fetch.s3_get("s3://b")
    for get, name, word in ((hasty, "index.json", "ReadTimeout"),
                            (patient, "shard-000000.npz", "Incomplete|Streaming")):
        with pytest.raises(fetch.Slow, match=word):
            get(name)
    with pytest.raises(fetch.Absent):
        patient("nothing")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(fetch.Slow, match="EndpointConnectionError"):
        fetch.s3_get("s3://b")("x")


def test_shards_asked_ahead_come_while_nobody_reads_them(hurt, tmp_path) -> None:
    found = data("s3://b", tmp_path)
    try:
        found.batch([0])
        found.soon([7, 20])
        here = {found.shards[1].copy, found.shards[3].copy}
        folder = tmp_path / "work/shards"
        waiting.wait_for(lambda: here <= {one.name for one in folder.iterdir()}, 60.0)
        assert "shard-000002.npz" not in hurt.asked
        before = len(hurt.asked)
        assert found.batch([7, 20])["number"].tolist() == [7, 20] and len(hurt.asked) == before
        # What failed ahead is asked for again by who needs it, and is no error before.
        (hurt.folder / "shard-000002.npz").rename(tmp_path / "away")
        found.soon([8])
        waiting.wait_for(lambda: "shard-000002.npz" in hurt.asked, 60.0)
        waiting.wait_for(lambda: not found._fetcher._answers.empty(), 60.0)
        (tmp_path / "away").rename(hurt.folder / "shard-000002.npz")
        assert found.batch([8])["number"].tolist() == [8]
    finally:
        found._fetcher.close()


def test_a_shard_put_back_while_it_was_asked_ahead_is_found(tmp_path, monkeypatch) -> None:
    """The answer that it is missing is on its way when it is needed: it is asked for once more."""
    found, told = fetch.Fetcher("s3://b", tmp_path, 5.0), []

    def tell(name, copy):
        told.append(name)
        found._asked.add(copy)
        found._answers.put(answers.pop(0) | {"copy": copy})

    monkeypatch.setattr(found, "_tell", tell)
    answers = [{"absent": "404"}, {}, {"absent": "404"}, {"absent": "404"}]
    for again in (contextlib.nullcontext(), pytest.raises(fetch.NotThere, match="404")):
        tell("shard", "copy")
        with again:
            found._wait("shard", "copy")
    assert told == ["shard"] * 4 and not answers


def test_a_disk_that_takes_no_more_is_named(hurt, tmp_path) -> None:
    found = data("s3://b", tmp_path)
    found._fetcher.close()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        text = said(lambda: found.batch([0]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        found._fetcher.close()
    folder = tmp_path / "work/shards"
    assert f"shard-000000.npz cannot be kept in {folder}: File too large: make room" in text


def test_an_s3_that_is_not_there_is_said(tmp_path, monkeypatch) -> None:
    pytest.importorskip("boto3", reason="boto3 is not installed")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    text = said(lambda: data("s3://m5/x", tmp_path, deadline_s=2.0))
    assert "s3://m5/x/index.json " in text and "look at the network" in text
