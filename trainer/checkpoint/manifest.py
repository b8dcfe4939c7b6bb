"""What a checkpoint says of the run that wrote it.

Owns the run manifest: for people and for comparing runs; nothing is decided from it.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from ..config import Config
from .format import digest

GIT_TIMEOUT_S = 5.0


def run_manifest(config: Config, data_digest: str) -> dict[str, Any]:
    text = config.text()
    return {
        "git": _git(), "packages": _packages(), "python": platform.python_version(),
        "torch": torch.__version__, "driver": _driver(), "threads": torch.get_num_threads(),
        "config": config.as_dict(), "config_digest": digest(text.encode()),
        "data_digest": data_digest,
    }


def _git() -> str:
    """The revision of the directory that we run in, with "+changes"; "" outside git."""
    try:
        revision, changes = (
            subprocess.run(
                ["git", *arguments], capture_output=True, text=True, timeout=GIT_TIMEOUT_S,
                check=True,
            ).stdout.strip()
            for arguments in (["rev-parse", "HEAD"], ["status", "--porcelain", "-uno"])
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return revision + ("+changes" if changes else "")


def _packages() -> dict[str, str]:
    found = {}
    for package in importlib.metadata.distributions():
        with contextlib.suppress(KeyError, TypeError):  # a damaged installation has no name
            found[package.metadata["Name"]] = package.version
    return dict(sorted((k, v) for k, v in found.items() if k))


def _driver() -> str:
    try:
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0][:200]
    except (OSError, IndexError):
        return ""
