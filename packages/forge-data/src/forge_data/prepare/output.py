"""The output of `prepare`: what it may replace, and JSON in it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forge_data._shared.atomic import write_file
from forge_data._shared.problems import invalid
from forge_data.config import SPLITS
from forge_data.sources.sidecar import SIDECAR


def check_output(output: Path, inputs: Sequence[Path], overwrite: bool) -> None:
    """Raise ValueError if `output` exists, unless it holds token files and `overwrite` is True."""
    if not (output.exists() or output.is_symlink()):
        return
    name, other = str(output), "choose another output"
    if not overwrite:
        rule, fix = (
            "must not exist yet",
            f"{other}, or replace it with overwrite=True (--overwrite)",
        )
        raise invalid("output", "exists", name, rule, fix)
    folders = [output, *(output / split for split in SPLITS)]
    if output.is_symlink() or not any((folder / SIDECAR).is_file() for folder in folders):
        rule = "must be a folder of token files to be overwritten"
        raise invalid("output", "no_tokens", name, rule, other)
    inside = [i for i in inputs if i.resolve().is_relative_to(output.resolve())]
    if inside:
        rule = f"must not be in the output {output}, which would be replaced"
        raise invalid("inputs", "inside", str(inside[0]), rule, other)


def make_folder(output: Path, folder: Path) -> None:
    """Make `folder`, and those above it. Raises ValueError that names the output if it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        rule = f"must be in a folder that can be written ({error.strerror})"
        raise invalid("output", "unwritable", str(output), rule, "choose another") from None


def write_json(path: Path, content: Any) -> None:
    """Write JSON as `write_file` writes."""
    write_file(path, json.dumps(content, indent=2) + "\n")
