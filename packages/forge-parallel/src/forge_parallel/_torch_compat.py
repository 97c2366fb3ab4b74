"""Private torch names in use, each with the versions it was seen in."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def foreach_norm(tensors: Sequence[Tensor], norm_type: float = 2.0) -> list[Tensor]:
    """Norm of each tensor in fp32, one fused launch per device and dtype (torch 2.11 to 2.13)."""
    return list(torch._foreach_norm(list(tensors), norm_type, dtype=torch.float32))


def foreach_mul_(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply each tensor in place by a 0-dim tensor (torch 2.11 to 2.13)."""
    torch._foreach_mul_(list(tensors), factor)


def set_timeout(group: Any, seconds: float) -> None:
    """Bound each later collective of a process group that torch made with its default (2.11 to 2.13)."""
    from torch.distributed.distributed_c10d import _set_pg_timeout

    _set_pg_timeout(datetime.timedelta(seconds=seconds), group)


def pipeline_stage(*args: Any, **kwargs: Any) -> Any:
    """torch's PipelineStage, whose last stage may give any output.

    `_validate_fwd_outputs` (torch 2.11, gone in 2.13) holds the logits against the example of what goes from
    stage to stage, too; a caller of the loss need not know their shape.
    """
    return _stage_class()(*args, **kwargs)


@functools.cache
def _stage_class() -> Any:
    from torch.distributed.pipelining import PipelineStage

    class Stage(PipelineStage):
        def _validate_fwd_outputs(self, outputs: Any) -> None:
            if not self.is_last:
                super()._validate_fwd_outputs(outputs)  # type: ignore[misc]

    return Stage
