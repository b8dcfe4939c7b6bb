"""The unit file is what systemd takes without a word, and stays as tight as it was."""

from __future__ import annotations

import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import pytest
from packages import builder

from holdfast.agent.actions import root_client, root_helper
from holdfast.agent.core.actions import ACTIONS
from holdfast.agent.launchers import admission
from holdfast.agent.telemetry import collectors

ROOT = Path(__file__).resolve().parent.parent
UNIT = ROOT / "deploy/systemd/holdfast.service"


def values(unit: Path, *keys: str) -> list[str]:
    """Every word that a unit gives to these keys."""
    lines = [line.partition("=") for line in unit.read_text().splitlines()]
    return [word for key, _, value in lines if key in keys for word in value.split()]


def analyze(tmp_path: Path, text: str, *command: str) -> subprocess.CompletedProcess[str]:
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("systemd-analyze is missing (Debian package systemd)")
    file = tmp_path / "holdfast.service"
    # verify wants the program to exist; where it is installed is the packager's choice
    file.write_text(text.replace("/opt/holdfast/bin/holdfast", "/bin/true"))
    return subprocess.run(
        [tool, *command, str(file)], capture_output=True, text=True, timeout=60, check=False
    )


def test_systemd_takes_the_unit_without_a_word(tmp_path: Path) -> None:
    # It returns 0 even for a key it does not know: any word on stderr counts.
    assert analyze(tmp_path, UNIT.read_text(), "verify").stderr == ""
    misspelt = UNIT.read_text().replace("WatchdogSec", "WatchdogSeconds")
    assert "WatchdogSeconds" in analyze(tmp_path, misspelt, "verify").stderr


def test_the_unit_stays_tight(tmp_path: Path) -> None:
    tight = ("security", "--offline=true", "--threshold=30")
    assert analyze(tmp_path, UNIT.read_text(), *tight).returncode == 0
    loose = UNIT.read_text().replace("ProtectSystem=strict", "").replace("CapabilityBounding", "X-")
    assert analyze(tmp_path, loose, *tight).returncode != 0


def test_the_unit_gives_the_agent_the_files_that_its_ranks_take() -> None:
    (files,) = [line for line in UNIT.read_text().splitlines() if line.startswith("LimitNOFILE=")]
    assert int(files.partition("=")[2]) == admission.OPEN_FILES
    needed = admission.RANKS_MAX * admission.FILES_PER_RANK + admission.OPEN_FILES_KEPT
    assert needed <= admission.OPEN_FILES


def test_systemd_takes_the_unit_of_a_user_without_a_word(tmp_path: Path) -> None:
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("systemd-analyze is missing (Debian package systemd)")
    name = "holdfast-accept@root.service"
    text = (UNIT.parent / "holdfast-accept@.service").read_text()
    (tmp_path / name).write_text(text.replace("/opt/holdfast/bin/holdfast", "/bin/true"))
    done = subprocess.run([tool, "verify", str(tmp_path / name)], capture_output=True, text=True,
                          timeout=60, check=False)
    assert done.stderr == ""


def node_units(tmp_path: Path, old: str = "", new: str = "") -> str:
    """What systemd has to say of the units by which a node is rebooted; "" when nothing."""
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("systemd-analyze is missing (Debian package systemd)")
    for name in ("holdfast-node.socket", "holdfast-node@.service"):
        text = (UNIT.parent / name).read_text().replace("/opt/holdfast/bin/python", "/bin/true")
        (tmp_path / name).write_text(text.replace(old, new) if old else text)
    command = [tool, "verify", str(tmp_path / "holdfast-node.socket"),
               str(tmp_path / "holdfast-node@x.service")]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False
    ).stderr


def test_systemd_takes_the_units_of_the_node_without_a_word(tmp_path: Path) -> None:
    (tmp_path / "good").mkdir()
    assert node_units(tmp_path / "good") == ""
    (tmp_path / "bad").mkdir()
    assert "Acept" in node_units(tmp_path / "bad", "Accept=", "Acept=")


def test_only_the_agent_may_knock_and_nothing_runs_without_the_socket() -> None:
    text = (UNIT.parent / "holdfast-node.socket").read_text()
    assert "SocketUser=holdfast\n" in text and "SocketMode=0600\n" in text
    service = (UNIT.parent / "holdfast-node@.service").read_text()
    assert "[Install]" not in service and "User=" not in service
    assert "holdfast.agent.actions.root_helper\n" in service  # and no argument


