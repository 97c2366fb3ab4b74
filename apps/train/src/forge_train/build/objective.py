"""The loss or the objective of a job by name, and the forward and backward that compute it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from forge_core import cross_entropy, fused_cross_entropy
from forge_core.loss import LossBreakdown
from forge_core.registry import Registry
from forge_data import Batch
from forge_parallel import Meshes
from forge_parallel.axes import (
    cut_sequence,
    ids_of_cut_logits,
    vocab_cross_entropy,
    vocab_fused_cross_entropy,
)
from forge_parallel.compute import Compute
from forge_parallel.micro_batches import MicroBatches
from forge_train._shared.problems import invalid
from forge_train.config.schema import JobConfig, TrainConfig
from forge_train.config.vlm import VLMModelConfig
from forge_train.errors import ConfigError
from forge_vlm.modalities import learnt_ranges

Loss = Callable[..., Tensor]

#: The built-in loss that the head computes: of the stream (B, S, D) and the head's weight (V, D) in place of logits.
FUSED = "fused_cross_entropy"
#: The built-in losses where each tp rank has a part of the logits, or of the head's weight.
_SHARDED: dict[str, Callable[..., Any]] = {
    "cross_entropy": vocab_cross_entropy,
    FUSED: vocab_fused_cross_entropy,
}
LOSSES = Registry(
    "train.loss",
    "forge.losses",
    ("logits", "labels", "weights"),
    {"cross_entropy": cross_entropy, FUSED: fused_cross_entropy},
)
OBJECTIVES = Registry("train.objective", "forge.objectives", ("model", "batch"), {})


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
    """What is logged of a built-in loss: its terms, the sources of a mixture, and text and images of a model that
    learns images as tokens. Nothing of another loss."""
    train, model = config.train, config.model
    if train.loss not in LOSSES.built_in:
        return LossBreakdown()
    terms = asdict(getattr(train, train.loss))
    if train.objective is not None:
        return LossBreakdown(terms)
    sources = tuple(config.data.sources) if len(config.data.sources) > 1 else ()
    ranges = learnt_ranges(model.modalities) if isinstance(model, VLMModelConfig) else {}
    return LossBreakdown(terms, sources, ranges)


def loss_columns(config: JobConfig) -> Callable[[Sequence[float]], dict[str, float]]:
    """From the sums after the first, over all ranks, to columns.

    `loss.<term>`, which the gradient contains and the column `loss` does not; `loss.source.<name>` and
    `loss.modality.<name>`, the mean of these labels, nan for a step without any; `loss.mtp`, the mean of tokens of MTP,
    without its weight; with `metrics.source_shares` also `share.source.<name>`, the fraction of the labels of a source.
    """
    breakdown, mtp = loss_breakdown(config), getattr(config.model, "mtp", None)

    def columns(others: Sequence[float]) -> dict[str, float]:
        found = breakdown.means(others)
        if mtp is not None and mtp.num_modules:
            found["mtp"] = others[breakdown.num_sums - 1]
        losses = {f"loss.{name}": value for name, value in found.items()}
        if not config.metrics.source_shares:
            return losses
        weights = breakdown.weights(others)  # the sums are over the weight of all labels
        return losses | {f"share.{n}": w for n, w in weights.items() if n.startswith("source.")}

    return columns


class Objective:
    """`fn(model, batch, **options) -> {name: 0-dim sum}`, of which the first is trained.

    The sums of all micro-batches and ranks add up, and are divided by the step's normaliser: the sum of
    `fn.count(batch)` over the ranks where fn defines it, a number that the host knows before the forward, else
    the weight of the labels. The other sums are columns of metrics. Every rank calls the model equally often.
    """

    def __init__(self, config: TrainConfig) -> None:
        assert config.objective is not None
        self._function = OBJECTIVES.checked(config.objective, config.objective_options)
        self._name, self._options = config.objective, config.objective_options
        self.names: tuple[str, ...] = ()

    def __call__(self, model: nn.Module, batch: Batch) -> list[Tensor]:
        """The sums of a micro-batch on the device, the one that is trained first."""
        sums: Any = self._function(model, batch, **self._options)
        values: list[Any] = list(sums.values()) if isinstance(sums, dict) else [None]
        if not values or not all(isinstance(v, Tensor) and v.dim() == 0 for v in values):
            shapes = [tuple(v.shape) if isinstance(v, Tensor) else type(v).__name__ for v in values]
            what = ", ".join(map(str, shapes))
            rule = f"must give a dict of 0-dim tensors, the trained one first, and gave {type(sums).__name__} ({what})"
            fix = "sum over sequences and tokens"
            raise invalid("train.objective", "type", self._name, rule, fix, kind=ConfigError)
        self.names = tuple(sums)
        return values

    def count(self, batch: Batch) -> float:
        """The number that this batch adds to the normaliser."""
        offered = getattr(self._function, "count", None)
        return batch.label_weight if offered is None else float(offered(batch))

    def columns(self, others: Sequence[float]) -> dict[str, float]:
        """`objective.<name>` of the sums after the first, over all ranks."""
        return {f"objective.{name}": value for name, value in zip(self.names[1:], others)}


def find_objective(config: TrainConfig) -> Objective | None:
    """The objective of a job; None for the sum of token losses."""
    return None if config.objective is None else Objective(config)


def make_compute(
    model: nn.Module,
    config: JobConfig,
    meshes: Meshes,
    division: MicroBatches,
    objective: Objective | None,
) -> Compute:
    """The `Compute` of a job. ValueError for a loss or an objective of one's own on a part of the logits."""
    train, breakdown = config.train, loss_breakdown(config)
    mtp = getattr(config.model, "mtp", None)  # an imported model has none
    sharded = None
    if (function := _SHARDED.get(train.loss)) is not None:
        ids = ids_of_cut_logits(model)
        sharded = partial(breakdown, partial(function, axis=meshes.tp, vocab_size=ids))

    key, name = ("loss", train.loss) if objective is None else ("objective", train.objective)
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
        ahead=0 if mtp is None else mtp.num_modules,
        ahead_weight=0.0 if mtp is None else mtp.weight,
        in_head=train.loss == FUSED,
        objective=None if objective is None else partial(_on_local_tokens, objective, meshes),
        called=f"train.{key} {name!r}",
    )


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
