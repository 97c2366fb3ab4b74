"""Micro-batches through the stages of a pipeline without a backward, for every placement alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forge_parallel.config import V_SCHEDULES, ParallelConfig
from forge_parallel.meshes import Axis
from forge_parallel.pipeline.schedule import num_stages, rank_of


def run_forward(
    config: ParallelConfig,
    axis: Axis,
    stages: dict[int, nn.Module],
    batches: Sequence[tuple[Tensor, dict[str, Any]]],
    stream: Tensor,
    finish: Callable[[Tensor, int], None],
) -> None:
    """Send every micro-batch (tokens, kwargs) through all stages; `finish(output, i)` behind the last one.

    `stages` are this rank's, by number; `stream` is an example of what goes from stage to stage. The clock
    is common to all: at each tick a rank runs at most one stage on one micro-batch and hands the result
    on. A rank runs one of its stages on all micro-batches before the next, so that it waits only where
    the pipe fills. Memory: the results of one stage for all micro-batches.
    """
    last = num_stages(config) - 1
    waiting: dict[tuple[int, int], Tensor] = {}
    starts = {stage: _start(config, stage, len(batches)) for stage in range(last + 1)}
    for tick in range(starts[last] + len(batches)):
        ops = []
        for stage, module in stages.items():
            i = tick - starts[stage]
            if 0 <= i < len(batches):
                tokens, kwargs = batches[i]
                out = module(tokens if stage == 0 else waiting.pop((stage, i)), **kwargs)
                if stage == last:
                    finish(out, i)
                elif stage + 1 in stages and rank_of(config, stage + 1) == axis.rank:
                    waiting[stage + 1, i] = out
                else:
                    to = rank_of(config, stage + 1)
                    ops.append(
                        dist.P2POp(dist.isend, out.contiguous(), group=axis.group, group_peer=to)
                    )
        for stage in stages:
            i = tick - starts.get(stage - 1, tick + 1)
            source = rank_of(config, stage - 1) if stage else axis.rank
            if 0 <= i < len(batches) and source != axis.rank:
                waiting[stage, i] = torch.empty_like(stream)
                ops.append(
                    dist.P2POp(dist.irecv, waiting[stage, i], group=axis.group, group_peer=source)
                )
        for work in dist.batch_isend_irecv(ops) if ops else ():
            work.wait()


def _start(config: ParallelConfig, stage: int, count: int) -> int:
    """The tick at which a stage has its first micro-batch; the i-th follows i ticks later."""
    turn, place = divmod(stage, config.pp)
    if config.pp_schedule in V_SCHEDULES:  # a V comes back over the same ranks, the last one first
        return turn * (count + config.pp - 1) + place
    return turn * max(count, config.pp) + place
