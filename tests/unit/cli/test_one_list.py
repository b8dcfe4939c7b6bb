"""What the API offers and what the command line offers is one list."""

from __future__ import annotations

import argparse
import inspect
import re

import pytest

from holdfast.agent.cli import bundle, control, main, modes, parser
from holdfast.agent.cli.text import Failure
from holdfast.agent.core import actions
from holdfast.agent.web import server

# (what, the API's word) -> the command that says it
OFFERED = {
    ("run", "restart"): "restart", ("run", "pause"): "pause", ("run", "resume"): "resume",
    ("run", "inject"): "inject", ("node", "pause"): "pause", ("node", "resume"): "resume",
    ("incident", "close"): "close", ("incident", "ack"): "incidents",
    ("incident", "label"): "incidents",
    ("node", "exclude"): "exclude", ("node", "drain"): "drain", ("node", "release"): "release",
    ("run", "drain"): "drain", ("node", "check"): "check", ("incident", "bundle"): "bundle",
    ("fleet", "pause"): "pause", ("fleet", "resume"): "resume",
}
ALSO_ALONE = {"check", "bundle"}  # most of what they do needs no word of the API


def words_of_the_api() -> set[tuple[str, str]]:
    source = inspect.getsource(server.WebServer if hasattr(server, "WebServer") else server)
    verbs = re.findall(r'\("(\w+)", self\._\w+\)', source)
    return ({("run", word) for word in (*actions.of_run(), "inject")}
            | {("node", word) for word in actions.of_node()}
            | {("fleet", word) for word in actions.of_fleet()}
            | {("incident", word) for word in verbs})


def test_every_word_of_the_api_has_a_command_and_every_command_a_word() -> None:
    assert words_of_the_api() == set(OFFERED)
    commands = {one.name: one for one in parser.COMMANDS}
    assert set(OFFERED.values()) <= set(commands)
    asking = {one.name for one in parser.COMMANDS if one.place.startswith("control:")}
    asked_for = set(OFFERED.values()) - ALSO_ALONE
    assert asking == asked_for, "a command that asks for nothing that is offered"
    for name in asking:
        assert callable(parser.load(name))


def test_each_word_is_posted_by_its_command() -> None:
    source = inspect.getsource(control) + inspect.getsource(bundle)
    for _, word in OFFERED:
        assert f'"{word}"' in source or f"/{word}" in source, word


def test_every_argument_of_every_command_has_its_place_in_the_table() -> None:
    own = {one.name for one in parser.COMMANDS if one.place}
    assert set(modes.MODES) == own
    for command, them in modes.MODES.items():
        told = {word for one in them for word in
                (one.chosen_by.partition("=")[0], *one.reads.split()) if word}
        assert told == set(modes.arguments(command)), command


def given(command: str, *names: str) -> argparse.Namespace:
    """As parsed, with these arguments set and no other: `what=push` to that, others to anything."""
    values = {name: one.default for name, one in modes.arguments(command).items()}
    for name, _, value in (one.partition("=") for one in names if one):
        values[name] = value or "given"
    return argparse.Namespace(command=command, **values)


def test_what_a_mode_does_not_read_is_refused_and_what_it_reads_is_not() -> None:
    for command, them in modes.MODES.items():
        choosers = {one.chosen_by.partition("=")[0] for one in them}
        for mode in them:
            for name, action in modes.arguments(command).items():
                if name in mode.reads.split():
                    modes.refuse(given(command, mode.chosen_by, name))
                elif name not in choosers:
                    with pytest.raises(Failure, match="exclude each other: |belongs to ") as said:
                        modes.refuse(given(command, mode.chosen_by, name))
                    shown = (action.option_strings or [str(action.metavar or name.upper())])[-1]
                    assert str(said.value).startswith(f"{shown} ") and said.value.code == 2


@pytest.mark.parametrize(("line", "said"), [
    ("drain --run m5 --within 5 --reason x", "--within and --run exclude each other: a run is"),
    ("drain node-a --no-wait --within 5 --reason x", "--within and --no-wait exclude each other"),
    ("drain node-a --run m5 --reason x", "NODE and --run exclude each other"),
    ("pause --run m5 --fleet --reason x", "--run and --fleet exclude each other"),
    ("pause --node a --fleet --reason x", "--node and --fleet exclude each other"),
    ("incidents i-16 --would-have", "--would-have and ID exclude each other"),
    ("dashboards render --url http://a", "--url belongs to `holdfast dashboards push`"),
    ("dashboards push --to d", "--to belongs to `holdfast dashboards render`"),
    ("simulate --trace", "--trace belongs to --seed"),
    ("simulate --seed 3 --seeds 1:4", "--seed is one alone"),
    ("simulate --seed 3 --processes 2", "--seed is one alone"),
    ("agent --run m5", "--run belongs to --private"),
    ("agent --rendezvous a:1", "--rendezvous belongs to --private"),
])
def test_a_refusal_says_what_excludes_what(
    capsys: pytest.CaptureFixture[str], line: str, said: str
) -> None:
    try:
        code = main(line.split())
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    assert code == 2
    shown = capsys.readouterr()
    assert said in " ".join(shown.err.split()) and not shown.out


@pytest.mark.parametrize(("line", "said"), [
    ("--reason x", "--reason belongs to --agent"),
    ("--history --peers a,b", "--peers and --history exclude each other"),
    ("--peers a,b --hostfile f", "--hostfile and --peers exclude each other"),
    ("--port 9858", "--port belongs to --peers or --hostfile"),
    ("clock --peers a,b", "NAME and --peers exclude each other: tests between nodes are"),
    ("--peers a,b --sizes 1M,2M", "give one"),
    ("--list --force", "--force and --list exclude each other"),
    ("--agent --path /tmp --reason x", "--path and --agent exclude each other"),
])
def test_a_check_that_is_asked_for_wrongly_is_refused(
    capsys: pytest.CaptureFixture[str], line: str, said: str
) -> None:
    asked = ["check", *line.split()]
    assert main(asked) == 3
    shown = capsys.readouterr()
    assert said in " ".join(shown.err.split()) and not shown.out


@pytest.mark.parametrize("line", ["--history --reason x", "clock --peers a,b", "--list --force",
                                  "--agent --path /tmp --reason x"])
def test_another_question_than_a_schedulers_drains_no_node(
    capsys: pytest.CaptureFixture[str], line: str
) -> None:
    assert main(["check", *line.split(), "--for", "slurm-prolog"]) == 0  # else it drains the node
    shown = capsys.readouterr()
    assert "holdfast: unknown: " in shown.err and not shown.out
