"""What a run was: code, packages, drivers, settings, data, environment, and what it began from.

Owns the run manifest, in every checkpoint and, for a run that writes none, in MANIFESTS beside
them.  For people and for comparing runs; nothing is decided from it but `holdfast promote`.  What
the environment holds is kept by name, never all of it: secrets live there, and in settings, which
are kept without.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from holdfast.worker.redact import redacted_head, redacted_value

from ..config import Config
from . import format as files

GIT_TIMEOUT_S = 5.0
MANIFESTS = "manifests"
FILES_MAX = 64  # of one folder of checkpoints; the oldest go
VARIABLES_MAX, VALUE_MAX = 256, 1000
# What changes how a run computes, talks or is placed.  A name that may hold a secret is never kept.
KEPT = re.compile(
    r"(CUDA|NVIDIA|NCCL|GLOO|UCX|FI|EFA|RDMAV|NEURON|XLA|PJRT|TPU|HIP|ROCR|HSA|RCCL|TORCH|PYTORCH"
    r"|TORCHELASTIC|TORCHINDUCTOR|TRITON|OMP|MKL|OPENBLAS|KMP|GOMP|NUMEXPR|TOKENIZERS|MALLOC"
    r"|SLURM|HOLDFAST|PYTHON)_?\w*\Z|(LD_LIBRARY_PATH|LD_PRELOAD|PATH|VIRTUAL_ENV|CONDA_PREFIX"
    r"|RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE)\Z")
SECRET = re.compile(r"TOKEN|SECRET|PASS|KEY|CREDENTIAL|AUTH|COOKIE|CERT|JWT", re.IGNORECASE)
MODULES = ("nvidia", "amdgpu", "neuron", "efa", "gdrdrv")  # drivers that say their version
SDK_TOOLS = ("neuronx-cc", "torch-neuronx", "libneuronxla", "torch-xla")  # of pip


class Manifest:
    """One process's run manifest: found out once, off the training's way, then the same for all."""

    def __init__(self, config: Config, data_digest: str) -> None:
        self._config, self._data_digest = config, data_digest
        self._lock, self._found = threading.Lock(), dict[str, Any]()
        self.began, self.strategy = dict[str, Any](), dict[str, Any]()
        self._kept: dict[str, Any] | None = None  # the strategy that was written last
        self._writer: threading.Thread | None = None

    def began_from(self, what: dict[str, Any]) -> None:
        """The first word stands: a later generation goes on with what this process began."""
        self.began = self.began or what

    def __call__(self) -> dict[str, Any]:
        with self._lock:
            self._found = self._found or run_manifest(self._config, self._data_digest)
            return {**self._found, "began": self.began, "strategy": self.strategy}

    def keep(self, run: str, generation: int, report: Any) -> None:
        """Writes it beside the checkpoints, and again once the strategy has another layout; in the
        background: half a second of git and of packages' names is not training's to wait for."""
        if self._kept == self.strategy:
            return
        self._kept = strategy = self.strategy
        root, before = self._config.checkpoint_dir / MANIFESTS, self._writer

        def work() -> None:
            if before is not None:
                before.join()  # the newest word is the last one
            try:
                root.mkdir(parents=True, exist_ok=True)
                value = {"run": run, "generation": generation, **self(), "strategy": strategy}
                files.write_file(root / f"gen-{generation:09d}.json", files.to_json(value))
                for old in sorted(root.glob("gen-*.json"))[:-FILES_MAX]:
                    old.unlink(missing_ok=True)
            except OSError as error:
                report("", f"the run's manifest is not kept: {error.strerror or error}")

        self._writer = threading.Thread(target=work, name="manifest", daemon=True)
        self._writer.start()


def run_manifest(config: Config, data_digest: str) -> dict[str, Any]:
    settings, packages = redacted_value(config.as_dict()), _packages()
    return {
        "git": _git(), "packages": packages, "python": platform.python_version(),
        "torch": torch.__version__, "drivers": _drivers(), "sdk": _sdk(packages),
        "machine": _machine(config), "threads": torch.get_num_threads(),
        "config": settings,
        "config_digest": files.digest(json.dumps(settings, sort_keys=True).encode()),
        "data_digest": data_digest, "seed": config.seed, "environment": environment(os.environ),
    }


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What of it may be kept, bounded, and with any secret within a value taken out."""
    names = sorted(name for name in environ if KEPT.match(name) and not SECRET.search(name))
    return {name: redacted_head(environ[name], VALUE_MAX) for name in names[:VARIABLES_MAX]}


def _git() -> dict[str, Any]:
    """The revision of the directory that we run in, and whether files differ from it; empty outside
    git."""
    try:
        revision, changes = (
            subprocess.run(
                ["git", *arguments], capture_output=True, timeout=GIT_TIMEOUT_S, check=True,
            ).stdout.strip()
            for arguments in (["rev-parse", "HEAD"], ["status", "--porcelain", "-uno"])
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    return {"revision": revision.decode(), "changed": bool(changes)}


def _packages() -> dict[str, str]:
    found = {}
    for package in importlib.metadata.distributions():
        with contextlib.suppress(KeyError, TypeError):  # a damaged installation has no name
            found[package.metadata["Name"]] = package.version
    return dict(sorted((k, v) for k, v in found.items() if k))


def _drivers() -> dict[str, str]:
    found = {}
    for module in MODULES:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            found[module] = Path(f"/sys/module/{module}/version").read_text()[:100].strip()
    return found


def _sdk(packages: Mapping[str, str]) -> dict[str, str]:
    version: Any = torch.version
    found = {"cuda": version.cuda, "hip": getattr(version, "hip", None)}
    if torch.cuda.is_available():
        nccl: Any = torch.cuda.nccl.version()
        found["nccl"] = ".".join(map(str, nccl))
    found |= {tool: packages.get(tool) for tool in SDK_TOOLS}
    return {name: str(value) for name, value in found.items() if value}


def _machine(config: Config) -> dict[str, str]:
    if config.device == "xla":
        name = os.environ.get("PJRT_DEVICE", "")
        return {"host": platform.node(), "kernel": platform.release(), "device": "xla",
                "name": name}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if config.device == "accelerator" and (found := torch.accelerator.current_accelerator()):
        device = found.type  # whatever this build of torch computes on
    if config.device == "cpu":
        device = "cpu"
    name = platform.machine()
    if device != "cpu":
        tell = getattr(torch.get_device_module(device), "get_device_name", None)
        name = str(tell()) if tell is not None else device
    return {"host": platform.node(), "kernel": platform.release(), "device": device, "name": name}
