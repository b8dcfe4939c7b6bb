"""The release of this agent, as the installed package says it."""

from __future__ import annotations

from importlib import metadata


def _version() -> str:
    try:
        return metadata.version("holdfast")
    except metadata.PackageNotFoundError:
        return "0.1.0"  # run from a source tree


VERSION = _version()
