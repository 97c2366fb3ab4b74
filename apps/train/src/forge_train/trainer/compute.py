"""Forward and backward of a job's steps, with its loss or objective."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from forge_data import Batch
from forge_parallel import Meshes
from forge_parallel.axes import cut_sequence, vocab_cross_entropy
from forge_parallel.compute import Compute
from forge_parallel.micro_batches import MicroBatches
from forge_train.config.schema import JobConfig
from forge_train.trainer.objective import FUSED, Objective, find_loss


def make_compute(
    model: nn.Module,
    config: JobConfig,
    meshes: Meshes,
    division: MicroBatches,
    objective: Objective | None,
) -> Compute:
    """The `Compute` of a job. ValueError for a loss or an objective of one's own on a part of the logits."""
    train, sharded_loss, whole = config.train, None, None
    if train.loss == "cross_entropy":
        sharded_loss = partial(_vocab_cross_entropy, meshes)
    if objective is not None:
        whole = partial(_on_local_tokens, objective, meshes)
    return Compute(
        model,
        config.parallel,
        meshes,
        micro_batch=division.size,
        num_micro_batches=division.count,
        seq_len=config.data.seq_len,
        loss=find_loss(train),
        sharded_loss=sharded_loss,
        in_head=train.loss == FUSED,
        objective=whole,
        called=f"train.objective {train.objective!r}"
        if objective
        else f"train.loss {train.loss!r}",
    )


def _vocab_cross_entropy(
    meshes: Meshes, logits: Tensor, labels: Tensor, weights: Tensor | None
) -> Tensor:
    """`token_cross_entropy` of logits of which each tp rank has a part."""
    return vocab_cross_entropy(logits, labels, meshes.tp, weights=weights)[0]


def _on_local_tokens(
    objective: Objective, meshes: Meshes, model: nn.Module, batch: Batch
) -> list[Tensor]:
    """An objective of this rank's part of each sequence, as a batch on its device."""
    here = batch.to(meshes.device, stay=tuple(getattr(model, "host_inputs", ())))
    if meshes.cp.size > 1:
        names = ("tokens", "labels", "positions", "document_ids", "weights")
        whole = {n: x for n in names if (x := getattr(here, n)) is not None}
        parts: dict[str, Any] = {n: cut_sequence(x, meshes.cp, dim=-1) for n, x in whole.items()}
        here = replace(here, **parts, label_weight=here.label_weight)
    return objective(model, here)
