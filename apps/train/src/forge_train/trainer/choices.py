"""Questions with several answers: the one that a model finds likeliest, the same on any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from forge_data import Batch, Tokenizer, filler_batch
from forge_data.tokenizer import encode_prompt
from forge_parallel import reshard
from forge_parallel.compute import Compute
from forge_resilience import Agreement
from forge_train._shared.jsonl import parse
from forge_train._shared.modes import evaluation_mode
from forge_train._shared.paths import open_regular, user_path
from forge_train._shared.problems import Problem, invalid, problems_of, raise_problems
from forge_train.config.evaluation import ChoicesConfig
from forge_train.config.schema import JobConfig
from forge_train.config.vlm import VLMModelConfig
from forge_train.errors import DataError
from forge_train.trainer.build import run_tokenizer

__all__ = ["Choices", "split_ids"]


@dataclass(frozen=True)
class Question:
    """The rows of a question: (prompt and choice, ids of the prompt) each, and the number of the right one."""

    rows: tuple[tuple[Sequence[int], int], ...]
    sizes: tuple[int, ...]  # bytes of each choice
    answer: int


class Choices:
    """The questions of one file.

        asked = Choices("arc", config.eval.choices["arc"], config)
        accuracy, by_bytes = asked(compute, agreement)      # on every rank, between steps

    A choice has the sum of the log-probabilities of its tokens behind the prompt, `split_ids` of them. `accuracy` takes
    the likeliest choice, the first of equal ones; `by_bytes` the likeliest per byte of its text.
    DataError for a file that does not fit: all its lines are read before anything starts.
    """

    def __init__(self, name: str, config: ChoicesConfig, job: JobConfig) -> None:
        self._key, self._seq_len = f"eval.choices.{name}", job.data.seq_len
        if problems := list(_unfit_job(job, self._key)):
            raise DataError(problems)
        assert config.path is not None
        self.questions = self._read(user_path(config.path), config.samples, run_tokenizer(job))

    def _read(self, path: Path, samples: int, tokenizer: Tokenizer) -> list[Question]:
        key = f"{self._key}.path"
        problems: list[Problem] = []
        found: list[Question] = []
        try:
            with open(open_regular(path)[0], encoding="utf-8") as file:
                lines = [line for line in file if line.strip()][:samples]
        except (OSError, ValueError) as error:
            rule, fix = f"cannot be read: {error}", "name a file of JSON lines"
            raise invalid(key, "read", str(path), rule, fix, kind=DataError) from error
        for number, line in enumerate(lines, 1):
            try:
                found.append(_question(line, tokenizer, self._seq_len))
            except ValueError as error:
                origin = f"{path}, question {number}"
                own = [replace(p.under(self._key), origin=origin) for p in problems_of(error)]
                problems += own
        if not lines:
            rule, fix = "has no questions", "name another file"
            problems.append(Problem(key, "empty", str(path), rule, fix))
        if problems:
            raise DataError(problems)
        return found

    def __call__(self, compute: Compute, agreement: Agreement) -> tuple[float, float]:
        """The shares of right answers, by the whole and per byte, the same on every rank. Collective."""
        plain = by_bytes = 0
        for question, own in zip(self.questions, self.losses(compute, agreement)):
            plain += _least(own) == question.answer
            per_byte = [loss / size for loss, size in zip(own, question.sizes)]
            by_bytes += _least(per_byte) == question.answer
        return plain / len(self.questions), by_bytes / len(self.questions)

    def losses(self, compute: Compute, agreement: Agreement) -> list[list[float]]:
        """Nats of each choice of each question, the same on every rank. Collective.

        Every rank computes as many batches, filler included. Restores the mode of each module, leaves the weights sharded.
        Costs a forward of every choice, each as long as a row of training, and one exchange.
        """
        rows = [row for question in self.questions for row in question.rows]
        meshes, size = compute.meshes, compute.rows_at_once
        each = -(-len(rows) // (size * meshes.batch_size))  # batches of a reader
        first = each * meshes.batch_rank * size
        model = compute.model
        with evaluation_mode(model):
            own = [
                compute.row_losses(self._batch(rows[i : i + size], size))
                for i in range(first, first + each * size, size)
            ]
        reshard(model)
        part: list[float] = torch.cat(own).double().tolist()
        losses = [0.0] * (each * size * meshes.batch_size)
        for start, values in agreement.exchange([first, part]):
            for i, value in enumerate(values, start):  # of ranks that share a row, each has a part
                losses[i] += value
        values = iter(losses)
        return [[next(values) for _ in question.rows] for question in self.questions]

    def _batch(self, rows: Sequence[tuple[Sequence[int], int]], size: int) -> Batch:
        filler = filler_batch(size, self._seq_len)
        tokens, labels = filler.tokens.clone(), filler.labels.clone()
        documents, positions = filler.document_ids.clone(), filler.positions.clone()
        for i, (ids, begin) in enumerate(rows):
            n = len(ids) - 1
            tokens[i, :n] = torch.tensor(ids[:-1])
            labels[i, begin - 1 : n] = torch.tensor(ids[begin:])
            documents[i, :n] = 0
            positions[i, :n] = torch.arange(n)
        return replace(
            filler,
            tokens=tokens,
            labels=labels,
            document_ids=documents,
            positions=positions,
            label_weight=-1.0,
        )


def split_ids(tokenizer: Tokenizer, prompt: str, text: str) -> tuple[list[int], int]:
    """(ids of prompt and text together, number of those before the text, with those that begin a text).

    White space at the end of a prompt goes to the text, as tokenizers join a space to the word behind it.
    """
    bare = prompt.rstrip()
    space = prompt[len(bare) :]
    ids = encode_prompt(tokenizer, bare + space + text)
    return ids, len(encode_prompt(tokenizer, bare))


def _question(line: str, tokenizer: Tokenizer, seq_len: int) -> Question:
    table = parse(line, "")
    raise_problems("", _unfit_record(table))
    rows = tuple(split_ids(tokenizer, table["prompt"], choice) for choice in table["choices"])
    for choice, (ids, begin) in zip(table["choices"], rows):
        if len(ids) <= begin:
            raise invalid(
                "choices", "empty", choice, "adds no token to the prompt", "give one that does"
            )
        if len(ids) - 1 > seq_len:
            rule = f"is the number of tokens of prompt and choice, and data.seq_len {seq_len} takes {seq_len + 1}"
            raise invalid("prompt", "length", len(ids), rule, "shorten it")
    return Question(rows, tuple(len(c.encode()) for c in table["choices"]), table["answer"])


def _unfit_record(table: Any) -> Iterator[Problem]:
    if not isinstance(table, dict) or not {"prompt", "choices", "answer"} <= table.keys():
        yield Problem("", "type", table, "must be an object with prompt, choices and answer")
        return
    prompt, choices, answer = table["prompt"], table["choices"], table["answer"]
    if not isinstance(prompt, str) or not prompt.strip():
        fix = "write the text before the choices"
        yield Problem("prompt", "type", prompt, "must be a text with a token", fix)
    if not isinstance(choices, list) or len(choices) < 2 or not all(_is_text(c) for c in choices):
        yield Problem("choices", "type", choices, "must be two texts or more", "give all of them")
    elif type(answer) is not int or not 0 <= answer < len(choices):
        rule = f"must be the number of a choice, from 0 to {len(choices) - 1}"
        yield Problem("answer", "range", answer, rule)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _unfit_job(job: JobConfig, key: str) -> Iterator[Problem]:
    if job.train.objective is not None:
        rule = f"needs losses of sequences, which train.objective {job.train.objective!r} has not"
        yield Problem(key, "objective", ..., rule, "train with a loss")
    elif isinstance(job.model, VLMModelConfig):
        fix = "use eval.exact_match"
        yield Problem(key, "images", ..., "has text only, and model.name is 'vlm'", fix)


def _least(losses: Sequence[float]) -> int:
    """The first of the lowest losses; one that is not a number is never the lowest."""
    finite = [math.inf if math.isnan(loss) else loss for loss in losses]
    return finite.index(min(finite))
