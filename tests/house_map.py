"""docs/map.md: every module by its folder, with the first line of its docstring.

Owns the page's head, which names the room of what is added most often; the rest is read from the
files, so that the map cannot say anything else than they do.
"""

from __future__ import annotations

import ast
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("agent", "worker", "collectors", "trainer", "dashboards", "runbooks", "bench")
HEAD = """\
# Map

Generated from the first line of every module by `make docs`. How the parts work together stands in
[architecture.md](architecture.md), how one is added in [CONTRIBUTING.md](../CONTRIBUTING.md).

Where something goes ("new": the folder comes with the first of its kind):

| what | where |
|---|---|
| a Slurm drain | `agent/actions/schedulers/slurm.py`; what may be: `agent/core/checks/fleet.py` |
| a straggler detector | `agent/core/detect/ranks/`, its entry in `agent/core/detect/registry.py` |
| an etcd store | `agent/store/etcd.py`, with what `agent/store/base.py` asks for |
| an S3 tier of checkpoints | `trainer/checkpoint/tiers/s3.py` (new) |
| a check | its row in `agent/checks/table.py`, its function in the module that the row names |
| a webhook | `agent/web/alerts.py`, its route in `agent/web/server.py` |
| a new column of the page | its value in `agent/web/status.py`, its cell in `agent/web/page.html` |
| an engine of the trainer | `trainer/engines/`, beside `ddp.py`; docs/engines.md has the contract |
| a metric | of host or device: its collector; else `agent/metrics/names.py`, `families.py` |
| a setting | `agent/config/settings.py`; of the trainer: `trainer/config.py` |
| a command | its row in `agent/cli/parser.py`, its function in `agent/cli/` |
| a fault | `runbooks/FAULT.md`, and the detector or the rule that says it |
| a line of the kernel's | `agent/catalog/kernel.toml` |
| a line of a training log | `agent/catalog/log_signatures.toml`; a kind: `log_families.toml` |
"""


def first_line(path: Path) -> str:
    """The first line of a module's docstring; "" where there is none.  Raises ValueError for one
    that is not a sentence by itself."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    line = docstring.partition("\n")[0]
    if line and not line.endswith("."):
        raise ValueError(f"{path.relative_to(ROOT)}: line 1 of its docstring is no whole sentence")
    return line


def render_map() -> str:
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")
             if path.relative_to(ROOT).parts[0] in FOLDERS]
    modules = [(path.parent.relative_to(ROOT).as_posix(), path.name, line)
               for path in paths if (line := first_line(path))]
    modules.sort(key=lambda module: (FOLDERS.index(module[0].split("/")[0]), module))
    pages = [HEAD]
    for folder, inside in groupby(modules, key=lambda module: module[0]):
        pages += [f"\n## {folder}\n\n", *(f"- `{name}`: {line}\n" for _, name, line in inside)]
    return "".join(pages)
