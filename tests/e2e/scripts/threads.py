"""A module to preload that does what a fork does not survive: one multi-threaded operation."""

import torch

torch.set_num_threads(2)
torch.ones(512, 512) @ torch.ones(512, 512)
