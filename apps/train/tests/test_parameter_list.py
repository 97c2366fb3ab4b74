"""`explain --parameters`: what each parameter of the model is; and the lines of a run about adapters."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from forge_testing import write_job
from forge_train import Trainer, cli, load_job

pytestmark = pytest.mark.lane("test")

TABLES = """
[optimizer.groups.head]
patterns = ["lm_head.*"]
weight_decay = 0.5
[optimizer.groups.front]
patterns = ["embedding.*"]
lr_multiplier = 0.0
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
    lines = Trainer(load_job(write_job(tmp_path, MIXTURE), own))._adapters
    every = patterns == ["*_proj"]
    assert [int(n) for n in re.findall(r"\b\d+(?= [a-z])", lines[0])] == [
        14 if every else 8,
        *([2] * (7 if every else 4)),
    ]
    experts = "layers.*.feed_forward.experts"
    names = [f"2 {experts}.{name}_proj" for name in ("gate", "up", "down")]
    assert [all(name in line for name in names) for line in lines[1:]] == [True] * every
