"""`holdfast check` reads the library that the configuration names, with nothing in its environment
that would have the loader find it."""

from __future__ import annotations

import json
import subprocess
import sys

import msgspec
import pytest

from holdfast.agent.checks.round import Round
from holdfast.agent.cli import main
from holdfast.agent.config.load import load


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


OWN = """[profile]
name = "our-h100"
vendor = "nvidia"
model = "H100"
devices = 8
"""
H100 = "gpus {}\nname NVIDIA H100 80GB HBM3\n"


def test_a_node_that_boots_with_seven_of_eight_devices_is_told_by_the_profile_of_the_configuration(
    node, tmp_path, monkeypatch, capsys
):
    """Both by the command and by the agent's child, and again well once the eighth is back."""
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    for one in ("STATE", "RUNTIME"):
        monkeypatch.setenv(f"HOLDFAST_{one}_DIR", str(tmp_path / one))
    own, file = tmp_path / "our.toml", tmp_path / "agent.toml"
    own.write_text(OWN)
    for profile, name in ((str(own), "our-h100"), ("hgx-h100", "hgx-h100"), ("", "")):
        file.write_text(f'[collectors]\nnvml = "{node.library}"\nsys = "{tmp_path}"\n'
                        f'[checks]\nprofile = "{profile}"\n')
        config = load(file).config
        asked = Round("n0", ("devices",), str(tmp_path / "round"), "boot", config.collectors,
                      profile=config.checks.profile)
        for count, status in ((7, "critical" if name else "ok"), (8, "ok")):
            node.becomes(H100.format(count))
            main(["check", "devices", "--json", "--config", str(file)])
            (by_hand,) = json.loads(capsys.readouterr().out)["checks"]
            done = subprocess.run(
                [sys.executable, "-P", "-m", "holdfast.agent.checks.round",
                 msgspec.json.encode(asked).decode()], capture_output=True, timeout=60, check=True)
            (by_agent,) = json.loads(done.stdout)
            for found in (by_hand, by_agent):
                assert found["status"] == status, found
                assert (f"7 nvidia devices, and {name} has 8" in found["reason"]) == (
                    status == "critical")
            assert by_agent["confirmed"] == (status == "critical")
    own.write_text(OWN.replace("8", "many"))
    wrong = msgspec.structs.replace(asked, profile=str(own))
    done = subprocess.run([sys.executable, "-P", "-m", "holdfast.agent.checks.round",
                           msgspec.json.encode(wrong).decode()], capture_output=True, text=True,
                          timeout=60, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert str(own) in done.stderr and "write one [profile]" in done.stderr
