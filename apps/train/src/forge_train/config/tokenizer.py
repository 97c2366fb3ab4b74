"""The tokenizer that weights came with: data of another one means other texts by the same ids."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forge_train._shared.problems import Problem
from forge_train.config.imported import FILES
from forge_train.config.init import InitConfig, find_source, has_begun

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
    path = beside_weights(init, run_dir)
    if path is None or gives_same_ids(spec, path):
        return []
    made = "bytes" if spec["name"] == "byte" else f"{spec.get('path', spec['name'])}"
    rule = f"is its tokenizer and must be that of the weights, {path}, or ids mean other texts"
    fix = f"prepare the text with --tokenizer {path}, or train the weights to another one with init.other_tokenizer = true"
    return [Problem(key, "weights", made, rule, fix)]


def beside_weights(init: InitConfig, run_dir: Path) -> Path | None:
    """The tokenizer's file of the folder of Hugging Face that the weights of a run are from, if it has one."""
    folder: Path | None = run_dir / FILES
    if init.from_ is not None and not has_begun(run_dir):
        source = find_source(init.from_)
        folder = source.path if source.is_hf else source.run and source.run / FILES
    return None if folder is None else tokenizer_in(folder)


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
