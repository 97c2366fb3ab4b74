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
    starts = [_start(config, stage, len(batches)) for stage in range(last + 1)]
    for tick in range(starts[last] + len(batches)):
        moves: list[tuple[Any, Tensor, int]] = []  # what is sent or received, and the other stage
        for stage, module in stages.items():
            i = tick - starts[stage]
            if not 0 <= i < len(batches):
                continue
            tokens, kwargs = batches[i]
            out = module(tokens if stage == 0 else waiting.pop((stage, i)), **kwargs)
            if stage == last:
                finish(out, i)
            elif stage + 1 in stages:
                waiting[stage + 1, i] = out
            else:
                moves.append((dist.isend, out.contiguous(), stage + 1))
        for stage in stages:
            i = tick - starts[stage - 1]
            if stage > 0 and stage - 1 not in stages and 0 <= i < len(batches):
                waiting[stage, i] = torch.empty_like(stream)
                moves.append((dist.irecv, waiting[stage, i], stage - 1))
        ops = [
            dist.P2POp(kind, tensor, group=axis.group, group_peer=rank_of(config, other))
            for kind, tensor, other in moves
        ]
        for work in dist.batch_isend_irecv(ops) if ops else ():
            work.wait()


def _start(config: ParallelConfig, stage: int, count: int) -> int:
    """The tick at which a stage has its first micro-batch; the i-th follows i ticks later."""
    turn, place = divmod(stage, config.pp)
    if config.pp_schedule in V_SCHEDULES:  # a V comes back over the same ranks, the last one first
        return turn * (count + config.pp - 1) + place
    return turn * max(count, config.pp) + place
