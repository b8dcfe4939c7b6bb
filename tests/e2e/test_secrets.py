"""A job that says its secrets in every form: none of them is in anything that Holdfast keeps."""

from __future__ import annotations

import gzip
import json
import stat
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from running import Run, Runs, wait_for

from holdfast.agent.cli import main

TOKEN = "operator-tQ7wE2rT9yU4iO1pA6s"
SECRET = "kAb3dEf6hIj9kLm2nOp5qRs8tUv1wXy4z"


def kept(folder: Path) -> dict[str, bytes]:
    """What lies below, by name; packed files are opened."""
    found = {}
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            content = path.read_bytes()
            found[str(path)] = gzip.decompress(content) if path.suffix == ".gz" else content
    return found


def live_pages(run: Run) -> dict[str, str]:
    """What the run's agent answers over TCP to its own user, who may read all, by path: once the
    run has died and lives again, and after a token was used and one was guessed."""
    wait_for(lambda: sum(one["state"] == "running" for one in run.ranks().values()) == 2
             and run.status()["generation"] == 2 and run.incidents(), what=run.output)
    address = (run.home / "rt" / run.name / "address").read_text().strip()

    def ask(path: str, token: str = "", body: bytes | None = None) -> tuple[int, str]:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            with urllib.request.urlopen(
                    urllib.request.Request(address + path, body, headers), timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    pause = f"/api/v1/runs/{run.name}/pause"
    reason = json.dumps({"reason": f"password={SECRET}"}).encode()
    assert ask(pause, SECRET, reason)[0] == 401 and ask(pause, TOKEN, reason)[0] == 202
    asked = "/api/v1/requests"
    wait_for(lambda: "pause" in ask(asked)[1], what="the request is kept")
    listed = [f"/api/v1/incidents/{one['id']}" for one in run.incidents()]
    found = {path: ask(path) for path in (
        "/api/v1/status", "/api/v1/incidents?all=1", "/api/v1/jobs", "/api/v1/ledger", asked,
        "/api/v1/refusals", "/api/v1/alerts", "/api/v1/fleet/status", "/api/v1/fleet/incidents",
        f"/api/v1/runs/{run.name}/curves", "/api/v1/drift", "/metrics", *listed)}
    assert {status for status, _ in found.values()} == {200}
    assert ask(f"/api/v1/runs/{run.name}/resume", TOKEN, reason)[0] == 202
    return {path: text for path, (_, text) in found.items()}


def test_no_secret_of_a_job_is_in_journal_store_evidence_or_bundle(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = runs.home / "evidence"
    (runs.home / "agent.toml").write_text(
        f'[evidence]\nstore = "{store}"\n[api]\ntokens_file = "{runs.home}/tokens"\n')
    runs.environ["HOLDFAST_CONFIG"] = str(runs.home / "agent.toml")
    runs.environ["PLANTED"] = SECRET
    tokens = runs.home / "tokens"
    tokens.write_text(f'"{TOKEN}" = "operator"\n')
    tokens.chmod(0o600)
    flags = ("--nproc-per-node", "2", "--max-restarts", "1")
    run = runs.script("secretive.py", "--db-password", SECRET, flags=flags)
    pages = live_pages(run)
    assert "could not reach postgres" in pages["/api/v1/incidents?all=1"], "its words are there"
    assert pages["/api/v1/jobs"] != "[]" and 'holdfast_restarts_total{' in pages["/metrics"]
    for path, page in pages.items():
        assert SECRET not in page and TOKEN not in page, path
    (runs.home / "enough").touch()
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
    for file in ("journal.db", "agent.log"):
        assert [name for name in state if name.endswith(file)], file
    for name, content in {**evidence, **state}.items():
        assert SECRET.encode() not in content and TOKEN.encode() not in content, name
