"""A job that says its secrets in every form: none of them is in anything that Holdfast keeps."""

from __future__ import annotations

import gzip
import json
import stat
from pathlib import Path

import pytest
from running import Runs

from holdfast.agent.cli import main

SECRET = "kAb3dEf6hIj9kLm2nOp5qRs8tUv1wXy4z"


def kept(folder: Path) -> dict[str, bytes]:
    """What lies below, by name; packed files are opened."""
    found = {}
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            content = path.read_bytes()
            found[str(path)] = gzip.decompress(content) if path.suffix == ".gz" else content
    return found


def test_no_secret_of_a_job_is_in_journal_store_evidence_or_bundle(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = runs.home / "evidence"
    (runs.home / "agent.toml").write_text(f'[evidence]\nstore = "{store}"\n')
    runs.environ["HOLDFAST_CONFIG"] = str(runs.home / "agent.toml")
    runs.environ["PLANTED"] = SECRET
    flags = ("--nproc-per-node", "2", "--max-restarts", "1")
    run = runs.script("secretive.py", "--db-password", SECRET, flags=flags)
    assert run.wait() == 1
    for variable in ("HOLDFAST_STATE_DIR", "HOLDFAST_RUNTIME_DIR"):
        monkeypatch.setenv(variable, runs.environ[variable])
    said = [line for line in run.output.splitlines() if line.startswith("holdfast")]
    assert said and SECRET not in "\n".join(said)

    assert main(["incidents", "--run", run.name, "--all", "--json"]) == 0
    told = capsys.readouterr().out
    assert json.loads(told) and SECRET not in told
    (newest, *_) = json.loads(told)
    to = runs.home / "out.tar.gz"
    assert main(["bundle", newest["id"], "--run", run.name, "--to", str(to)]) == 0
    assert SECRET not in capsys.readouterr().out
    assert stat.S_IMODE(to.stat().st_mode) == 0o640
    text = gzip.decompress(to.read_bytes())
    assert SECRET.encode() not in text and b"could not reach postgres" in text  # its logs are in
    assert main(["bundle", newest["id"], "--run", run.name, "--to", str(to)]) == 1
    assert "File exists" in capsys.readouterr().err

    evidence = kept(store)
    assert [name for name in evidence if name.endswith(".tar.gz")], evidence.keys()
    assert {stat.S_IMODE(path.stat().st_mode) for path in store.iterdir()} == {0o640}
    state = {name: content for name, content in kept(runs.home / "st").items()
             if "/logs/" not in name}  # the ranks' own words, their user's alone
    assert [name for name in state if name.endswith("journal.db")]
    for name, content in {**evidence, **state}.items():
        assert SECRET.encode() not in content, name
