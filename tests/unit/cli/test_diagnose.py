"""`holdfast diagnose` over files as people keep them: folders, gzip, standard input, junk."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.agent.cli import main
from holdfast.agent.cli.diagnose import said
from holdfast.agent.cli.text import field, plain
from holdfast.agent.logs import files

Captured = pytest.CaptureFixture[str]
USER = b'Traceback (most recent call last):\n  File "a.py", line 1, in f\nValueError: bad\n'


@pytest.mark.parametrize(
    ("path", "rank"),
    [
        ("logs/rank3.log", 3), ("logs/rank_12/x.log", 12), ("run/attempt_0/7/stderr.log", 7),
        ("4.out", 4), ("g2-rank5.a1/stdout.log", 5), ("slurm-4711.out", -1), ("run.log", -1),
        ("rank3/attempt_0/stdout.log", 3), ("lora_rank16/train.log", -1),
        ("lora_rank16/rank2.log", 2), ("lora_rank16/1/stderr.log", 1),
    ],
)
def test_a_path_names_its_rank(path: str, rank: int) -> None:
    assert files.rank_of(path) == rank


def test_gzip_and_a_folder(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "rank1.log.gz").write_bytes(gzip.compress(USER))
    (tmp_path / "rank0.log").write_bytes(b"\xff\xfe\x00junk" * 9000)
    (tmp_path / "weights.bin").write_bytes(USER)
    assert main(["diagnose", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["root"]["signature"], found["root"]["rank"]) == ("python_exception", 1)
    assert (found["root"]["culprit"], found["blames"], len(found["files"])) == ("user", "job", 2)


def test_a_cut_gzip_is_read_as_far_as_it_goes(tmp_path: Path, capsys: Captured) -> None:
    packed = gzip.compress(USER + b"quiet\n" * 200_000, 0)
    (tmp_path / "a.log.gz").write_bytes(packed[: len(packed) // 2])
    (tmp_path / "b.log.gz").write_bytes(b"no gzip at all")
    assert main(["diagnose", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["root"]["line"] == "ValueError: bad"
    assert [text.rpartition("/")[2][:20] for text in found["problems"]] == ["a.log.gz: not whole:"]
    assert found["bytes"] > len(USER)


def test_what_a_file_is_called_does_not_say_that_it_is_packed(
    tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / "a.log").write_bytes(gzip.compress(USER))
    assert main(["diagnose", str(tmp_path / "a.log")]) == 0
    (tmp_path / "b.gz").write_bytes(USER)
    assert main(["diagnose", str(tmp_path / "b.gz")]) == 0
    assert capsys.readouterr().out.count("ValueError: bad") == 2


def test_standard_input(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        [sys.executable, "-m", "holdfast.agent.cli", "diagnose", "-", "--json"], input=USER,
        capture_output=True, timeout=30, check=False, cwd=tmp_path,
        env={"PYTHONPATH": str(root / ".types")},
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["root"]["line"] == "ValueError: bad"


def test_what_cannot_be_read_is_an_error_of_use(tmp_path: Path, capsys: Captured) -> None:
    assert main(["diagnose", str(tmp_path / "no.log")]) == 2
    assert "no.log: No such file" in capsys.readouterr().err
    assert main(["diagnose", str(tmp_path)]) == 2
    assert "no log in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("data", "said"),
    [(gzip.compress(USER)[:8], "not whole"), (random.Random(1).randbytes(300_000), "is no text")],
    ids=["header cut", "random"],
)
def test_a_file_that_says_nothing_is_not_a_log_without_a_root(
    tmp_path: Path, capsys: Captured, data: bytes, said: str
) -> None:
    (tmp_path / "bad.log").write_bytes(data)
    assert main(["diagnose", str(tmp_path / "bad.log")]) == 2
    assert said in capsys.readouterr().err
    (tmp_path / "rank1.log").write_bytes(USER)
    names = [str(tmp_path / name) for name in ("gone.log", "bad.log", "rank1.log")]
    assert main(["diagnose", *names, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["root"]["rank"], found["root"]["file"]) == (1, names[2])
    assert "No such file" in found["problems"][0] and said in found["problems"][1]


def test_rotated_logs_are_read_oldest_first(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "train.log.1").write_bytes(USER)
    assert main(["diagnose", str(tmp_path)]) == 0
    (tmp_path / "train.log").write_bytes(USER.replace(b"bad", b"new"))
    (tmp_path / "train.log.10.gz").write_bytes(gzip.compress(USER.replace(b"bad", b"old")))
    capsys.readouterr()
    assert main(["diagnose", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["line"][-3:] for one in found["matches"]] == ["old", "bad", "new"]


def test_more_files_than_are_read_is_said(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "FILES_MAX", 1)
    for name in ("a.log", "b.log"):
        (tmp_path / name).write_bytes(USER)
    assert main(["diagnose", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["problems"] == ["1 of 2 files were not read"]


def test_an_empty_log_has_no_root(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "a.log").touch()
    assert main(["diagnose", str(tmp_path / "a.log")]) == 1
    assert "nothing was read" in capsys.readouterr().out


def test_a_configurations_own_signatures_are_used(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "a.log").write_text("E0412 blobfs: volume train-7 went away\n")
    row = ('[[signature]]\nid = "blob_gone"\nrole = "root"\ncategory = "storage"\n'
           'culprit = "storage"\nretryable = "yes"\npattern = "blobfs: volume"\n'
           'literals = ["blobfs"]\nsamples = ["blobfs: volume a went away"]\n')
    (tmp_path / "agent.toml").write_text(row)
    log, given = str(tmp_path / "a.log"), ["--config", str(tmp_path / "agent.toml")]
    assert main(["diagnose", log]) == 1
    capsys.readouterr()
    assert main(["diagnose", log, *given]) == 0
    assert "blob_gone (storage)" in capsys.readouterr().out
    (tmp_path / "agent.toml").write_text(row.replace("yes", "perhaps"))
    assert main(["diagnose", log, *given]) == 78
    assert "signature 'blob_gone': retryable: " in capsys.readouterr().err


def test_help_shows_an_example(capsys: Captured) -> None:
    with pytest.raises(SystemExit):
        main(["diagnose", "--help"])
    assert "example: holdfast diagnose" in capsys.readouterr().out


def test_the_end_of_files_that_still_grow(tmp_path: Path) -> None:
    old = b"RuntimeError: CUDA error: device-side assert triggered\n"
    (tmp_path / "rank0.log").write_bytes(old + b"quiet\n" * 1000 + USER)
    spans = [files.Span(str(tmp_path / name), 0) for name in ("rank0.log", "gone.log")]
    report = files.diagnose_tails(spans, files.load_catalogue(), tail_bytes=2000)
    assert [one.text for one in report.diagnosis.matches] == ["ValueError: bad"]
    assert report.nbytes == 2000
    assert "gone.log: No such file" in report.problems[0]


def test_a_path_that_cannot_be_looked_at_is_an_error_of_use(
    tmp_path: Path, capsys: Captured
) -> None:
    name = str(tmp_path / ("x" * 300))  # an error for root as well, as a closed folder is for users
    assert main(["diagnose", name]) == 2
    assert "File name too long" in capsys.readouterr().err


def test_a_configuration_that_may_not_be_read_costs_its_signatures_alone(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.agent.config.load.DEFAULT_FILE", tmp_path / ("x" * 300))
    (tmp_path / "a.log").write_bytes(USER)
    assert main(["diagnose", str(tmp_path / "a.log")]) == 0
    assert main(["config", "check"]) == 0
    said = capsys.readouterr().out
    assert "no readable" in said and "0 values set" in said


@pytest.mark.parametrize(("culprit", "said"), [
    ("storage", "the storage that"), ("policy", "what the scheduler allows"), ("user", "the job, "),
])
def test_where_to_look_follows_the_culprit(
    tmp_path: Path, capsys: Captured, culprit: str, said: str
) -> None:
    (tmp_path / "a.log").write_text("blobfs: volume train-7 went away\n")
    (tmp_path / "agent.toml").write_text(
        '[[signature]]\nid = "blob_gone"\nrole = "root"\ncategory = "any"\n'
        f'culprit = "{culprit}"\nretryable = "yes"\npattern = "blobfs: volume"\n'
        'literals = ["blobfs"]\nsamples = ["blobfs: volume a went away"]\n')
    config = ["--config", str(tmp_path / "agent.toml")]
    assert main(["diagnose", str(tmp_path / "a.log"), *config]) == 0
    assert f"look at      {said}" in capsys.readouterr().out
    assert main(["config", "check", *config]) == 0
    assert f"good: {config[1]}: 0 values set" in (out := capsys.readouterr().out)
    assert "1 own signature" in out


def test_a_name_is_not_broken_at_its_hyphens() -> None:
    path = ".local/state/holdfast/runs/t-20261122-115723/logs/rank-1/stderr.log"
    assert path in plain(field("where", f"{path}, line 5"))


def test_standard_input_is_named_in_words(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(USER)
    report = files.diagnose([str(tmp_path / "a.log")])._replace(names=("-",))
    assert "where        standard input, line" in plain(said(report))


@pytest.mark.parametrize("command", [["config", "check"], ["diagnose", __file__]])
def test_a_configuration_that_cannot_be_looked_at_is_an_error(
    tmp_path: Path, capsys: Captured, command: list[str]
) -> None:
    assert main([*command, "--config", str(tmp_path / ("x" * 300))]) == 78
    assert "File name too long: give another with --config" in capsys.readouterr().err
