"""States without shards, and states to load into, for tests that compare layouts."""

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


def spoiled(built, train, warm):
    """Model and optimizer with other weights. `warm`: the optimizer has made a step, and so has slots of its own to be filled."""
    model, optimizer = built
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(9.0)
    if warm:
        train(model, optimizer, 1)
    return model, optimizer
