"""Calls of a training loop to the MoE layers of its model: router losses, expert biases, columns of metrics."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from forge_moe._shared.problems import invalid
from forge_moe.layer import MoE
from forge_moe.load_balancing import AuxLosses, moved_bias, rate_at, reduction_groups, sum_over
from forge_moe.statistics import load_summary

__all__ = ["MoEHooks", "num_experts_by_layer", "whole_batch_options"]


def moe_layers(model: nn.Module) -> dict[str, MoE]:
    """The MoE layers of a model by their names."""
    return {name: module for name, module in model.named_modules() if isinstance(module, MoE)}


def num_experts_by_layer(model: nn.Module) -> dict[str, int]:
    """{name of a MoE layer: its number of experts}, of a model before it is sharded or divided into stages."""
    return {name: layer.config.num_experts for name, layer in moe_layers(model).items()}


def whole_batch_options(model: nn.Module) -> dict[str, str]:
    """{option of a MoE layer: replacement} for options that need all tokens of a micro-batch on one rank."""
    found = dict[str, str]()
    for name, layer in moe_layers(model).items():
        found |= layer.config.whole_batch(name)
    return found


def aux_losses(model: nn.Module) -> AuxLosses:
    """Router losses of the last training forward of all MoE layers in `model`, with gradients.

        total = task_loss(model(x)) + aux_losses(model).total

    The layers then drop them, so that none is added twice: a second call without a forward between raises ValueError, and
    so does a model whose layers attach their losses (adding them would count them twice).
    """
    layers = [layer for layer in moe_layers(model).values() if layer.config.aux == "return"]
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

    `scale` is a 0-dim tensor, the factor on the caller's mean loss of this micro-batch; backward reads it, without a host
    sync. With `per_token` it is the factor on the sum of a loss over tokens: 1 / the tokens of the step on all ranks,
    without pads, weights micro-batches and ranks by their tokens. Raises ValueError for another shape.
    """
    if scale.dim() != 0:
        fix = "use torch.tensor(0.25)"
        raise invalid("scale", "shape", tuple(scale.shape), "must be a 0-dim tensor", fix)
    for layer in moe_layers(model).values():
        layer.aux_scale, layer.aux_per_token = scale, per_token


@torch.no_grad()
def update_expert_bias(
    model: nn.Module,
    step: int | None = None,
    total_steps: int | None = None,
    groups: Any = None,
    skip: Tensor | None = None,
) -> None:
    """End a step for all MoE layers of `model`: once per optimizer step, after the last backward.

        optimizer.step(); update_expert_bias(model)
        optimizer.step(); update_expert_bias(model, step, total_steps)     # for a bias_schedule over training

    `register_expert_bias_update` calls it after each step of an optimizer. Updates the biases of layers with `bias_update_rate` and the lagged counts of layers with `aux_scope =
    "global_batch_lagged"`, and resets the counts of the step. Counts include the training forwards since the last call,
    without pads, without recomputation, before capacity drops.

    `groups`: the process group of all data ranks (with the expert-parallel ranks, which read different data), or several
    to reduce over in turn. One all-reduce of int64 per group for all layers, no host sync. ValueError if there are
    several ranks and no group is given. `skip`: 0-dim tensor; 1.0 leaves biases and lagged counts unchanged (a masked
    step), and discards the counts of that step.
    """
    layers = list(moe_layers(model).values())
    if not layers:
        return
    counts = [layer.counters.take_step(layer.router.weight.device) for layer in layers]
    all_counts = sum_over(torch.cat(counts), reduction_groups(groups))

    for layer, total in zip(layers, all_counts.split([c.numel() for c in counts])):
        config = layer.config
        bias = layer.router.expert_bias
        if bias is not None and config.bias_update_rate > 0.0:
            if step is None or total_steps is None:
                rule = "is a function of step and total_steps, and they are not given"
                fix = "give both, or use bias_schedule = 'constant'"
                if config.bias_schedule != "constant":
                    raise invalid("bias_schedule", "missing", config.bias_schedule, rule, fix)
                step, total_steps = 0, 1
            rate = rate_at(config.bias_update_rate, config.bias_schedule, step, total_steps)
            _write(bias, moved_bias(bias, total, rate, config.bias_center), skip)
        if layer.lagged_counts is not None:
            _write(layer.lagged_counts, total, skip)


