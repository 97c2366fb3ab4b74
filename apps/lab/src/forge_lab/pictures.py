"""Answers of a trained model to questions with pictures: one of the command line, or those of a file."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from forge_core import SamplingConfig
from forge_lab._shared.paths import open_regular
from forge_lab._shared.problems import invalid
from forge_lab.prompts import folder_prompts
from forge_train import RunDirectory, load_folder, load_model
from forge_train.errors import ConfigError, as_config_error
from forge_train.toolkit import prompts_of
from forge_vlm import VLM
from forge_vlm.answers import answer_all
from forge_vlm.data import Prompt, Prompts

_FORMATS = {"messages": "chat", "conversations": "llava"}
_NEW_TOKENS = 400  # that are written if no number is asked for, and the model has room for them


@dataclass(frozen=True)
class Asked:
    """A question with pictures, or the file `path` of them in a `format`."""

    text: str
    images: tuple[Path, ...]
    path: Path | None
    format: str | None


def conversations_in(path: Path) -> str | None:
    """The format of a .jsonl of conversations, by the keys of its first object; None for another file."""
    if path.suffix != ".jsonl":
        return None
    try:
        with open(open_regular(path)[0], encoding="utf-8") as file:
            first = json.loads(next((line for line in file if line.strip()), "{}"))
    except (OSError, ValueError):
        return None  # whoever reads it says why
    keys = first if isinstance(first, dict) else {}
    return next((name for key, name in _FORMATS.items() if key in keys), None)


def answer_pictures(
    source: Path,
    asked: Asked,
    sampling: SamplingConfig,
    max_new_tokens: int | None,
    batch_size: int,
    device: torch.device,
) -> int:
    """Print the answer to a question, or an object with prompt and text for each of a file. ConfigError for what
    cannot be read or answered."""
    if batch_size < 1:
        raise invalid(
            "--batch_size", "range", batch_size, "must be at least 1", "use 8", kind=ConfigError
        )
    try:
        model, prompts = load_asked(source, device)
        if asked.path is None:
            questions = [prompts.of(asked.text, asked.images)]
        else:
            questions = prompts.read(asked.path, asked.format or "chat")
        new = _room(model, questions) if max_new_tokens is None else max_new_tokens
        for question, text in zip(
            questions, answer_all(model, prompts, questions, new, sampling, batch_size)
        ):
            row = {"prompt": question.name, "text": text}
            print(text if asked.path is None else json.dumps(row, ensure_ascii=False), flush=True)
    except ValueError as error:  # a damaged picture, a prompt that is too long
        raise as_config_error(error) from error
    return 0


def load_asked(source: str | Path, device: torch.device | str = "cpu") -> tuple[VLM, Prompts]:
    """The model with images of a run's newest good checkpoint or of a Hugging Face folder, and what writes its prompts.

    A run's are those of its first source of name vlm, a folder's those of its processor. Says on stderr which it is.
    """
    source = Path(source)
    if (source / "config.json").is_file() and not RunDirectory(source).config.exists():
        model, _ = load_folder(source, device)
        model = _with_images(source, model)
        print(f"{source}, a folder of Hugging Face", file=sys.stderr)
        return model, folder_prompts(source, model)
    model, config, step = load_model(source, device)
    model = _with_images(source, model)
    print(f"{source} at step {step}", file=sys.stderr)
    return model, prompts_of(config)


def _with_images(source: Path, model: torch.nn.Module) -> VLM:
    if not isinstance(model, VLM):
        rule = "has a text model, which takes no images"
        raise invalid("source", "images", str(source), rule, "give text", kind=ConfigError)
    return model


def _room(model: VLM, questions: list[Prompt]) -> int:
    """New tokens where no number was asked for: what max_seq_len leaves of 400."""
    longest = max((len(question.tokens) for question in questions), default=0)
    return max(1, min(_NEW_TOKENS, model.config.max_seq_len - longest))
