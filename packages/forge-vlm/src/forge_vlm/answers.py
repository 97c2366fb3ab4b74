"""Answers that a model writes to questions with images, and how many are right.

B   prompts at once        N   new tokens of each
"""

from __future__ import annotations

import string
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from forge_core import SamplingConfig, generate
from forge_vlm._renamed import renamed, renamed_keyword
from forge_vlm._shared.problems import Problem
from forge_vlm.data.prompts import Prompt, Prompts

__all__ = [
    "NORMALIZE",
    "Normalize",
    "answer",
    "answer_all",
    "is_match",
    "media_on",
    "question_problems",
]

Normalize = Literal["none", "strip", "words"]
NORMALIZE: tuple[str, ...] = get_args(Normalize)
GREEDY = SamplingConfig(temperature=0.0)
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def answer_all(
    model: nn.Module,
    prompts: Prompts,
    asked: Sequence[Prompt],
    max_new_tokens: int,
    sampling: SamplingConfig = GREEDY,
    rows: int = 8,
) -> Iterator[str]:
    """The answer to each prompt up to an end token, `rows` prompts at a time; each image is encoded once.

        for text in answer_all(model, prompts, prompts.read("questions.jsonl"), 20):
            print(text)

    Answers do not depend on `rows`. Raises as `generate_stream` for lengths, InvalidSample for a damaged image.
    """
    for first in range(0, len(asked), rows):
        part = asked[first : first + rows]
        media = prompts.media(part)
        yield from answer(model, prompts, part, media, max_new_tokens, sampling, first_row=first)


def answer(
    model: nn.Module,
    prompts: Prompts,
    asked: Sequence[Prompt],
    media: Mapping[str, Tensor],
    max_new_tokens: int,
    sampling: SamplingConfig = GREEDY,
    *,
    first_row: int = 0,
    stops: bool = True,
) -> list[str]:
    """Answers (B) to prompts with the media of `prompts.media(asked)`, all at once.

    With `stops` False N is max_new_tokens also where all sequences have ended, as ranks of a sharded model need that run it
    together on rows of their own.
    """
    rows = [torch.from_numpy(prompt.tokens) for prompt in asked]
    eos = prompts.end_ids if stops else None
    extras = media_on(model, media)
    new = generate(
        model, rows, max_new_tokens, sampling, eos, first_row=first_row, extras=extras
    ).tolist()  # (B, N)
    return [prompts.text(row) for row in new]


def media_on(model: nn.Module, media: Mapping[str, Tensor]) -> dict[str, Any]:
    """Media where a model reads them: on its device, or on the host."""
    device = next(model.parameters()).device
    stay = getattr(model, "host_inputs", ())
    return {name: m if name in stay else m.to(device) for name, m in media.items()}


@renamed_keyword(normalise="normalize")  # language: old name
def is_match(found: str, wanted: str, normalize: Normalize = "strip") -> bool:
    """Whether an answer is the wanted one, both normalized: "none" character by character, "strip" without white space at
    the ends, "words" also without ASCII punctuation, in lower case, with one blank for any white space."""
    return _normal(found, normalize) == _normal(wanted, normalize)


def question_problems(
    asked: Sequence[Prompt], path: str, max_new_tokens: int, max_seq_len: int | None = None
) -> Iterator[Problem]:
    """Why answers to the prompts of a file cannot be compared: none, one without an answer, too long for a model."""
    if not asked:
        yield Problem("path", "empty", path, "has no questions", "name another file")
    unanswered = [prompt.name for prompt in asked if prompt.answer is None]
    if unanswered:
        rule, fix = "has no answer to compare with", "end it with that of the assistant"
        yield Problem("path", "answer", unanswered[0], rule, fix)
        return
    longest = max((len(prompt.tokens) for prompt in asked), default=0)
    if max_seq_len is not None and longest + max_new_tokens > max_seq_len:
        rule = f"after a prompt of {longest} tokens must be at most model.max_seq_len {max_seq_len}"
        fix = "lower one, or raise max_seq_len"
        yield Problem("max_new_tokens", "range", max_new_tokens, rule, fix)


def _normal(text: str, normalize: Normalize) -> str:
    if normalize == "none":
        return text
    if normalize == "strip":
        return text.strip()
    return " ".join(text.translate(_NO_PUNCTUATION).lower().split())


__getattr__ = renamed(__name__)
