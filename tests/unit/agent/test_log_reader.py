"""The log child: spans of one generation, bounded samples, junk, and its life on a pipe."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.agent.core.detect.ranks import live_logs
from holdfast.agent.core.parse.logs import literals, unlisted
from holdfast.agent.logs import child
from holdfast.agent.logs import files as logfiles
from holdfast.agent.logs.files import Span

CATALOGUE = logfiles.load_catalogue()
ECC = b"RuntimeError: CUDA error: uncorrectable ECC error encountered\n"
USER = b'Traceback (most recent call last):\n  File "a.py", line 1, in f\nValueError: bad\n'
PEER = b"torch.distributed.DistBackendError: NCCL communicator was aborted on rank 1.\n"
OWN = {
    "id": "blob_gone", "role": "root", "category": "storage", "culprit": "storage",
    "retryable": "yes", "pattern": "blobfs: volume", "literals": ["blobfs: volume"],
}


class Files:
    """A run's log folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reader = child.Reader(CATALOGUE)
        self.number = 0

    def write(self, rank: int, data: bytes, name: str = "stderr.log") -> int:
        """Appends; returns where it began."""
        path = self.folder / f"rank-{rank}" / name
        path.parent.mkdir(exist_ok=True)
        for other in child.STREAMS:
            (path.parent / other).touch()
        with path.open("ab") as file:
            file.write(data)
            return file.tell() - len(data)

    def ask(self, what: str, *ranks: list[int], **more: Any) -> dict[str, Any]:
        self.number += 1
        rows = list(ranks) or [[0, 0, -1, 0, -1], [1, 0, -1, 0, -1]]
        request = {"n": self.number, "do": what, "folder": str(self.folder), "ranks": rows, **more}
        answer = self.reader.answer(json.loads(json.dumps(request)))
        assert answer["n"] == self.number and answer["cpu_s"] > 0 and answer["rss_bytes"] > 0
        return answer

    def root(self, *ranks: list[int], **more: Any) -> live_logs.Line | None:
        answer = self.ask("diagnose", *ranks, **more)
        read = live_logs.read(json.dumps(answer["detail"]))
        assert read is not None
        return read.root


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def test_the_root_of_all_ranks_is_found_with_its_place(files: Files) -> None:
    files.write(0, b"step 1\n" + PEER)
    at = files.write(1, b"step 1\n" * 300_000 + ECC) + 7 * 300_000
    found = files.root()
    assert found is not None and (found.signature, found.rank) == ("cuda_ecc", 1)
    assert (found.culprit, found.offset) == ("infra", at)
    assert found.path.endswith("rank-1/stderr.log")


def test_lines_of_another_generation_are_never_blamed(files: Files) -> None:
    files.write(1, ECC)
    begin = files.write(1, b"step 1\n" + USER)
    end = begin + 7 + len(USER)
    files.write(1, ECC)
    found = files.root([1, 0, -1, begin, end])
    assert found is not None and found.signature == "python_exception"
    assert files.root([1, 0, -1, begin, begin + 7]) is None
    assert files.root([1, 0, -1, end + len(ECC), -1]) is None


def test_without_clocks_the_rank_that_ended_first_is_the_first(files: Files) -> None:
    files.write(0, b"RuntimeError: CUDA error: device-side assert triggered\n")
    files.write(1, ECC)
    for order, expected in (((0, 1), "cuda_device_assert"), ((1, 0), "cuda_ecc")):
        found = files.root(*([rank, 0, -1, 0, -1] for rank in order))
        assert found is not None and found.signature == expected


def test_a_line_in_a_ranks_own_file_is_that_ranks(files: Files) -> None:
    files.write(1, b"[rank0]:[E] [PG ID 1 PG GUID 1 Rank 0] " + ECC)
    found = files.root()
    assert found is not None and (found.signature, found.rank) == ("cuda_ecc", 1)
    assert files.ask("sample", bytes=1 << 20)["seen"][0]["rank"] == 1


def test_a_missing_file_and_a_folder_in_its_place_are_problems(files: Files) -> None:
    files.write(0, ECC)
    (files.folder / "rank-1").mkdir()
    (files.folder / "rank-1" / "stdout.log").mkdir()
    answer = files.ask("diagnose")["detail"]
    assert answer["root"]["signature"] == "cuda_ecc"
    assert ["Is a directory" in text for text in answer["problems"]] == [True, False]
    assert "No such file" in answer["problems"][1]


