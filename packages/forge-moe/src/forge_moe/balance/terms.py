"""The router losses of layers, for the caller who adds them to a loss of their own."""

from typing import NamedTuple

import torch
from torch import Tensor, nn


class AuxLosses(NamedTuple):
    """0-dim fp32 tensors, already multiplied by their weights; total is the sum of the other three."""

    total: Tensor
    balance: Tensor
    z: Tensor
    sequence: Tensor

    @staticmethod
    def of(balance: Tensor, z: Tensor, sequence: Tensor) -> "AuxLosses":
        """With the total."""
        return AuxLosses(balance + z + sequence, balance, z, sequence)


def aux_losses(model: nn.Module) -> AuxLosses:
    """Router losses of the last training forward of all MoE layers in `model`, with gradients.

        total = task_loss(model(x)) + aux_losses(model).total

    Takes them away, so that none is added twice: a second call without a forward between raises ValueError,
    and so does a model whose layers attach their losses (adding them here would count them twice).
    """
    from forge_moe.layer import MoE

    layers = [m for m in model.modules() if isinstance(m, MoE) and m.config.aux == "return"]
    if not layers:
        raise ValueError(
            "no MoE layer here has aux = 'return'; with 'attach' the gradient is added in backward already"
        )
    pending = [layer.pending for layer in layers]
    for layer in layers:
        layer.pending = None
    found = [terms for terms in pending if terms is not None]
    if not found:
        raise ValueError(
            "no router losses are waiting; call aux_losses once after each forward in training mode"
        )
    sums = [torch.stack(terms).sum(0) for terms in zip(*found)]
    return AuxLosses(*sums)


def set_aux_scale(model: nn.Module, scale: Tensor) -> None:
    """The factor on attached router losses from the next forward on, for layers with aux = "attach".

        set_aux_scale(model, torch.tensor(1 / 4))          # four micro-batches, each loss / 4

    `scale` is a 0-dim tensor, the factor that the caller's mean loss of this micro-batch gets; it is read
    in backward, without a host sync. Raises ValueError for another shape.
    """
    from forge_moe.layer import MoE

    if scale.dim() != 0:
        raise ValueError(
            f"scale {tuple(scale.shape)} must be a 0-dim tensor; use torch.tensor(0.25)"
        )
    for module in model.modules():
        if isinstance(module, MoE):
            module.aux_scale = scale
