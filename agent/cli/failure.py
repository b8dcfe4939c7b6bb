"""What a command says when it cannot do what was asked: one sentence and an exit code."""

from __future__ import annotations

from holdfast.worker.exits import CONFIGURATION, FAILED, USAGE

__all__ = ["CONFIGURATION", "FAILED", "USAGE", "Failure"]


class Failure(Exception):
    """Ends the command.  The text says what is wrong and what to do about it."""

    def __init__(self, text: str, code: int = FAILED) -> None:
        super().__init__(text)
        self.code = code
