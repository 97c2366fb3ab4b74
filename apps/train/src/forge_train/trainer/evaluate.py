"""Validation loss: the same sequences each time, each label once, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

import forge_data
from forge_data import Batch, Stream, batch_of
from forge_parallel import Meshes, reshard
from forge_parallel.compute import Compute
from forge_resilience import Agreement
from forge_train.errors import DataError, run_on_all_ranks


def share_of_rows(
    stream: Stream, sequences: int, batch_size: int, meshes: Meshes, agreement: Agreement
) -> list[Batch]:
    """This rank's part of the first `sequences` rows (all if there are fewer), `batch_size` at a time.

    The rows are divided into the same batches for any number of ranks; each data rank gets equally many of them,
    filler included, as every rank must take part in every gather. All are read before anything is computed:
    if one rank cannot read its own, all raise DataError.
    """
    rows = min(sequences, len(stream))
    each = -(-rows // (batch_size * meshes.batch_size))
    first = each * meshes.batch_rank

    def read() -> list[Batch]:
        try:
            return [
                _rows(stream, range(batch * batch_size, (batch + 1) * batch_size), rows)
                for batch in range(first, first + each)
            ]
        except (forge_data.InvalidData, OSError, ValueError) as error:
            raise DataError([f"validation data: {type(error).__name__}: {error}"]) from error

    return run_on_all_ranks(agreement, read)


def evaluate(
    model: nn.Module,
    compute: Compute,
    count: Callable[[Batch], float],
    parts: Sequence[Batch],
    agreement: Agreement,
) -> float:
    """Mean loss in nats per token over the parts of all ranks, as many on each; `count` weighs a part's labels.

    One host read and one exchange at the end; every rank returns the same bits. Restores the
    model's mode and leaves its weights sharded, so that weights swapped in for the evaluation can be swapped back.
    """
    device = compute.meshes.device
    total = torch.zeros((), dtype=torch.float64, device=device)
    training = model.training
    model.eval()
    for part in parts:
        total += compute.losses(part).double()
    model.train(training)
    reshard(model)
    weight = sum(count(part) for part in parts)
    shares = agreement.exchange([float(total), weight])
    return sum(loss for loss, _ in shares) / (sum(weight for _, weight in shares) or 1.0)


def _rows(stream: Stream, ids: range, rows: int) -> Batch:
    """Rows `ids`; filler for those from `rows` on."""
    real = range(ids.start, max(ids.start, min(ids.stop, rows)))
    missing = len(ids) - len(real)
    batch = batch_of(stream, real)
    return batch.with_filler(missing) if missing else batch
