"""Parts of a model by name: trained by the runner, or refused before a run directory exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from forge_testing import write_job
from forge_train import Trainer, load_job
from forge_train.errors import ConfigError

PARTS = "forge_testing.parts"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"model.mixer": f"{PARTS}:Buffered"},
            r"layers.0.mixer.decay: no init_table of a module names it; add a row",
        ),
        (
            {"model.feed_forward": f"{PARTS}:Silent"},
            r"Silent does not say its FLOPs; give it a method flops_per_token",
        ),
        (
            {"model.mixer": f"{PARTS}:RunningMean", "model.mixer_options.gian": 2.0},
            r"model.mixer_options.gian 2.0 is no option .* did you mean 'gain'",
        ),
        (
            {"model.feed_forward": f"{PARTS}:PowerOfReLU"},
            r"model.feed_forward_options lacks 'power'",
        ),
        (
            {"schedule.name": "constant", "schedule.min_lr_ratio": 0.2},
            r"schedule: min_lr_ratio 0.2 is a key of name 'cosine', and name is 'constant'",
        ),
        ({"schedule.options.x": 1}, r"schedule.options.x 1: 'cosine' is built in"),
        ({"model.norm": "rmsnorm"}, r"model: norm 'rmsnorm' is unknown; use 'rms_norm'"),
    ],
)
def test_refused_before_the_run_directory_exists(
    tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        Trainer(load_job(write_job(tmp_path), settings))
    assert not (tmp_path / "run").exists()


def test_a_later_layer_with_another_part_drops_the_options_of_the_first(tmp_path: Path) -> None:
    base = """
[model.mixer_options]
gain = 2.0
[schedule]
name = "forge_testing.parts:staircase"
options = {height = 0.5}
"""
    job = write_job(tmp_path, base)
    text = job.read_text().replace("[model]", f'[model]\nmixer = "{PARTS}:RunningMean"')
    job.write_text(text)
    kept = load_job(job).config
    assert (kept.model.mixer_options, kept.schedule.options) == ({"gain": 2.0}, {"height": 0.5})
    other = load_job(job, {"model.mixer": "attention", "schedule.name": "constant"}).config
    assert (other.model.mixer_options, other.schedule.options) == ({}, {})


def test_a_run_from_before_a_key_was_known_goes_on(tmp_path: Path) -> None:
    job, settings = write_job(tmp_path), {"schedule.name": "constant"}
    Trainer(load_job(job, {**settings, "train.steps": 3})).fit()
    written = tmp_path / "run/config.toml"
    text = written.read_text()
    old = re.sub(r"(?m)^(mixer|block) = .*\n|^\[\w+\.(\w+_)?options\]\n", "", text)
    assert len(text.splitlines()) - len(old.splitlines()) >= 8
    written.write_text(old)
    assert Trainer(load_job(job, {**settings, "train.steps": 4})).fit().step == 4
    written.write_text(old)
    again = {**settings, "train.steps": 5, "model.mixer": f"{PARTS}:RunningMean"}
    with pytest.raises(ConfigError, match=r"model.mixer was None"):
        Trainer(load_job(job, again)).fit()
    assert Trainer(load_job(written, {"train.steps": 5})).fit().step == 5
