"""`forge-train generate`: texts of a trained model, for a prompt, a file of prompts, or questions with images."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import nn

from forge_core import SamplingConfig, generate, generate_stream
from forge_core.generate import generate_text
from forge_data import Tokenizer
from forge_data.tokenizer import prompt_ids
from forge_lab._shared.jsonl import parse
from forge_lab._shared.paths import open_regular, read_regular
from forge_lab._shared.problems import invalid
from forge_lab.prompts import folder_prompts
from forge_parallel import select_device
from forge_train import RunDirectory, load_folder, load_model, load_trained
from forge_train.errors import ConfigError, as_config_error
from forge_train.toolkit import prompts_of
from forge_vlm import VLM
from forge_vlm.answers import answer_all
from forge_vlm.data import Prompt, Prompts

_NEW_TOKENS = 400  # the default of --max_new_tokens, where the model has room for them
_MAX_BYTES = 1 << 28  # of a file of prompts
#: Formats of .jsonl files of conversations, by the key of their first object.
_FORMATS = {"messages": "chat", "conversations": "llava"}


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

    The checkpoint may have any layout of ranks; the full model runs in this process.

    Args:
        source: folder of a run, or of Hugging Face (config.json, tokenizer.json)
        prompt: text to continue, or the question about --image
        image: image files of a question, placed before its text, for a model with images
        prompts: file of texts to continue, one a line, or objects with a key prompt (.jsonl); writes an object with
            prompt and text for each; or .jsonl of conversations with images (messages, or LLaVA's conversations),
            whose last answer is generated again
        batch_size: prompts of the file that are continued at once
        max_new_tokens: tokens to write; without it 400, or as many as the model has room for
        temperature: 0: the most likely token each time
        top_k: sample from the k most likely tokens
        top_p: sample from the likeliest tokens of this total probability
        min_p: sample from tokens with at least this fraction of the likeliest one's probability
        repetition_penalty: above 1: tokens that the text contains are less likely
        prefill_chunk: tokens of a long prompt that are read at once
        seed: the same seed gives the same text
        device: auto, cpu or cuda
    """
    try:
        sampling = SamplingConfig(temperature, top_k, top_p, min_p, repetition_penalty, seed)
        chosen = select_device(device)
        conversations = None if prompts is None else _conversation_format(prompts)
        texts = None if prompts is None or conversations else read_prompts(prompts)
    except ValueError as error:
        raise as_config_error(error) from error

    if prompts is not None and (prompt or image):
        key, rule = "--prompt" if prompt else "--image", "and --prompts exclude each other"
        raise invalid(key, "excludes", ..., rule, "leave one out", kind=ConfigError)
    with_images = bool(conversations or image)
    if with_images and prefill_chunk is not None:
        rule = "must be left out with images, whose prompts are read in one chunk"
        raise invalid("--prefill_chunk", "images", prefill_chunk, rule, kind=ConfigError)
    if with_images and batch_size < 1:
        rule, fix = "must be at least 1", "use 8"
        raise invalid("--batch_size", "range", batch_size, rule, fix, kind=ConfigError)

    try:
        if with_images:
            vlm, reader = load_with_images(source, chosen)
            if prompts is None:
                questions = [reader.of(prompt, image)]
            else:
                questions = reader.read(prompts, conversations or "chat")
            new = _room_for_answers(vlm, questions) if max_new_tokens is None else max_new_tokens
            answers = answer_all(vlm, reader, questions, new, sampling, batch_size)
            for question, text in zip(questions, answers):
                print(text if prompts is None else _row(question.name, text), flush=True)
            return 0

        model, tokenizer = _load(source, chosen)
        if max_new_tokens is None:
            max_new_tokens = _room(model, tokenizer, [prompt] if texts is None else texts)
        if texts is not None:
            continued = continue_all(
                model, tokenizer, texts, sampling, max_new_tokens, prefill_chunk, batch_size
            )
            for text, more in zip(texts, continued):
                print(_row(text, more), flush=True)
            return 0

        ids = prompt_ids(tokenizer, prompt)
        pieces = generate_text(model, tokenizer, ids, max_new_tokens, sampling, prefill_chunk)
        sys.stdout.write(prompt.encode(errors="replace").decode())
        for piece in pieces:
            sys.stdout.write(piece)
            sys.stdout.flush()
    except (
        ValueError
    ) as error:  # a damaged image, a prompt that is not text, a length above the model's
        raise as_config_error(error) from error
    sys.stdout.write("\n")
    return 0


def _row(prompt: str, text: str) -> str:
    return json.dumps({"prompt": prompt, "text": text}, ensure_ascii=False)


# ---- models


def is_hf_folder(folder: Path) -> bool:
    """Whether a folder is one of Hugging Face and not of a run."""
    return (folder / "config.json").is_file() and not RunDirectory(folder).config.exists()


