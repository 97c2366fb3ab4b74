"""Every shipped configuration loads (F85), is planned, and fits; some are stepped at full size.

All of them: `python scripts/step_presets.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from forge_parallel.plan import estimate_layout
from forge_train import load_job
from forge_train.build.build import build_model, freeze_groups
from forge_train.build.layout import layout_problems
from forge_train.config.schema import JobConfig

pytestmark = pytest.mark.lane("test")

ROOT = Path(__file__).parents[2]
PRESETS = sorted((ROOT / "configs" / "presets").glob("*.toml"))
MODELS = sorted((ROOT / "configs" / "models").glob("*.toml"))
NAMES = ["125m", "13b", "1b", "20m", "29b", "70b", "7b", "llava_7b", "moe_16", "moe_64", "moe_8",
         "qwen3_siglip2"]  # fmt: skip


def gpus_of(path: Path) -> int:
    return int(path.stem.rpartition("_")[2].removesuffix("gpu"))


def load(path: Path) -> JobConfig:
    return load_job(path, with_data=False).config


def test_there_is_a_preset_of_every_model_and_number_of_gpus() -> None:
    assert sorted(p.stem for p in MODELS) == NAMES
    assert {p.stem.rpartition("_")[0] for p in PRESETS} == set(NAMES)
    assert {gpus_of(p) for p in PRESETS} == {1, 4, 8, 16, 32}


def test_F175_a_preset_requests_its_gpus_from_slurm() -> None:
    for path in PRESETS:
        slurm = tomllib.loads(path.read_text())["slurm"]
        assert slurm["nodes"] * slurm["gpus_per_node"] == gpus_of(path), path
        assert slurm["gpus_per_node"] == min(gpus_of(path), 8), path
    small = {p.stem: tomllib.loads(p.read_text()) for p in (ROOT / "apps/train/configs").glob("*.toml")}  # fmt: skip
    asked = {name: table["slurm"] for name, table in small.items() if "extends" not in table}
    adapted = {name: {"gpus_per_node": 1} for name in ("chat", "qwen3_vl")}
    assert asked == adapted | {
        name: {"cpus_per_task": 2} for name in ("debug", "text", "vlm_debug")
    }


@pytest.mark.slow
@pytest.mark.lane("ci")
@pytest.mark.parametrize("path", PRESETS, ids=lambda p: p.stem)
def test_F85_a_preset_loads_and_fits_its_gpus(path: Path) -> None:
    config, gpus = load(path), gpus_of(path)
    per_node = min(gpus, 8)
    assert layout_problems(config, gpus, per_node) == []
    model = build_model(config.model, 0)
    freeze_groups(model, config)
    plan = estimate_layout(
        model,
        config.parallel,
        gpus,
        global_batch=config.train.global_batch,
        micro_batch=config.train.micro_batch,
        seq_len=config.data.seq_len,
        gpus_per_node=per_node,
    )
    assert plan.fits, f"{plan.peak / 1e9:.0f} GB"
    # the card's own name in the first line, and its estimate
    said = path.read_text(encoding="utf-8").splitlines()[0]
    assert f" {plan.peak / 1e9:.0f} GB " in said
    assert f"{plan.time.tokens_per_second:,.0f} tokens/s" in said


@pytest.mark.slow
def test_models_have_the_sizes_of_their_names() -> None:
    billions = {p.stem: sum(q.numel() for q in build_model(load(p).model, 0).parameters()) / 1e9
                for p in (ROOT / "configs" / "recipes").glob("*.toml")}  # fmt: skip
    want = {"20m": 0.0228, "125m": 0.124, "1b": 1.24, "7b": 8.03, "13b": 14.84, "29b": 29.2,
            "70b": 70.55, "moe_8": 9.23, "moe_16": 17.69, "moe_64": 16.48, "llava_7b": 7.06, "llava_7b_stage_1": 7.06,
            "qwen3_siglip2": 2.16}  # fmt: skip
    assert billions == pytest.approx(want, rel=0.01)


@pytest.mark.slow
def test_presets_step_at_full_size_under_a_fake_group() -> None:
    chosen = [
        f"configs/presets/{name}.toml" for name in ("7b_8gpu", "moe_64_8gpu", "llava_7b_8gpu")
    ]
    done = subprocess.run(
        [sys.executable, "scripts/step_presets.py", *chosen],
        cwd=ROOT, capture_output=True, text=True, timeout=1500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["ok"] for row in rows] == [True] * 3
    assert rows[0]["parameters"] == 8_030_261_248 // 8  # every dim 0 divides
