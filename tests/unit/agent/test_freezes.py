"""What people wrote is read within a limit: a FIFO, a device, an endless text or expression ends in
a sentence, on the command line as in a running agent."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import shutil
import signal
import sys
import time
import tomllib
from pathlib import Path

import pytest

from holdfast.agent.cli import main
from holdfast.agent.config import child
from holdfast.agent.config.load import ConfigError, load
from holdfast.agent.config.runbooks import RunbookError, load_runbooks
from holdfast.agent.logs import operator_signatures
from holdfast.trainer.checkpoint import format
from holdfast.worker import time_limit, toml_text
from holdfast.worker.time_limit import TooSlow, at_most

PATTERNS = (r"(a+)+$", r"foo (\w+\s?)*!", r"lost (.*)*x", r"err: (x|xx)*y",
            r"(?:(?:[a-z]+\.)+)+lost", r"node (\d+|\w+)* down")
SAMPLES = ("aaaa", "foo bar baz!", "lost yx", "err: xy", "a.b.lost", "node 3 down")
ROW = {"id": "our_own", "role": "root", "category": "storage", "culprit": "storage",
       "retryable": "yes"}


def bomb(parts: int = 100_000) -> str:
    return "[agent]\n" + "a." * parts + "a = 1\n"


def test_a_key_of_endless_parts_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """tomllib keeps what grows with the square of the parts: dozens of GB for these."""
    file = tmp_path / "agent.toml"
    file.write_text(bomb())
    begin_s = time.process_time()
    with pytest.raises(ConfigError, match="agent.toml: .*line 2: a key of more than 64 parts"):
        load(file)
    (tmp_path / "rank_hung.md").write_text(f"+++\n{bomb()}+++\n")
    with pytest.raises(RunbookError, match="rank_hung.md: no valid TOML: line 3: a key of more th"):
        load_runbooks(tmp_path)
    assert time.process_time() - begin_s < 2.0


@pytest.mark.parametrize("text", [
    "a." * 63 + "a = 1", "'a' . \"b.c\". " * 30 + "a = 1", f"a = '{'.' * 100_000}'",
    f"a = [{'0.5, ' * 10_000}]", f"a = \"{'word ' * 20_000}\"", "a" * 100_000 + " = 1",
    f"a = '''{'x: 10.0.0.1, ' * 10_000}'''", f"a = 1 {' ' * 100_000}"])
def test_what_somebody_may_well_write_is_read(text: str) -> None:
    begin_s = time.process_time()
    assert toml_text.parse(tomllib.loads, text) == tomllib.loads(text)
    assert time.process_time() - begin_s < 1.0


@pytest.mark.parametrize("part", [
    "a.", "a .", "a\t. ", "'a b'.", '"=#".', "-_9.", '"\\"".', '"\\\\".', "'\"'.", '"a\\"b\\"".'])
def test_a_long_key_is_seen_however_it_is_written(part: str) -> None:
    for line in (f"{part * 64}a = 1", f"[{part * 64}a]", f"x = {{ {part * 64}a = 1 }}"):
        tomllib.loads(line)
        with pytest.raises(ValueError, match="line 3: a key of more than 64 parts: shorten it"):
            toml_text.parse(tomllib.loads, f"# comment\n\n{line}\n")


@pytest.mark.parametrize("longer_s", [0.0, 20.0])  # than until the exception that is lost
def test_a_limit_holds_though_its_first_exception_is_lost(
    longer_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python drops what is raised in a callback of its garbage collector."""
    lost: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda one: lost.append(one.exc_type))

    def long(phase: str, _info: dict[str, int]) -> None:
        while not lost and phase == "stop" and time.process_time() - begin_s < 20.0:
            pass

    begin_s = time.process_time()
    gc.callbacks.append(long)
    try:
        with pytest.raises(TooSlow, match="takes longer than 0.2 s"), at_most(0.2):
            gc.collect()
            while time.process_time() - begin_s < longer_s:
                pass
    finally:
        gc.callbacks.remove(long)
    assert lost == [TooSlow] and time.process_time() - begin_s < 5.0


