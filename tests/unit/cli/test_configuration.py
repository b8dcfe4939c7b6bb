"""A configuration that cannot be used ends what would use it: at once, with 78 and every error."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.agent.cli import launch, main
from holdfast.agent.config.load import ConfigError, load
from holdfast.agent.config.settings import Config
from holdfast.agent.daemon.daemon import Daemon, Options
from holdfast.agent.store import sqlite

Captured = pytest.CaptureFixture[str]
TOKEN = '"operator-token-0123" = "operator"\n'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "books").mkdir()
    path = tmp_path / "agent.toml"
    path.write_text(f'[runbooks]\ndirectory = "{tmp_path}/books"\n')
    return path


def add(file: Path, text: str) -> None:
    file.write_text(file.read_text() + text)


def refused(file: Path, capsys: Captured, tmp_path: Path) -> str:
    """What `config check`, `agent` and `run` say of it; each ends with 78."""
    assert main(["config", "check", "--config", str(file)]) == 78
    said = capsys.readouterr().err
    assert main(["agent", "--config", str(file), "--state", str(tmp_path / "state"),
                 "--runtime", str(tmp_path / "run")]) == 78
    said += capsys.readouterr().err
    environ = {**os.environ, "HOLDFAST_CONFIG": str(file), "HOLDFAST_RUNTIME_DIR": str(tmp_path),
               "HOLDFAST_STATE_DIR": str(tmp_path / "of-runs")}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "holdfast.agent.cli", "run", "--no-python", "true"],
        env=environ, stderr=subprocess.PIPE, text=True, timeout=60.0, check=False)
    assert done.returncode == 78 and "HOLDFAST_CONFIG: " in done.stderr
    assert not (tmp_path / "of-runs").exists()  # it did not begin: ten seconds were lost before
    return said + done.stderr


def test_every_error_is_told_by_each(file: Path, capsys: Captured, tmp_path: Path) -> None:
    add(file, '[agent]\ntick_s = 1e-9\nlisten = "0.0.0.0"\nslow_s = nan\n')
    said = refused(file, capsys, tmp_path)
    for part in ("agent.tick_s: ", "agent.slow_s: ",
                 "agent.listen: '0.0.0.0': set HOST:PORT, for example 127.0.0.1:9855"):
        assert said.count(part) == 3, part


def test_beyond_loopback_needs_tokens(file: Path, capsys: Captured, tmp_path: Path) -> None:
    add(file, '[agent]\nlisten = "0.0.0.0:9855"\n')
    said = refused(file, capsys, tmp_path)
    assert said.count("agent.listen = '0.0.0.0:9855' is not loopback: set api.tokens_file") == 3
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(TOKEN)
    tokens.chmod(0o600)
    add(file, f'[api]\ntokens_file = "{tokens}"\n')
    assert main(["config", "check", "--config", str(file)]) == 0


@pytest.mark.parametrize(("text", "mode", "why"), [
    (TOKEN, 0o644, "chmod 600"), ('"short" = "operator"\n', 0o600, "16 characters"),
    ("x", 0o600, "no valid TOML"), (None, 0, "No such file"),
    ("a." * 100_000 + "a = 1\n", 0o600, "line 1: a key of more than 64 parts"),
])
def test_a_bad_tokens_file_is_told(
    text: str | None, mode: int, why: str, file: Path, capsys: Captured, tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens.toml"
    if text is not None:
        tokens.write_text(text)
        tokens.chmod(mode)
    add(file, f'[api]\ntokens_file = "{tokens}"\n')
    assert main(["config", "check", "--config", str(file)]) == 78
    assert why in capsys.readouterr().err
    with pytest.raises(ConfigError, match=why):
        load(file, serves=True)
    load(file)  # whoever only asks what a fault means need not read it


def test_tokens_come_from_systemd_or_lie_beside_the_configuration(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    assert load(file, serves=True).config.api.tokens_file == ""
    beside = file.parent / "tokens"
    beside.write_text(TOKEN)
    beside.chmod(0o600)
    assert load(file, serves=True).config.api.tokens_file == str(beside)
    handed = tmp_path / "handed"
    handed.mkdir()
    (handed / "tokens").write_text(TOKEN)
    (handed / "tokens").chmod(0o440)  # as systemd shows what one user alone may read
    with pytest.raises(ConfigError, match="chmod 600"):
        add(file, f'[api]\ntokens_file = "{handed}/tokens"\n')
        load(file, serves=True)
    file.write_text("")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(handed))
    assert load(file, serves=True).config.api.tokens_file == str(handed / "tokens")
    (handed / "tokens").unlink()  # never what lies elsewhere, once systemd hands something over
    assert load(file, serves=True).config.api.tokens_file == ""


def test_a_fifo_of_tokens_holds_nobody_up(file: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tokens.toml")
    add(file, f'[api]\ntokens_file = "{tmp_path}/tokens.toml"\n')
    with pytest.raises(ConfigError, match="no regular file"):
        load(file, serves=True)


def test_a_bad_runbook_is_told(file: Path, capsys: Captured, tmp_path: Path) -> None:
    (tmp_path / "books/rank_hung.md").write_text("+++\nseverity = 'loud'\n+++\n")
    assert refused(file, capsys, tmp_path).count("rank_hung.md:2: severity: 'loud'") == 3


def test_errors_of_settings_and_of_runbooks_are_told_together(
    file: Path, capsys: Captured, tmp_path: Path
) -> None:
    add(file, '[agent]\ntick_s = "often"\n')
    (tmp_path / "books/rank_hung.md").write_text("+++\nseverity = 'loud'\n+++\n")
    assert main(["config", "check", "--config", str(file)]) == 78
    said = capsys.readouterr().err
    assert "agent.tick_s: " in said and "rank_hung.md:2: severity: 'loud'" in said


def test_a_token_file_between_agents_is_read_by_config_check(
    file: Path, capsys: Captured, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    add(file, f'[store]\nurl = "etcd://10.0.0.1:2379"\n[cluster]\ntoken_file = "{token}"\n')
    for make, why in ((lambda: None, "No such file"), (lambda: token.touch(0o600), "is empty"),
                      (lambda: token.chmod(0o644), f"chmod 600 {token}")):
        make()
        assert main(["config", "check", "--config", str(file)]) == 78
        said = capsys.readouterr().err
        assert f"{file}: cluster.token_file: {token}: " in said and why in said
    token.write_text("a-token-of-some-length\n")
    token.chmod(0o600)
    assert main(["config", "check", "--config", str(file)]) == 0


def test_a_run_without_a_configuration_is_refused_for_a_bad_runbook_of_the_sites(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own agent would read it, and end: the run went on unwatched, and ended with 0."""
    assert launch.SITE_RUNBOOKS == Config().runbooks.directory
    monkeypatch.setattr(launch, "SITE_RUNBOOKS", str(tmp_path / "books"))
    launch.check_configuration({"HOLDFAST_RUNTIME_DIR": "/x"})  # there are none
    (tmp_path / "books").mkdir()
    launch.check_configuration({"HOLDFAST_RUNTIME_DIR": "/x"})
    (tmp_path / "books/rank_hung.md").write_text("+++\nseverity = 'loud'\n+++\n")
    with pytest.raises(launch.Failure, match="rank_hung.md:2: severity: 'loud'") as refused:
        launch.check_configuration({"HOLDFAST_RUNTIME_DIR": "/x"})
    assert refused.value.code == 78
    monkeypatch.setattr(launch, "_node_agent", lambda _: True)
    launch.check_configuration({})


