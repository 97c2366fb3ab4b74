"""Parts of a model by name: trained by the runner, or refused before a run directory exists."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forge_core import ScheduleConfig
from forge_testing import write_job
from forge_testing.problems import rejects
from forge_train import Trainer, load_job
from forge_train.build.build import build_model
from forge_train.errors import ConfigError

pytestmark = pytest.mark.lane("test")

PARTS = "forge_testing.extensions"


@pytest.mark.parametrize(
    ("settings", "key", "value", "code"),
    [
        ({"model.mixer": f"{PARTS}:Buffered"}, "layers.0.mixer.decay", ..., "missing"),
        (
            {"model.mixer": f"{PARTS}:RunningMean", "model.mixer_options.gian": 2.0},
            "model.mixer_options.gian",
            2.0,
            "unknown_key",
        ),
        (
            {"schedule.name": "wsd", "schedule.wsd.decay_steps": 1000},
            "schedule.warmup_steps",
            0,
            "overlap",
        ),
        ({"schedule.options.x": 1}, "schedule.options.x", 1, "built_in"),
        (
            {"model.attention.mask": f"{PARTS}:self_only"},
            "model.attention.mask",
            f"{PARTS}:self_only",
            "generation",
        ),
    ],
)
def test_errors_come_before_the_run_directory_exists(
    tmp_path: Path, settings: dict[str, Any], key: str, value: Any, code: str
) -> None:
    """At each moment that one is found in; all problems: packages/forge-core/tests/test_parts.py and test_schedule.py."""
    with rejects(key, value, code, ConfigError):
        Trainer(load_job(write_job(tmp_path), settings))
    assert not (tmp_path / "run").exists()


def test_F177_a_layer_that_counts_no_operations_is_built(tmp_path: Path) -> None:
    job = load_job(write_job(tmp_path), {"model.feed_forward": f"{PARTS}:FeedForwardWithoutFlops"})
    silent, dense = (
        build_model(c, 0) for c in (job.config.model, load_job(write_job(tmp_path)).config.model)
    )
    linears = [2.0 * b.feed_forward.weight.numel() for b in silent.blocks()]
    rest = dense.flops_per_token(8) - sum(b.feed_forward.flops_per_token(8) for b in dense.blocks())
    assert silent.flops_per_token(8) == rest + sum(linears)


def test_attention_over_ranks_is_rejected_by_layer_and_field(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "init_process_group", None)
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    job, settings = write_job(tmp_path), {"parallel.cp": 2, "sample.max_new_tokens": 0}
    for field, value in {
        "softcap": 2.0,
        "sinks": True,
        "mask": f"{PARTS}:self_only",
    }.items():
        with rejects(f"layers.0.mixer.attend.{field}", value, "spec", ConfigError):
            Trainer(load_job(job, {**settings, f"model.attention.{field}": value}))
    with rejects("attend", ..., "missing", ConfigError):
        Trainer(load_job(job, {**settings, "model.mixer": f"{PARTS}:RunningMean"}))
    for field, value in {"scale": 0.3, "window": 8}.items():
        Trainer(load_job(job, {**settings, f"model.attention.{field}": value}))


def test_a_later_layer_with_another_part_drops_the_options_of_the_first(tmp_path: Path) -> None:
    base = """
[model.mixer_options]
gain = 2.0
[schedule]
name = "forge_testing.extensions:half_way"
options = {height = 0.5}
"""
    job = write_job(tmp_path, base)
    text = job.read_text().replace("[model]", f'[model]\nmixer = "{PARTS}:RunningMean"')
    job.write_text(text)
    kept = load_job(job).config
    assert (kept.model.mixer_options, kept.schedule.options) == ({"gain": 2.0}, {"height": 0.5})
    other = load_job(job, {"model.mixer": "attention", "schedule.name": "constant"}).config
    assert (other.model.mixer_options, other.schedule.options) == ({}, {})


def test_a_later_layer_with_another_name_drops_the_table_of_the_first(tmp_path: Path) -> None:
    table = '[schedule]\nname = "wsd"\n[schedule.wsd]\ndecay = "linear"\ndecay_steps = 2\n'
    job = write_job(tmp_path, table)
    kept = load_job(job, {"schedule.wsd.decay_steps": 3}).config.schedule.wsd
    assert (kept.decay, kept.decay_steps) == ("linear", 3)
    assert load_job(job, {"schedule.name": "cosine"}).config.schedule == ScheduleConfig()


@pytest.mark.slow
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
    with rejects("model.mixer", f"{PARTS}:RunningMean", "fixed", ConfigError):
        Trainer(load_job(job, again)).fit()
    assert Trainer(load_job(written, {"train.steps": 5})).fit().step == 5


def test_stages_reject_an_installed_optimizer_like_one_by_import_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    point = SimpleNamespace(name="theirs", load=lambda: torch.optim.SGD)
    monkeypatch.setattr(
        "forge_core.registry.entry_points",
        lambda group: [point] if group == "forge.optimizers" else [],
    )
    settings = {"model.num_layers": 2, "parallel.pp": 2, "train.micro_batch": 2}
    for name in ("theirs", "torch.optim:SGD"):
        with rejects("parallel.pp", 2, "optimizer", ConfigError, where=name):
            Trainer(load_job(write_job(tmp_path), {**settings, "optimizer.name": name}))
