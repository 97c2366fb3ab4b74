"""Stages of a pipeline and the order of its micro-batches, by the name of the schedule: arithmetic alone."""

from __future__ import annotations

from forge_parallel.config import V_SCHEDULES, ParallelConfig

_IN_HALVES = ("interleaved_zero_bubble", "zbv_zero_bubble", "dualpipev")


def splits_backward(config: ParallelConfig) -> bool:
    """Whether gradients of inputs and of weights are computed apart, to fill the bubble with the latter."""
    return config.pp > 1 and config.pp_schedule in _IN_HALVES


def keeps_gathered(config: ParallelConfig) -> bool:
    """Whether FSDP2 must not reshard after the forward: `fully_shard(..., reshard_after_forward=False)`.

    A schedule that splits the backward reads the module's parameters before FSDP2's hooks have gathered them again.
    It gets the shards, which are not in the graph, and gradients are silently missing or wrong (torch 2.11 to
    2.13). Cost: a rank holds the gathered weights of its stages in compute precision throughout the step.
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
