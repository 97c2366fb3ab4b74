"""Layers of configuration: what wins, and what is remembered about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forge_testing.problems import rejects
from forge_train.config.layers import Layers, read_layers
from forge_train.errors import ConfigError

pytestmark = pytest.mark.lane("test")


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.toml").write_text(text)
    return folder / f"{next(iter(files))}.toml"


def test_child_overrides_base_and_tables_merge(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        child='extends = "base.toml"\n[model]\ndim = 32',
        base="[model]\ndim = 16\nnum_layers = 2",
    )
    layers = read_layers(path)
    assert layers.values == {"model": {"dim": 32, "num_layers": 2}}
    assert layers.origins["model.dim"] == str(path)
    assert layers.origins["model.num_layers"] == f"base {tmp_path / 'base.toml'}"


def test_extends_is_relative_to_the_file_that_contains_it(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    write(tmp_path, top='extends = "deep/mid.toml"\n[a]\nx = 1')
    write(tmp_path / "deep", mid='extends = "low.toml"\n[a]\ny = 2', low="[a]\nz = 3\nx = 9")
    assert read_layers(tmp_path / "top.toml").values == {"a": {"x": 1, "y": 2, "z": 3}}


def test_a_later_length_replaces_an_earlier_one(tmp_path: Path) -> None:
    path = write(
        tmp_path, child='extends = "base.toml"\n[train]\ntokens = 100', base="[train]\nsteps = 5"
    )
    layers = read_layers(path)
    assert layers.values["train"] == {"tokens": 100}
    layers.set("train.tokens_per_parameter", 20.0, "flag")
    assert layers.values["train"] == {"tokens_per_parameter": 20.0}
    assert "train.tokens" not in layers.origins


def test_two_lengths_in_one_file_are_both_kept_and_rejected_later(tmp_path: Path) -> None:
    layers = read_layers(write(tmp_path, one="[train]\nsteps = 5\ntokens = 100"))
    assert layers.values["train"] == {"steps": 5, "tokens": 100}


def test_a_flag_reaches_into_name_keyed_tables() -> None:
    layers = Layers({"data": {"sources": {"a": {"name": "builtin"}}}})
    layers.set("data.sources.a.split", "validation", "flag")
    assert layers.values["data"]["sources"]["a"] == {"name": "builtin", "split": "validation"}


@pytest.mark.parametrize(
    ("skipped", "more", "wanted"),
    [
        (0, "", {"action": "stop"}),
        (2, "", {"action": "skip", "max_in_a_row": 2}),
        (
            2,
            '[resilience.nonfinite]\naction = "rollback"',
            {"action": "rollback", "max_in_a_row": 2},
        ),
    ],
)
def test_the_key_of_version_0_1_for_skipped_steps_is_read(
    tmp_path: Path, skipped: int, more: str, wanted: dict[str, object]
) -> None:
    layers = read_layers(write(tmp_path, a=f"[train]\nmax_skipped_steps = {skipped}\n{more}"))
    layers.replace_old_keys()
    assert layers.values == {"train": {}, "resilience": {"nonfinite": wanted}}


def test_circle_names_every_file(tmp_path: Path) -> None:
    path = write(tmp_path, a='extends = "b.toml"', b='extends = "a.toml"')
    circle = " -> ".join(str(tmp_path / name) for name in ("a.toml", "b.toml", "a.toml"))
    with rejects("extends", ..., "circular", ConfigError, where=circle):
        read_layers(path)


@pytest.mark.parametrize(("base", "value", "code"), [(3, 3, "type"), ("''", ..., "not_a_file")])
def test_a_base_is_the_path_of_a_file(tmp_path: Path, base: Any, value: Any, code: str) -> None:
    path = write(tmp_path, a=f"extends = {base}")
    with rejects("extends" if code == "type" else "", value, code, ConfigError, where=path):
        read_layers(path)


def test_a_chain_of_files_has_an_end(tmp_path: Path) -> None:
    path = write(tmp_path, **{f"f{i}": f'extends = "f{i + 1}.toml"' for i in range(20)})
    with rejects("extends", ..., "depth", ConfigError, where=path):
        read_layers(path)
