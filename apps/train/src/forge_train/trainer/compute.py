"""How a batch goes through the model in its layout: micro-batches, pieces of sequences, stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from forge_core import cross_entropy
from forge_data import Batch
from forge_data.batch import IGNORE
from forge_parallel import Meshes, accumulate
from forge_parallel.axes.context import arguments_with_positions, cut_sequence
from forge_parallel.axes.tensor import width_of_cut_logits
from forge_parallel.axes.vocab import vocab_cross_entropy
from forge_parallel.micro_batches import MicroBatches
from forge_parallel.pipeline import Pipeline, sync_tied_gradients, tied_copies
from forge_train.config.schema import DenseModelConfig, JobConfig


class Compute:
    """Forward and backward of the rows that this rank reads, whatever the layout.

    What it returns adds up over all ranks of the job: ranks that hold the same numbers (tp), or none of
    them (stages without the head), give zero.
    """

    def __init__(
        self, model: nn.Module, config: JobConfig, meshes: Meshes, division: MicroBatches
    ) -> None:
        self.model, self.meshes = model, meshes
        self.micro_batch = division.size
        self._cut_width = width_of_cut_logits(model)
        self._pipeline: Any = None
        if meshes.pp.size > 1 and isinstance(config.model, DenseModelConfig):
            self._pipeline = Pipeline(
                model,
                config.parallel,
                meshes,
                num_micro_batches=division.count,
                micro_batch=self.micro_batch,
                seq_len=config.data.seq_len,
                dim=config.model.dim,
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

    def gradients(self, batch: Batch, valid: Callable[[], int]) -> Tensor:
        """Add the gradients of the mean token loss over `valid()` labels; returns this rank's share of it.

        `valid` is asked after the first forward, before the first loss (in a pipeline: before both).
        """
        if self._pipeline is not None:
            return self._through_stages(batch, valid())
        total = torch.zeros((), device=self.meshes.device)
        parts = batch.split(self.micro_batch)
        for part in parts:
            accumulate(self.model, last=part is parts[-1])
            part = self._here(part)
            output = self._forward(part)
            loss = self._token_loss(output, part.labels) / valid()
            del output  # or it would stand beside the next one's forward
            loss.backward()
            total += loss.detach()
        return self._mine(total)

    @torch.no_grad()
    def losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(sum of token losses fp32, labels int64) of `rows_at_once` rows, without gradients."""
        part = self._here(batch)
        count = (part.labels != IGNORE).sum() * int(self.meshes.pp.rank == 0)
        if self._pipeline is None:
            total = self._token_loss(self._forward(part), part.labels)
        else:
            total = self._pipeline.evaluate(
                part.tokens,
                part.labels,
                self._token_loss,
                positions=part.positions,
                document_ids=part.document_ids,
            )
        return self._mine(total), self._mine(count)

    def _through_stages(self, batch: Batch, valid: int) -> Tensor:
        part = self._here(batch)
        total = self._pipeline.step(
            part.tokens,
            part.labels,
            lambda logits, labels: self._token_loss(logits, labels) / valid,
            positions=part.positions,
            document_ids=part.document_ids,
        )
        sync_tied_gradients(self.model, self.meshes)
        return self._mine(total)

    def _forward(self, part: Batch) -> Any:
        return self.model(part.tokens, positions=part.positions, document_ids=part.document_ids)

    def _token_loss(self, output: Any, labels: Tensor) -> Tensor:
        """Sum over the labels; under tp each rank may hold a part of the vocabulary."""
        logits: Tensor = getattr(output, "logits", output)  # a Hugging Face model's
        if logits.size(-1) == self._cut_width:
            return vocab_cross_entropy(logits, labels, self.meshes.tp)[0]
        if self.meshes.tp.size > 1 and logits.shape[:2] != labels.shape:
            raise ValueError(
                f"logits {tuple(logits.shape)} must be of the tokens {tuple(labels.shape)}, and a head that "
                "each tp rank has whole gives those of its part of the rows; use parallel.sequence_parallel = "
                "false, or give the head the role sharded_logits"
            )
        return cross_entropy(logits, labels).sum

    def _here(self, batch: Batch) -> Batch:
        """This rank's piece of each sequence, on its device. Labels are shifted already.

        What the model reads on the host stays there; document ids stay whole, so that ranks of cp need not
        tell one another what each of them has read.
        """
        stay = [n for n in getattr(self.model, "host_inputs", ()) if hasattr(batch, n)]
        if self.meshes.cp.size > 1:
            whole = {"document_ids"} & {*stay} & {*arguments_with_positions(self.model)}
            names = {"tokens", "labels", "positions", "document_ids"} - whole
            pieces: dict[str, Any] = {
                n: cut_sequence(getattr(batch, n), self.meshes.cp) for n in names
            }
            batch = replace(batch, **pieces, num_valid=-1)
        here = batch.to(self.meshes.device)
        return replace(here, **{n: getattr(batch, n) for n in stay})

    def _mine(self, value: Tensor) -> Tensor:
        """What several ranks of a tp group hold alike counts on the first."""
        return value if self.meshes.tp.rank == 0 else torch.zeros_like(value)
