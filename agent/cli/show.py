"""`holdfast demo`.  Owns only the way there; agent/cli/demo.py has the story."""

from __future__ import annotations

import argparse


def demo(options: argparse.Namespace) -> int:
    from holdfast.agent.cli.demo import demo as perform

    return perform(options.ranks, options.steps, options.keep)
