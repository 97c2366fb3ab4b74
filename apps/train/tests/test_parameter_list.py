"""`explain --parameters`: what each parameter of the model is; and the lines of a run about adapters."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from forge_core.lora import adapter_lines
from forge_testing import write_job
from forge_train import Trainer, cli, load_job, read_run

pytestmark = pytest.mark.lane("test")

TABLES = """
[optimizer.groups]
head = { patterns = ["lm_head.*"], weight_decay = 0.5 }
front = { patterns = ["embedding.*"], lr_multiplier = 0.0 }
[model.moe]
num_experts = 4
bias = true
"""


def test_F146_explain_lists_kind_decay_and_optimizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        cli.explain(
            [
                str(write_job(tmp_path, TABLES)),
                "--optimizer.name",
                "muon",
                "--model.num_layers",
                "2",
                "--parameters",
            ]
        )
        == 0
    )
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    start = next(i for i, cells in enumerate(lines) if cells[:1] == ["parameter"])
    rows = {cells[0]: [cells[1], *cells[-3:]] for cells in lines[start + 1 :]}
    experts = "layers.*.feed_forward.experts"
    assert {
        name: rows[name]
        for name in [
            f"{experts}.up_proj",
            f"{experts}.up_proj_bias",
            "lm_head.weight",
            "layers.*.mixer_norm.weight",
        ]
    } == {
        f"{experts}.up_proj": ["2", "stacked_matrix", "0.1", "muon"],
        f"{experts}.up_proj_bias": ["2", "stacked_bias", "0", "adamw"],
        "lm_head.weight": ["1", "matrix", "0.5", "adamw"],
        "layers.*.mixer_norm.weight": ["2", "norm", "0", "adamw"],
    }
    assert rows["embedding.weight"][1:] == ["embedding", "none:", "frozen"]


@pytest.mark.parametrize("how", ["resume", "fork", "fork of weights", "newer"])
def test_F146_an_older_run_lists_what_its_optimizer_does_otherwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    """Stacked biases decayed in versions whose config.toml has no key bos."""
    path = write_job(tmp_path, "[model.moe]\nnum_experts = 4\nbias = true\n")
    short = {"train.steps": 1, "sample.max_new_tokens": 0, "eval.every_steps": 0}
    Trainer(load_job(path, short)).fit()
    config = tmp_path / "run/config.toml"
    lines = config.read_text().splitlines()
    if how != "newer":
        config.write_text("\n".join(line for line in lines if not line.startswith("bos =")))
    keep = ["weights"] if how.endswith("weights") else ["weights", "optimizer"]
    fork = {
        "run.dir": str(tmp_path / "other"),
        "init.from": str(tmp_path / "run"),
        "init.keep": keep,
    }
    more = {
        **short,
        "train.steps": 2,
        "metrics.console": "plain",
        **(fork if "fork" in how else {}),
    }
    capsys.readouterr()

    Trainer(load_job(path, more)).fit()
    events = read_run(more.get("run.dir", tmp_path / "run")).events
    begin = [event for event in events if event["event"] in ("start", "resume")][-1]
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("optimizer: ")]
    assert [line.removeprefix("optimizer: ") for line in told] == begin.get("optimizer", [])
    if how in ("fork of weights", "newer"):
        assert not told
        return
    (line,) = told
    assert "layers.*.feed_forward.experts.up_proj_bias" in line
    assert "weight_decay = 0.1" in line
    Trainer(load_job(path, {**more, "train.steps": 3})).fit()
    assert "optimizer: " not in capsys.readouterr().out  # once


MIXTURE = """
[model.moe]
num_experts = 4
num_shared_experts = 1
[lora]
rank = 2
patterns = ["*_proj"]
"""


@pytest.mark.parametrize("patterns", [["*_proj"], ["*.mixer.*_proj"]])
def test_F155_a_run_counts_adapters_and_names_experts_without(
    tmp_path: Path, patterns: list[str]
) -> None:
    own = {"model.num_layers": 2, "lora.patterns": patterns}
    job = load_job(write_job(tmp_path, MIXTURE), own)
    lines = adapter_lines(Trainer(job).model, job.config.lora.patterns)
    every = patterns == ["*_proj"]
    assert [int(n) for n in re.findall(r"\b\d+(?= [a-z])", lines[0])] == [
        14 if every else 8,
        *([2] * (7 if every else 4)),
    ]
    experts = "layers.*.feed_forward.experts"
    names = [f"2 {experts}.{name}_proj" for name in ("gate", "up", "down")]
    assert [all(name in line for name in names) for line in lines[1:]] == [True] * every
