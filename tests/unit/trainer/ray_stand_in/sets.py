"""A user's datasets for the stand-in."""

import numpy as np
import ray

MADE = []
MAPPED = """task()
  File "sets.py", line 1, in fill
ValueError: row 7 has no label

The above exception was the direct cause of the following exception:

task()
ray.exceptions.UserCodeException: a block was not made."""


def rows(options):
    return ray.data.Dataset([{"number": np.arange(first, first + 4)} for first in (0, 4, 8)])


def pairs(options):
    return ray.data.Dataset([{"query": np.arange(12), "document": -np.arange(12)}])


def changing(options):
    MADE.append(1)
    return ray.data.Dataset([{"number": np.arange(12) + len(MADE)}])


def words(options):
    return ray.data.Dataset([{"text": np.array(["a", "bb"])}])


def empty(options):
    return ray.data.Dataset([{"number": np.arange(0)}])


def raising(options):
    raise ValueError("row 7 has no label")


def mapping(options):
    """As Ray hands it on: the function's own error is in the text around it, and nowhere else."""
    error = ray.exceptions.RayTaskError(ray.exceptions.UserCodeException("a block was not made"))
    error.args = (MAPPED,)
    raise error
