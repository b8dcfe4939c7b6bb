"""`python -m holdfast.trainer [--config train.toml] [key=value ...]`: one rank of a run.

Owns exit codes; config.py reads the arguments.  Run by `holdfast train` on every rank, by plain
torchrun, or alone.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from holdfast.worker import exits


def main(arguments: list[str] | None = None) -> int:
    # DDP would tell every user, on every rank, that no parameter was unused (see ddp.wrap).
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from .config import ConfigError, from_arguments

    try:
        config = from_arguments(arguments)
        elastic = _elastic()
        from .loop import train

        result = train(config, elastic)
    except ConfigError as error:
        for problem in error.problems:
            print(f"holdfast train: {problem}", file=sys.stderr, flush=True)
        return exits.CONFIGURATION
    if result.rank == 0:
        elastic.report("", "result " + json.dumps(result._asdict()))
    if not elastic.active():
        # gloo's threads abort some interpreters at teardown (4 of 14 runs): leave before it.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    return 0


def _elastic() -> Any:
    """The launcher's side if there is one, else a stand-in for one generation."""
    from .standalone import Standalone

    try:
        from holdfast.worker import elastic
    except ImportError:
        return Standalone()
    return elastic if elastic.active() else Standalone()


if __name__ == "__main__":
    sys.exit(main())
