"""What mixtures of experts ask of the training loop: a scale, an update of biases, columns of metrics."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forge_core.model import FeedForward
from forge_moe import MoE, set_aux_scale, update_expert_bias
from forge_moe.parallel import expert_parallelize
from forge_moe.statistics import load_summary
from forge_parallel import Meshes, find_world
from forge_train.config.schema import DenseModelConfig, JobConfig


def feed_forward_factory(config: DenseModelConfig) -> Callable[[int], nn.Module] | None:
    """Mixtures where [model.moe] wants them, dense elsewhere; None for a dense model."""
    if not config.moe.num_experts:
        return None

    def make(layer: int) -> nn.Module:
        hidden = config.resolved_hidden_dim
        if config.moe.is_mixture(layer):
            return MoE(config.moe.layer_config(config.dim, hidden))
        gated = config.feed_forward == "swiglu"
        return FeedForward(config.dim, hidden, gated=gated, bias=config.feed_forward_bias)

    return make


def spread_experts(model: nn.Module, job: JobConfig, meshes: Meshes) -> None:
    """Deal the experts out to the ranks of `parallel.ep`; nothing without it. Collective."""
    config = job.model
    if meshes.sparse is None or not isinstance(config, DenseModelConfig):
        return
    ranks = meshes.sparse["ep"]
    expert_parallelize(
        model,
        ranks,
        dispatcher=config.moe.dispatcher,
        chunks=config.moe.dispatch_chunks,
        ranks_per_node=min(find_world().local_world_size, ranks.size()),
        timeout=timedelta(seconds=job.parallel.timeout_seconds),
    )


class Mixtures:
    """The MoE layers of a model, wherever they stand in it; nothing happens without any.

    Router losses join the gradient by themselves, each micro-batch's times `share`, its part of the
    global batch. Counts are summed over all ranks: each reads other data.
    """

    def __init__(self, model: nn.Module, meshes: Meshes, share: float) -> None:
        self._model = model
        self._layers = {n: m for n, m in model.named_modules() if isinstance(m, MoE)}
        self._group = dist.group.WORLD if meshes.world_size > 1 else None
        for layer in self._layers.values():
            layer.data_group = self._group
        if self._layers:
            set_aux_scale(model, torch.tensor(share, device=meshes.device))

    def end_step(self, step: int, total_steps: int, skip: Tensor) -> None:
        """After the optimizer's step: move the biases, unless the step was masked. One all-reduce of
        integers over the data ranks, none on one process; no host sync."""
        if self._layers:
            groups = self._group or ()
            update_expert_bias(self._model, step, total_steps, groups=groups, skip=skip)

    def take(self) -> Callable[[], dict[str, float]]:
        """Begin the statistics anew; the columns of what they were, to be read when the device is done.

        One all-reduce of integers over all ranks.
        """
        if not self._layers:
            return dict
        found = {name: layer.statistics(reset=True) for name, layer in self._layers.items()}
        sums = torch.cat([_sums(statistics) for statistics in found.values()])
        if self._group is not None:
            dist.all_reduce(sums, group=self._group)
        return partial(_columns, found, sums)

    def forget(self) -> None:
        """Drop what was counted since the last row (an evaluation)."""
        for layer in self._layers.values():
            layer.statistics(reset=True)


def _sums(statistics: dict[str, Tensor]) -> Tensor:
    """Counts, dropped, tokens and summed entropy of one layer as one fp64 row."""
    tokens = statistics["tokens"].double()
    tail = torch.stack(
        [statistics["dropped"].double(), tokens, statistics["entropy"].double() * tokens]
    )
    return torch.cat([statistics["counts"].double(), tail])


def _columns(found: dict[str, dict[str, Tensor]], sums: Tensor) -> dict[str, float]:
    """`moe.<layer>.max_load`: the fullest expert over the mean; min_load; entropy of the router in nats;
    drop_rate: share of the choices that found no room; dead experts; max_bias."""
    columns: dict[str, float] = {}
    sizes = [statistics["counts"].numel() + 3 for statistics in found.values()]
    for (name, statistics), row in zip(found.items(), sums.cpu().split(sizes)):
        counts, (dropped, tokens, entropy) = row[:-3], row[-3:].tolist()
        load = load_summary(counts.long())
        here: dict[str, Any] = {
            "max_load": load.max_over_mean,
            "min_load": load.min_over_mean,
            "dead": load.dead,
            "entropy": entropy / max(tokens, 1.0),
            "drop_rate": dropped / max(float(counts.sum()), 1.0),
        }
        if "bias" in statistics:
            here["max_bias"] = statistics["bias"].abs().max()
        prefix = f"moe.{'.'.join(part for part in name.split('.') if part.isdecimal())}."
        columns.update({f"{prefix}{key}": round(float(value), 6) for key, value in here.items()})
    return columns
