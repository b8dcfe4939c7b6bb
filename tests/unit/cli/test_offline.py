"""Commands that need no agent: launching, verify, explain, config, doctor, dashboards, help."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from holdfast.agent.cli import doctor, launch, main, policy, report
from holdfast.agent.cli.doctor_node import HAVE, Finding
from holdfast.agent.cli.parser import COMMANDS
from holdfast.agent.cli.text import Failure, failed, paragraphs, plain, seconds, size, table
from holdfast.agent.config.runbooks import load_runbooks
from holdfast.agent.simulate.__main__ import main as simulate
from holdfast.runbooks import prose
from holdfast.trainer.checkpoint import format
from holdfast.worker.launcher import spec

Captured = pytest.CaptureFixture[str]

# ------------------------------------------------------------------------------------- launching


@pytest.mark.parametrize(
    ("argv", "python"),
    [
        (["--python", "/a/py", "train.py"], "/a/py"),
        (["--nnodes", "1", "--python=/a/py", "-m", "job"], "/a/py"),
        (["-m", "--python", "/a/py", "job"], "/a/py"),
        (["--standalone", "train.py", "--python", "/of/the/script"], ""),
        (["--nproc-per-node", "2", "train.py", "--python=/of/the/script"], ""),
        (["--no_python", "job", "--python", "x"], ""),
        (["--", "--python", "x"], ""),
        ([], ""),
    ],
)
def test_only_the_launchers_own_python_flag_counts(argv: list[str], python: str) -> None:
    assert launch.python_flag(argv) == python


def test_flags_without_a_value_are_those_of_the_launcher() -> None:
    parser = spec.build("run")
    without = {
        name.replace("_", "-")
        for action in parser._actions
        if action.nargs == 0
        for name in action.option_strings
    }
    assert without == launch.WITHOUT_VALUE


def test_the_jobs_interpreter(tmp_path: Path) -> None:
    python = tmp_path / "bin/python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    environ = {"VIRTUAL_ENV": str(tmp_path), "CONDA_PREFIX": "/nowhere", "PATH": ""}
    assert launch.job_python([], environ) == str(python)
    assert launch.job_python(["--python", sys.executable], environ) == sys.executable
    assert launch.job_python([], {}) == sys.executable
    with pytest.raises(Failure, match="CONDA_PREFIX names /nowhere/bin/python") as raised:
        launch.job_python([], {"CONDA_PREFIX": "/nowhere"})
    assert raised.value.code == 78


def test_a_packages_own_interpreter_is_not_the_jobs(tmp_path: Path) -> None:
    """bin/holdfast of a package starts it isolated; what is on the PATH is what the user runs."""
    (tmp_path / "python3").symlink_to("/bin/true")
    code = ("import sys; from holdfast.agent.cli import launch\n"
            "for path in sys.argv[1:]: print(launch.job_python([], {'PATH': path}))")

    def chosen(*flags: str) -> list[str]:
        return subprocess.run(
            [sys.executable, *flags, "-c", code, str(tmp_path), "/nowhere"], capture_output=True,
            text=True, timeout=60, check=True).stdout.split()

    assert chosen("-I") == [str(tmp_path / "python3"), sys.executable]
    assert chosen() == [sys.executable] * 2


def test_the_doctor_looks_for_the_trainer_where_it_would_run(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin/python"
    python.write_text("#!/bin/sh\necho torch holdfast\n")
    python.chmod(0o755)
    found = doctor.trainer({"VIRTUAL_ENV": str(tmp_path), "PATH": ""})
    assert found.state == doctor.LACK and found.said == f"no torch, holdfast in {python}"
    python.write_text("#!/bin/sh\n")
    assert doctor.trainer({"VIRTUAL_ENV": str(tmp_path), "PATH": ""}).state == HAVE
    assert doctor.trainer({"VIRTUAL_ENV": "/nowhere"}).state == doctor.LACK


def test_run_becomes_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, list[str], dict[str, str]]] = []
    monkeypatch.setattr(launch.os, "execve", lambda *given: seen.append(given))
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    monkeypatch.delenv("CONDA_PREFIX", raising=False)
    main_argv = ["run", "--nproc-per-node", "2", "train.py", "--lr", "3"]
    launch.launch(main_argv[0], main_argv[1:])
    python, argv, environ = seen[0]
    assert python == sys.executable
    assert argv[1].endswith("worker/bootstrap.py")
    assert argv[2:] == main_argv
    assert environ["HOLDFAST_PYTHON"] == sys.executable


# ---------------------------------------------------------------------------------------- verify


def checkpoint(root: Path, step: int) -> Path:
    directory = root / format.directory_name(step, 1)
    entries = [format.Entry("w", "float32", (4,), 0, 16)]
    format.write_shard(directory, 0, 1, entries, b"\x01" * 16)
    format.commit(directory, {"generation": 1, "step": step, "world": 1})
    return directory


def test_verify_proves_one_or_all(tmp_path: Path, capsys: Captured) -> None:
    good, bad = checkpoint(tmp_path, 10), checkpoint(tmp_path, 20)
    assert main(["verify", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("good: every byte is proven") == 2
    (bad / "shard-00000-of-00001.bin").write_bytes(b"\x01" * 15 + b"\x02")
    assert main(["verify", str(tmp_path), "--json"]) == 2
    problems = {one["name"]: one["problems"] for one in json.loads(capsys.readouterr().out)}
    assert problems[good.name] == []
    assert "bytes differ" in problems[bad.name][0]
    assert main(["verify", str(good)]) == 0


def test_verify_of_nothing_is_an_error(tmp_path: Path, capsys: Captured) -> None:
    assert main(["verify", str(tmp_path)]) == 1
    assert "holds no committed checkpoint" in capsys.readouterr().err
    assert main(["verify", str(tmp_path / "no")]) == 1
    capsys.readouterr()
    assert main(["verify", str(tmp_path / ("x" * 300))]) == 1  # as a closed folder is, for root too
    assert "File name too long" in capsys.readouterr().err


# ---------------------------------------------------------------------- explain, config, doctor


def test_explain_knows_every_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setenv("HOLDFAST_RUNTIME_DIR", str(tmp_path))
    books = load_runbooks()
    for name in prose.names():
        assert main(["explain", name]) == 0
        text = capsys.readouterr().out
        assert text.startswith(f"{name}: ")
        # Every rung is explained; only those that reach beyond the run are not there yet.
        beyond = any(r.endswith(("_node", "_gpu", "_person")) for r in books[name].ladder)
        assert "off in this version" not in text or beyond, text
    assert main(["explain", "rank_kiled"]) == 1
    assert "did you mean rank_killed?" in capsys.readouterr().err
    assert main(["explain"]) == 0
    listed = capsys.readouterr().out
    assert max(len(row) for row in listed.splitlines()) <= 80
    assert "…" not in listed  # a ladder goes on below itself, to its last rung
    rungs = listed.replace(",", " ").split()
    assert all(rungs.count(one) for book in books.values() for one in book.ladder)
    assert rungs.count("restart_ranks") == sum("restart_ranks" in b.ladder for b in books.values())
    assert main(["explain", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == len(prose.names())


def test_config_errors_come_all_at_once(tmp_path: Path, capsys: Captured) -> None:
    file = tmp_path / "agent.toml"
    file.write_text('[agent]\ntick_z = 1\n[detect]\nodds = "high"\n')
    assert main(["config", "check", "--config", str(file)]) == 78
    said = capsys.readouterr().err
    assert "2 errors" in said
    assert str(file) in said
    file.write_text("[agent]\ntick_s = 0.5\n")
    assert main(["config", "check", "--config", str(file)]) == 0
    assert main(["config", "show", "--config", str(file)]) == 0
    assert f"tick_s = 0.5  # {file}" in capsys.readouterr().out


def test_a_program_that_checks_the_configuration_hears_of_a_bad_runbook(
    tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / "rank_hung.md").write_text("no machine part\n")
    file = tmp_path / "agent.toml"
    file.write_text(f'[runbooks]\ndirectory = "{tmp_path}"\n')
    for more in ([], ["--json"]):
        assert main(["config", "check", "--config", str(file), *more]) == 78, more
        assert "rank_hung.md" in capsys.readouterr().err


def test_what_config_show_writes_can_be_read_again(tmp_path: Path, capsys: Captured) -> None:
    file = tmp_path / "agent.toml"
    file.write_text("[agent]\ntick_s = 0.5\n")
    assert main(["config", "show", "--config", str(file)]) == 0
    file.write_text(capsys.readouterr().out)
    assert main(["config", "check", "--config", str(file)]) == 0


def test_doctor_names_the_cost_of_what_is_missing(capsys: Captured) -> None:
    assert main(["doctor", "--json"]) in (0, 1)
    findings = json.loads(capsys.readouterr().out)
    assert len(findings) == len(doctor.PROBES) + 1  # what orders for the node need
    assert {"Neuron devices", "node orders"} <= {one["what"] for one in findings}
    assert all(one["cost"] for one in findings if one["state"] != "have")
    broken = doctor.job_interpreter({"VIRTUAL_ENV": "/nowhere"})
    assert broken.state == doctor.NEED
    assert "cannot start" in plain(doctor.report([broken]))


def test_alert_rules_are_written(tmp_path: Path) -> None:
    base = ["dashboards", "render", "--runbook-base", "https://wiki/books"]
    assert main([*base, "--to", str(tmp_path)]) == 0
    text = (tmp_path / "holdfast-alerts.yml").read_text()
    assert "runbook_url: https://wiki/books/rank_killed.md\n" in text
    assert "runbook_url: https://wiki/books/fleet/breaker_open.md\n" in text
    samples = {"holdfast-alertmanager.yml", "holdfast-prometheus.yml",
               "holdfast-grafana-dashboards.yml", "holdfast-grafana-datasource.yml"}
    boards = {f"holdfast-{one}.json" for one in ("fleet", "run", "node", "recovery")}
    assert {one.name for one in tmp_path.iterdir()} == {"holdfast-alerts.yml", *samples, *boards}
    fleet = (tmp_path / "holdfast-fleet.json").read_text()
    assert "https://wiki/books/${__data.fields.fault}.md" in fleet and "}/runbooks" not in fleet


def test_links_to_agents_that_speak_tls_are_https(tmp_path: Path) -> None:
    assert main(["dashboards", "render", "--runbook-base", "https://", "--to", str(tmp_path)]) == 0
    urls = {rule["annotations"]["runbook_url"] for group in
            yaml.safe_load((tmp_path / "holdfast-alerts.yml").read_text())["groups"]
            for rule in group["rules"] if "alert" in rule}
    over_tls = 'https://{{ with query "holdfast_build_info or '
    assert urls and all(url.startswith(over_tls) for url in urls)
    fleet = (tmp_path / "holdfast-fleet.json").read_text()
    assert "https://${__data.fields.instance}/runbooks/" in fleet and "http://${__d" not in fleet


def test_a_fault_of_the_operators_own_is_explained_and_has_its_alert(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """Its runbook stands in one file, with prose or without."""
    head = '+++\nseverity = "warn"\nscope = "run"\nladder = ["restart_ranks"]\n%s+++\n'
    (tmp_path / "books").mkdir()
    (tmp_path / "books/fabric_storm.md").write_text(head % "")
    (tmp_path / "books/own_alert.md").write_text(
        head % 'alert = "HoldfastOwnAlert"\n' + "## Meaning\n\nTwo switches drop. All of it.\n")
    (tmp_path / "books/rank_hung.md").write_text(head % 'alert = "HoldfastRankHung"\n')
    (tmp_path / "agent.toml").write_text(f'[runbooks]\ndirectory = "{tmp_path}/books"\n')
    monkeypatch.setattr("holdfast.agent.config.load.DEFAULT_FILE", tmp_path / "agent.toml")
    monkeypatch.setenv("HOLDFAST_RUNTIME_DIR", str(tmp_path / "none"))
    assert main(["explain", "fabric_storm"]) == 0
    assert "restart_ranks" in capsys.readouterr().out
    assert main(["explain", "own_alert"]) == 0
    assert "Two switches drop." in capsys.readouterr().out
    assert main(["explain", "rank_hung"]) == 0
    said = capsys.readouterr().out
    assert "books/rank_hung.md" in "".join(said.split()) and "Mitigation" in said
    assert main(["dashboards", "render"]) == 0
    rules = yaml.safe_load(capsys.readouterr().out)["groups"]
    (ticket,) = [one for group in rules for one in group["rules"]
                 if one.get("alert") == "HoldfastOwnAlert"]
    assert ticket["annotations"]["summary"] == "Two switches drop."


def test_alert_rules_go_to_standard_output_unless_told_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["dashboards", "render", "--to", "."]) == 0
    written = (tmp_path / "holdfast-alerts.yml").read_text()
    before = sorted(tmp_path.iterdir())
    capsys.readouterr()
    assert main(["dashboards", "render"]) == 0
    assert capsys.readouterr().out == written
    assert sorted(tmp_path.iterdir()) == before


# ------------------------------------------------------------------------------------------ help


@pytest.mark.parametrize("name", [one.name for one in COMMANDS if one.place])
def test_every_command_explains_itself(name: str, capsys: Captured) -> None:
    with pytest.raises(SystemExit) as raised:
        main([name, "--help"])
    assert raised.value.code == 0
    said = capsys.readouterr().out
    assert f"example: holdfast {name}" in said
    assert "exit codes: 0: " in said
    assert max(len(row) for row in said.splitlines()) <= 80


def test_help_and_start_import_nothing_heavy() -> None:
    code = (
        "import sys, contextlib, io\n"
        "from holdfast.agent.cli import main\n"
        "with contextlib.redirect_stdout(io.StringIO()): main([])\n"
        "print(sorted({'rich', 'msgspec', 'aiohttp', 'torch', 'http.client', 'tomllib'}"
        " & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n"


# ------------------------------------------------------------------------------------------ text


def test_words_for_quantities() -> None:
    said = [seconds(value) for value in (0.123, 5.04, 42, 200, 8000, None)]
    assert said == ["0.12 s", "5.0 s", "42 s", "3 min 20 s", "2 h 13 min", "unknown"]
    assert [size(value) for value in (12, 4500, 41_500_000, 7.6e10)] == [
        "12 bytes", "4 kB", "42 MB", "76.0 GB",
    ]


def test_an_incident_that_is_not_over_has_no_cost_yet() -> None:
    assert report.cost({"state": "acted", "lost_s": 0.0}) == "not over"
    assert report.cost({"state": "closed", "lost_s": 0.0}) == "nothing"
    assert report.cost({"state": "acted", "lost_s": 2.0}) == "2.0 s"


def test_the_comments_of_commands_stay_within_the_page() -> None:
    """A command itself is never broken: it is copied."""
    for name, text in prose.pages().items():
        for body in prose.sections(text).values():
            for row in plain(paragraphs(body)).splitlines():
                assert len(row) <= 80 or "  # " not in row, (name, row)
    block = "    short       # " + "word " * 20 + "\n    a-longer command\n    two  # words"
    assert plain(paragraphs(block)) == (
        "    short  # word word word word word word word word word word word word word\n"
        "           # word word word word word word word\n"
        "    a-longer command\n    two    # words\n")


def test_why_a_command_fails_is_wrapped_on_a_terminal_and_one_line_elsewhere() -> None:
    text = "nothing runs here: " + "word " * 20 + "/a/path" * 15 + "\nsecond\x1b[31m"
    assert failed(text, False) == [f"holdfast: {text.partition(chr(10))[0]}", "second?[31m"]
    rows = failed(text, True)
    assert rows[-1] == "second?[31m" and all(len(one) <= 80 or "/a/path" in one for one in rows)
    assert " ".join(one.strip() for one in rows[:-1]) == f"holdfast: {text.partition(chr(10))[0]}"


def test_commands_in_prose_keep_their_lines() -> None:
    text = plain(paragraphs("a b\nc\n\n    ls -l\n    df\n\nd"))
    assert text == "  a b c\n\n    ls -l\n    df\n\n  d\n"


def test_a_table_is_never_wider_than_the_page() -> None:
    rows = table(("a", "b"), [["x" * 20, "y" * 200]])
    assert max(len(row) for row in plain(rows).splitlines()) == 80


def test_a_table_that_wraps_loses_nothing() -> None:
    text = plain(table(("a", "b"), [["x", ", ".join(f"word{n}" for n in range(40))]], 2, wrap=True))
    rows = text.splitlines()
    assert max(map(len, rows)) <= 80 and text.count("word") == 40
    assert all(row.startswith(" " * 5 + "word") for row in rows[2:])


def test_options_reach_commands_as_a_namespace() -> None:
    from holdfast.agent.cli.parser import build

    chosen = build().parse_args(["pause", "--run", "m5", "--reason", "x"])
    assert isinstance(chosen, argparse.Namespace)
    assert (chosen.run, chosen.node, chosen.reason) == ("m5", None, "x")


def test_the_list_of_commands_has_one_line_for_each(capsys: Captured) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    rows = capsys.readouterr().out.splitlines()
    assert max(map(len, rows)) <= 80
    for command in COMMANDS:
        assert any(row.split(maxsplit=1) == [command.name, command.help] for row in rows), command


def test_the_doctor_names_a_path_whole(tmp_path: Path) -> None:
    path = "/" + "a-long-name/" * 3 + "bin/python"
    text = plain(doctor.report([Finding("job's Python", HAVE, f"3.11.7 with torch ({path})")]))
    assert path in text and max(map(len, text.splitlines())) <= 80


def test_what_an_agent_must_be_allowed_is_not_said_to_happen() -> None:
    books = load_runbooks()
    withheld = "reboot_node: not done, because actions.allow does not name it"
    assert policy.outlook([{"subject": "node/a", "rung": "", "reason": withheld}],
                          books["host_kernel_crash"]) == [f"nothing: {withheld}; for node/a"]
    rows = [{"subject": f"run/r/rank/{n}", "rung": "restart_ranks", "code": -1} for n in range(6)]
    rows.append({"subject": "run/r/rank/6", "rung": "stop_run", "code": 76, "reason": "spent"})
    assert policy.outlook(rows, books["rank_hung"]) == [
        "restart_ranks; for run/r/rank/0, run/r/rank/1, run/r/rank/2, run/r/rank/3 and 2 more",
        "stop_run: the run would end with 76 (spent); for run/r/rank/6"]
    assert policy.outlook([], books["log_root_cause"]) == ["only shown"]


def test_seeds_that_are_none_are_refused_with_an_example(capsys: Captured) -> None:
    with pytest.raises(SystemExit, match="2"):
        simulate(["--seeds", "many"])
    assert "'many': give FIRST:LAST, for example 0:200" in capsys.readouterr().err


def test_an_agent_without_a_place_for_sockets_says_what_to_set(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    given = ["--state", str(tmp_path / "state"), "--runtime", str(tmp_path / "file/run")]
    done = subprocess.run(
        [sys.executable, "-m", "holdfast.agent", *given, "--listen", ""],
        capture_output=True, text=True, timeout=30, check=False,
    )
    said = f"{tmp_path}/file/run: Not a directory: set agent.runtime_dir, or --runtime"
    assert done.returncode == 1 and said in done.stderr, done.stderr


@pytest.mark.parametrize("argv", [
    ["--seeds", "5:3"], ["--seeds", "0:99999999999999999999"], ["--seed", "-1"],
    ["--processes", "0"], ["--processes", "99999999"],
])
def test_a_simulation_is_bounded(argv: list[str], capsys: Captured) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *argv])
    assert ended.value.code == 2 and "give " in capsys.readouterr().err


@pytest.mark.parametrize(("argv", "meant"), [
    (["statsu"], "status"), (["status", "--jsn"], "--json"), (["config", "chek"], "check"),
    (["dashboards", "render", "--too", "x"], "--to"), (["simulate", "--sed", "3"], "--seed"),
    (["simulate", "--storm", "netwrk"], "network"), (["agent", "--privat0"], "--private"),
    (["zzzzz"], ""),
])
def test_what_was_meant_is_named(argv: list[str], meant: str, capsys: Captured) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert f"did you mean {meant}?" in said if meant else "did you mean" not in said


@pytest.mark.parametrize("argv", [
    ["demo", "--ranks", "0"], ["demo", "--steps", "-1"], ["inject", "stall", "--seconds", "nan"],
    ["inject", "kill", "--rank", "-1"], ["inject", "stall", "--seconds", "inf"],
])
def test_numbers_of_commands_have_bounds(argv: list[str], capsys: Captured) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2 and ": give " in capsys.readouterr().err


def test_the_folder_for_the_rules_is_made(tmp_path: Path, capsys: Captured) -> None:
    assert main(["dashboards", "render", "--to", str(tmp_path / "new/rules")]) == 0
    assert (tmp_path / "new/rules/holdfast-alerts.yml").is_file()
    (tmp_path / "file").touch()
    assert main(["dashboards", "render", "--to", str(tmp_path / "file/rules")]) == 1
    assert "Not a directory" in capsys.readouterr().err