@pytest.mark.parametrize(("where", "words"), [
    ("load._read", ["config", "check"]), ("runbooks._texts", ["config", "check"]),
    ("load._read", ["agent"]), ("runbooks._texts", ["agent"]),
    ("load._read", ["run", "--no-python", "true"]),
])
def test_a_file_system_that_hangs_ends_what_begins_and_is_said(
    where: str, words: list[str], file: Path, tmp_path: Path
) -> None:
    """As a hung mount does, a FIFO that nobody writes holds whoever opens it for reading."""
    os.mkfifo(tmp_path / "hung")
    own = {"config": ["--config", str(file)], "run": [],
           "agent": ["--config", str(file), "--state", str(tmp_path / "state"),
                     "--runtime", str(tmp_path / "run")]}[words[0]]
    code = f"""import sys
from holdfast.agent.cli import main
from holdfast.agent.config import load, runbooks
load.READ_S = 0.2
{where} = lambda *_: open({str(tmp_path / "hung")!r})
sys.exit(main({[*words[:2], *own, *words[2:]]!r}))"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], stderr=subprocess.PIPE, text=True, timeout=30.0,
        env={**os.environ, "HOLDFAST_CONFIG": str(file), "HOLDFAST_RUNTIME_DIR": str(tmp_path)},
        check=False)
    assert done.returncode == (75 if words[0] == "run" else 1), done.stderr
    assert f"holdfast {words[0]}: no configuration within 0.2 s" in done.stderr
    assert f"see to the mounts of {file}, of conf.d beside it" in done.stderr


@pytest.mark.parametrize("call", ["pwrite", "ftruncate"])
def test_an_agent_says_where_the_disk_is_full_and_what_to_do(
    call: str, file: Path, capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    state = tmp_path / "state"
    words = ["agent", "--config", str(file), "--state", str(state), "--runtime", str(tmp_path)]
    monkeypatch.setattr(sqlite.os, call, full)
    assert main(words) == 78
    assert capsys.readouterr().err == (
        f"holdfast agent: {state}/lock: No space left on device: make room there, or set "
        "agent.state_dir to a directory on another disk\n")
    monkeypatch.undo()
    sqlite.DirectoryLock(state).release()  # nobody holds it


def test_a_run_of_the_nodes_agent_reads_no_configuration(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text("[")
    monkeypatch.setattr(launch, "_node_agent", lambda _: True)
    launch.check_configuration({"HOLDFAST_CONFIG": str(file)})
    with pytest.raises(launch.Failure):
        launch.check_configuration({"HOLDFAST_CONFIG": str(file), "HOLDFAST_RUNTIME_DIR": "/x"})


@pytest.mark.parametrize("why", ["never", "parent"])
def test_a_private_agent_to_which_nobody_came_has_failed(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.agent.daemon.parts import private_life

    if why == "never":
        monkeypatch.setattr(private_life, "FIRST_HELLO_S", 0.2)
    else:
        pids = iter([1, *[2] * 1000])
        monkeypatch.setattr(private_life.os, "getppid", lambda: next(pids))
    overrides: dict[str, tuple[object, str]] = {
        "agent.state_dir": (str(tmp_path / "state"), "test"),
        "agent.runtime_dir": (str(tmp_path / "run"), "test"), "agent.listen": ("", "test"),
    }
    from holdfast.agent.__main__ import _make_node

    daemon = Daemon(load(None, overrides), Options(True, "m5", None, overrides), _make_node)
    assert asyncio.run(asyncio.wait_for(daemon.run(), 30.0)) == 1


@pytest.mark.parametrize("name", ["excluded", "exclusive", "devices", "peers"])
def test_whatever_a_refusal_names_may_be_ignored(name: str) -> None:
    """It says with which words the run starts all the same."""
    launch.check_names(["--ignore-check", name, "--reason", "x", "train.py"])
    with pytest.raises(launch.Failure, match=f"no check '{name}s'"):
        launch.check_names(["--ignore-check", f"{name}s", "train.py"])