def test_a_long_key_is_seen_among_parts_of_other_kinds() -> None:
    for parts in ("a." * 63 + '"\\"".', '"\\"".' * 32 + "'.'. " * 32):
        tomllib.loads(f"{parts}a = 1")
        with pytest.raises(ValueError, match="a key of more than 64 parts"):
            toml_text.parse(tomllib.loads, f"{parts}a = 1")


def test_a_file_that_is_hard_to_search_for_long_keys_is_searched_in_time() -> None:
    for text in (f"{'a.' * 60}a = 1\n" * 8000, '"' * 1_000_000, '"\\' * 500_000,
                 "a b" * 300_000, "a" + " " * 1_000_000, "'" * 1_000_000):
        with at_most(15.0):
            assert toml_text._LONG_KEY.search(text) is None, text[:20]


def test_a_limit_is_told_though_the_body_made_another_error_of_it() -> None:
    with pytest.raises(TooSlow, match="takes longer than 0.05 s"), at_most(0.05):
        try:
            while True:
                pass
        except ValueError:
            raise ValueError("line 3: no valid value") from None
    with pytest.raises(ValueError, match="of its own"), at_most(5.0):
        raise ValueError("of its own")


def test_a_limit_is_never_told_where_with_would_not_end() -> None:
    """Between the body and the end of the block stand frames of ours and of contextlib."""
    for file in (time_limit.__file__, contextlib.__file__):
        code = compile("late(0, frame())", file, "exec")
        with at_most(5.0):
            exec(code, {"late": time_limit._late, "frame": sys._getframe})


def test_a_signal_that_comes_late_ends_nothing() -> None:
    with at_most(10.0):
        pass
    os.kill(os.getpid(), signal.SIGVTALRM)
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


@pytest.mark.parametrize(("pattern", "sample"), list(zip(PATTERNS, SAMPLES, strict=True)))
def test_an_expression_that_explodes_is_refused(pattern: str, sample: str) -> None:
    errors: list[str] = []
    row = {**ROW, "pattern": pattern, "literals": [sample[:3]], "samples": [sample]}
    assert operator_signatures.check([row], "own.toml", errors) == []
    assert "own.toml: signature 'our_own': pattern: takes longer than 2 s" in errors[0]


def test_many_of_them_cost_no_more_than_a_few() -> None:
    errors: list[str] = []
    rows = [{**ROW, "id": f"own_{number}", "pattern": "(a+)+$", "literals": ["aaa"],
             "samples": ["aaaa"]} for number in range(64)]
    begin_s = time.process_time()
    assert operator_signatures.check(rows, "own.toml", errors) == []
    assert time.process_time() - begin_s < 12.0 and len(errors) == 64
    assert "was not tried" in errors[-1]


def test_an_expression_of_many_blanks_is_none_of_them() -> None:
    errors: list[str] = []
    row = {**ROW, "pattern": r".*disk (?P<disk>\S+) .* of (\d+) blocks .* lost",
           "literals": ["blocks"], "samples": ["E1: disk sda has 3 of 17 blocks that are lost"]}
    assert operator_signatures.check([row], "own.toml", errors) == [row] and not errors


@pytest.mark.parametrize("made", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_only_files_are_read_as_configuration(made, tmp_path: Path) -> None:
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "books").mkdir()
    file = tmp_path / "agent.toml"
    file.write_text("[agent]\ntick_s = 0.5\n")
    made(tmp_path / "conf.d/own.toml")
    (tmp_path / "conf.d/folder.toml").mkdir()
    with pytest.raises(ConfigError, match="own.toml: is no regular file") as raised:
        load(file)
    assert "folder.toml: is a folder" in str(raised.value)
    made(tmp_path / "books/rank_hung.md")
    with pytest.raises(RunbookError, match="rank_hung.md: is no regular file"):
        load_runbooks(tmp_path / "books")


def test_a_link_to_a_file_is_followed_as_a_mounted_map_has_them(tmp_path: Path) -> None:
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "data.toml").write_text("[agent]\nslow_s = 20.0\n")
    (tmp_path / "conf.d/own.toml").symlink_to(tmp_path / "data.toml")
    (tmp_path / "agent.toml").write_text("\ufeff[agent]\ntick_s = 0.5\n")  # as Windows writes it
    loaded = load(tmp_path / "agent.toml")
    assert (loaded.config.agent.slow_s, loaded.config.agent.tick_s) == (20.0, 0.5)


