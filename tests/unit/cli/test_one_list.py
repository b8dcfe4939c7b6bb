"""What the API offers and what the command line offers is one list."""

from __future__ import annotations

import inspect
import re

from holdfast.agent.cli import bundle, control, parser
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
