"""The host lane of a step: what this rank brings to the others, and what all of them decide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import forge_data
from forge_data import Batch
from forge_resilience import (
    Agreement,
    Decision,
    ExitCode,
    PendingDecision,
    StopSignal,
    Vote,
)
from forge_train.errors import DataError, share_errors

_FP32 = torch.finfo(torch.float32)


class StepVotes:
    """Collects what concerns all ranks between two votes, and acts on what they decide.

    `fault` is what kept this rank from reading its share of the batch, `save_requested` a wish for a
    checkpoint; `decision` is the last one taken.
    """

    def __init__(self) -> None:
        self.signal = StopSignal()
        self.fault: Exception | None = None
        self.save_requested = False
        self.decision = Decision(())

    def start(self, agreement: Agreement, batch: Batch, count: float) -> PendingDecision:
        """Send this rank's vote; it travels while the first micro-batch goes forward. `count` is what it
        adds to the normaliser."""
        return agreement.start(
            Vote(
                stop=self.signal.number,
                save=self.save_requested,
                fault=0 if self.fault is None else int(_code(self.fault)),
                digest=batch.digest,
                count=count,
            )
        )

    def heed(
        self,
        pending: PendingDecision,
        agreement: Agreement,
        step: int,
        record: Callable[..., None],
    ) -> float:
        """The sum of the counts, 1 where that is 0. Raises on all ranks when one of them cannot go on,
        before anything is updated; `record` writes the event, `step` is the one that was done last."""
        self.decision = decision = pending.wait()
        if decision.faults:
            self._share_faults(agreement, step, record)
        if decision.mismatched_ranks:
            raise DataError(
                [f"step {step + 1}: ranks {decision.mismatched_ranks} read another global batch than rank 0; "
                 "data and configuration must be the same on all nodes: compare them"]
            )  # fmt: skip
        if decision.count and not _FP32.tiny <= abs(decision.count) <= _FP32.max:
            raise DataError(
                [f"step {step + 1}: the labels of the global batch weigh {decision.count:g}, which must be 0 or "
                 f"between {_FP32.tiny:.1e} and {_FP32.max:.1e}, as fp32 gradients are divided by it; scale the "
                 "weights"]
            )  # fmt: skip
        return decision.count or 1.0  # a floor of one would rescale small weights

    def _share_faults(self, agreement: Agreement, step: int, record: Callable[..., None]) -> None:
        mine = self.fault
        said = mine and f"step {step + 1}: {type(mine).__name__}: {mine}"
        told: list[Any] = agreement.exchange(mine and [int(_code(mine)), said])
        for rank, code in self.decision.faults.items():
            record("fault", step=step, rank=rank, code=code, cause=told[rank][1])
        if mine is not None and not isinstance(mine, forge_data.DataError | OSError):
            raise mine
        share_errors(told)


def _code(error: Exception) -> ExitCode:
    known = isinstance(error, forge_data.DataError | OSError)
    return ExitCode.DATA_ERROR if known else ExitCode.ERROR
