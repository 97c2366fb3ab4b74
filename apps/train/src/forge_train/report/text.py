"""Text from a trained run, streamed as it is sampled."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import tyro
from torch import nn

from forge_core import SamplingConfig, generate_stream
from forge_data import Tokenizer
from forge_parallel import select_device
from forge_train.errors import ConfigError
from forge_train.jobs import load_trained


def continuation(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompt: str,
    max_new_tokens: int,
    sampling: SamplingConfig,
    device: torch.device | str,
) -> Iterator[str]:
    """Pieces of text that continue `prompt`, until EOS or `max_new_tokens`.

    Raises ConfigError when the prompt has no tokens and the tokenizer has no token to start from.
    """
    ids = tokenizer.encode(prompt)
    if not ids:
        if tokenizer.eos_id is None:
            raise ConfigError(
                ["prompt '' has no tokens and the tokenizer no end token; give a prompt"]
            )
        ids = [tokenizer.eos_id]  # documents begin after it
    tokens = torch.tensor([ids], device=device)
    shown, new = tokenizer.decode([]), []
    # the end token is looked for here alone: one read from the device per token
    for step in generate_stream(model, tokens, max_new_tokens, sampling=sampling):
        token = int(step[0])
        if token == tokenizer.eos_id:
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


def stream_text(
    run_dir: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(help="folder of a run")],
    /,
    prompt: Annotated[str, tyro.conf.arg(help="text to continue")] = "",
    max_new_tokens: Annotated[int, tyro.conf.arg(help="tokens to write")] = 400,
    temperature: Annotated[float, tyro.conf.arg(help="0: the most likely token each time")] = 0.8,
    top_k: Annotated[int | None, tyro.conf.arg(help="sample from the k most likely tokens")] = None,
    top_p: Annotated[
        float | None,
        tyro.conf.arg(help="sample from the likeliest tokens of this total probability"),
    ] = None,
    seed: Annotated[int, tyro.conf.arg(help="the same seed gives the same text")] = 0,
    device: Annotated[str, tyro.conf.arg(help="auto, cpu or cuda")] = "auto",
) -> int:
    """Stream text from the newest good checkpoint of a run."""
    try:
        sampling = SamplingConfig(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        chosen = select_device(device)
    except ValueError as error:
        raise ConfigError(str(error).splitlines()) from error
    model, tokenizer, step = load_trained(run_dir, chosen)
    print(f"{run_dir} at step {step}", file=sys.stderr)
    sys.stdout.write(prompt.encode(errors="replace").decode())
    try:
        for piece in continuation(model, tokenizer, prompt, max_new_tokens, sampling, chosen):
            sys.stdout.write(piece)
            sys.stdout.flush()
    except ValueError as error:  # a prompt that is no text, a length beyond the model's
        raise ConfigError(str(error).splitlines()) from error
    sys.stdout.write("\n")
    return 0
