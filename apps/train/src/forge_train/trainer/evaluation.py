"""All evaluations of a run: which are due at a step, and their columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy

from forge_data import Batch, Stream
from forge_data.batch import IGNORE
from forge_data.token_bytes import byte_lengths
from forge_parallel.compute import Compute, evaluate
from forge_resilience import Agreement
from forge_train.config.evaluation import VALIDATION
from forge_train.config.schema import JobConfig
from forge_train.config.vlm import VLMModelConfig
from forge_train.trainer.build import run_tokenizer
from forge_train.trainer.choices import Choices
from forge_train.trainer.exact_match import COLUMN, ExactMatch
from forge_train.trainer.objective import LOSSES
from forge_train.trainer.validation import share_of_rows

__all__ = ["Evaluation"]


class Evaluation:
    """The held-out rows and questions of a job. DataError, or ConfigError, for files that do not fit it.

        evaluation = Evaluation(config, streams)
        if evaluation.due(step, last):
            found = evaluation(compute, count, agreement, step, last)

    `streams` are the rows of each set by the key of its table; that of [data.validation] is called "validation".
    """

    def __init__(self, config: JobConfig, streams: Mapping[str, Stream]) -> None:
        own = config.eval
        self.streams = {key.rpartition(".")[2]: stream for key, stream in streams.items()}
        self.choices = {name: Choices(name, c, config) for name, c in own.choices.items()}
        self.exact_match = ExactMatch.of(config)
        self._intervals = {name: own.every_steps for name in (VALIDATION, COLUMN)}
        self._intervals |= {n: own.interval(s.every_steps) for n, s in own.sets.items()}
        self._intervals |= {n: own.interval(c.every_steps) for n, c in own.choices.items()}
        self._rows = {n: s.sequences or own.sequences for n, s in own.sets.items()}
        self._rows[VALIDATION] = own.sequences
        self._in_nats = config.train.objective is None and config.train.loss in LOSSES.built_in
        self._lengths = _token_bytes(config) if self._in_nats else None
        self._bytes: dict[str, float] = {}

    @property
    def asks(self) -> bool:
        """Whether there is anything to evaluate."""
        return bool(self.streams or self.choices or self.exact_match)

    @property
    def columns(self) -> list[str]:
        """Columns of metrics, beside val_loss."""
        sets = [name for name in self.streams if name != VALIDATION]
        measures = ["loss", *(["perplexity"] if self._in_nats else [])]
        measures += ["bits_per_byte"] if self._lengths is not None else []
        found = [f"eval/{name}/{m}" for name in sets for m in measures]
        found += [
            f"eval/{name}/{m}" for name in self.choices for m in ("accuracy", "accuracy_per_byte")
        ]
        if VALIDATION in self.streams and self._lengths is not None:
            found.append("val_bits_per_byte")
        return [*found, *([COLUMN] if self.exact_match is not None else [])]

    def losses(self, found: Mapping[str, float]) -> dict[str, float]:
        """The losses among columns, by the names of their sets."""
        columns = {n: "val_loss" if n == VALIDATION else f"eval/{n}/loss" for n in self.streams}
        return {name: found[column] for name, column in columns.items() if column in found}

    def due(self, step: int, last: bool) -> bool:
        """Whether a part is evaluated at a step; all are at the last one, and at step 0."""
        return self.asks and any(self._is_due(name, step, last) for name in self.names)

    @property
    def names(self) -> list[str]:
        """Sets and questions in the order in which they are evaluated."""
        return [*self.streams, *self.choices, *([COLUMN] if self.exact_match is not None else [])]

    def _is_due(self, name: str, step: int, last: bool) -> bool:
        every = self._intervals[name]
        return last or step == 0 or (every > 0 and step % every == 0)

    def __call__(
        self,
        compute: Compute,
        count: Callable[[Batch], float],
        agreement: Agreement,
        step: int,
        last: bool,
    ) -> dict[str, float]:
        """Columns of the parts that are due, the same bits on every rank. Collective."""
        found: dict[str, float] = {}
        for name in (n for n in self.names if self._is_due(n, step, last)):
            measures = self.measure(name, compute, count, agreement)
            if name == VALIDATION:  # e to its loss is no column of every run
                shown = ("loss", "bits_per_byte")
                measures = {f"val_{m}": measures[m] for m in shown if m in measures}
            elif name != COLUMN:
                measures = {f"eval/{name}/{measure}": v for measure, v in measures.items()}
            found |= measures
        return found

    def measure(
        self,
        name: str,
        compute: Compute,
        count: Callable[[Batch], float],
        agreement: Agreement,
    ) -> dict[str, float]:
        """What is measured of a set or of questions, by name. Collective.

        loss in nats per label, perplexity (e to that) and bits_per_byte of the labels' text, as far as there are any;
        accuracy and accuracy_per_byte of choices; eval/exact_match of questions with pictures.
        """
        if name in self.streams:
            return self._of_set(name, compute, count, agreement)
        if name in self.choices:
            plain, by_bytes = self.choices[name](compute, agreement)
            return {"accuracy": plain, "accuracy_per_byte": by_bytes}
        assert self.exact_match is not None
        return {COLUMN: self.exact_match(compute.model, compute.meshes, agreement)}

    def _of_set(
        self,
        name: str,
        compute: Compute,
        count: Callable[[Batch], float],
        agreement: Agreement,
    ) -> dict[str, float]:
        stream, rows = self.streams[name], self._rows[name]
        parts = share_of_rows(stream, rows, compute.rows_at_once, compute.meshes, agreement, name)
        found = {"loss": evaluate(compute, parts, count, agreement.exchange)}
        if self._in_nats:
            found["perplexity"] = _exp(found["loss"])
        if self._lengths is not None:
            labels = self._labels_per_byte(name, parts, compute, agreement)
            found |= {"bits_per_byte": found["loss"] / math.log(2) * labels} if labels else {}
        return found

    def _labels_per_byte(
        self, name: str, parts: list[Batch], compute: Compute, agreement: Agreement
    ) -> float:
        """Labels of a set by the bytes of their text, 0 without text. The rows are the same each time: they are counted once."""
        if name not in self._bytes:
            own = [0.0, 0.0]
            for part in parts if compute.meshes.is_batch_leader else []:
                own[0] += part.label_weight
                own[1] += self._bytes_of(part)
            labels, size = (sum(column) for column in zip(*agreement.exchange(own)))
            self._bytes[name] = labels / size if size else 0.0
        return self._bytes[name]

    def _bytes_of(self, part: Batch) -> float:
        assert self._lengths is not None
        valid = part.labels != IGNORE
        ids = part.labels[valid].numpy()
        weights = 1.0 if part.weights is None else part.weights[valid].double().numpy()
        return float(numpy.sum(self._lengths[ids] * weights))


def _token_bytes(config: JobConfig) -> numpy.ndarray | None:
    """Bytes of each id, (vocab_size,); None where ids are not those of a tokenizer that keeps text."""
    if isinstance(config.model, VLMModelConfig):
        return None
    try:
        found = byte_lengths(run_tokenizer(config))
    except ValueError:  # ids without a tokenizer
        return None
    if found is None:
        return None
    lengths = numpy.zeros(max(config.model.vocab_size, len(found)), numpy.int64)
    lengths[: len(found)] = found
    return lengths


def _exp(loss: float) -> float:
    """e to the loss; inf beyond what a float holds, never cut."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
