"""What mixtures of experts ask of the training loop: a scale, an update of biases, columns of metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forge_core.model import build_feed_forward
from forge_moe import MoE, expert_parallelize, set_aux_scale, update_expert_bias
from forge_moe.statistics import load_summary
from forge_parallel import Meshes, find_world
from forge_train.config.schema import DenseModelConfig, JobConfig
from forge_train.trainer.host_copy import HostCopy


def feed_forward_factory(config: DenseModelConfig) -> Callable[[int], nn.Module] | None:
    """Mixtures where [model.moe] wants them, dense elsewhere; None for a dense model."""
    if not config.moe.num_experts:
        return None

    def make(layer: int) -> nn.Module:
        if config.moe.is_mixture(layer):
            return MoE(config.moe.layer_config(config.dim, config.resolved_hidden_dim))
        return build_feed_forward(config, layer)

    return make


def spread_experts(model: nn.Module, job: JobConfig, meshes: Meshes) -> None:
    """Deal the experts out to the ranks of `parallel.ep`; nothing without it. Collective."""
    config = job.model
    if job.parallel.ep == 1 or not isinstance(config, DenseModelConfig):
        return
    ranks = meshes.sparse["ep"]
    per_node = job.parallel.gpus_per_node or find_world().local_world_size
    expert_parallelize(
        model,
        ranks,
        dispatcher=config.moe.dispatcher,
        chunks=config.moe.dispatch_chunks,
        ranks_per_node=min(per_node, ranks.size()),
        timeout=timedelta(seconds=job.parallel.timeout_seconds),
    )


def mixture_sizes(model: nn.Module) -> dict[str, int]:
    """Names of the MoE layers of a model that is still whole, and their numbers of experts."""
    return {n: m.config.num_experts for n, m in model.named_modules() if isinstance(m, MoE)}


def whole_batch(model: nn.Module) -> dict[str, str]:
    """What its MoE layers decide over all tokens of a micro-batch, with what to use instead."""
    found = {}
    for name, layer in model.named_modules():
        if isinstance(layer, MoE):
            if layer.config.capacity_factor is not None:
                found[f"{name}.capacity_factor {layer.config.capacity_factor}"] = "no capacity"
            if layer.config.router == "expert_choice":
                found[f"{name}.router 'expert_choice'"] = "another router"
    return found


class Mixtures:
    """The MoE layers of a model, wherever they stand in it; nothing happens without any.

    Router losses join the gradient by themselves, each micro-batch's times `share`, its part of the
    global batch. Counts are summed over the ranks that hold the same layers: each routes other tokens.
    `sizes` are those of the whole model; a pipeline rank has some of the layers.
    """

    def __init__(
        self, model: nn.Module, meshes: Meshes, share: float, sizes: Mapping[str, int]
    ) -> None:
        self._model, self._meshes, self._sizes = model, meshes, sizes
        self._layers = {n: m for n, m in model.named_modules() if isinstance(m, MoE)}
        # with sequences or heads cut over ranks the tokens of one row are, too
        same_rows = tuple(axis.group for axis in (meshes.cp, meshes.tp) if axis.size > 1)
        for layer in self._layers.values():
            layer.data_group = meshes.stage.group or ()
            layer.sequence_group = same_rows or None
        if self._layers:
            set_aux_scale(model, torch.tensor(share, device=meshes.device))

    def end_step(self, step: int, total_steps: int, skip: Tensor) -> None:
        """After the optimizer's step: move the biases, unless the step was masked. One all-reduce of
        integers over the ranks of the stage, none on one process; no host sync."""
        if self._layers:
            groups = self._meshes.stage.group or ()
            update_expert_bias(self._model, step, total_steps, groups=groups, skip=skip)

    def take(self) -> Callable[[], dict[str, float]]:
        """Begin the statistics anew; the columns of what they were, to be read when the device is done.

        One all-reduce of a few numbers for each expert over all ranks.
        """
        if not self._sizes:
            return dict
        rows = [self._row(name, size) for name, size in self._sizes.items()]
        sums = torch.cat(rows)
        if self._meshes.world_size > 1:
            dist.all_reduce(sums)
        return partial(_columns, self._sizes, HostCopy([sums]))

    def _row(self, name: str, size: int) -> Tensor:
        """Counts, dropped, tokens, summed entropy and largest bias of a layer, fp64, as this rank adds to
        them: zeros for a layer of another stage."""
        if name not in self._layers:
            return torch.zeros(size + 4, dtype=torch.float64, device=self._meshes.device)
        found = self._layers[name].statistics(reset=True)
        tokens = found["tokens"].double()
        bias = found["bias"].abs().max().double() if "bias" in found else torch.zeros_like(tokens)
        once = float(self._meshes.stage.rank == 0)  # all ranks of a stage have the same bias
        rest = [found["dropped"].double(), tokens, found["entropy"].double() * tokens, once * bias]
        return torch.cat([found["counts"].double(), torch.stack(rest)])

    def forget(self) -> None:
        """Drop what was counted since the last row (an evaluation)."""
        for layer in self._layers.values():
            layer.statistics(reset=True)


def _columns(sizes: Mapping[str, int], sums: HostCopy) -> dict[str, float]:
    """`moe.<layer>.max_load`: the fullest expert over the mean; min_load; entropy of the router in nats;
    drop_rate: share of the choices that found no room; dead experts; max_bias, 0 without one."""
    columns: dict[str, float] = {}
    rows = torch.tensor(sums.read(), dtype=torch.float64).split(
        [size + 4 for size in sizes.values()]
    )
    for name, row in zip(sizes, rows, strict=True):
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
        prefix = f"moe.{'.'.join(part for part in name.split('.') if part.isdecimal())}."
        columns.update({f"{prefix}{key}": round(float(value), 6) for key, value in here.items()})
    return columns