def test_no_user_can_make_a_path_that_keeps_the_agent_from_starting() -> None:
    """A link to itself is no missing file: a leading "-" does not forgive it."""
    keys = ("BindPaths", "BindReadOnlyPaths", "ReadWritePaths", "ReadOnlyPaths", "ExecPaths",
            "InaccessiblePaths", "TemporaryFileSystem", "LoadCredential")
    for unit in UNIT.parent.glob("*.service"):
        named = [path.lstrip("-+") for path in values(unit, *keys)]
        assert not [path for path in named
                    if path.startswith(("/tmp", "/var/tmp", "/dev/shm", "/home"))]
    # Neuron's compile cache lies there, and a private /var/tmp would be an empty one.
    assert not values(UNIT, "PrivateTmp")


def test_the_clock_may_be_read_by_whichever_call_a_library_makes() -> None:
    allowed = values(UNIT, "SystemCallFilter")
    assert {"adjtimex", "clock_adjtime", "clock_adjtime64"} <= set(allowed)
    assert "ProtectClock" not in [line.partition("=")[0] for line in UNIT.read_text().splitlines()]


def test_a_probe_that_is_killed_for_memory_does_not_end_the_agent() -> None:
    assert values(UNIT, "OOMPolicy") == ["continue"]


def test_the_store_of_the_documentation_is_the_one_that_the_unit_may_write() -> None:
    assert values(UNIT, "ProtectSystem") == ["strict"]
    (path,) = values(UNIT.parent / "holdfast-evidence.conf", "ReadWritePaths")
    text = (ROOT / "docs/node-orders.md").read_text()
    assert f'store = "{path.lstrip("-")}"' in text and "holdfast-evidence.conf" in text
    assert path.startswith("-")  # a file system that is late does not keep the agent from starting


def test_the_operators_program_has_room() -> None:
    """The limits of the unit hold for `kubectl drain` on a node of 192 cores as well."""
    unit = UNIT.parent / "holdfast-node@.service"
    assert values(unit, "TasksMax") == ["512"] and values(unit, "MemoryMax") == ["1G"]
    assert "char-ipmidev" in values(unit, "DeviceAllow") and not values(unit, "PrivateDevices")
    assert "char-nvidia*" in values(unit, "DeviceAllow")  # nvidia-smi's reset
    (limit_s,) = values(unit, "TimeoutStartSec")
    # Reading the order, the longest verb, and room for the answer.
    longest_s = max(root_helper.COMMAND_S, root_helper.RESET_S)
    assert root_helper.READ_S + longest_s + 10.0 <= float(limit_s)
    # Orders follow each other at once: the one before may not have gone yet.
    (connections,), (burst,) = (values(UNIT.parent / "holdfast-node.socket", key)
                                for key in ("MaxConnections", "TriggerLimitBurst"))
    assert int(connections) > 1 and int(burst) >= root_helper.RESETS_MAX + len(root_helper.VERBS)
    # Each side waits longer than the one behind it.
    order_s = min(one.deadline_s for one in ACTIONS.values() if one.verb)
    assert root_helper.COMMAND_S < root_client.ANSWER_S < order_s - root_client.EVIDENCE_S
    assert root_helper.RESET_S < root_client.RESET_S
    before_s = root_client.EVIDENCE_S + collectors.REST_S
    assert root_client.RESET_S + before_s < ACTIONS["reset_gpu"].deadline_s


@pytest.mark.parametrize("found", ["65.5.0", "", "76"])
def test_a_python_without_the_setuptools_that_it_needs_is_told_what_to_install(
    found: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def version(name: str) -> str:
        if not found:
            raise metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(metadata, "version", version)
    assert builder().main(["wheel", "--to", str(tmp_path / "dist")]) == 1
    said = capsys.readouterr().err
    assert "-m pip install 'setuptools>=77'" in said and "Traceback" not in said
    assert not (tmp_path / "dist").exists()


def test_a_package_serves_pythons_in_order_and_without_a_gap(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its control file names the lowest and the highest."""
    low, middle, high = builder().PYTHONS
    assert builder().served([high, middle, high]) == [middle, high]
    assert builder().main(["--python", high, "--python", low, "deb", "--to", str(tmp_path)]) == 1
    assert f"--python: {middle} between {low} and {high} is missing" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