def _load(source: Path, device: torch.device) -> tuple[nn.Module, Tokenizer]:
    """Load the model and tokenizer of a run or of a Hugging Face folder; print to stderr which it is."""
    if is_hf_folder(source):
        model, tokenizer = load_folder(source, device)
        print(f"{source}, a folder of Hugging Face", file=sys.stderr)
    else:
        model, tokenizer, step = load_trained(source, device)
        print(f"{source} at step {step}", file=sys.stderr)
    return model, tokenizer


def load_with_images(source: str | Path, device: torch.device | str = "cpu") -> tuple[VLM, Prompts]:
    """Load a model with images and the reader of its prompts; print to stderr what `source` is.

    Prompts of a run are written as its first source of name vlm writes them, those of a Hugging Face folder as its
    processor does. ConfigError for a model of text only.
    """
    source = Path(source)
    is_hf = is_hf_folder(source)
    if is_hf:
        model, _ = load_folder(source, device)
        line = f"{source}, a folder of Hugging Face"
    else:
        model, config, step = load_model(source, device)
        line = f"{source} at step {step}"
    if not isinstance(model, VLM):
        rule = "has a text model, which takes no images"
        raise invalid("source", "images", str(source), rule, "give text", kind=ConfigError)
    print(line, file=sys.stderr)
    return model, folder_prompts(source, model) if is_hf else prompts_of(config)


def _room(model: nn.Module, tokenizer: Tokenizer, texts: Sequence[str]) -> int:
    """Return the default number of new tokens: 400, or what max_seq_len leaves, which is then printed to stderr."""
    longest = getattr(getattr(model, "config", None), "max_seq_len", None)
    used = max((len(prompt_ids(tokenizer, text)) for text in texts), default=0)
    if longest is None or used + _NEW_TOKENS <= longest:
        return _NEW_TOKENS
    if used < longest:  # a longer prompt is an error of the generation
        print(
            f"at most {longest - used} new tokens: max_seq_len {longest} less a prompt of {used}; "
            "--max_new_tokens N asks for fewer",
            file=sys.stderr,
        )
    return max(1, longest - used)


def _room_for_answers(model: VLM, questions: Sequence[Prompt]) -> int:
    """Return the default number of new tokens of answers: 400, or what max_seq_len leaves."""
    longest = max((len(question.tokens) for question in questions), default=0)
    return max(1, min(_NEW_TOKENS, model.config.max_seq_len - longest))


# ---- files of prompts


def _conversation_format(path: Path) -> str | None:
    """The format of a .jsonl of conversations, by the keys of its first object; None for another file."""
    if path.suffix != ".jsonl":
        return None
    try:
        with open(open_regular(path)[0], encoding="utf-8") as file:
            first = json.loads(next((line for line in file if line.strip()), "{}"))
    except (OSError, ValueError):
        return None  # `read_prompts` reports it with its line
    keys = first if isinstance(first, dict) else {}
    return next((name for key, name in _FORMATS.items() if key in keys), None)


def read_prompts(path: Path) -> list[str]:
    """The texts of a file: the lines of a text, or "prompt" of each object of a .jsonl. ValueError, with the line."""
    try:
        lines = read_regular(path, _MAX_BYTES).decode().splitlines()
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
    """Yield the continuation of each text, up to an end token; it does not depend on `batch_size`, the texts at once.

    Invalid texts raise before the first one is continued.
    """
    if batch_size < 1:
        raise invalid("--batch_size", "range", batch_size, "must be at least 1", "use 8")
    ids = [prompt_ids(tokenizer, text) for text in texts]
    if ids:  # this checks the lengths; it is never iterated
        generate_stream(
            model, [max(ids, key=len)], max_new_tokens, sampling, prefill_chunk=prefill_chunk
        )

    for first in range(0, len(ids), batch_size):
        batch = ids[first : first + batch_size]
        new = generate(
            model, batch, max_new_tokens, sampling, tokenizer.end_ids, prefill_chunk, first
        )
        for tokens in new.tolist():
            text = takewhile(lambda token: token not in tokenizer.end_ids, tokens)
            yield tokenizer.decode([token for token in text if token < tokenizer.vocab_size])


# ---- tasks of lm_eval and lmms_eval


def task_options(options: Mapping[str, Any]) -> tuple[float, tuple[str, ...]]:
    """(temperature, strings that end a text) of a task; greedy unless it asks to sample."""
    temperature = float(options.get("temperature") or 0) if options.get("do_sample") else 0.0
    until = options.get("until") or []
    ends = [until] if isinstance(until, str) else until
    return temperature, tuple(end for end in ends if end)


def truncate(text: str, ends: Sequence[str]) -> str:
    """The text before the first of `ends`."""
    for end in ends:
        text = text.split(end)[0]
    return text
