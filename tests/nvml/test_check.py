"""`holdfast check` reads the library that the configuration names, with nothing in its environment
that would have the loader find it."""

from __future__ import annotations

import json

import pytest

from holdfast.agent.cli import main


@pytest.mark.parametrize(("state", "status", "said"), [
    ("gpus 2\n", "ok", "2 x "),
    ("gpus 2\ngpu 1 lost 1\n", "critical", "the driver says that nvidia/1 is lost"),
])
def test_a_check_reads_the_library_that_is_named(
    node, tmp_path, monkeypatch, capsys, state, status, said
):
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    for one in ("STATE", "RUNTIME"):
        monkeypatch.setenv(f"HOLDFAST_{one}_DIR", str(tmp_path / one))
    node.becomes(state)
    file = tmp_path / "agent.toml"
    file.write_text(f'[collectors]\nnvml = "{node.library}"\nsys = "{tmp_path}"\n')
    main(["check", "devices", "--json", "--config", str(file)])
    (devices,) = json.loads(capsys.readouterr().out)["checks"]
    assert devices["status"] == status and said in devices["reason"]