def test_what_there_is_no_time_for_is_said(files: Files) -> None:
    files.write(0, ECC)
    files.write(1, USER)
    spans = child.spans_of(str(files.folder), [[0, 0, -1, 0, -1], [1, 0, -1, 0, -1]])
    report = logfiles.diagnose_tails(spans[1:], CATALOGUE, limit_s=0.0)
    assert [match.signature for match in report.diagnosis.matches] == ["cuda_ecc"]
    assert report.problems[0] == "2 of 3 files were not read within 0 s"


def test_an_answer_fits_its_packet_whatever_the_lines(files: Files) -> None:
    for rank in range(64):
        files.write(rank, b"\xff\xfe\x00" * 3000 + b"\n" + ECC[:-1] + b"\xe2\x80\xa6" * 900 + b"\n")
    answer = files.ask("diagnose", *([rank, 0, -1, 0, -1] for rank in range(64)))
    assert len(json.dumps(answer["detail"])) <= child.ANSWER_MAX_CHARS
    assert answer["detail"]["root"]["signature"] == "cuda_ecc"


def test_a_sample_reads_what_is_new_once(files: Files) -> None:
    files.write(0, ECC * 3)
    first = files.ask("sample", bytes=1 << 20)
    assert first["lines"] == [["cuda_ecc", "root", "infra", 3]] and first["skipped"] == 0
    assert [one["rank"] for one in first["seen"]] == [0, 0, 0]
    assert files.ask("sample", bytes=1 << 20)["lines"] == []
    files.write(0, b"loss: nan\n" + ECC[:20])
    assert files.ask("sample", bytes=1 << 20)["lines"] == [["loss_nonfinite", "signal", "data", 1]]
    files.write(0, ECC[20:])  # the half line is whole now
    assert files.ask("sample", bytes=1 << 20)["lines"] == [["cuda_ecc", "root", "infra", 1]]


def test_a_traceback_cut_by_a_sample_is_one_thing(files: Files) -> None:
    files.write(0, USER[:-17])
    assert files.ask("sample", bytes=1 << 20)["lines"] == []
    files.write(0, USER[-17:])
    lines = files.ask("sample", bytes=1 << 20)["lines"]
    assert lines == [["python_exception", "root", "user", 1]]


def test_a_loud_file_loses_its_older_part_and_a_quiet_one_nothing(files: Files) -> None:
    budget = 100_000
    loud = ECC + b"quiet\n" * 500_000
    files.write(0, loud)
    files.write(1, ECC)
    answer = files.ask("sample", bytes=budget)
    assert answer["lines"] == [["cuda_ecc", "root", "infra", 1]]
    assert answer["seen"][0]["rank"] == 1
    assert answer["read"] <= budget
    assert answer["skipped"] + answer["read"] >= len(loud) + len(ECC)
    assert len(loud) - budget <= answer["skipped"] <= len(loud) - budget // 2
    assert files.ask("sample", bytes=budget)["skipped"] == 0


def test_a_file_that_was_cut_is_read_from_its_begin(files: Files) -> None:
    files.write(0, b"quiet\n" * 100)
    files.ask("sample", bytes=1 << 20)
    (files.folder / "rank-0" / "stderr.log").write_bytes(ECC)
    assert files.ask("sample", bytes=1 << 20)["lines"] == [["cuda_ecc", "root", "infra", 1]]


def test_more_files_than_the_budget_reads_of_are_counted(files: Files) -> None:
    for rank in range(40):
        files.write(rank, b"quiet\n" * 2000)
    answer = files.ask("sample", *([rank, 0, -1, 0, -1] for rank in range(40)), bytes=50_000)
    assert answer["read"] <= 50_000
    assert answer["read"] + answer["skipped"] >= 40 * 12_000


def test_own_signatures_go_first_and_bad_ones_change_nothing(files: Files) -> None:
    files.write(0, b"E0412 blobfs: volume train-7 went away\n")
    assert files.root() is None
    found = files.root(own=[OWN])
    assert found is not None and (found.signature, found.culprit) == ("blob_gone", "storage")
    answer = files.ask("diagnose", own=[{**OWN, "pattern": "("}])
    assert answer["detail"]["root"] is None and "own signatures" in answer["problem"]
    shadow = {**OWN, "id": "cuda_ecc", "pattern": "uncorrectable ECC", "literals": ["ECC error"]}
    files.write(1, ECC)
    found = files.root(own=[shadow])
    assert found is not None and (found.signature, found.culprit) == ("cuda_ecc", "storage")


