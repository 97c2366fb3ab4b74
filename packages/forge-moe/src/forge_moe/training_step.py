"""Router losses and expert biases of all MoE layers of a model, for a training loop."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forge_moe._shared.problems import invalid
from forge_moe.balance.bias import moved_bias, rate_at
from forge_moe.balance.losses import AuxLosses
from forge_moe.balance.scopes import reduction_groups
from forge_moe.layer import MoE


def aux_losses(model: nn.Module) -> AuxLosses:
    """Router losses of the last training forward of all MoE layers in `model`, with gradients.

        total = task_loss(model(x)) + aux_losses(model).total

    The layers then drop them, so that none is added twice: a second call without a forward between raises
    ValueError, and so does a model whose layers attach their losses (adding them would count them twice).
    """
    layers = [layer for layer in _layers(model) if layer.config.aux == "return"]
    if not layers:
        rule = "is 'return' in no MoE layer of the model: with 'attach' backward adds the gradient"
        raise invalid("aux", "attached", ..., rule, "leave aux_losses out, or use aux = 'return'")
    pending = [layer.pending_losses for layer in layers]
    for layer in layers:
        layer.pending_losses = None
    found = [losses for losses in pending if losses is not None]
    if not found:
        fix = "call aux_losses once after each forward in training mode"
        raise invalid("model", "no_losses", ..., "holds no router losses", fix)
    sums = [torch.stack(terms).sum(0) for terms in zip(*found)]
    return AuxLosses(*sums)


def set_aux_scale(model: nn.Module, scale: Tensor, *, per_token: bool = False) -> None:
    """Set the factor on attached router losses, from the next forward on, of layers with aux = "attach".

        set_aux_scale(model, torch.tensor(1 / 4))          # four micro-batches, each loss / 4

    `scale` is a 0-dim tensor, the factor on the caller's mean loss of this micro-batch; backward reads it,
    without a host sync. With `per_token` it is the factor on the sum of a loss over tokens: 1 / the tokens of the
    step on all ranks, pads left out, weights micro-batches and ranks by their tokens. Raises ValueError for another
    shape.
    """
    if scale.dim() != 0:
        fix = "use torch.tensor(0.25)"
        raise invalid("scale", "shape", tuple(scale.shape), "must be a 0-dim tensor", fix)
    for layer in _layers(model):
        layer.aux_scale, layer.aux_per_token = scale, per_token


@torch.no_grad()
def update_expert_bias(
    model: nn.Module,
    step: int,
    total_steps: int,
    groups: Any = None,
    skip: Tensor | None = None,
) -> None:
    """End a step for all MoE layers of `model`: once per optimizer step, after the last backward.

        optimizer.step(); update_expert_bias(model, step, total_steps)

    Updates the biases of layers with `bias_update_rate` and the lagged counts of layers with `aux_scope =
    "global_batch_lagged"`, and resets the counts of the step. Counts are those of training forwards since
    the last call, without pads, without recomputation, before capacity drops.

    `groups`: the process group of all data ranks (expert-parallel ranks read different data: they are
    among them), or several to reduce over in turn. One all-reduce of int64 per group for all layers,
    no host sync. ValueError if there are several ranks and no group is given.
    `skip`: 0-dim tensor; 1.0 leaves biases and lagged counts unchanged (a step that is masked), and
    discards the counts of that step.
    """
    layers = _layers(model)
    if not layers:
        return
    counts = [layer.counters.take_step(layer.router.weight.device) for layer in layers]
    all_counts = torch.cat(counts)
    for group in reduction_groups(groups):
        dist.all_reduce(all_counts, group=group)
    for layer, total in zip(layers, all_counts.split([c.numel() for c in counts])):
        config = layer.config
        bias = layer.router.expert_bias
        if bias is not None and config.bias_update_rate > 0.0:
            rate = rate_at(config.bias_update_rate, config.bias_schedule, step, total_steps)
            _write(bias, moved_bias(bias, total, rate, config.bias_center), skip)
        if layer.lagged_counts is not None:
            _write(layer.lagged_counts, total, skip)


def _write(target: Tensor, value: Tensor, skip: Tensor | None) -> None:
    # Masked on the device: reading `skip` would cost a host sync.
    target.copy_(value if skip is None else torch.where(skip > 0, target, value))


def _layers(model: nn.Module) -> list[MoE]:
    return [module for module in model.modules() if isinstance(module, MoE)]
