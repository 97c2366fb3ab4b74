"""Forward and backward of a job's steps, with its loss or objective."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from forge_data import Batch
from forge_parallel import Meshes
from forge_parallel.axes import (
    VocabLoss,
    cut_sequence,
    ids_of_cut_logits,
    vocab_cross_entropy,
    vocab_fused_cross_entropy,
)
from forge_parallel.compute import Compute
from forge_parallel.micro_batches import MicroBatches
from forge_train.config.schema import JobConfig
from forge_train.errors import config_errors
from forge_train.trainer.layout import micro_batches
from forge_train.trainer.objective import (
    FUSED,
    Objective,
    Shown,
    all_sums,
    find_loss,
    find_objective,
    loss_terms,
    shown_parts,
    term_names,
)


def make_compute(
    model: nn.Module,
    config: JobConfig,
    meshes: Meshes,
    division: MicroBatches,
    objective: Objective | None,
) -> Compute:
    """The `Compute` of a job. ValueError for a loss or an objective of one's own on a part of the logits."""
    train, whole = config.train, None
    terms, function = loss_terms(train), _SHARDED.get(train.loss)
    sharded_loss, shown = None, shown_parts(config)
    if function is not None:
        ids = ids_of_cut_logits(model)
        sharded_loss = partial(_on_part_of_vocabulary, function, meshes, ids, terms, shown)
    mtp = getattr(config.model, "mtp", None)  # an imported model has none
    if objective is not None:
        whole = partial(_on_local_tokens, objective, meshes)
    return Compute(
        model,
        config.parallel,
        meshes,
        micro_batch=division.size,
        num_micro_batches=division.count,
        seq_len=config.data.seq_len,
        loss=find_loss(config),
        sharded_loss=sharded_loss,
        num_sums=1 + len(term_names(terms)) + 2 * len(shown.names),
        by_source=bool(shown.sources),
        ahead=0 if mtp is None else mtp.num_modules,
        ahead_weight=0.0 if mtp is None else mtp.weight,
        in_head=train.loss == FUSED,
        objective=whole,
        called=f"train.objective {train.objective!r}"
        if objective
        else f"train.loss {train.loss!r}",
    )


def job_compute(model: nn.Module, config: JobConfig, meshes: Meshes) -> Compute:
    """Forward and backward of a job outside of a run: `model` is sharded over `meshes`, those of `config.parallel`.

    Raises ConfigError for a loss or an objective that these ranks cannot compute.
    """
    with config_errors():
        division = micro_batches(config, config.parallel.axes(meshes.world_size))
        return make_compute(model, config, meshes, division, find_objective(config.train))


#: The built-in losses where each tp rank has a part of the logits, or of the head's weight.
_SHARDED: dict[str, Callable[..., VocabLoss]] = {
    "cross_entropy": vocab_cross_entropy,
    FUSED: vocab_fused_cross_entropy,
}


def _on_part_of_vocabulary(
    function: Callable[..., VocabLoss],
    meshes: Meshes,
    ids: int | None,
    terms: dict[str, float],
    shown: Shown,
    *given: Any,
    sources: Tensor | None = None,
    **head: float,
) -> Tensor:
    """`token_cross_entropy` or `inside_head` with a part of the logits or the weight."""
    *parts, labels, weights = given
    found = function(*parts, labels, meshes.tp, weights=weights, vocab_size=ids, **terms, **head)
    return all_sums(found, labels, weights, terms, sources, shown)


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
