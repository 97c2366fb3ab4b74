"""forge_lab imports public names of forge_train and no others: this list is what the runner must keep for it."""

from __future__ import annotations

import ast
import importlib
from collections import defaultdict
from pathlib import Path

import pytest

import forge_lab

pytestmark = pytest.mark.lane("test")

#: The package itself, and modules with a list of names that a user of the runner does not need.
#: `errors` has the kinds of errors and how to raise them, `cli` reads a job with its flags, `command_line` the arguments of a verb, `slurm` writes
#: batch scripts, `toolkit` opens jobs and runs without a Trainer.
MODULES = ("forge_train", "forge_train.cli", "forge_train.command_line", "forge_train.errors", "forge_train.slurm", "forge_train.toolkit")  # fmt: skip


def names_of_train() -> dict[str, set[str]]:
    """The names that forge_lab imports, by module of forge_train."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in Path(forge_lab.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("forge_train"):
                found[str(node.module)].update(alias.name for alias in node.names)
            elif isinstance(node, ast.Import):
                assert not any(alias.name.startswith("forge_train") for alias in node.names), path
    return found


def test_they_are_public_names_of_few_modules() -> None:
    found = names_of_train()
    assert found.keys() == set(MODULES)
    for module, names in found.items():
        assert names <= set(importlib.import_module(module).__all__), module


def test_the_toolkit_has_no_name_that_forge_lab_does_not_need() -> None:
    toolkit = importlib.import_module("forge_train.toolkit")
    assert names_of_train()["forge_train.toolkit"] == set(toolkit.__all__)


def test_the_top_needs_these() -> None:
    assert names_of_train()["forge_train"] == {
        *("Callback", "JobConfig", "Layers", "ResolvedJob", "Run", "RunDirectory", "Trainer"),
        *("column_of", "load_folder", "load_model", "load_trained"),
        *("read_layers", "read_rows", "read_run", "resolve"),
    }
