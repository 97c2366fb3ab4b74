"""The training objective by name: a sum of token losses, or a function of model and batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from forge_core import TokenLoss, cross_entropy, fused_cross_entropy
from forge_core.registry import Registry
from forge_data import Batch
from forge_data.batch import IGNORE
from forge_parallel.axes import VocabLoss
from forge_train._shared.problems import invalid
from forge_train.config.schema import JobConfig, TrainConfig
from forge_train.config.vlm import VLMModelConfig
from forge_train.errors import ConfigError
from forge_vlm.modalities import learnt_ranges

Loss = Callable[..., Tensor]


@dataclass(frozen=True)
class Shown:
    """Parts of the labels whose losses are columns: those of each source, by number, and of each modality of `ranges`, (first
    id, one behind the last) by name; what is in no range is text."""

    sources: tuple[str, ...] = ()
    ranges: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """Columns behind `loss.`."""
        modalities = ("text", *self.ranges) if self.ranges else ()
        of_source = (f"source.{name}" for name in self.sources)
        return (*of_source, *(f"modality.{name}" for name in modalities))

    def parts(self, labels: Tensor, sources: Tensor | None) -> list[Tensor]:
        """(B, S) bool of each name, of labels and the sources of their tokens (B, S)."""
        found = [sources == number for number in range(len(self.sources)) if sources is not None]
        if not self.ranges:
            return found
        images = [(labels >= first) & (labels < end) for first, end in self.ranges.values()]
        return [*found, ~torch.stack(images).any(0), *images]


def token_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    weights: Tensor | None,
    sources: Tensor | None = None,
    shown: Shown = Shown(),
    **terms: Any,
) -> Tensor:
    """Sum of the weighted cross-entropies of (B, S) labels, 0-dim fp32; with terms or shown parts as `all_sums`."""
    found = cross_entropy(logits, labels, weights=weights, **terms)
    return all_sums(found, labels, weights, terms, sources, shown)


def inside_head(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    weights: Tensor | None,
    sources: Tensor | None = None,
    shown: Shown = Shown(),
    **terms: Any,
) -> Tensor:
    """The same of the stream (B, S, D) and the head's weight (V, D), without all logits."""
    found = fused_cross_entropy(x, weight, labels, weights=weights, **terms)
    return all_sums(found, labels, weights, terms, sources, shown)


def all_sums(
    loss: TokenLoss | VocabLoss,
    labels: Tensor,
    weights: Tensor | None,
    terms: Mapping[str, float],
    sources: Tensor | None,
    shown: Shown,
) -> Tensor:
    """The sum of a loss, 0-dim; with terms or shown parts (k,): the plain cross-entropy, whose gradient is that of the
    whole sum, then as numbers the terms that are switched on, in the order of `term_names`, the cross-entropy of the
    labels of each part, and what these weigh."""
    names = term_names(terms)
    if not names and not shown.names:
        return loss.sum
    trained, plain = loss.sum.detach(), loss.cross_entropy
    values = {"z_loss": loss.z_loss, "label_smoothing": trained - loss.z_loss - plain}
    sums = [plain + (loss.sum - trained), *(values[name] for name in names)]
    if shown.names:
        valid = labels != IGNORE
        weighing = valid.to(plain.dtype) if weights is None else weights.where(valid, 0.0)
        parts = shown.parts(labels, sources)
        for each in (loss.token_losses, weighing.to(plain.dtype)):
            # a sum for each: adding by index has no order on a GPU
            sums += [each.where(chosen, 0.0).sum() for chosen in parts]
    return torch.stack(sums)


def term_names(terms: Mapping[str, float]) -> tuple[str, ...]:
    """Terms beside the cross-entropy that are switched on."""
    return tuple(name for name in ("z_loss", "label_smoothing") if terms.get(name))


