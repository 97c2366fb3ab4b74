"""From a model on one process to the parts that train it on these ranks. Collective: every rank calls it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from forge_ckpt.stage_state import tensor_names
from forge_core import build_optimizer, initialise
from forge_core.optim import IdleOptimizer, groups_of_part, trains_nothing
from forge_moe import recompute_contexts
from forge_moe.hooks import num_experts_by_layer
from forge_parallel import Meshes, parallelize
from forge_parallel.compute import Compute
from forge_parallel.micro_batches import MicroBatches
from forge_resilience import Agreement
from forge_train.config.schema import JobConfig
from forge_train.errors import config_errors
from forge_train.trainer.build import refuse_other_model, seed_process
from forge_train.trainer.compute import make_compute
from forge_train.trainer.experts import shard_experts
from forge_train.trainer.objective import Objective, find_objective


@dataclass(frozen=True)
class Parts:
    """The objects that train a model. `tensor_names` are those of the whole model, of which `model` may be a stage.

    `masks_update`: the optimizer's step takes `skip`, a flag on the device.
    """

    model: nn.Module
    tensor_names: set[str]
    objective: Objective | None
    compute: Compute
    optimizer: Any
    masks_update: bool


def assemble(
    model: nn.Module,
    config: JobConfig,
    meshes: Meshes,
    division: MicroBatches,
    agreement: Agreement,
    report: Callable[[str], None] | None,
) -> Parts:
    """Shard a whole model over the ranks, give it its initial values, and build what trains it.

    `report` prints a line. Raises ConfigError for what the parts refuse of the configuration.
    """
    names = tensor_names(model)
    model = shard(model, config, meshes, agreement, report)
    with config_errors():
        objective = find_objective(config.train)
        compute = make_compute(model, config, meshes, division, objective)
        optimizer = _build_optimizer(model, config, meshes)
    return Parts(
        model=model,
        tensor_names=names,
        objective=objective,
        compute=compute,
        optimizer=optimizer,
        masks_update="skip" in inspect.signature(optimizer.step).parameters,
    )


def shard(
    model: nn.Module,
    config: JobConfig,
    meshes: Meshes,
    agreement: Agreement,
    report: Callable[[str], None] | None = None,
) -> nn.Module:
    """A whole model over the ranks of `config.parallel`, with its initial values. Collective, as `assemble`."""
    built_in = config.model.is_built_in
    if not built_in and meshes.world_size > 1:
        refuse_other_model(model, agreement)
    records, names = num_experts_by_layer(model) or config.parallel.ep > 1, tensor_names(model)
    with config_errors():
        shard_experts(model, config, meshes)
        model = parallelize(
            model,
            config.parallel,
            meshes,
            seq_len=config.data.seq_len,
            recompute_contexts=recompute_contexts if records else None,
            report=report,
        )
        # an imported model keeps the values of its builder where it declares no table of its own
        initialise(model, config.init_seed, strict=built_in, by_kind=built_in, whole=names)
    return model


def _build_optimizer(model: nn.Module, config: JobConfig, meshes: Meshes) -> Any:
    """Over this rank's part of the model, which may hold none of a group, or nothing to train at all."""
    if meshes.pp.size > 1 and trains_nothing(model):
        return IdleOptimizer()
    groups = groups_of_part(model, config.optimizer)
    return build_optimizer(model, replace(config.optimizer, groups=groups), seed=config.run.seed)


def seed_rank(seed: int, meshes: Meshes) -> None:
    """Begin this rank's random streams: ranks of a tp group hold the same stream and must drop the same of it."""
    seed_process(seed, meshes.rank // meshes.tp.size)
