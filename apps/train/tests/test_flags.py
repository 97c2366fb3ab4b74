"""Flags of lists, of tables that the file does not have, and of free tables."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from forge_testing.problems import rejects
from forge_train.config.flags import parse_flags
from forge_train.config.init import find_source
from forge_train.config.layers import read_layers
from forge_train.config.schema import RunConfig
from forge_train.errors import ConfigError
from forge_train.trainer.run_directory import RunDirectory

pytestmark = pytest.mark.lane("test")

FILE = {"data": {"sources": {"text": {"name": "builtin"}}}}


def parse(*args: str, values: Any = FILE) -> dict[str, Any]:
    return parse_flags(values, args, "forge-train run", "")


@pytest.mark.parametrize(
    ("args", "wanted"),
    [
        (["--init.patterns", '["a.*", "!b"]'], {"init.patterns": ["a.*", "!b"]}),
        (['--init.patterns=["a.*"]'], {"init.patterns": ["a.*"]}),
        (["--init.patterns", "a.*", "!b"], {"init.patterns": ("a.*", "!b")}),
        (["--init.patterns", "[ab]"], {"init.patterns": ("[ab]",)}),  # of fnmatch
        (["--init.patterns", "[]"], {"init.patterns": []}),
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
    with rejects("--init.patterns", text, "type", ConfigError):
        parse("--init.patterns", text)


@pytest.mark.slow
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


def test_a_free_table_itself_is_none() -> None:
    with rejects("--optimizer.options", "1", "table", ConfigError):
        parse("--optimizer.options", "1")


@pytest.mark.slow
@pytest.mark.parametrize(
    "flag", ["--callbacks.mine.nam", "--callbacks.0.name", "--callbacks.class.name", "--init.pat"]
)
def test_unknown_flags_stay_unknown(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        parse(flag, '["a"]')
    assert flag.rpartition(".")[0] in capsys.readouterr().err


@dataclass(frozen=True)
class Own:
    output: Path | None = None


def test_F149_paths_of_flags_begin_at_home_and_texts_do_not(monkeypatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    flags = parse_flags(FILE, ["--output=~/[a]", "--sample.prompt=~/x"], "forge-train run", "", Own)
    assert flags == {"output": Path("/home/ada/[a]"), "sample.prompt": "~/x"}


def test_F149_paths_of_keys_begin_at_home(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "base.toml").write_text('[run]\ndir = "~/runs/a"')
    (tmp_path / "job.toml").write_text('extends = "~/base.toml"')
    (tmp_path / "run@5" / "checkpoints").mkdir(parents=True)
    layers = read_layers("~/job.toml")
    assert RunConfig(**layers.at("run")).dir == str(tmp_path / "runs/a")
    assert RunDirectory("~/runs/a").path == tmp_path / "runs/a"
    with rejects("init.from", "~/run@4", "not_found", where=tmp_path / "run"):
        find_source("~/run@4")
