"""States without shards, for tests that compare layouts."""

import torch
from torch.distributed.tensor import DTensor


def full(state):
    """Nested state with every DTensor gathered, as copies; collective."""
    if isinstance(state, dict):
        return {key: full(value) for key, value in state.items()}
    if isinstance(state, list):
        return [full(value) for value in state]
    if isinstance(state, DTensor):
        return state.full_tensor().detach().clone()
    return state.detach().clone() if isinstance(state, torch.Tensor) else state
