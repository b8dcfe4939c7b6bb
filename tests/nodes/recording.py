"""A small model and its data in a trainer that writes down what it computes.

A line for each micro-batch, [generation, rank, step, number, samples, loss], the samples as the
model was given them; and one for each step that this rank has finished, [generation, rank, step].
With $PACED a run of few steps outlives what is done to it: those of its first two generations take
their time.
"""

from __future__ import annotations

import json
import os
import time

import tiny
import torch

from holdfast.trainer import loop

# The second waits for a node that starts.
STEP_S = {1: 0.1, 2: 1.0} if "PACED" in os.environ else {}
trains, looks = loop.Generation.step, loop.Generation.look


def write(*line: object) -> None:
    with open(f"{os.environ['RECORDED']}/{os.getpid()}.steps", "a") as file:
        file.write(json.dumps(line) + "\n")


class Data(tiny.Data):
    def batch(self, indices):
        return {**super().batch(indices), "samples": torch.tensor(indices)}


class Model(tiny.Chain):
    samples: list[int] = []

    def forward(self, batch):
        Model.samples = batch["samples"].tolist()
        return super().forward(batch)


def step(generation):
    place = generation.assignment.generation, generation.group.rank, generation.held.step
    time.sleep(STEP_S.get(place[0], 0.0))
    tokens = trains(generation)
    write(*place)
    return tokens


def look(generation, number, loss):
    write(generation.assignment.generation, generation.group.rank, generation.held.step, number,
          Model.samples, loss)
    looks(generation, number, loss)


loop.Generation.step, loop.Generation.look = step, look
