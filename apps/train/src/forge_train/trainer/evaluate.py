"""Validation loss: the same sequences each time, each label once."""

from __future__ import annotations

import torch
from torch import nn

from forge_core import cross_entropy
from forge_data import PackedStream


@torch.no_grad()
def evaluate(
    model: nn.Module, stream: PackedStream, sequences: int, batch_size: int, device: torch.device
) -> float:
    """Mean loss in nats per token over the first `sequences` rows (all of them if there are fewer).

    One host read at the end. Leaves the model in the mode it was in.
    """
    rows = min(sequences, len(stream))
    total = torch.zeros((), dtype=torch.float64, device=device)
    count = torch.zeros((), dtype=torch.int64, device=device)
    training = model.training
    model.eval()
    for start in range(0, rows, batch_size):
        batch = stream.batch(range(start, min(start + batch_size, rows))).to(device)
        logits = model(batch.tokens, positions=batch.positions, document_ids=batch.document_ids)
        loss = cross_entropy(logits, batch.labels)
        total += loss.sum.double()
        count += loss.count
    model.train(training)
    return float(total / count.clamp(min=1))