@pytest.mark.parametrize("key", ["agent.tick_s", "agent.fast_s", "agent.slow_s", "detect.lease_s",
                                 "collectors.deadline_s", "detect.stop_grace_s"])
@pytest.mark.parametrize("value", ["1e-9", "0", "-1", "nan", "inf", "1e300"])
def test_every_interval_has_bounds(key: str, value: str, tmp_path: Path) -> None:
    section, name = key.split(".")
    (tmp_path / "agent.toml").write_text(f"[{section}]\n{name} = {value}\n")
    with pytest.raises(ConfigError, match=f"agent.toml: {key}: .*set number >= "):
        load(tmp_path / "agent.toml")


def test_a_reload_reads_beside_the_loop(agent, tmp_path, monkeypatch) -> None:
    async def scenario():
        async with agent() as (daemon, _node):
            file = tmp_path / "agent.toml"
            daemon.options = daemon.options._replace(config_file=file)
            file.write_text(bomb())
            reading = asyncio.create_task(daemon.reload())
            turns = 0
            while not reading.done():
                await asyncio.sleep(0.02)
                turns += 1
            assert turns > 2 and not daemon.state.reload_ok  # the loop went on meanwhile
            assert "a key of more than 64" in daemon.state.reload_error
            # A child that never answers: a mount that hangs, for example.
            monkeypatch.setattr(child, "READ_S", 0.05)
            await daemon.reload()
            assert "no answer within 0.05 s" in daemon.state.reload_error
            monkeypatch.setattr(child, "READ_S", 30.0)
            file.write_text("[detect]\nstopped_s = 2.0\n")
            daemon._hangup()
            daemon._hangup()  # is not lost
            await daemon._reloading
            assert daemon.state.reload_ok and daemon.state.config.detect.stopped_s == 2.0

    asyncio.run(scenario())


# ------------------------------------------------------------------------------- verify, diagnose


def checkpoint(root: Path, step: int = 20) -> Path:
    folder = root / format.directory_name(step, 1)
    format.write_shard(folder, 0, 1, [], b"x" * 64)
    format.commit(folder, {"step": step, "generation": 1, "world": 1})
    return folder


@pytest.mark.parametrize("name", ["manifest.json", "COMMIT", "shard-00000-of-00001.bin",
                                  "shard-00000-of-00001.json"])
@pytest.mark.parametrize("made", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_verify_waits_for_nothing(name: str, made, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    (folder / name).unlink()
    made(folder / name)
    said = str(format.verify(folder)[0])
    assert "no regular file" in said or "truncated" in said


def test_verify_holds_the_name_against_the_manifest(tmp_path: Path, capsys) -> None:
    folder = checkpoint(tmp_path)
    assert format.verify(folder) == []
    link = tmp_path / format.directory_name(9999, 1)
    link.symlink_to(folder)
    said = str(format.verify(link)[0])
    assert said == f"manifest.json: is of step 20, generation 1, and not of {link.name}"
    assert main(["verify", str(link)]) == 2
    assert "is of step 20" in capsys.readouterr().out
    shutil.copytree(folder, tmp_path / format.directory_name(7, 1))
    assert main(["verify", str(tmp_path)]) == 2
    link.unlink()
    current = tmp_path / "current"  # a name that says nothing is held against nothing
    current.symlink_to(folder)
    assert format.verify(current) == []


def test_diagnose_reads_files_and_standard_input_alone(tmp_path: Path, capsys) -> None:
    os.mkfifo(tmp_path / "rank0.log")
    for name in (str(tmp_path / "rank0.log"), "/dev/zero"):
        assert main(["diagnose", name]) == 2
        assert "is no regular file: give `-`" in capsys.readouterr().err


def test_diagnose_of_a_pipe(tmp_path: Path) -> None:
    import subprocess

    done = subprocess.run(
        [sys.executable, "-P", "-m", "holdfast.agent.cli", "diagnose", "-"],
        input=b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n",
        stdout=subprocess.PIPE, timeout=60.0, check=False)
    assert done.returncode == 0 and b"root" in done.stdout
