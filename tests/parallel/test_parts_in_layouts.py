"""Attention off its defaults, and parts of somebody else, end in each layout where one process does."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_testing.runs import Fitted, assert_close, fit_alone, fit_on_ranks, make_job

pytestmark = pytest.mark.distributed

ATTENTION = """
[model.attention]
window = 6
scale = 0.3
softcap = 2.0
"""
FUSED = """
[model.attention]
window = 6
scale = 0.3
"""
LAYERS = """
[model.layer_types.local]
window = 5
rope_theta = 100.0
[model.layer_types.nope]
rope = false
"""
PARTS = """
[model.feed_forward_options]
power = 2
[model.norm_options]
gain = 1.5
"""
NAMES = {
    "model.mixer": "RunningMean",
    "model.norm": "GainNorm",
    "model.feed_forward": "PowerOfReLU",
    "model.block": "SideBySide",
}
COMMON = {"optimizer.lr": 1e-3, "model.num_layers": 4, "model.num_heads": 4, "model.dim": 32,
          "train.micro_batch": 3, "train.steps": 4, "sample.max_new_tokens": 0,
          "metrics.console": "off"}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "softcap": (ATTENTION, {}),
    "window": (FUSED, {}),
    "layers": (LAYERS, {"model.layer_pattern": ["local", "nope", "global"]}),
    "parts": (PARTS, {key: f"forge_testing.parts:{name}" for key, name in NAMES.items()}),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp2-recomputed": {"recompute": "full"},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "cp2": {"cp": 2},
    "cp2-ring": {"cp": 2, "cp_exchange": "ring"},
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Fitted]:
    folder = tmp_path_factory.mktemp("alone")
    return {
        kind: fit_alone(make_job(folder / kind, extra), **COMMON, **more)
        for kind, (extra, more) in KINDS.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        (kind, layout)
        for kind, layout in product(KINDS, LAYOUTS)
        if kind in ("window", "layers") or "cp" not in LAYOUTS[layout]  # cp refuses the others
    ],
)
def test_a_layout_ends_where_one_process_does(
    tmp_path: Path, alone: dict[str, Fitted], kind: str, layout: str
) -> None:
    extra, more = KINDS[kind]
    options = {f"parallel.{key}": value for key, value in LAYOUTS[layout].items()}
    fitted = fit_on_ranks(2, make_job(tmp_path, extra), **COMMON, **more, **options)
    found: dict[str, torch.Tensor] = {}
    for rank in fitted:
        assert rank.problems == ()
        found.update(rank.weights)
    assert_close(found, alone[kind].weights)
