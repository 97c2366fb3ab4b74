"""Validation loss: the same sequences each time, each label once, whatever the number of ranks."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from forge_core import cross_entropy
from forge_data import Batch, PackedStream
from forge_data.batch import IGNORE
from forge_parallel import Meshes
from forge_resilience import Agreement


@torch.no_grad()
def evaluate(
    model: nn.Module,
    stream: PackedStream,
    sequences: int,
    batch_size: int,
    meshes: Meshes,
    agreement: Agreement,
) -> float:
    """Mean loss in nats per token over the first `sequences` rows (all of them if there are fewer).

    Each rank takes an equal run of rows, `batch_size` at a time; where they do not divide, the last
    ranks compute rows without labels, as every rank must take part in every gather. One host read and
    one exchange at the end; every rank returns the same bits. Leaves the model in the mode it was in.
    """
    rows = min(sequences, len(stream))
    share = -(-rows // meshes.batch_size)
    first = share * meshes.batch_rank
    total = torch.zeros((), dtype=torch.float64, device=meshes.device)
    count = torch.zeros((), dtype=torch.int64, device=meshes.device)
    training = model.training
    model.eval()
    for start in range(first, first + share, batch_size):
        ids = range(start, min(start + batch_size, first + share))
        batch = _rows(stream, ids, rows).to(meshes.device)
        logits = model(batch.tokens, positions=batch.positions, document_ids=batch.document_ids)
        loss = cross_entropy(logits, batch.labels)
        total += loss.sum.double()
        count += loss.count
    model.train(training)
    parts = agreement.exchange([float(total), int(count)])
    return sum(part for part, _ in parts) / max(sum(n for _, n in parts), 1)


def _rows(stream: PackedStream, ids: range, rows: int) -> Batch:
    """Rows `ids`; those from `rows` on without labels."""
    batch = stream.batch([min(i, rows - 1) for i in ids])
    beyond = torch.tensor([i >= rows for i in ids])
    if not beyond.any():
        return batch
    return replace(batch, labels=batch.labels.masked_fill(beyond[:, None], IGNORE), num_valid=-1)
