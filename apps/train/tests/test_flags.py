"""Flags of lists, of tables that the file does not have, and of free tables."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from forge_testing.problems import assert_problem, rejects
from forge_train.build.run_directory import RunDirectory
from forge_train.command_line import parse_arguments
from forge_train.config.flags import add_flags
from forge_train.config.init import find_source
from forge_train.config.layers import Layers, read_layers
from forge_train.config.schema import RunConfig
from forge_train.config.structure import structure
from forge_train.errors import ConfigError

pytestmark = pytest.mark.lane("test")

FILE = {"data": {"sources": {"text": {"name": "builtin"}}}}


def parse(*args: str, values: Any = FILE) -> dict[str, Any]:
    layers = Layers(copy.deepcopy(values))
    assert add_flags(layers, args) == []
    assert set(layers.origins.values()) == {"flag"}
    return {key: layers.at(key) for key in layers.origins}


def rejected(*args: str) -> ConfigError:
    layers = Layers(copy.deepcopy(FILE))
    add_flags(layers, args)
    return ConfigError(structure(layers.values)[1])


@pytest.mark.parametrize(
    ("args", "wanted"),
    [
        (["--init.patterns", '["a.*", "!b"]'], {"init.patterns": ["a.*", "!b"]}),
        (['--init.patterns=["a.*"]'], {"init.patterns": ["a.*"]}),
        (["--init.patterns", "a.*", "!b"], {"init.patterns": ["a.*", "!b"]}),
        (["--init.patterns", "[ab]"], {"init.patterns": ["[ab]"]}),  # of fnmatch
        (["--init.patterns", "[]"], {"init.patterns": []}),
        (["--init.patterns"], {"init.patterns": []}),
        (["--optimizer.betas", "none"], {"optimizer.betas": "none"}),
        (["--optimizer.betas", "0.9", ".95"], {"optimizer.betas": [0.9, 0.95]}),
        (
            ["--data.sources.text.text.ignore_keys", "a", "b"],
            {"data.sources.text.text.ignore_keys": ["a", "b"]},
        ),
        (["--optimizer.betas", "[0.9, 0.95]"], {"optimizer.betas": [0.9, 0.95]}),
        (["--slurm.sbatch_options", '["--qos=x"]'], {"slurm.sbatch_options": ["--qos=x"]}),
        (["--sample.prompt", "[1, 2]"], {"sample.prompt": "[1, 2]"}),
        (["--data.sources.text.path", "[a, b]"], {"data.sources.text.path": "[a, b]"}),
        (
            ["--optimizer.groups.emb.patterns", '["a"]', "--optimizer.groups.emb.lr-multiplier=0"],
            {"optimizer.groups.emb.patterns": ["a"], "optimizer.groups.emb.lr_multiplier": 0.0},
        ),
    ],
)
def test_a_list_is_words_or_one_list_of_toml(args: list[str], wanted: dict[str, Any]) -> None:
    assert parse(*args) == wanted


@pytest.mark.parametrize("text", ["[a,b]", "['a', b]"])
def test_a_list_whose_quotes_the_shell_took_is_no_pattern(text: str) -> None:
    assert_problem(rejected("--init.patterns", text), "init.patterns", text, "type")


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("callbacks.mine.name", "lab:Mine", "lab:Mine"),
        ("callbacks.mine.every_steps", "3", 3),
        ("metrics.sinks.own.name", "tensorboard", "tensorboard"),
        ("train.stages.late.start_step", "7", 7),
        ("model.layer_types.local.window", "8", 8),
        ("data.sources.other.path", "x", "x"),
        ("optimizer.groups.emb.muon", "false", False),
        ("optimizer.muon.momentum", "0.9", 0.9),
        ("optimizer.ema.decay", "0.9", 0.9),
        ("schedule.wsd.decay_steps", "5", 5),
        ("train.steps", "007", 7),
        ("train.steps", "none", "none"),
        ("train.max_grad_norm", "5.", 5.0),
        ("parallel.dp_shard", "-1", -1),
        ("slurm.nodes", "2", 2),
        ("slurm.nodes", "1-4", "1-4"),
        ("slurm.time_limit", "01:00:00", "01:00:00"),
        ("sample.prompt", "5", "5"),
        ("sample.prompt", '"a"', '"a"'),
        ("run.dir", "a=b", "a=b"),
        ("parallel.pp_schedule", "1f1b", "1f1b"),
    ],
)
def test_a_flag_needs_no_table_in_the_file(key: str, text: str, value: Any) -> None:
    for values in (FILE, {}):
        assert parse(f"--{key}", text, values=values) == {key: value}
    assert "callbacks" not in FILE, "the file's values changed"


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("optimizer.options.rate", "0.5", 0.5),
        ("optimizer.options.word", "fast", "fast"),
        ("callbacks.mine.options.Every-So", "[1, 2]", [1, 2]),
        ("model.norm_options.a.b", "true", True),
        ("slurm.environment.OMP_NUM_THREADS", "1", "1"),
        ("train.stages.late.lr_multipliers.emb", "0.5", 0.5),
        ("resilience.watch.limits.save", "9", 9),
    ],
)
def test_a_key_of_a_free_table_is_a_flag(key: str, text: str, value: Any) -> None:
    assert parse(f"--{key}={text}") == {key: value}


def test_a_free_table_may_be_none() -> None:
    assert_problem(rejected("--optimizer.options", "1"), "optimizer.options", 1, "table")


@pytest.mark.parametrize(
    ("flag", "text", "key", "value", "code"),
    [
        ("--callbacks.mine.nam", "a", "callbacks.mine.nam", ..., "unknown_key"),
        ("--init.pat", '["a"]', "init.pat", ..., "unknown_key"),
        ("--trian.steps", "3", "trian", ..., "unknown_key"),
        ("--callbacks.0.name", "a", "callbacks", "0", "name"),
        ("--callbacks.class.name", "a", "callbacks", "class", "name"),
        ("--train.global_batch", "none", "train.global_batch", "none", "type"),
        ("--train.global_batch", "1.9", "train.global_batch", 1.9, "type"),
        ("--metrics.tensorboard", "True", "metrics.tensorboard", "True", "type"),
        ("--optimizer.betas", "0.9", "optimizer.betas", [0.9], "length"),
        ("--optimizer.muon", "3", "optimizer.muon", 3, "table"),
    ],
)
def test_a_flag_is_rejected_as_the_key_of_a_file(
    flag: str, text: str, key: str, value: Any, code: str
) -> None:
    assert_problem(rejected(flag, text), key, value, code)


@pytest.mark.parametrize("args", [["--train.steps"], ["--train.steps", "--run.dir", "a"]])
def test_a_flag_has_a_value(args: list[str]) -> None:
    with rejects("train.steps", ..., "missing", ConfigError):
        parse(*args)


def test_the_types_of_keys_follow_a_model_that_a_flag_names() -> None:
    wanted = {"model.name": "lab:build", "model.args.width": 5}
    assert parse("--model.name", "lab:build", "--model.args.width", "5") == wanted


def test_arguments_of_no_key_are_left() -> None:
    args = ["--train.steps", "3", "4", "--plot=a.b", "--run.dir=c", "-h"]
    assert add_flags(Layers(), args) == ["4", "--plot=a.b", "-h"]


@dataclass(frozen=True)
class Own:
    output: Path | None = None


def test_F149_a_tilde_is_expanded_in_paths_of_flags_and_not_in_texts(monkeypatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    rest = add_flags(layers := Layers(), ["--output=~/[a]", "--sample.prompt=~/x"])
    assert parse_arguments(Own, rest, "run", "") == Own(Path("/home/ada/[a]"))
    assert layers.values == {"sample": {"prompt": "~/x"}}


def test_F149_a_tilde_is_expanded_in_paths_of_keys(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "base.toml").write_text('[run]\ndir = "~/runs/a"')
    (tmp_path / "job.toml").write_text('extends = "~/base.toml"')
    (tmp_path / "run@5" / "checkpoints").mkdir(parents=True)
    layers = read_layers("~/job.toml")
    assert RunConfig(**layers.at("run")).dir == str(tmp_path / "runs/a")
    assert RunDirectory("~/runs/a").path == tmp_path / "runs/a"
    with rejects("init.from", "~/run@4", "not_found", where=tmp_path / "run"):
        find_source("~/run@4")
