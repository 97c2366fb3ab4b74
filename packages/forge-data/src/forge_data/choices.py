"""Questions with several answers, of which a model's is the one with the lowest loss.

B   choices in a batch        S   tokens of a sequence
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from forge_data._shared.jsonl import parse
from forge_data._shared.paths import open_regular, user_path
from forge_data._shared.problems import Problem, invalid, problems_of, raise_problems
from forge_data.batch import Batch, filler_batch
from forge_data.errors import InvalidData, invalid_data
from forge_data.protocols import Tokenizer
from forge_data.tokenizer import encode_prompt

__all__ = ["Choice", "Question", "accuracies", "batch_of_choices", "read_questions", "split_ids"]

#: Ids of prompt and choice together, and the number of those of the prompt, which get no labels.
Choice = tuple[Sequence[int], int]


class Question(NamedTuple):
    """The choices of a question, the UTF-8 bytes of each, and the number of the right one."""

    choices: tuple[Choice, ...]
    sizes: tuple[int, ...]
    answer: int


def read_questions(
    path: str | Path, tokenizer: Tokenizer, seq_len: int, most: int | None = None
) -> list[Question]:
    """The first `most` questions of a file of JSON lines, `{"prompt": ..., "choices": [...], "answer": 0}` each.

    Raises InvalidData with the problems of all lines: key, and as origin the number of the question.
    """
    where = str(user_path(path))
    try:
        with open(open_regular(where)[0], encoding="utf-8") as file:
            lines = [line for line in file if line.strip()][:most]
    except (OSError, ValueError) as error:
        rule, fix = f"cannot be read: {error}", "name a file of JSON lines"
        raise invalid_data("path", "read", where, rule, fix) from error

    found: list[Question] = []
    problems: list[Problem] = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(_question(parse(line, ""), tokenizer, seq_len))
        except ValueError as error:
            origin = f"{where}, question {number}"
            problems += [replace(problem, origin=origin) for problem in problems_of(error)]

    if not lines:
        problems.append(Problem("path", "empty", where, "has no questions", "name another file"))
    raise_problems("", problems, InvalidData)
    return found


def split_ids(tokenizer: Tokenizer, prompt: str, text: str) -> Choice:
    """(ids of prompt and text together, number of those before the text, with those that begin a text).

    White space at the end of a prompt goes to the text, as tokenizers join a space to the word after it.
    """
    ids = encode_prompt(tokenizer, prompt + text)
    return ids, len(encode_prompt(tokenizer, prompt.rstrip()))


def batch_of_choices(choices: Sequence[Choice], batch_size: int, seq_len: int) -> Batch:
    """A sequence for each choice, with labels after its prompt, then padding sequences."""
    padding = filler_batch(batch_size, seq_len)
    names = ("tokens", "labels", "document_ids", "positions")
    tensors = {name: getattr(padding, name).clone() for name in names}
    for i, (ids, begin) in enumerate(choices):
        n = len(ids) - 1
        tensors["tokens"][i, :n] = torch.tensor(ids[:-1])
        tensors["labels"][i, begin - 1 : n] = torch.tensor(ids[begin:])
        tensors["document_ids"][i, :n] = 0
        tensors["positions"][i, :n] = torch.arange(n)
    return replace(padding, **tensors, label_weight=-1.0)


def accuracies(
    questions: Sequence[Question], losses: Sequence[Sequence[float]]
) -> tuple[float, float]:
    """Return the fractions of questions where the right choice has the lowest loss, and the lowest loss per byte of its text.

    `losses` are sums of nats of each choice. The first of equal ones counts; nan is never the lowest.
    """
    plain = by_bytes = 0
    for question, own in zip(questions, losses, strict=True):
        finite = [math.inf if math.isnan(loss) else loss for loss in own]
        per_byte = [loss / size for loss, size in zip(finite, question.sizes)]
        plain += finite.index(min(finite)) == question.answer
        by_bytes += per_byte.index(min(per_byte)) == question.answer
    return plain / len(questions), by_bytes / len(questions)


def _question(record: Any, tokenizer: Tokenizer, seq_len: int) -> Question:
    raise_problems("", _record_problems(record))
    choices = tuple(split_ids(tokenizer, record["prompt"], choice) for choice in record["choices"])
    for choice, (ids, begin) in zip(record["choices"], choices):
        if len(ids) <= begin:
            fix = "give one that does"
            raise invalid("choices", "empty", choice, "adds no token to the prompt", fix)
        if len(ids) - 1 > seq_len:
            rule = f"is the number of tokens of prompt and choice, and seq_len {seq_len} takes {seq_len + 1}"
            raise invalid("prompt", "length", len(ids), rule, "shorten it")
    return Question(choices, tuple(len(c.encode()) for c in record["choices"]), record["answer"])


def _record_problems(record: Any) -> Iterator[Problem]:
    if not isinstance(record, dict) or not {"prompt", "choices", "answer"} <= record.keys():
        yield Problem("", "type", record, "must be an object with prompt, choices and answer")
        return
    prompt, choices, answer = record["prompt"], record["choices"], record["answer"]
    if not isinstance(prompt, str) or not prompt.strip():
        fix = "write the text before the choices"
        yield Problem("prompt", "type", prompt, "must be a text with a token", fix)
    texts = isinstance(choices, list) and all(isinstance(c, str) and c for c in choices)
    if not texts or len(choices) < 2:
        yield Problem("choices", "type", choices, "must be two texts or more", "give all of them")
    elif type(answer) is not int or not 0 <= answer < len(choices):
        rule = f"must be the number of a choice, from 0 to {len(choices) - 1}"
        yield Problem("answer", "range", answer, rule)
