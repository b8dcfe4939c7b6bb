"""Fault named in code -> runbook, whole, and back again; its alert is tests/test_alerts.py's."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest

from holdfast.agent.catalog import load
from holdfast.agent.cli import parser
from holdfast.agent.cli.parser import INJECTABLE
from holdfast.agent.core.actions import rungs
from holdfast.agent.core.model import OK, SEVERITIES
from holdfast.agent.core.parse import kernel_line
from holdfast.runbooks import index, prose
from holdfast.runbooks.rehearsals import REHEARSALS, Kernel, Nothing

ROOT = Path(__file__).resolve().parent.parent
NAMERS = ("agent", "collectors", "trainer", "worker")
SCOPES = {"gpu", "neuron", "nic", "rank", "node", "run", "store"}
INJECTED = set(INJECTABLE)  # `inject` calls what it does to a rank a fault as well
CLEARS = {"reboot", "quiet_10m", "check", "operator"}


def machine(text: str) -> dict[str, Any]:
    return tomllib.loads(prose.split(text)[0])


def wrong_with(fault: str, text: str) -> list[str]:
    """What a runbook lacks, as sentences."""
    table, (_, sections) = machine(text), prose.split(text)
    camel = "Holdfast" + "".join(word.capitalize() for word in fault.split("_"))
    checks = {
        "keys": set(table) - {"checks"} == {
            "severity", "scope", "ladder", "budget", "clears", "alert"},
        "severity": table.get("severity") in SEVERITIES,
        "scope": table.get("scope") in SCOPES,
        "rungs": set(table.get("ladder", ["?"])) <= set(rungs()),
        "budget": table.get("budget", {}).keys() == {"count", "window_h"},
        "clears": table.get("clears") in CLEARS,
        "alert": table.get("alert") == camel,
        "title": f"\n# {fault}\n" in text,
        "sections": tuple(sections) == prose.SECTIONS,
        "texts": all(body.strip() for body in sections.values()),
    }
    return [f"{fault}: {what}" for what, good in checks.items() if not good]


Places = dict[str, set[int]]


def fault_places(trees: list[ast.Module]) -> Places:
    """Where a fault's name stands among the arguments of our functions and values."""
    places: Places = {}
    for node in (node for tree in trees for node in ast.walk(tree)):
        names: list[str] = []
        if isinstance(node, ast.FunctionDef):
            names = [one.arg for one in node.args.args if one.arg not in ("self", "cls")]
        elif isinstance(node, ast.ClassDef):
            fields = (one.target for one in node.body if isinstance(one, ast.AnnAssign))
            names = [one.id for one in fields if isinstance(one, ast.Name)]
        if "fault" in names:
            places.setdefault(node.name, set()).add(names.index("fault"))  # type: ignore
    return places


def is_fault(node: ast.expr) -> bool:
    name = node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")
    return name == "fault" or name.endswith("FAULT")


def faults_named_in(tree: ast.AST, places: Places) -> set[str]:
    """Faults that code names: as an argument, an assigned value, a key's value, a comparison."""
    named: list[ast.expr | None] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            named += [one.value for one in node.keywords if one.arg == "fault"]
            called = getattr(node.func, "id", getattr(node.func, "attr", ""))
            found = places.get(called, set())
            named += [one for index, one in enumerate(node.args) if index in found]
        elif isinstance(node, ast.Dict):
            named += [
                value for key, value in zip(node.keys, node.values, strict=True)
                if isinstance(key, ast.Constant) and key.value == "fault"
            ]
        elif isinstance(node, ast.Assign) and any(is_fault(one) for one in node.targets):
            named.append(node.value)
        elif isinstance(node, ast.Compare) and is_fault(node.left):
            named += node.comparators
    return {text for value in named if value for text in texts_of(value)}


def texts_of(value: ast.expr) -> set[str]:
    """The texts that an expression may be: a constant, a side of an `if`, a member."""
    if isinstance(value, ast.IfExp):
        return texts_of(value.body) | texts_of(value.orelse)
    if isinstance(value, (ast.Tuple, ast.Set, ast.List)):
        return {text for one in value.elts for text in texts_of(one)}
    if isinstance(value, ast.Constant) and isinstance(value.value, str) and value.value:
        return {value.value}
    return set()


def sources() -> list[Path]:
    """Files that may raise faults; the simulator has some of its own, on virtual hardware."""
    found = [path for folder in NAMERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path for path in found if "simulate" not in path.parts and path.name != "demo.py"]


def faults_of_the_catalogue() -> set[str]:
    """Faults that rows of agent/catalog raise: data is as good as code."""
    text = "".join(path.read_text() for path in sorted((ROOT / "agent/catalog").glob("*.toml")))
    return set(re.findall(r'\bfault = "([a-z_]+)"', text))


def test_every_fault_of_the_catalogue_has_a_runbook() -> None:
    assert len(faults_of_the_catalogue()) >= 14
    assert not faults_of_the_catalogue() - set(prose.names())


