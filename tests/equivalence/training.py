"""What both sides share: the model's description, the seed weights, the settings of an update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from batches import SEQ, VOCAB
from cells import FEATURES, Cell
from torch import Tensor, nn

from forge_core import TransformerConfig

# Five times the usual: logits are not flat, gradients are of order one and every step is clipped.
STD = {"std": 0.1, "residual_std": 0.05}
MAX_NORM = 0.5
SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
# eps: with 1e-8 the rounding noise of a gradient near zero becomes a whole step. lr: what is left of
# that noise, about 1e-7 / eps of a step, must stay far below the bound.
ADAMW: dict[str, Any] = {"lr": 2e-3, "betas": (0.9, 0.95), "eps": 1e-4, "weight_decay": 0.1}


@dataclass
class Run:
    """What is compared: per step the loss, all gradients before clipping and their norm; the weights
    after the last update."""

    losses: list[Tensor]
    gradients: list[dict[str, Tensor]]
    norms: list[Tensor]
    weights: dict[str, Tensor]


def model_config(cell: Cell) -> TransformerConfig:
    return TransformerConfig(
        vocab_size=VOCAB,
        dim=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        hidden_dim=72,
        max_seq_len=SEQ,
        **FEATURES[cell.feature].model,
    )


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay, norms do not."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def full(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies; a DTensor becomes the whole tensor on every rank (collective)."""
    return {name: _whole(tensor.detach()).clone() for name, tensor in tensors.items()}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Of every parameter; a missing one is an error of the cell."""
    return full({name: _gradient(name, p) for name, p in model.named_parameters()})


def _gradient(name: str, parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        raise AssertionError(f"{name} has no gradient")
    return parameter.grad


def _whole(tensor: Any) -> Tensor:
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.to(torch.float32)
