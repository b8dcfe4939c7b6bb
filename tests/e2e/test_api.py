"""A running agent against its own OpenAPI document: schemathesis asks what a person would not."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from running import wait_for

TOKEN = "operator-token-of-this-test"
CONFIG = """
[agent]
listen = "127.0.0.1:0"
node = "node-a"
runtime_dir = "{home}/run"
state_dir = "{home}/state"
[api]
tokens_file = "{home}/tokens"
[collectors]
kmsg = "/dev/null"
"""
CHECKS = ("not_a_server_error", "status_code_conformance", "content_type_conformance",
          "response_schema_conformance", "response_headers_conformance")


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """A node's agent, alone."""
    for name in ("run", "state"):
        (tmp_path / name).mkdir()
    (tmp_path / "agent.toml").write_text(CONFIG.format(home=tmp_path))
    (tmp_path / "tokens").write_text(f'"{TOKEN}" = "operator"\n')
    (tmp_path / "tokens").chmod(0o600)
    process = subprocess.Popen(
        [sys.executable, "-m", "holdfast.agent.cli", "agent", "--config",
         str(tmp_path / "agent.toml")], stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        place = tmp_path / "run/address"
        wait_for(lambda: place.exists() or process.poll() is not None, 60, "the agent's address")
        yield place.read_text().strip()
    finally:
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=30)[1]
        assert process.returncode == 0 and "Traceback" not in said, said


def test_whatever_is_asked_the_agent_answers_as_its_document_says(
    address: str, tmp_path: Path
) -> None:
    beside = Path(sys.executable).with_name("schemathesis")
    if not beside.exists():
        pytest.skip("schemathesis is missing: pip install -e '.[test]'")
    # This node's name, so that requests arrive; they are journalled, and no run is here.
    config = tmp_path / "schemathesis.toml"
    config.write_text('[parameters]\n"path.node" = "node-a"\n')
    done = subprocess.run(
        [str(beside), "--config-file", str(config), "run", f"{address}/api/v1/openapi.json",
         "--header", f"Authorization: Bearer {TOKEN}", "--max-examples", "15", "--checks",
         ",".join(CHECKS), "--phases", "coverage,fuzzing", "--generation-database", "none",
         "--seed", "7", "--suppress-health-check", "all", "--no-color"],
        cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    with urllib.request.urlopen(f"{address}/api/v1/status", timeout=10) as answer:
        status = json.load(answer)
    assert "web" not in status["agent"]["troubles"], status["agent"]
