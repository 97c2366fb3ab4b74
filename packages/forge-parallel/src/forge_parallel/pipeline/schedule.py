"""torch's schedules, by the names of ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from forge_parallel.config import ParallelConfig


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
