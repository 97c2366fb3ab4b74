"""Text from a trained model: one continuation, streamed as it is sampled, or those of a file of prompts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path

import torch
import tyro
from torch import nn

from forge_core import SamplingConfig, generate, generate_stream
from forge_core.generate import generate_text
from forge_data import Tokenizer
from forge_data.tokenizer import prompt_ids
from forge_lab._shared.jsonl import parse
from forge_lab._shared.paths import read_regular
from forge_lab._shared.problems import invalid
from forge_lab.pictures import Asked, answer_pictures, conversations_in
from forge_parallel import select_device
from forge_train import RunDirectory, load_folder, load_trained
from forge_train.errors import ConfigError, as_config_error

_NEW_TOKENS = 400  # that are written if no number is asked for, and the model has room for them
_MAX_PROMPTS = 1 << 28  # bytes of a file of them


def stream_text(
    source: tyro.conf.Positional[Path],
    /,
    prompt: str = "",
    image: tuple[Path, ...] = (),
    prompts: Path | None = None,
    batch_size: int = 8,
    max_new_tokens: int | None = None,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    prefill_chunk: int | None = None,
    seed: int = 0,
    device: str = "auto",
) -> int:
    """Continue a text, or each of a file, by the newest good checkpoint of a run or a folder of Hugging Face.

    A checkpoint may be of any layout of ranks; the model runs whole in this process.

    Args:
        source: folder of a run, or of Hugging Face (config.json, tokenizer.json)
        prompt: text to continue, or the question about --image
        image: pictures of a question, before its text, for a model with images
        prompts: file of texts to continue, one a line, or objects with a key prompt (.jsonl); writes an object with
            prompt and text for each; or .jsonl of conversations with pictures (messages, or LLaVA's conversations),
            whose last answer is written anew
        batch_size: prompts of the file that are continued at once
        max_new_tokens: tokens to write; left out, 400, or as many as the model has room for
        temperature: 0: the most likely token each time
        top_k: sample from the k most likely tokens
        top_p: sample from the likeliest tokens of this total probability
        min_p: sample from tokens with this share of the likeliest one's probability
        repetition_penalty: above 1: tokens that the text holds are less likely
        prefill_chunk: tokens of a long prompt that are read at once
        seed: the same seed gives the same text
        device: auto, cpu or cuda
    """
    try:
        sampling = SamplingConfig(temperature, top_k, top_p, min_p, repetition_penalty, seed)
        chosen = select_device(device)
        talks = None if prompts is None else conversations_in(prompts)
        texts = None if prompts is None or talks else read_prompts(prompts)
    except ValueError as error:
        raise as_config_error(error) from error
    if prompts is not None and (prompt or image):
        key, rule = "--prompt" if prompt else "--image", "and --prompts exclude each other"
        raise invalid(key, "excludes", ..., rule, "leave one out", kind=ConfigError)
    if talks or image:
        if prefill_chunk is not None:
            rule = "must be left out with images, which belong to whole prompts"
            raise invalid("--prefill_chunk", "images", prefill_chunk, rule, kind=ConfigError)
        asked = Asked(prompt, image, prompts, talks)
        return answer_pictures(source, asked, sampling, max_new_tokens, batch_size, chosen)
    model, tokenizer = _load(source, chosen)
    try:
        if max_new_tokens is None:
            max_new_tokens = _room(model, tokenizer, [prompt] if texts is None else texts)
        if texts is not None:
            continued = continue_all(
                model, tokenizer, texts, sampling, max_new_tokens, prefill_chunk, batch_size
            )
            for text, more in zip(texts, continued):
                print(json.dumps({"prompt": text, "text": more}, ensure_ascii=False), flush=True)
            return 0
        ids = prompt_ids(tokenizer, prompt)
        pieces = generate_text(model, tokenizer, ids, max_new_tokens, sampling, prefill_chunk)
        sys.stdout.write(prompt.encode(errors="replace").decode())
        for piece in pieces:
            sys.stdout.write(piece)
            sys.stdout.flush()
    except ValueError as error:  # a prompt that is no text, a length beyond the model's
        raise as_config_error(error) from error
    sys.stdout.write("\n")
    return 0


def _load(source: Path, device: torch.device) -> tuple[nn.Module, Tokenizer]:
    """The model of a run, or that of a folder of Hugging Face; says which."""
    if (source / "config.json").is_file() and not RunDirectory(source).config.exists():
        model, tokenizer = load_folder(source, device)
        print(f"{source}, a folder of Hugging Face", file=sys.stderr)
    else:
        model, tokenizer, step = load_trained(source, device)
        print(f"{source} at step {step}", file=sys.stderr)
    return model, tokenizer


def _room(model: nn.Module, tokenizer: Tokenizer, texts: Sequence[str]) -> int:
    """New tokens where no number was asked for: what the model's max_seq_len leaves of 400, which is then said."""
    longest = getattr(getattr(model, "config", None), "max_seq_len", None)
    used = max((len(prompt_ids(tokenizer, text)) for text in texts), default=0)
    if longest is None or used + _NEW_TOKENS <= longest:
        return _NEW_TOKENS
    if used < longest:  # else it is refused
        print(
            f"at most {longest - used} new tokens: max_seq_len {longest} less a prompt of {used}; "
            "--max_new_tokens N asks for fewer",
            file=sys.stderr,
        )
    return max(1, longest - used)


def read_prompts(path: Path) -> list[str]:
    """The texts of a file: the lines of a text, or "prompt" of each object of a .jsonl. ValueError, with the line."""
    try:
        lines = read_regular(path, _MAX_PROMPTS).decode().splitlines()
    except (OSError, ValueError) as error:
        rule, fix = f"cannot be read: {error}", "give a file of UTF-8 text"
        raise invalid("--prompts", "read", str(path), rule, fix) from error
    if path.suffix != ".jsonl":
        return [line for line in lines if line]
    found = []
    for number, line in enumerate(lines, 1):
        where = f"{path}, line {number}"
        row = parse(line, where) if line.strip() else None
        if row is not None:
            text = row.get("prompt") if isinstance(row, dict) else None
            if not isinstance(text, str):
                fix = 'write {"prompt": "..."}'
                raise invalid("prompt", "type", text, "must be a text", fix, where=where)
            found.append(text)
    return found


def continue_all(
    model: nn.Module,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    sampling: SamplingConfig,
    max_new_tokens: int,
    prefill_chunk: int | None,
    batch_size: int,
) -> Iterator[str]:
    """What follows each text, up to an end token; the same whatever `batch_size`, the texts that are continued at once.

    Refused texts raise before the first one is continued.
    """
    if batch_size < 1:
        raise invalid("--batch_size", "range", batch_size, "must be at least 1", "use 8")
    ids = [prompt_ids(tokenizer, text) for text in texts]
    if ids:  # not begun: it refuses lengths
        generate_stream(
            model, [max(ids, key=len)], max_new_tokens, sampling, prefill_chunk=prefill_chunk
        )
    for first in range(0, len(ids), batch_size):
        part = ids[first : first + batch_size]
        new = generate(
            model, part, max_new_tokens, sampling, tokenizer.end_ids, prefill_chunk, first
        ).tolist()
        for row in new:
            text = takewhile(lambda token: token not in tokenizer.end_ids, row)
            yield tokenizer.decode([token for token in text if token < tokenizer.vocab_size])