def test_every_runbook_is_whole() -> None:
    wrong = [line for name in prose.names() for line in wrong_with(name, prose.text_of(name))]
    assert not wrong, "\n".join(wrong)


def test_every_fault_named_in_code_has_a_runbook() -> None:
    known = set(prose.names())
    trees = {path: ast.parse(path.read_text()) for path in sources()}
    places = fault_places(list(trees.values()))
    unknown = {
        f"{path.relative_to(ROOT)}: {name}"
        for path, tree in trees.items()
        for name in faults_named_in(tree, places) - known - INJECTED
    }
    assert not unknown, "\n".join(sorted(unknown))


def test_every_runbook_is_of_a_fault_that_code_raises() -> None:
    raised = {
        node.value
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    unraised = sorted(set(prose.names()) - raised - faults_of_the_catalogue())
    assert not unraised, ", ".join(unraised)


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ('severity = "fatal"', 'severity = "bad"', "severity"),
        ('scope    = "rank"', 'scope    = "moon"', "scope"),
        ('"restart_ranks"', '"pray"', "rungs"),
        ('alert    = "Holdfast', 'alert    = "Other', "alert"),
        ("## Impact", "## Effect", "sections"),
        ("# rank_killed", "# rank_kiled", "title"),
    ],
)
def test_the_check_of_runbooks_can_fail(old: str, new: str, what: str) -> None:
    text = prose.text_of("rank_killed")
    assert old in text
    assert f"rank_killed: {what}" in wrong_with("rank_killed", text.replace(old, new))


def test_faults_are_found_however_code_names_them() -> None:
    code = (
        "class Verdict:\n    fault: str\n    subject: str\n"
        "def finish(self, why, fault): ...\n"
        'Verdict("a", s)\nx.finish(why, "b")\nf(fault="c")\nd = {"fault": "d"}\n'
        'HANG_FAULT = "e"\nf(fault=x)\nfault = "f" if x else "g"\nif c.fault == "h": pass\n'
        'if fault in ("i", "j"): pass\nd["fault"]\nother("k", "l")'
    )
    tree = ast.parse(code)
    assert faults_named_in(tree, fault_places([tree])) == set("abcdefghij")


def test_a_file_without_fences_is_refused() -> None:
    with pytest.raises(ValueError, match="machine part"):
        prose.split("# title\n")


def test_every_page_stands_under_one_symptom() -> None:
    listed = [name for found in index.SYMPTOMS.values() for name in found]
    assert sorted(listed) == sorted(prose.pages()), "runbooks/index.py"
    page = Path(__file__).resolve().parent.parent / "docs/runbooks.md"
    assert page.read_text() == index.render_index(), "run `make docs`"


def test_every_page_has_its_rehearsal() -> None:
    """Or says why there is none; what is typed is taken by what it is typed into."""
    catalogue, pages = load.load(load.tables()), prose.pages()
    assert set(REHEARSALS) == set(pages), "runbooks/rehearsals.py"
    for name, how in REHEARSALS.items():
        if isinstance(how, Nothing):
            assert len(how.reason.split()) > 2, name
        elif isinstance(how, Kernel):
            event = kernel_line.parse(catalogue, how.line)
            assert event is not None and (event.fault, event.severity != OK) == (name, True), name
            assert "'" not in how.line
        else:
            for command in re.findall(r"`(holdfast [^`]+)`", how) or [how]:
                if command.startswith("holdfast "):
                    parser.build().parse_args(shlex.split(command)[1:])
            for other in re.findall(r"the line of (\w+)", how):
                assert isinstance(REHEARSALS[other], Kernel)
    none = [name for name, how in REHEARSALS.items() if isinstance(how, Nothing)]
    assert len(none) < len(pages) / 4, none


PLACES = {"ID": "i-1", "NODE": "n0", "RUN": "m5", "FAULT": "rank_hung", "DIR": "/tmp", "PATH": "/"}


def commands_of(text: str) -> list[str]:
    """What a page tells people to type of Holdfast's own."""
    rows = [row.partition("#")[0].strip() for row in text.splitlines() if row.startswith("    ")]
    quoted = re.findall(r"`(holdfast [^`]+)`", " ".join(text.split()))
    return [row for row in (*rows, *quoted) if row.startswith("holdfast ")]


def test_every_command_of_a_page_is_one_that_the_command_line_takes() -> None:
    wrong = []
    known = {one.name for one in parser.COMMANDS}
    for name, text in prose.pages().items():
        for command in commands_of(text):
            words = [PLACES.get(word, word) for word in shlex.split(command.replace("...", "x"))]
            if words[1] in ("run", "train", "agent", "simulate") or "|" in words:
                ok = words[1] in known
            else:
                try:
                    parser.build().parse_args(words[1:])
                    ok = True
                except SystemExit:
                    ok = False
            if not ok:
                wrong.append(f"{name}: {command}")
    assert not wrong, "\n".join(wrong)
