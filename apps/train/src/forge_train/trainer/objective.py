"""The training objective by name: a sum of token losses, or a function of model and batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from forge_core import TokenLoss, cross_entropy, fused_cross_entropy
from forge_core.registry import Registry
from forge_data import Batch
from forge_data.batch import IGNORE
from forge_parallel.axes import VocabLoss
from forge_train.config.schema import JobConfig, TrainConfig
from forge_train.errors import ConfigError

Loss = Callable[..., Tensor]


def token_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    weights: Tensor | None,
    sources: Tensor | None = None,
    num_sources: int = 0,
    **terms: Any,
) -> Tensor:
    """Sum of the weighted cross-entropies of (B, S) labels, 0-dim fp32; with terms or sources as `all_sums`."""
    found = cross_entropy(logits, labels, weights=weights, **terms)
    return all_sums(found, labels, weights, terms, sources, num_sources)


def inside_head(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    weights: Tensor | None,
    sources: Tensor | None = None,
    num_sources: int = 0,
    **terms: Any,
) -> Tensor:
    """The same of the stream (B, S, D) and the head's weight (V, D), without all logits."""
    found = fused_cross_entropy(x, weight, labels, weights=weights, **terms)
    return all_sums(found, labels, weights, terms, sources, num_sources)


def all_sums(
    loss: TokenLoss | VocabLoss,
    labels: Tensor,
    weights: Tensor | None,
    terms: Mapping[str, float],
    sources: Tensor | None,
    num_sources: int,
) -> Tensor:
    """The sum of a loss, 0-dim; with terms or sources (k,): the plain cross-entropy, whose gradient is that of the
    whole sum, then as numbers the terms that are switched on, in the order of `term_names`, the cross-entropy of the
    labels of each source, and what these weigh."""
    names = term_names(terms)
    if not names and sources is None:
        return loss.sum
    trained, plain = loss.sum.detach(), loss.cross_entropy
    shown = {"z_loss": loss.z_loss, "label_smoothing": trained - loss.z_loss - plain}
    sums = [plain + (loss.sum - trained), *(shown[name] for name in names)]
    if sources is not None:
        valid = labels != IGNORE
        weighing = valid.to(plain.dtype) if weights is None else weights.where(valid, 0.0)
        of_source = [sources == number for number in range(num_sources)]
        for values in (loss.token_losses, weighing.to(plain.dtype)):
            # a sum for each: adding by index has no order on a GPU
            sums += [values.where(chosen, 0.0).sum() for chosen in of_source]
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
    which are the columns of `loss_columns`, and takes `sources` where there are `shown_sources`.

    ValueError for an unknown name, and for options that the loss does not take.
    """
    train = config.train
    found = LOSSES.checked(train.loss, train.loss_options)
    options = train.loss_options or own_keywords(config)
    return partial(found, **options) if options else found


def own_keywords(config: JobConfig) -> dict[str, Any]:
    """Keywords of the built-in loss of a job; none for another."""
    shown = len(shown_sources(config))
    return loss_terms(config.train) | ({"num_sources": shown} if shown else {})


def shown_sources(config: JobConfig) -> tuple[str, ...]:
    """The sources whose losses are columns: those of a mixture, by number, where the loss is built in."""
    names = tuple(config.data.sources)
    built_in = config.train.objective is None and config.train.loss in LOSSES.built_in
    return names if built_in and len(names) > 1 else ()


def loss_terms(config: TrainConfig) -> dict[str, float]:
    """Keywords of the built-in loss of a job; none for another."""
    return asdict(getattr(config, config.loss)) if config.loss in LOSSES.built_in else {}


def loss_columns(config: JobConfig) -> Callable[[Sequence[float]], dict[str, float]]:
    """From the sums behind the first, over all ranks, to columns: `loss.<term>`, which the gradient contains and
    the column `loss` does not; `loss.source.<name>`, the mean of the labels of a source, nan for a step without any;
    and `loss.mtp`, the mean of tokens further ahead, without its weight."""
    mtp = getattr(config.model, "mtp", None)
    ahead = ("mtp",) if mtp is not None and mtp.num_modules else ()
    terms, sources = term_names(loss_terms(config.train)), shown_sources(config)

    def columns(others: Sequence[float]) -> dict[str, float]:
        values = iter(others)
        found = dict(zip(terms, values))
        losses = [next(values) for _ in sources]
        weigh = [next(values) for _ in sources]
        means = [loss / weight if weight else math.nan for loss, weight in zip(losses, weigh)]
        found |= {f"source.{name}": mean for name, mean in zip(sources, means)}
        found |= zip(ahead, values)
        return {f"loss.{name}": value for name, value in found.items()}

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
            raise ConfigError(
                [f"train.objective {self._name!r} gave {type(sums).__name__} ({what}) and must give a dict of "
                 "0-dim tensors, what is trained first; sum over rows and tokens"]
            )  # fmt: skip
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
