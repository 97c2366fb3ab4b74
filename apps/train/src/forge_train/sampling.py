"""Text that a model writes after a prompt, with a tokenizer's begin and end tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from forge_core import SamplingConfig, generate_stream
from forge_data import Tokenizer
from forge_data.tokenizer import encode_prompt
from forge_train._shared.problems import invalid
from forge_train.errors import ConfigError


def continuation(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompt: str,
    max_new_tokens: int,
    sampling: SamplingConfig,
    device: torch.device | str,
    prefill_chunk: int | None = None,
) -> Iterator[str]:
    """Pieces of text that continue `prompt`, until an end token or `max_new_tokens`.

    Before the first piece is asked for it raises ConfigError when the prompt has no tokens and the tokenizer has no
    token to start from, and ValueError as `generate_stream`.
    """
    ids = prompt_ids(tokenizer, prompt)
    tokens = torch.tensor([ids]).to(device, non_blocking=True)
    # the end token is looked for in `_pieces` alone: one read from the device per token
    stream = generate_stream(
        model, tokens, max_new_tokens, sampling=sampling, prefill_chunk=prefill_chunk
    )
    return _pieces(stream, tokenizer)


def _pieces(stream: Iterator[Tensor], tokenizer: Tokenizer) -> Iterator[str]:
    shown, new = tokenizer.decode([]), []
    for step in stream:
        token = int(step[0])
        if token in tokenizer.end_ids:
            break
        if token >= tokenizer.vocab_size:  # the model has more ids than the tokenizer has texts
            yield "\N{REPLACEMENT CHARACTER}"
            continue
        new.append(token)
        text = tokenizer.decode(new)
        if text.endswith("\N{REPLACEMENT CHARACTER}"):  # the middle of a character
            continue
        yield text[len(shown) :]
        shown = text


def prompt_ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Ids of a prompt after those that begin a text, or the end token where there are none; ConfigError without one."""
    ids = encode_prompt(tokenizer, prompt)
    if ids:
        return ids
    if tokenizer.eos_id is None:
        rule = "has no tokens and the tokenizer no end token"
        raise invalid("prompt", "empty", prompt, rule, "give a prompt", kind=ConfigError)
    return [tokenizer.eos_id]  # documents begin after it
