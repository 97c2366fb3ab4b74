"""The loss or the objective of a job by name, and the forward and backward that compute it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor, nn

from forge_core.loss import FUSED, LOSSES, LossBreakdown, Objective
from forge_parallel import Meshes, axes
from forge_train.config.model import VLMModelConfig
from forge_train.config.schema import JobConfig, TrainConfig
from forge_train.errors import ConfigError
from forge_vlm.modalities import discrete_ranges

if TYPE_CHECKING:
    from forge_parallel.compute import Compute, MicroBatches

Loss = Callable[..., Tensor]


def find_loss(config: JobConfig) -> Loss:
    """`loss(logits (B, S, V), labels (B, S), weights (B, S) or None) -> 0-dim sum`, with its options bound.

    A built-in loss is a `LossBreakdown`. ValueError for an unknown name, and for options that the loss does not take.
    """
    train = config.train
    found = LOSSES.checked(train.loss, train.loss_options)
    if train.loss in LOSSES.built_in:
        return partial(loss_breakdown(config), found)
    return partial(found, **train.loss_options)


def loss_breakdown(config: JobConfig) -> LossBreakdown:
    """The columns of a built-in loss: its terms, the sources of a mixture, and text and images of a model that predicts
    image tokens. None for another loss."""
    train, model = config.train, config.model
    if train.loss not in LOSSES.built_in:
        return LossBreakdown()
    terms = asdict(getattr(train, train.loss))
    if train.objective is not None:
        return LossBreakdown(terms)
    sources = tuple(config.data.sources) if len(config.data.sources) > 1 else ()
    if not isinstance(model, VLMModelConfig):
        return LossBreakdown(terms, sources)
    ranges = discrete_ranges(model.modalities)
    return LossBreakdown(terms, sources, ranges)


def loss_columns(config: JobConfig) -> Callable[[Sequence[float]], dict[str, float]]:
    """Make columns of a row from the sums after the first, over all ranks.

    `loss.<term>`, which the gradient contains and the column `loss` does not; `loss.source.<name>` and
    `loss.modality.<name>`, the mean of these labels, nan for a step without any; `loss.mtp`, the mean of tokens of MTP,
    without its weight; with `metrics.source_shares` also `share.source.<name>`, the fraction of the labels of a source.
    """
    mtp = getattr(config.model, "mtp", None)
    return partial(
        loss_breakdown(config).columns,
        mtp=mtp is not None and mtp.num_modules > 0,
        fractions=config.metrics.source_shares,
    )


def find_objective(config: TrainConfig) -> Objective | None:
    """The objective of a job; None for the sum of token losses."""
    if config.objective is None:
        return None
    return Objective(config.objective, config.objective_options, ConfigError)


def make_compute(
    model: nn.Module,
    config: JobConfig,
    meshes: Meshes,
    division: MicroBatches,
    objective: Objective | None,
) -> Compute:
    """The `Compute` of a job. ValueError for a custom loss or objective on sharded logits."""
    # imports torch.distributed.tensor, for half a second
    from forge_parallel.compute import Compute

    train, breakdown = config.train, loss_breakdown(config)
    mtp = getattr(config.model, "mtp", None)  # an imported model has none
    sharded = None
    if (function := axes.VOCAB_LOSSES.get(train.loss)) is not None:
        ids = axes.sharded_logits_vocab_size(model)
        sharded = partial(breakdown, partial(function, axis=meshes.tp, vocab_size=ids))

    key, name = ("loss", train.loss) if objective is None else ("objective", train.objective)
    mtp_depths, mtp_weight = (0, 0.0) if mtp is None else (mtp.num_modules, mtp.weight)

    return Compute(
        model,
        config.parallel,
        meshes,
        micro_batch=division.size,
        num_micro_batches=division.count,
        seq_len=config.data.seq_len,
        loss=find_loss(config),
        sharded_loss=sharded,
        num_sums=breakdown.num_sums,
        by_source=bool(breakdown.sources),
        mtp_depths=mtp_depths,
        mtp_weight=mtp_weight,
        in_head=train.loss == FUSED,
        objective=objective,
        called=f"train.{key} {name!r}",
    )
