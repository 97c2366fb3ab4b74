"""How a batch goes through the model in its layout: micro-batches, pieces of sequences, stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from forge_data import Batch
from forge_parallel import Meshes, accumulate
from forge_parallel.axes import (
    arguments_with_positions,
    cut_sequence,
    vocab_cross_entropy,
    width_of_cut_logits,
)
from forge_parallel.config import Layout
from forge_parallel.micro_batches import MicroBatches
from forge_parallel.pipeline import (
    Pipeline,
    stages_of,
    stream_dim,
    sync_tied_gradients,
    tied_copies,
)
from forge_train.config.schema import JobConfig
from forge_train.trainer.host_copy import HostCopy
from forge_train.trainer.objective import FUSED, find_loss, find_objective

#: An extra that is no data: what a model calls on its stream (B, S, D) where context ranks cut it.
AFTER_EMBEDDING = "after_embedding"

Targets = tuple[Tensor, Tensor | None]  # labels and weights


class Given(NamedTuple):
    """A micro-batch as this rank's model gets it."""

    tokens: Tensor
    targets: Targets
    keywords: dict[str, Tensor]
    extras: dict[str, Any]


class Compute:
    """Forward and backward of the rows that this rank reads, whatever the layout.

    What it returns adds up over all ranks of the job: ranks that hold the same numbers (tp), or none of
    them (stages without the head), give zero. Raises ValueError for a loss or an objective of one's own where
    each rank holds a part of the vocabulary.
    """

    def __init__(
        self, model: nn.Module, config: JobConfig, meshes: Meshes, division: MicroBatches
    ) -> None:
        self.model, self.meshes = model, meshes
        self.micro_batch = division.size
        self._cut_width = width_of_cut_logits(model)
        self._loss, self.objective = find_loss(config.train), find_objective(config.train)
        self._fused = config.train.loss == FUSED and self.objective is None
        self._refuse_cut_logits(config)
        stages = [model] if meshes.pp.size == 1 else stages_of(model)
        self._host_inputs = tuple(getattr(model, "host_inputs", ()))
        # a stage may take less than the whole model
        self._extra_inputs = list(
            dict.fromkeys(n for s in stages for n in getattr(s, "extra_inputs", ()))
        )
        self._whole_tokens = AFTER_EMBEDDING in self._extra_inputs
        self._pipeline: Any = None
        if meshes.pp.size > 1:
            self._pipeline = Pipeline(
                model,
                config.parallel,
                meshes,
                num_micro_batches=division.count,
                micro_batch=self.micro_batch,
                seq_len=config.data.seq_len,
                dim=stream_dim(model),
                whole_tokens=self._whole_tokens,
            )
        twice = tied_copies(model, meshes) if self._pipeline else set()
        self.parameters = list(model.parameters())
        self.counted = [p for p in self.parameters if p not in twice]  # once each, for the norm

    @property
    def rows_at_once(self) -> int:
        """Rows of one evaluation call; a pipeline takes all micro-batches of a step together."""
        if self._pipeline is None:
            return self.micro_batch
        return self.micro_batch * int(self._pipeline.num_micro_batches)

    def count(self, batch: Batch) -> float:
        """What this rank adds to the normaliser: of the ranks that read the same rows one does."""
        if not self.meshes.speaks:
            return 0.0
        return batch.label_weight if self.objective is None else self.objective.count(batch)

    def gradients(self, batch: Batch, normaliser: Callable[[], float]) -> Tensor:
        """Add the gradients of the sum of weighted token losses over `normaliser()`; returns this rank's
        share of that, (1,) fp32, and behind it those of the objective's other sums.

        `normaliser` is asked after the first forward, before the first loss (in a pipeline: before both).
        """
        if self._pipeline is not None:
            return self._through_stages(batch, normaliser())
        total = torch.zeros((), device=self.meshes.device)
        parts = batch.split(self.micro_batch)
        for part in parts:
            accumulate(self.model, last=part is parts[-1])
            sums = self._sums(part)
            loss = sums[0] / normaliser()
            others = [value.detach() / normaliser() for value in sums[1:]]
            del sums
            loss.backward()
            total = total + torch.stack([loss.detach(), *others])
        return self._mine(total)

    def _sums(self, part: Batch) -> list[Tensor]:
        """0-dim sums over a micro-batch, the one that is trained first."""
        if self.objective is not None:
            return self.objective(self.model, self._cut(part))
        given = self._here(part)
        return [self._token_loss(self._forward(given), given.targets)]

    def columns(self, others: Sequence[Tensor]) -> Callable[[], dict[str, float]]:
        """`objective.<name>`: what `gradients` gave behind the loss, summed over ranks, to be read when the
        device is done."""
        if self.objective is None or not others:
            return dict
        names = [f"objective.{name}" for name in self.objective.names[1:]]
        values = HostCopy(others)
        return lambda: dict(zip(names, values.read(), strict=True))

    @torch.no_grad()
    def losses(self, batch: Batch) -> tuple[Tensor, float]:
        """(sum of weighted token losses fp32, what the labels weigh) of `rows_at_once` rows, without
        gradients; of the ranks that read the same rows one weighs them."""
        weight = self.count(batch)
        if self._pipeline is None:
            total = self._sums(batch)[0]
        else:
            given = self._here(batch)
            total = self._pipeline.evaluate(
                given.tokens,
                given.targets,
                self._token_loss,
                given.extras,
                self._then,
                **given.keywords,
            )
        return self._mine(total), weight

    def _through_stages(self, batch: Batch, normaliser: float) -> Tensor:
        given = self._here(batch)
        total = self._pipeline.step(
            given.tokens,
            given.targets,
            lambda logits, targets: self._token_loss(logits, targets) / normaliser,
            given.extras,
            self._then,
            **given.keywords,
        )
        sync_tied_gradients(self.model, self.meshes)
        return self._mine(total.reshape(1))

    def _forward(self, given: Given) -> Any:
        more = {"then": partial(self._then, labels=given.targets)} if self._then else {}
        return self.model(given.tokens, **given.keywords, **given.extras, **more)

    @property
    def _then(self) -> Callable[..., Tensor] | None:
        """What the model's head is to compute in place of logits."""
        return self._inside_head if self._fused else None

    def _inside_head(self, x: Tensor, weight: Tensor, labels: Targets) -> Tensor:
        return self._loss(x, weight, *labels)

    def _token_loss(self, output: Any, targets: Targets) -> Tensor:
        """Weighted sum over the labels; under tp each rank may hold a part of the vocabulary."""
        if self._fused:
            return output
        labels, weights = targets
        logits: Tensor = getattr(output, "logits", output)  # a Hugging Face model's
        if logits.size(-1) == self._cut_width:
            return vocab_cross_entropy(logits, labels, self.meshes.tp, weights=weights)[0]
        if self.meshes.tp.size > 1 and logits.shape[:2] != labels.shape:
            raise ValueError(
                f"logits {tuple(logits.shape)} must be of the tokens {tuple(labels.shape)}, and a head that "
                "each tp rank has whole gives those of its part of the rows; use parallel.sequence_parallel = "
                "false, or give the head the role sharded_logits"
            )
        return self._loss(logits, labels, weights)

    def _refuse_cut_logits(self, config: JobConfig) -> None:
        train = config.train
        own = train.objective or (train.loss if train.loss != "cross_entropy" else None)
        if own is not None and self._cut_width is not None:
            key = "loss" if train.objective is None else "objective"
            raise ValueError(
                f"train.{key} {own!r} must have whole logits, and with parallel.tp {config.parallel.tp} each rank "
                "has those of a part of the vocabulary; use tp = 1"
            )

    def _cut(self, batch: Batch) -> Batch:
        """This rank's piece of each sequence as a batch on its device, for an objective."""
        here = batch.to(self.meshes.device, stay=self._host_inputs)
        if self.meshes.cp.size == 1:
            return here
        names = ("tokens", "labels", "positions", "document_ids", "weights")
        whole = {n: getattr(here, n) for n in names if getattr(here, n) is not None}
        pieces: dict[str, Any] = {
            n: cut_sequence(x, self.meshes.cp, dim=-1) for n, x in whole.items()
        }
        return replace(here, **pieces, label_weight=here.label_weight)

    def _here(self, batch: Batch) -> Given:
        """This rank's piece of each sequence, on its device. Labels are shifted already.

        What the model reads on the host stays there; document ids stay whole, so that ranks of cp need not
        tell one another what each of them has read. Extras stay whole, too, and with them the tokens that
        a model joins to them before it cuts the stream.
        """
        host = [n for n in self._host_inputs if n not in self._extra_inputs]
        extras = {n: batch.extras[n] for n in self._extra_inputs if n != AFTER_EMBEDDING}
        batch = replace(batch, extras=extras, label_weight=batch.label_weight)
        here = batch.to(self.meshes.device, stay=self._host_inputs)
        named = {"positions": here.positions, "document_ids": here.document_ids}
        cut = partial(cut_sequence, axis=self.meshes.cp)  # x itself without cp
        whole = {"document_ids"} & {*host} & {*arguments_with_positions(self.model)}
        keywords = {n: x if n in whole else cut(x, dim=-1) for n, x in named.items()}
        given_extras: dict[str, Any] = dict(here.extras)
        tokens = here.tokens
        if AFTER_EMBEDDING in self._extra_inputs:
            given_extras[AFTER_EMBEDDING] = cut
        if not self._whole_tokens:
            tokens = cut(tokens, dim=-1)
        weights = None if here.weights is None else cut(here.weights, dim=-1)
        return Given(tokens, (cut(here.labels, dim=-1), weights), keywords, given_extras)

    def _mine(self, value: Tensor) -> Tensor:
        """What several ranks of a tp group hold alike counts on the first."""
        return value if self.meshes.tp.rank == 0 else torch.zeros_like(value)


def extra_problems(
    model: nn.Module, batch: Batch, layout: Layout, data: str = "[data]"
) -> list[str]:
    """What keeps a model from getting the extras that it declares (`extra_inputs`) from batches of `data`."""
    wanted = [n for n in getattr(model, "extra_inputs", ()) if n != AFTER_EMBEDDING]
    missing = [name for name in wanted if name not in batch.extras]
    if missing:
        has = ", ".join(batch.extras) or "none"
        return [
            f"model.name: the model takes the extras {', '.join(missing)}, and batches of {data} have {has}; "
            "use a source that gives them"
        ]
    if wanted and layout.cp > 1 and AFTER_EMBEDDING not in model.extra_inputs:  # type: ignore[operator]
        return [
            f"parallel.cp {layout.cp} cuts rows before a model that takes the extras {', '.join(wanted)} has "
            f"joined them to its stream; let it name {AFTER_EMBEDDING!r} among its extra_inputs and call that on "
            "the stream (B, S, D), or use cp = 1"
        ]
    return []