def register_expert_bias_update(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    total_steps: int | None = None,
    groups: Any = None,
    *,
    first_step: int = 0,
) -> RemovableHandle:
    """Call `update_expert_bias` after each step of a torch optimizer, with the `skip` of that step.

        register_expert_bias_update(optimizer, model)
        for batch in batches:
            ...                             # forward, backward
            optimizer.step()                # and then the biases

    total_steps is for a `bias_schedule` over training, with `first_step`, the number of steps that were done before (of a
    run that is resumed). `handle.remove()` ends it. With several optimizers register one of them, and before accelerate or
    Lightning Fabric wraps it. A step that GradScaler leaves out updates no bias; its counts join those of the next step.
    """
    steps = count(first_step)

    def update(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if _is_inside_of_a_step(optimizer):
            return
        step = None if total_steps is None else next(steps)
        update_expert_bias(model, step, total_steps, groups, kwargs.get("skip"))

    return optimizer.register_step_post_hook(update)


def _is_inside_of_a_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a post-step hook was called for a `step` that another `step` of the optimizer called, as `super().step()`.

    torch wraps `step` of each class by itself, and calls the hooks in each of them.
    """
    frame, steps, file = sys._getframe().f_back, 0, torch.optim.Optimizer.step.__code__.co_filename
    while frame is not None:
        if frame.f_code.co_name == "wrapper" and frame.f_code.co_filename == file:
            steps += frame.f_locals["args"][0] is optimizer
        frame = frame.f_back
    return steps > 1


def _write(target: Tensor, value: Tensor, skip: Tensor | None) -> None:
    # Masked on the device: reading `skip` would cost a host sync.
    target.copy_(value if skip is None else torch.where(skip > 0, target, value))


class MoEHooks:
    """The calls of a training loop to all MoE layers of its model; a model without any costs nothing.

        hooks = MoEHooks(model)                                  # aux = "attach"
        hooks.set_tokens(tokens_of_step)                         # before the first backward of the step
        ...                                                      # forward, backward
        optimizer.step(skip=bad)
        hooks.end_step(step, total_steps, bad)
        row |= hooks.columns(hooks.take().tolist())              # when a row is logged

    stage_group: the ranks that hold the same layers and route other tokens: counts are summed over them. None for one
    process.
    row_groups: groups of ranks that split the same sequences (context and tensor parallelism).
    num_experts: `num_experts_by_layer` of the full model, if this rank has one pipeline stage of it.
    device: device of the statistics; by default the device of the parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        stage_group: dist.ProcessGroup | None = None,
        row_groups: Sequence[Any] = (),
        num_experts: Mapping[str, int] | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._model, self._stage_group = model, stage_group
        self._num_experts = num_experts_by_layer(model) if num_experts is None else num_experts
        self._device = next(model.parameters()).device if device is None else device
        self._layers = {n: m for n, m in model.named_modules() if isinstance(m, MoE)}
        for layer in self._layers.values():
            layer.data_group = stage_group or ()
            layer.sequence_group = tuple(row_groups) or None

        self._carried: Tensor | None = None
        # nan shows in the gradients of a loop that forgets `set_tokens`.
        self._scale = torch.full((), math.nan, device=self._device)
        set_aux_scale(model, self._scale, per_token=True)

    @property
    def routes(self) -> bool:
        """Whether the full model has a MoE layer."""
        return bool(self._num_experts)

    def count_tokens(self, document_ids: Tensor) -> tuple[int, ...]:
        """Return (tokens of a batch,) without padding, to sum over batches and ranks for `set_tokens`; () without a MoE layer."""
        return (int((document_ids >= 0).sum()),) if self.routes else ()

    def set_tokens(self, tokens: int) -> None:
        """Set the number of tokens of the step on all ranks, without pads: each token's router losses get weight 1 / tokens.

        Call it in each step, before its first backward; it may come after forwards. No host sync.
        """
        # .data: forwards before this call keep the tensor for their backward, which must read the new value.
        self._scale.data.fill_(1.0 / max(tokens, 1))

    def end_step(self, step: int, total_steps: int, skip: Tensor) -> None:
        """Update the expert biases after the optimizer's step, unless `skip` (0-dim) is 1.0.

        One all-reduce of integers over `stage_group`; no host sync.
        """
        if self._layers:
            groups = self._stage_group or ()
            update_expert_bias(self._model, step, total_steps, groups=groups, skip=skip)

    def take(self) -> Tensor:
        """Take the sums of the statistics since the last call over all ranks, (n,) fp64 on the device; new ones start at 0.

        One all-reduce over all ranks of the job; no host sync. `columns` takes the numbers when the host has read them.
        """
        if not self._num_experts:
            return torch.zeros(0, dtype=torch.float64, device=self._device)
        sums = torch.cat([self._row(name, count) for name, count in self._num_experts.items()])
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(sums)
        carried, self._carried = self._carried, None
        return sums if carried is None else sums + carried

    def state_dict(self) -> list[float]:
        """Return the sums since the last `take` over all ranks, for a checkpoint between two rows; empty if all are 0.

        They stay for the next `take`. An all-reduce as there, and one host sync.
        """
        self._carried = self.take()
        for row in self._by_layer(self._carried):
            row[1][-1].zero_()  # the largest bias is not a sum over steps
        sums: list[float] = self._carried.tolist()
        return sums if any(sums) else []

    def load_state_dict(self, sums: Sequence[float]) -> None:
        """Continue from the sums of `state_dict`, also of another number of ranks; sums of another model are ignored."""
        self.forget()
        if len(sums) == sum(count + 4 for count in self._num_experts.values()):
            carried = torch.tensor(sums, dtype=torch.float64)
            self._carried = carried.to(self._device, non_blocking=True)

    def columns(self, sums: Sequence[float]) -> dict[str, float]:
        """Return columns of metrics for each layer, from the sums of `take`.

        `moe.<layer>.max_load`, `min_load`: the fullest and the emptiest expert over the mean; `dead`: experts without a
        token; `entropy` of the router in nats; `drop_rate`: fraction of the choices that the capacity dropped;
        `max_bias`, 0 without biases.
        """
        columns: dict[str, float] = {}
        for prefix, row in self._by_layer(sums):
            counts, (dropped, tokens, entropy, bias) = row[:-4], row[-4:].tolist()
            load = load_summary(counts.long())
            here: dict[str, Any] = {
                "max_load": load.max_over_mean,
                "min_load": load.min_over_mean,
                "dead": load.dead,
                "entropy": entropy / max(tokens, 1.0),
                "drop_rate": dropped / max(float(counts.sum()), 1.0),
                "max_bias": bias,
            }
            columns |= {f"{prefix}{key}": round(float(value), 6) for key, value in here.items()}
        return columns

    def loads(self, sums: Sequence[float]) -> dict[str, list[float]]:
        """Return {`moe.<layer>.load`: tokens of each expert over the mean, E numbers}, from the sums of `take`.

            row |= hooks.loads(sums)      # next to `columns`, for a plot of all experts

        Zeros for a layer without tokens.
        """
        found = {}
        for prefix, row in self._by_layer(sums):
            counts = row[:-4]
            load = counts / counts.mean().clamp(min=1e-12)
            found[f"{prefix}load"] = [round(value, 4) for value in load.tolist()]
        return found

    def _by_layer(self, sums: Sequence[float] | Tensor) -> list[tuple[str, Tensor]]:
        """(prefix of the columns, sums (E + 4,) fp64) of each layer; views of a tensor."""
        sizes = [count + 4 for count in self._num_experts.values()]
        rows = torch.as_tensor(sums, dtype=torch.float64).split(sizes) if sizes else ()
        numbers = [".".join(filter(str.isdecimal, name.split("."))) for name in self._num_experts]
        return [(f"moe.{number}.", row) for number, row in zip(numbers, rows, strict=True)]

    def forget(self) -> None:
        """Drop the statistics since the last `take` (an evaluation)."""
        self._carried = None
        for layer in self._layers.values():
            layer.statistics(reset=True)

    def _row(self, name: str, num_experts: int) -> Tensor:
        """This rank's summands of a layer, (E + 4,) fp64: counts, dropped, tokens, entropy times tokens, largest bias.

        Zeros for a layer of another stage, so that all ranks reduce the same shape.
        """
        if name not in self._layers:
            return torch.zeros(num_experts + 4, dtype=torch.float64, device=self._device)
        found = self._layers[name].statistics(reset=True)
        # those of a layer before its first forward are on the CPU
        found = {key: value.to(self._device) for key, value in found.items()}
        tokens = found["tokens"].double()
        bias = found["bias"].abs().max().double() if "bias" in found else torch.zeros_like(tokens)
        # All ranks of a stage have the same bias: one of them adds it to the sum.
        group = self._stage_group
        once = float(group is None or dist.get_rank(group) == 0)
        rest = [found["dropped"].double(), tokens, found["entropy"].double() * tokens, once * bias]
        return torch.cat([found["counts"].double(), torch.stack(rest)])
