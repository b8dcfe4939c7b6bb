"""The shipped runbooks as text: the prose for a person, beside the machine part at the top.

Owns where the files are and how they divide into sections.  The machine part is read, and checked
against the configuration's shadows, by agent/config/runbooks.py; nothing here decides anything.
The pages in fleet/ are prose alone: they belong to alerts that no single node can raise.
"""

from __future__ import annotations

from importlib import resources

SECTIONS = ("Meaning", "Impact", "Diagnosis", "Mitigation")
FENCE = "+++"
FLEET = "fleet"


def names() -> tuple[str, ...]:
    """The faults that have a shipped runbook, sorted."""
    files = resources.files(__package__).iterdir()
    return tuple(sorted(one.name.removesuffix(".md") for one in files if one.name.endswith(".md")))


def text_of(fault: str) -> str:
    """The whole file.  Raises FileNotFoundError for a fault without a runbook."""
    if fault not in names():
        raise FileNotFoundError(f"no runbook for {fault!r}")
    return resources.files(__package__).joinpath(f"{fault}.md").read_text(encoding="utf-8")


def pages() -> dict[str, str]:
    """Every page for a person by its name, "rank_hung" or "fleet/breaker_open": text without the
    machine part."""
    fleet = resources.files(__package__).joinpath(FLEET)
    found = {name: text_of(name).split(FENCE, 2)[2].lstrip("\n") for name in names()}
    for file in sorted(fleet.iterdir(), key=lambda one: one.name):
        found[f"{FLEET}/{file.name.removesuffix('.md')}"] = file.read_text(encoding="utf-8")
    return found


def split(text: str) -> tuple[str, dict[str, str]]:
    """(the TOML of the machine part, {section: its text}).  Raises ValueError without fences."""
    _, toml, prose = (text.split(FENCE, 2) + ["", ""])[:3]
    if not toml.strip():
        raise ValueError(f"no machine part between {FENCE} and {FENCE}")
    return toml, sections(prose)


def sections(prose: str) -> dict[str, str]:
    """{title: its text} of what stands below the machine part."""
    found: dict[str, str] = {}
    for part in f"\n{prose}".split("\n## ")[1:]:
        title, _, body = part.partition("\n")
        found[title.strip()] = body.strip("\n")
    return found


def first_sentence(text: str) -> str:
    """The first sentence of a section, on one line."""
    line = " ".join(text.split("\n\n")[0].split())
    head, dot, _ = line.partition(". ")
    return head + "." if dot else line