def test_requests_come_and_go_by_lines(files: Files) -> None:
    files.write(0, ECC)
    good = {"n": 7, "do": "diagnose", "folder": str(files.folder), "ranks": [[0, 0, -1, 0, -1]]}
    lines = [b"junk", b"[]", b'{"do": "diagnose"}', json.dumps(good).encode(),
             json.dumps({**good, "n": 8, "ranks": [[0, 0]]}).encode()]
    sink = io.BytesIO()
    child.serve(io.BytesIO(b"\n".join(lines)), sink, files.reader)
    said = [json.loads(line) for line in sink.getvalue().splitlines()]
    assert ["error" in one for one in said] == [True, True, True, False, True]
    assert said[3]["n"] == 7 and said[3]["detail"]["root"]["signature"] == "cuda_ecc"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(max_size=300), max_size=8), st.integers(0, 20_000))
def test_junk_is_read_and_never_twice(pieces: list[bytes], budget: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        made = Files(Path(folder))
        total = covered = 0
        for piece in pieces:
            made.write(0, piece)
            total += len(piece)
            answer = made.ask("sample", [0, 0, -1, 0, -1], bytes=budget)
            assert answer["read"] <= max(0, budget)
            covered += answer["skipped"]
        assert covered <= total


def test_a_span_that_lies_beyond_its_file_is_empty(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(ECC)
    for begin, end in ((1000, -1), (1000, 2000), (10, 5)):
        assert logfiles.read_tail(Span(str(tmp_path / "a"), 0, begin, end), 100)[1] == b""


# ----------------------------------------------------------------- what no signature knows


def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(file, bytes) of each search for errors without a signature."""
    looked: list[tuple[int, int]] = []
    read = unlisted.Reader.read

    def counted(self: unlisted.Reader, data: bytes, *more: Any) -> list[Any]:
        looked.append((self.file, len(data)))
        return read(self, data, *more)

    monkeypatch.setattr(unlisted.Reader, "read", counted)
    return looked


def test_no_log_is_searched_further_where_one_rank_has_a_sure_root(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = looked_at(monkeypatch)
    for rank in range(4):
        files.write(rank, b"step 1\n" * 9000 + PEER)
    files.write(3, ECC)
    ranks = [[rank, 0, -1, 0, -1] for rank in range(4)]
    found = files.root(*ranks)
    assert found is not None and found.signature == "cuda_ecc"
    assert looked == []


def test_the_further_search_is_bounded_and_takes_the_newest_logs_first(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = looked_at(monkeypatch)
    monkeypatch.setattr(logfiles, "FURTHER_BYTES", 256 << 10)
    for rank in range(8):
        files.write(rank, b"step 1\n" * 20_000 + b"amdgpu: GPU reset begin!\n")
        os.utime(files.folder / f"rank-{rank}" / "stderr.log", (rank, rank))
    found = files.root(*([rank, 0, -1, 0, -1] for rank in range(8)))
    assert found is not None and (found.culprit, found.family) == ("infra", True)
    assert [file // 2 for file, _ in looked] == [7, 6, 5, 4]
    assert sum(nbytes for _, nbytes in looked) <= 256 << 10
    begin = (files.folder / "rank-4/stderr.log").stat().st_size - len(b"amdgpu: GPU reset begin!\n")
    assert found.offset == begin


def test_what_a_diagnosis_needs_is_loaded_behind_the_first_sample(files: Files) -> None:
    """The first question after a fault comes while ranks come back."""
    files.write(0, b"step 1\n")
    caches = logfiles.load_families, literals.sieve_of
    for cache in caches:
        cache.cache_clear()
    sample = {"n": 1, "do": "sample", "folder": str(files.folder), "bytes": 1000,
              "ranks": [[0, 0, -1, 0, -1]]}
    sink = io.BytesIO()
    child.serve(io.BytesIO(json.dumps(sample).encode() + b"\n"), sink, files.reader)
    assert json.loads(sink.getvalue())["n"] == 1
    before = [cache.cache_info().misses for cache in caches]
    assert min(before) >= 1
    files.write(0, b"RuntimeError: something that nobody has met, at 0x7f\n")
    files.ask("diagnose", [0, 0, -1, 0, -1])
    assert [cache.cache_info().misses for cache in caches] == before
