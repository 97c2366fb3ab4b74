"""The tokenizer that weights came with: data of another one means other texts by the same ids."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forge_train._shared.problems import Problem, invalid
from forge_train.config.imported import FILES
from forge_train.config.init import InitConfig, find_source, has_begun
from forge_train.errors import ConfigError

_FILE = "tokenizer.json"
#: Parts of the file that decide about ids. The rest is about what goes around a text, and how ids are shown.
_PARTS = ("model", "normalizer", "pre_tokenizer", "added_tokens")
_MAX_BYTES = 2**28


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
    """End tokens of the folder that the weights of a run are from, where the data has its tokenizer."""
    folder = folder_of_weights(init, run_dir)
    return () if spec is None or folder is None else ends_beside(spec, folder)


def ends_beside(spec: Mapping[str, Any], folder: Path) -> tuple[int, ...]:
    """`folder_ends` of a folder that has the tokenizer of the spec; none of another."""
    path = tokenizer_in(folder)
    return folder_ends(folder) if path is not None and gives_same_ids(spec, path) else ()


def folder_ends(folder: Path) -> tuple[int, ...]:
    """Ids that end a text in `generate` of transformers: of generation_config.json, otherwise of config.json.

    Raises ConfigError for something else than an id or a list of them.
    """
    from forge_ckpt.hf import read_json  # with torch, which a mistyped key must not wait for

    for path in (folder / "generation_config.json", folder / "config.json"):
        table = read_json(path) if path.is_file() else {}
        for part in (table, table.get("text_config") or {}):
            if (ends := part.get("eos_token_id")) is None:
                continue
            found = ends if isinstance(ends, list) else [ends]
            if not all(type(end) is int for end in found):
                rule, fix = "must be an id or a list of ids", "correct the file"
                raise invalid("eos_token_id", "type", ends, rule, fix, where=path, kind=ConfigError)
            return tuple(found)
    return ()


def tokenizer_in(folder: Path) -> Path | None:
    """The tokenizer's file in a folder of Hugging Face; None without one that the library tokenizers reads."""
    path = folder / _FILE
    return path if os.path.isfile(path) and _parts(path) is not None else None


def gives_same_ids(spec: Mapping[str, Any], path: Path) -> bool:
    """Whether the tokenizer of a spec gives the ids that the file `path` gives, as far as their parts tell.

    A file that was written again, by another version of the library, may be the same one. A false "no" is possible, a
    false "yes" is not.
    """
    if spec["name"] != "json":
        return False
    if spec.get("fingerprint") == hashlib.sha256(path.read_bytes()).hexdigest():
        return True
    own = Path(spec["path"])
    return own.is_file() and _parts(own) == _parts(path)


def _parts(path: Path) -> dict[str, Any] | None:
    """What decides about ids, without keys that are off; None for a file that is no tokenizer."""
    if path.stat().st_size > _MAX_BYTES:
        return None
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return None
    model = table.get("model") if isinstance(table, dict) else None
    if not isinstance(model, dict):
        return None
    model = {key: value for key, value in model.items() if value not in (None, False)}
    if isinstance(model.get("merges"), list):  # pairs, or texts of two words
        model["merges"] = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
    return {**{part: table.get(part) for part in _PARTS}, "model": model}
