"""Orders of micro-batches in a pipeline: by name, with their rules and where their stages lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from forge_parallel import _torch_compat
from forge_parallel.config import V_SCHEDULES, ParallelConfig

_IN_HALVES = ("interleaved_zero_bubble", "zbv_zero_bubble", "dualpipev")


def splits_backward(config: ParallelConfig) -> bool:
    """Whether gradients of inputs and of weights are computed apart, to fill the bubble with the latter."""
    return config.pp > 1 and config.pp_schedule in _IN_HALVES


def keeps_gathered(config: ParallelConfig) -> bool:
    """Whether FSDP2 must not reshard after the forward: `fully_shard(..., reshard_after_forward=False)`.

    A schedule that splits the backward asks the module for its parameters before FSDP2's hooks have gathered
    them again, and finds shards that no graph knows: gradients are missing without a word. Cost: a rank
    holds the gathered weights of its stages in compute precision throughout the step.
    """
    return splits_backward(config)


def num_stages(config: ParallelConfig) -> int:
    """Stages of the whole pipeline."""
    return config.pp * config.stages_per_rank


def rank_of(config: ParallelConfig, stage: int) -> int:
    """The pp rank of a stage: round and round, or down and up again in a V."""
    if config.pp_schedule in V_SCHEDULES:
        return min(stage, 2 * config.pp - 1 - stage)
    return stage % config.pp


def stages_on(config: ParallelConfig, rank: int) -> list[int]:
    """The stages of a pp rank, in order of depth."""
    return [stage for stage in range(num_stages(config)) if rank_of(config, stage) == rank]


def forward_starts(config: ParallelConfig, count: int) -> list[int]:
    """The tick of each stage's first of `count` forwards without a backward; the others follow at once."""
    # a V comes back over the same ranks, the last one first
    turn = count + config.pp - 1 if config.pp_schedule in V_SCHEDULES else max(count, config.pp)
    return [stage // config.pp * turn + stage % config.pp for stage in range(num_stages(config))]


def next_allowed_count(config: ParallelConfig, num_micro_batches: int) -> int:
    """The least number of micro-batches, from `num_micro_batches` on, that the schedule can run."""
    count, pp = max(1, num_micro_batches), config.pp
    if pp == 1:
        return count
    if config.pp_schedule == "1f1b":
        return max(count, pp)
    if config.pp_schedule == "dualpipev":
        return max(count, num_stages(config))
    if config.pp_schedule.startswith("interleaved"):
        while count % max(1, count // pp):
            count += 1
    return count


def _count_rule(config: ParallelConfig, count: int, allowed: int) -> str:
    """What `next_allowed_count` asks of a number of micro-batches, and the fix, in words."""
    if count < 1:
        return f"at least 1; use pp {config.pp} or more of them"
    if config.pp_schedule == "1f1b":
        return f"at least pp {config.pp} with 1f1b; use {allowed} or more, or gpipe"
    if config.pp_schedule == "dualpipev":
        return (
            f"at least the {num_stages(config)} stages with dualpipev; use {allowed} or more, or "
            "zbv_zero_bubble"
        )
    fewer = count - count % config.pp
    return (
        f"a multiple of their {count // config.pp} rounds of pp {config.pp} with {config.pp_schedule}; "
        f"use {fewer} or {allowed}"
    )


def schedule_problems(config: ParallelConfig, num_micro_batches: int, num_layers: int) -> list[str]:
    """What keeps a pipeline from running, each as "value, rule; fix"; empty without pp.

    `num_micro_batches` is that of one data rank in one step. Needs no process group.
    """
    if config.pp == 1:
        return []
    found = []
    pp, name, batches, stages = config.pp, config.pp_schedule, num_micro_batches, num_stages(config)
    if num_layers < stages:
        found.append(
            f"num_layers {num_layers} must be at least one for each of the {stages} stages of pp {pp} with "
            f"{config.stages_per_rank} per rank; use pp {max(1, num_layers // config.stages_per_rank)} or more layers"
        )
    allowed = next_allowed_count(config, batches)
    if batches != allowed:
        found.append(f"{batches} micro-batches must be {_count_rule(config, batches, allowed)}")
    if splits_backward(config) and not _torch_compat.SPLITS_ANY_BACKWARD:
        found.append(
            f"pp_schedule {name} must have torch 2.13 or newer, not {torch.__version__}, whose halves of a backward "
            "do not fit every model; use interleaved_1f1b"
        )
    if splits_backward(config) and config.compile:
        found.append(
            f"compile must be off with {name}, which halves the backward: a compiled block has it in one piece, "
            "and would run it twice; use compile = false, or interleaved_1f1b"
        )
    return [f"parallel: {problem}" for problem in found]


def make_schedule(
    config: ParallelConfig,
    stages: Sequence[Any],
    num_micro_batches: int,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
) -> Any:
    """torch's schedule over this rank's PipelineStages; gradients are summed, never scaled (F05)."""
    from torch.distributed.pipelining.schedules import get_schedule_class

    kind = get_schedule_class(config.pp_schedule.replace("_", ""))  # "interleaved1f1b"
    one_or_all = stages[0] if config.stages_per_rank == 1 else list(stages)
    return kind(one_or_all, num_micro_batches, loss_fn=loss_fn, scale_grads=False)
