"""A model with each kind of parameter that the optimizers of matrices and vectors tell apart."""

import torch
from torch import nn

DECAYED = {"table", "experts"}


class Small(nn.Module):
    """A matrix longer than a chunk of the update, a stack, a norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(300, 240))
        self.experts = nn.Parameter(torch.randn(2, 3, 4))
        self.experts_bias = nn.Parameter(torch.randn(2, 4))  # F146: a vector for each expert
        self.norm = nn.LayerNorm(4)
