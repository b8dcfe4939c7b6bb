"""Configuration and runbooks for an agent that runs already: read in a child, which can be killed.

Owns the child's two ends.  A file system that hangs, or a text that takes for ever to read, holds
up no step of the agent.  What is good is decided by load.py and runbooks.py.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from ..core.model import Runbook
from ..system.child_probe import Prober
from .load import READ_S, ConfigError, Loaded, load_all
from .runbooks import InForce
from .settings import Config

Overrides = Mapping[str, tuple[object, str]]


class Answer(msgspec.Struct):
    """What the child says: all of it, or the errors alone."""

    errors: list[str] = []
    config: Config = Config()
    origins: dict[str, str] = {}
    signatures: tuple[dict[str, object], ...] = ()
    runbooks: dict[str, Runbook] = {}
    site_pages: dict[str, str] = {}


async def read(
    prober: Prober, file: Path | None, overrides: Overrides
) -> tuple[Loaded, InForce]:
    """Raises ConfigError, also where the child does not answer in time."""
    given = msgspec.json.encode((str(file) if file else "", overrides)).decode()
    # -P: a private agent stands in the user's directory
    command = (sys.executable, "-P", "-m", "holdfast.agent.config.child", given)
    answer = await prober.ask("configuration", command, READ_S)
    if not answer.ok:
        raise ConfigError([f"{file or 'default'}: could not be read: {answer.error}"])
    said = msgspec.json.decode(answer.output, type=Answer)
    if said.errors:
        raise ConfigError(said.errors)
    loaded = Loaded(said.config, said.origins, said.signatures)
    return loaded, InForce(said.runbooks, said.site_pages)


def answer(file: str, overrides: Overrides) -> Answer:
    """In the child."""
    try:
        loaded, books = load_all(Path(file) if file else None, overrides)
    except OSError as error:
        return Answer([str(error)])
    except ValueError as error:
        return Answer(str(error).split("\n"))
    except ConfigError as error:
        return Answer(error.errors)
    return Answer([], loaded.config, loaded.origins, loaded.signatures, *books)


def main() -> None:
    file, overrides = msgspec.json.decode(
        sys.argv[1], type=tuple[str, dict[str, tuple[object, str]]])
    os.write(1, msgspec.json.encode(answer(file, overrides)))


if __name__ == "__main__":
    main()
