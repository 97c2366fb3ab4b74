"""All evaluations of a run: held-out sequences, questions with choices, questions that the model answers.

Each takes the same sequences or questions in the same batches on any number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy
from torch import Tensor

from forge_core.loss import LOSSES
from forge_data import Batch, InvalidData, Stream, batch_of
from forge_data.choices import accuracies, batch_of_choices, read_questions
from forge_data.token_bytes import byte_lengths, label_bytes
from forge_parallel import reshard
from forge_parallel.compute import Compute, evaluate, evaluate_sequences, reader_batches
from forge_resilience import Agreement
from forge_train._shared.problems import invalid
from forge_train.build.data import run_tokenizer
from forge_train.config.evaluation import KINDS, VALIDATION, ChoicesConfig
from forge_train.config.init import ends_of_weights
from forge_train.config.model import VLMModelConfig
from forge_train.config.schema import JobConfig
from forge_train.errors import (
    ConfigError,
    DataError,
    config_errors,
    data_errors,
    problems_at,
    refuse,
    run_on_all_ranks,
)
from forge_vlm.answers import answer, is_match, question_problems
from forge_vlm.data import InvalidSample, Prompt, Prompts

#: Name and column of the questions that the model answers.
COLUMN = "eval/exact_match"
_EXACT_MATCH = "eval.exact_match"

#: The weight of this rank's labels of a batch; 0.0 if another rank counts them.
Count = Callable[[Batch], float]


class Evaluation:
    """The held-out sequences and questions of a job. DataError, or ConfigError, for files that do not fit it.

        evaluation = Evaluation(config, streams)
        if evaluation.due(step, last):
            found = evaluation(compute, count, agreement, step, last)

    `streams` are the sequences of each set by the key of its table; the set of [data.validation] is called "validation".
    """

    def __init__(self, config: JobConfig, streams: Mapping[str, Stream]) -> None:
        own = config.eval
        self.streams = {key.rpartition(".")[2]: stream for key, stream in streams.items()}
        in_nats = config.train.objective is None and config.train.loss in LOSSES.built_in
        lengths = _token_bytes(config) if in_nats else None

        self.parts: dict[str, HeldOut | Choices | ExactMatch] = {}
        self._every: dict[str, int] = {}
        for name, stream in self.streams.items():
            table = own.sets.get(name)  # none of [data.validation]
            sequences = (table.sequences if table else None) or own.sequences
            self.parts[name] = HeldOut(name, stream, sequences, in_nats, lengths)
            self._every[name] = own.interval(table.every_steps if table else None)

        for name, choices in own.choices.items():
            self.parts[name] = Choices(name, choices, config)
            self._every[name] = own.interval(choices.every_steps)
        if own.exact_match.path is not None:
            self.parts[COLUMN] = ExactMatch(config)
            self._every[COLUMN] = own.every_steps

    @property
    def names(self) -> list[str]:
        """Sets and questions in the order in which they are evaluated."""
        return list(self.parts)

    @property
    def columns(self) -> list[str]:
        """Columns of metrics, next to val_loss."""
        return [c for part in self.parts.values() for c in part.columns.values() if c != "val_loss"]

    def losses(self, found: Mapping[str, float]) -> dict[str, float]:
        """The losses among columns, by the names of their sets."""
        columns = {name: self.parts[name].columns["loss"] for name in self.streams}
        return {name: found[column] for name, column in columns.items() if column in found}

    def due(self, step: int, last: bool) -> bool:
        """Whether a part is evaluated at a step; all are at the last one, and at step 0."""
        return any(self._is_due(name, step, last) for name in self.parts)

    def _is_due(self, name: str, step: int, last: bool) -> bool:
        every = self._every[name]
        return last or step == 0 or (every > 0 and step % every == 0)

    def __call__(
        self, compute: Compute, count: Count, agreement: Agreement, step: int, last: bool
    ) -> dict[str, float]:
        """Columns of the parts that are due, the same bits on every rank. Collective."""
        found: dict[str, float] = {}
        for name, part in self.parts.items():
            if self._is_due(name, step, last):
                measures = self.measure(name, compute, count, agreement)
                found |= {part.columns[m]: v for m, v in measures.items() if m in part.columns}
        return found

    def measure(
        self, name: str, compute: Compute, count: Count, agreement: Agreement
    ) -> dict[str, float]:
        """What is measured of a set or of questions, by name. Collective.

        loss in nats per label, perplexity (e to that) and bits_per_byte of the labels' text, as far as there are any;
        accuracy and accuracy_per_byte of choices; eval/exact_match of questions with images.
        """
        return self.parts[name].measure(compute, count, agreement)


class HeldOut:
    """The loss of the first sequences of a stream: each label once.

    `in_nats`: it is a cross-entropy. `lengths` (vocab_size,) are the bytes of each id, None without text.
    """

    def __init__(
        self,
        name: str,
        stream: Stream,
        sequences: int,
        in_nats: bool,
        lengths: numpy.ndarray | None,
    ) -> None:
        self._name, self._stream, self._in_nats, self._lengths = name, stream, in_nats, lengths
        self._rows = min(sequences, len(stream))
        self._labels_per_byte: float | None = None
        measures = ["loss", *(["perplexity"] if in_nats and name != VALIDATION else [])]
        measures += ["bits_per_byte"] if lengths is not None else []
        prefix = "val_" if name == VALIDATION else f"eval/{name}/"
        self.columns = {measure: prefix + measure for measure in measures}

    def measure(self, compute: Compute, count: Count, agreement: Agreement) -> dict[str, float]:
        """loss, perplexity and bits_per_byte. Collective. If one rank cannot read its own, all raise DataError."""
        batches = run_on_all_ranks(agreement, lambda: self._read(compute))
        loss = evaluate(compute, batches, count, agreement.exchange)
        found = {"loss": loss}
        if self._in_nats:
            try:
                found["perplexity"] = math.exp(loss)
            except OverflowError:  # beyond the range of a float
                found["perplexity"] = math.inf

        if self._lengths is not None:
            if self._labels_per_byte is None:  # the sequences are the same each time
                counted = batches if compute.meshes.is_batch_leader else []
                bytes_of = partial(label_bytes, lengths=self._lengths)
                own = [sum(b.label_weight for b in counted), sum(map(bytes_of, counted))]
                labels, size = (sum(column) for column in zip(*agreement.exchange(own)))
                self._labels_per_byte = labels / size if size else 0.0
            if self._labels_per_byte:
                found["bits_per_byte"] = loss / math.log(2) * self._labels_per_byte
        return found

    def _read(self, compute: Compute) -> list[Batch]:
        batches = reader_batches(self._rows, compute.sequences_at_once, compute.meshes)
        try:
            return [self._batch(rows) for rows in batches]
        except (InvalidData, OSError, ValueError) as error:
            raise DataError(problems_at(error, f"{self._name} data")) from error

    def _batch(self, rows: range) -> Batch:
        batch = batch_of(self._stream, rows[: max(0, self._rows - rows.start)])
        missing = len(rows) - len(batch)
        return batch.with_filler(missing) if missing else batch


class Choices:
    """The questions of one file. DataError for a file that does not fit: all its lines are read before anything starts."""

    def __init__(self, name: str, config: ChoicesConfig, job: JobConfig) -> None:
        key, self._seq_len = f"eval.choices.{name}", job.data.seq_len
        self.columns = {m: f"eval/{name}/{m}" for m in ("accuracy", "accuracy_per_byte")}
        if job.train.objective is not None:
            rule = f"needs losses of sequences; train.objective {job.train.objective!r} has none"
            raise invalid(key, "objective", ..., rule, "train with a loss", kind=DataError)
        if isinstance(job.model, VLMModelConfig):
            rule, fix = "has text only, and model.name is 'vlm'", "use eval.exact_match"
            raise invalid(key, "images", ..., rule, fix, kind=DataError)

        assert config.path is not None
        tokenizer = run_tokenizer(job)
        with data_errors(key, InvalidData):
            self.questions = read_questions(config.path, tokenizer, self._seq_len, config.samples)

    def measure(self, compute: Compute, count: Count, agreement: Agreement) -> dict[str, float]:
        """accuracy, the fraction of right answers, and accuracy_per_byte. Collective."""
        found = accuracies(self.questions, self.losses(compute, agreement))
        return dict(zip(self.columns, found))

    def losses(self, compute: Compute, agreement: Agreement) -> list[list[float]]:
        """Nats of each choice of each question, the same on every rank. Collective.

        Every rank computes as many batches, filler included. Restores the mode of each module, leaves the weights sharded.
        Costs a forward of every choice, each as long as a sequence of training, and one exchange.
        """
        rows = [choice for question in self.questions for choice in question.choices]

        def batch(numbers: range) -> Batch:
            chosen = rows[numbers.start : numbers.stop]
            return batch_of_choices(chosen, len(numbers), self._seq_len)

        losses = iter(evaluate_sequences(compute, len(rows), batch, agreement.exchange))
        return [[next(losses) for _ in question.choices] for question in self.questions]


class ExactMatch:
    """Questions with images that the model answers. ConfigError for prompts without an answer or that are too long."""

    def __init__(self, config: JobConfig) -> None:
        self.columns = {COLUMN: COLUMN}
        self._config = own = config.eval.exact_match
        self.prompts = prompts_of(config, own.source)
        assert own.path is not None
        with data_errors(_EXACT_MATCH, InvalidSample, OSError):
            self._asked = self.prompts.read(own.path, own.format, own.samples)
        room = getattr(config.model, "max_seq_len", None)
        problems = question_problems(self._asked, own.path, own.max_new_tokens, room)
        refuse(problem.under(_EXACT_MATCH) for problem in problems)

    def measure(self, compute: Compute, count: Count, agreement: Agreement) -> dict[str, float]:
        """The fraction of right answers, the same on every rank. Collective; one reader answers each question.

        Draws no random numbers, restores the model's mode and leaves its weights sharded.
        """
        own, meshes, model = self._config, compute.meshes, compute.model
        starts = [batch.start for batch in reader_batches(len(self._asked), own.rows, meshes)]
        # ranks with fewer batches repeat the last one, so that collectives match
        last = (len(self._asked) - 1) // own.rows * own.rows
        batches = [self._asked[i : i + own.rows] for i in (min(i, last) for i in starts)]
        media = run_on_all_ranks(agreement, lambda: self._media(batches))
        right, stops = 0, meshes.world_size == 1
        for start, asked, given in zip(starts, batches, media):
            found = answer(model, self.prompts, asked, given, own.max_new_tokens, stops=stops)
            if start <= last and meshes.is_batch_leader:
                how = own.normalise  # language: key of TOML files
                right += sum(is_match(text, p.answer or "", how) for p, text in zip(asked, found))
        reshard(model)
        return {COLUMN: float(sum(agreement.exchange(right))) / len(self._asked)}

    def _media(self, batches: list[list[Prompt]]) -> list[dict[str, Tensor]]:
        with data_errors(_EXACT_MATCH, InvalidSample, OSError):
            return [self.prompts.media(batch) for batch in batches]


def prompts_of(config: JobConfig, name: str | None = None) -> Prompts:
    """Prompts as a source of conversations of the job writes them, by default the first: also one that is prepared or
    streaming. ConfigError for sources of other kinds."""
    sources = {n: s for n, s in config.data.sources.items() if s.name in KINDS}
    if not sources:
        rule = "must have a source of name 'vlm', whose template and resolution write questions with images"
        raise invalid("data.sources", "missing", ..., rule, "train with one", kind=ConfigError)
    source = sources[name] if name is not None else next(iter(sources.values()))
    with config_errors():
        prompts = Prompts.of_source(source.path or "", **source.options)
    more = ends_of_weights(prompts.tokens.spec, config.init, Path(config.run.dir))
    prompts.end_ids = tuple(dict.fromkeys((*prompts.end_ids, *more)))
    return prompts


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
    return numpy.pad(found, (0, max(0, config.model.vocab_size - len(found))))
