"""Datasets of the stand-in: blocks that come in order only where that is asked for."""

import types

CONTEXT = types.SimpleNamespace(execution_options=types.SimpleNamespace(preserve_order=False))


class DataContext:
    @staticmethod
    def get_current():
        return CONTEXT


class Dataset:
    def __init__(self, blocks):
        self.blocks, self.ordered = blocks, CONTEXT.execution_options.preserve_order

    def iter_batches(self, batch_size, batch_format, drop_last):
        import numpy as np

        assert batch_format == "numpy" and not drop_last
        blocks = self.blocks if self.ordered else self.blocks[::-1]
        whole = {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}
        rows = len(next(iter(whole.values())))
        for first in range(0, rows, batch_size):
            yield {name: column[first : first + batch_size] for name, column in whole.items()}
