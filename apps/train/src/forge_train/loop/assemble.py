"""From a model on one process to the parts that train it on these ranks. Collective: every rank calls it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch import nn

from forge_ckpt.rng import seed_process
from forge_ckpt.stage_state import tensor_names
from forge_core import build_optimizer, initialize
from forge_core.optim import IdleOptimizer, groups_of_part, trains_nothing
from forge_moe import expert_parallelize, recompute_contexts
from forge_moe.hooks import num_experts_by_layer
from forge_moe.model_section import MoESection
from forge_parallel import Meshes, find_world, parallelize
from forge_parallel.check_model import ranks_with_other_values
from forge_parallel.compute import Compute
from forge_resilience import Agreement
from forge_train._shared.problems import invalid
from forge_train.build.layout import micro_batches
from forge_train.build.objective import find_objective, make_compute
from forge_train.config.schema import JobConfig
from forge_train.errors import ConfigError, config_errors

if TYPE_CHECKING:
    from forge_train.run.run import Run


def assemble(run: Run) -> None:
    """Shard the model of a run over its ranks, give it its initial values, and build what trains it.

    Raises ConfigError for what the parts refuse of the configuration.
    """
    config, meshes = run.config, run.meshes
    report = run.report if run.prints else None
    run.model = shard(run.model, config, meshes, run.agreement, report)
    with config_errors():
        run.objective = find_objective(config.train)
        compute = make_compute(run.model, config, meshes, run.division, run.objective)
        run.optimizer = _build_optimizer(run.model, config, meshes)
    run.begin_segments(compute)


def shard(
    model: nn.Module,
    config: JobConfig,
    meshes: Meshes,
    agreement: Agreement,
    report: Callable[[str], None] | None = None,
) -> nn.Module:
    """A whole model over the ranks of `config.parallel`, with its initial values. Collective, as `assemble`."""
    built_in = config.model.is_built_in
    others: list[int] = []
    if not built_in and meshes.world_size > 1:  # its builder may read a file, which ours never does
        others = ranks_with_other_values(model, agreement.exchange)
    if others:
        rule = f"must build the same values on every rank, and ranks {others} differ from rank 0"
        fix = "draw from torch, random or numpy, which are seeded alike before it runs"
        raise invalid("model.name", "mismatch", ..., rule, fix, kind=ConfigError)

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
        initialize(model, config.init_seed, strict=built_in, by_kind=built_in, whole=names)
    return model


def shard_experts(model: nn.Module, config: JobConfig, meshes: Meshes) -> None:
    """Shard the experts of every MoE layer and of every group of MoMa over the ranks of `parallel.ep`; nothing without it. Collective."""
    if config.parallel.ep == 1:
        return
    # an imported model may have MoE layers too; it has no [model.moe], so the defaults hold
    moe: Any = getattr(config.model, "moe", None) or MoESection()
    ranks = meshes.sparse["ep"]
    per_node = config.parallel.gpus_per_node or find_world().local_world_size
    expert_parallelize(
        model,
        ranks,
        dispatcher=moe.dispatcher,
        chunks=moe.dispatch_chunks,
        ranks_per_node=min(per_node, ranks.size()),
        timeout=timedelta(seconds=config.parallel.timeout_seconds),
    )


def job_compute(model: nn.Module, config: JobConfig, meshes: Meshes) -> Compute:
    """Forward and backward of a job outside of a run: `model` is sharded over `meshes`, those of `config.parallel`.

    Raises ConfigError for a loss or an objective that these ranks cannot compute.
    """
    with config_errors():
        division = micro_batches(config, config.parallel.axes(meshes.world_size))
        return make_compute(model, config, meshes, division, find_objective(config.train))


def _build_optimizer(model: nn.Module, config: JobConfig, meshes: Meshes) -> Any:
    """Over this rank's part of the model, which may hold none of a group, or nothing to train at all."""
    if meshes.pp.size > 1 and trains_nothing(model):
        return IdleOptimizer()
    groups = groups_of_part(model, config.optimizer)
    return build_optimizer(model, replace(config.optimizer, groups=groups), seed=config.run.seed)


def seed_rank(seed: int, meshes: Meshes) -> None:
    """Begin this rank's random streams: ranks of a tp group hold the same stream and must drop the same of it."""
    seed_process(seed, meshes.rank // meshes.tp.size)
