"""What a launcher opens it closes: a socket or file that is left to the collector fails a test.

In a job that runs for weeks a descriptor that stays behind a refused start is one more each time.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ERRORS = ("error::ResourceWarning", "error::pytest.PytestUnraisableExceptionWarning")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            for one in ERRORS:
                item.add_marker(pytest.mark.filterwarnings(one))


@pytest.fixture(autouse=True, scope="module")
def _own_garbage_alone() -> Iterator[None]:
    """What tests before these left is not held against them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()
    yield
    gc.collect()
