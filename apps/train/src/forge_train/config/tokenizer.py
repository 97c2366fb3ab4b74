"""The tokenizer that weights came with: data of another one means other texts by the same ids."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forge_data.tokenizer_files import ends_beside, gives_same_ids, tokenizer_in
from forge_train._shared.problems import Problem
from forge_train.config.imported import FILES
from forge_train.config.init import InitConfig, find_source, has_begun
from forge_train.errors import config_errors


def tokenizer_problems(
    key: str, spec: Mapping[str, Any] | None, init: InitConfig, run_dir: Path
) -> list[Problem]:
    """The problem if the data of `key` was made with another tokenizer than the one next to the weights.

    `spec` is that of the data's source. None where data or weights have no tokenizer to compare.
    """
    if init.other_tokenizer or spec is None:
        return []
    folder = folder_of_weights(init, run_dir)
    path = None if folder is None else tokenizer_in(folder)
    if path is None or gives_same_ids(spec, path):
        return []
    made = "bytes" if spec["name"] == "byte" else f"{spec.get('path', spec['name'])}"
    rule = f"is its tokenizer and must be that of the weights, {path}, or ids mean other texts"
    fix = f"prepare the text with --tokenizer {path}, or train the weights to another one with init.other_tokenizer = true"
    return [Problem(key, "weights", made, rule, fix)]


def folder_of_weights(init: InitConfig, run_dir: Path) -> Path | None:
    """The files of the folder of Hugging Face that the weights of a run are from; there may be none in it."""
    if init.from_ is None or has_begun(run_dir):
        return run_dir / FILES
    source = find_source(init.from_)
    return source.path if source.is_hf else source.run and source.run / FILES


def ends_of_weights(
    spec: Mapping[str, Any] | None, init: InitConfig, run_dir: Path
) -> tuple[int, ...]:
    """End tokens of the folder that the weights of a run are from, where the data has its tokenizer; ConfigError for a
    folder whose end tokens are no ids."""
    folder = folder_of_weights(init, run_dir)
    with config_errors():
        return () if spec is None or folder is None else ends_beside(spec, folder)
