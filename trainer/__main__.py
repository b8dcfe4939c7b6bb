"""`python -m holdfast.trainer [--config train.toml] [key=value ...]`: one rank of a run.

Owns arguments and exit codes.  Run by `holdfast train` on every rank, by plain torchrun, or alone.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from holdfast.worker import exits


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="holdfast train", description=__doc__)
    parser.add_argument("--config", help="a TOML file", default=None)
    parser.add_argument("--export", metavar="DIR", default="",
                        help="write embeddings of all samples there instead of training")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parsed = parser.parse_intermixed_args(arguments)
    # DDP would tell every user, on every rank, that no parameter was unused (see ddp.wrap).
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from .config import ConfigError, load

    try:
        # Quoted: a directory may be called 7, or true.
        more = [f"export.dir={json.dumps(parsed.export)}"] if parsed.export else []
        config = load(parsed.config, [*parsed.overrides, *more])
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