#: The built-in loss that the head computes: it is called as `inside_head`, not on logits.
FUSED = "fused_cross_entropy"
LOSSES = Registry(
    "train.loss",
    "forge.losses",
    ("logits", "labels", "weights"),
    {"cross_entropy": token_cross_entropy, FUSED: inside_head},
)
OBJECTIVES = Registry("train.objective", "forge.objectives", ("model", "batch"), {})


def find_loss(config: JobConfig) -> Loss:
    """`loss(logits (B, S, V), labels (B, S), weights (B, S) or None) -> 0-dim sum`, with its options bound; for
    `FUSED` with the stream and the head's weight in place of logits. A built-in one may give further sums, (k,),
    which are the columns of `loss_columns`, and takes `sources` where the parts that are shown are sources.

    ValueError for an unknown name, and for options that the loss does not take.
    """
    train = config.train
    found = LOSSES.checked(train.loss, train.loss_options)
    options = train.loss_options or own_keywords(config)
    return partial(found, **options) if options else found


def own_keywords(config: JobConfig) -> dict[str, Any]:
    """Keywords of the built-in loss of a job; none for another."""
    shown = shown_parts(config)
    return loss_terms(config.train) | ({"shown": shown} if shown.names else {})


def shown_parts(config: JobConfig) -> Shown:
    """The parts whose losses are columns where the loss is built in: sources of a mixture, and text and images of a model
    that learns images as tokens."""
    if config.train.objective is not None or config.train.loss not in LOSSES.built_in:
        return Shown()
    sources = tuple(config.data.sources) if len(config.data.sources) > 1 else ()
    if not isinstance(config.model, VLMModelConfig):
        return Shown(sources)
    return Shown(sources, learnt_ranges(config.model.modalities))


def loss_terms(config: TrainConfig) -> dict[str, float]:
    """Keywords of the built-in loss of a job; none for another."""
    return asdict(getattr(config, config.loss)) if config.loss in LOSSES.built_in else {}


def loss_columns(config: JobConfig) -> Callable[[Sequence[float]], dict[str, float]]:
    """From the sums behind the first, over all ranks, to columns: `loss.<term>`, which the gradient contains and
    the column `loss` does not; `loss.source.<name>` and `loss.modality.<name>`, the mean of the labels of a source and of a
    modality, nan for a step without any; and `loss.mtp`, the mean of tokens further ahead, without its weight. With
    `metrics.source_shares` also `share.source.<name>`, the part of the labels that are of a source."""
    mtp = getattr(config.model, "mtp", None)
    ahead = ("mtp",) if mtp is not None and mtp.num_modules else ()
    terms, shown = term_names(loss_terms(config.train)), shown_parts(config).names

    def columns(others: Sequence[float]) -> dict[str, float]:
        values = iter(others)
        found = dict(zip(terms, values))
        losses = [next(values) for _ in shown]
        weigh = [next(values) for _ in shown]
        means = [loss / weight if weight else math.nan for loss, weight in zip(losses, weigh)]
        found |= zip(shown, means)
        found |= zip(ahead, values)
        # the sums are over what all labels weigh
        shares = {f"share.{n}": w for n, w in zip(shown, weigh) if n.startswith("source.")}
        losses_by_name = {f"loss.{name}": value for name, value in found.items()}
        return losses_by_name | (shares if config.metrics.source_shares else {})

    return columns


class Objective:
    """`fn(model, batch, **options) -> {name: 0-dim sum}`, of which the first is trained.

    The sums of all micro-batches and ranks add up, and are divided by the step's normaliser: the sum of
    `fn.count(batch)` over the ranks where fn offers it, a number that the host knows before the forward, else
    what the labels weigh. The other sums are columns of metrics. Every rank calls the model equally often.
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
            what = ", ".join(
                f"{tuple(v.shape)}" if isinstance(v, Tensor) else type(v).__name__ for v in values
            )
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
        """`objective.<name>` of the sums behind the first, over all ranks."""
        return {f"objective.{name}": value for name, value in zip(self.names[1:], others)}


def find_objective(config: TrainConfig) -> Objective | None:
    """The objective of a job; None for the sum of token losses."""
    return None if config.objective is None else Objective(config)
