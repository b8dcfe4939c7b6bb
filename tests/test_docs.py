"""What the documents say is so: links lead somewhere, commands exist, the example trains."""

from __future__ import annotations

import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.agent.cli.parser import COMMANDS
from holdfast.runbooks import prose
from holdfast.worker.launcher import spec

ROOT = Path(__file__).resolve().parent.parent
TEXTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")),
         *sorted((ROOT / "runbooks").glob("*.md"))]
LINK = re.compile(r"\]\(([^)#]+)\)")
COMMAND = re.compile(r"(?:^ {4}|`)holdfast ([a-z][a-z-]*)", re.MULTILINE)


def dead_links(path: Path, text: str) -> list[str]:
    """Relative links that lead nowhere."""
    targets = (one for one in LINK.findall(text) if "://" not in one)
    return [one for one in targets if not (path.parent / one).exists()]


def unknown_commands(text: str) -> set[str]:
    return set(COMMAND.findall(text)) - {one.name for one in COMMANDS}


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_and_commands(path: Path) -> None:
    text = path.read_text()
    assert not dead_links(path, text)
    assert not unknown_commands(text)


def test_the_checks_can_fail() -> None:
    assert dead_links(ROOT / "README.md", "[a](docs) [b](no/such.md)") == ["no/such.md"]
    assert unknown_commands("    holdfast status\nsee `holdfast fly`") == {"fly"}


def test_the_page_of_exit_codes_is_current() -> None:
    from holdfast.agent.cli.parser import render_exit_docs

    text = (ROOT / "docs/exit-codes.md").read_text()
    assert text == render_exit_docs(), "docs/exit-codes.md is old: generate it again"


def test_the_page_of_the_trainers_settings_is_current() -> None:
    pytest.importorskip("torch", reason="the trainer's extra is not installed")
    from holdfast.trainer.settings_page import render_train_docs

    text = (ROOT / "docs/train.md").read_text()
    assert text == render_train_docs(), "docs/train.md is old: generate it again"


def test_make_docs_writes_every_generated_page() -> None:
    pages = dict(re.findall(r"^(?:PAGES :=| ) *([a-z-]+)=(\S+:\S+)",
                            (ROOT / "Makefile").read_text(), re.MULTILINE))
    made = {path.stem for path in (ROOT / "docs").glob("*.md")
            if re.search("^Generated from", path.read_text(), re.MULTILINE)}
    assert set(pages) == made
    del pages["train"]  # needs torch
    for name, function in pages.items():
        text = (ROOT / f"docs/{name}.md").read_text()
        assert pkgutil.resolve_name(function)() == text, f"docs/{name}.md is old: make docs"


def test_every_decision_says_what_why_and_what_else() -> None:
    for path in sorted((ROOT / "docs/decisions").glob("*.md")):
        text = path.read_text()
        assert re.match(rf"# {path.name[:3]}: ", text), path
        assert "**Decided.**" in text, path


def test_a_number_means_one_decision() -> None:
    names = sorted(path.name for path in (ROOT / "docs/decisions").glob("*.md"))
    assert [name[:3] for name in names] == [f"{number:03d}" for number in range(1, len(names) + 1)]


def test_faults_in_documents_have_runbooks() -> None:
    said = {
        name
        for path in TEXTS
        for name in re.findall(r"holdfast explain ([a-z_]+)", path.read_text())
    }
    assert said <= set(prose.names())


def test_the_readme_says_how_often_a_run_is_restarted_and_torchruns_is_not() -> None:
    torchrun = pytest.importorskip("torch.distributed.run", reason="torch is not installed")
    theirs = torchrun.get_args_parser().get_default("max_restarts")
    ours = spec.build("run").get_default("max_restarts")
    said = " ".join((ROOT / "README.md").read_text().split())
    assert ours != theirs
    assert f"`--max-restarts` is {ours} when it is not given, where torchrun's is {theirs}." in said


def test_the_readmes_own_model_and_data_train(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the trainer's extra is not installed")
    example = (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]
    (tmp_path / "mine.py").write_text(example)
    command = [sys.executable, "-m", "holdfast.trainer", "model=mine:Model", "data=mine:Data",
               "steps=5", "checkpoint.every=0"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT / ".types")}
    done = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert '"step": 5' in done.stdout + done.stderr
