"""Jobs on files of pictures of several shapes, packed: one process, ranks, resumed, planned, refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.vlm.file_jobs import STRIP_KEYS, STRIP_OPTIONS, packed_job, write_strips

from forge_testing import runs
from forge_testing.problems import rejects
from forge_testing.processes import forge_train
from forge_testing.vlm_jobs import flags, write_vlm_job
from forge_train import ConfigError, Trainer, load_job

pytestmark = pytest.mark.lane("test")

pytest.importorskip("PIL")
FROZEN = """
[optimizer.groups.vision]
patterns = ["vision.*"]
lr_multiplier = 0.0
"""
SKIP = {"too_long": "skip"}
EIGHT = {"multiple": 8, "min_pixels": 64, "max_pixels": 288}


def strips(folder: Path, options: dict[str, Any] | None = None) -> dict[str, Any]:
    """Keys of a job on `write_strips`."""
    source = {"name": "forge_vlm.data:open_source", "path": str(write_strips(folder))}
    given = {**source, "options": {**STRIP_OPTIONS, **(options or {})}}
    return {f"data.sources.squares.{k}": v for k, v in given.items()} | STRIP_KEYS


@pytest.mark.slow
def test_the_answer_is_learned_from_images_of_any_shape(tmp_path: Path) -> None:
    job = packed_job(tmp_path)
    runs.fit_alone(job, **strips(tmp_path), **{"train.steps": 40})
    losses = runs.columns(job)["loss"]
    assert losses[-1] < 0.2 * losses[0]


@pytest.mark.slow
@pytest.mark.lane("ci")
@pytest.mark.distributed
def test_a_frozen_encoder_stays_as_it_began(tmp_path: Path) -> None:
    keys = strips(tmp_path) | {"train.steps": 2}
    job = packed_job(tmp_path, FROZEN)
    begun = Trainer(load_job(job, keys))
    begun.prepare()
    first = {n: p.detach().clone() for n, p in begun.model.named_parameters()}
    got = runs.together(runs.fit_on_ranks(2, job, None, **flags(keys)))
    moved = {n for n, p in first.items() if not (got[n] == p).all()}
    assert moved
    assert not any(n.startswith("vision.") for n in moved)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("world", [1, 2])
def test_a_resumed_run_has_the_same_bits(tmp_path: Path, world: int) -> None:
    keys = {**strips(tmp_path), "checkpoint.every_steps": 1, "checkpoint.keep_last": 9}
    job, other = packed_job(tmp_path), tmp_path / "other"
    runs.fit_on_ranks(world, job, None, **flags(keys))
    (other / "checkpoints").mkdir(parents=True)
    shutil.copy(tmp_path / "run/config.toml", other)
    step = "checkpoints/step-00000002"
    shutil.copytree(tmp_path / "run" / step, other / step)
    runs.fit_on_ranks(world, job, None, **flags({**keys, "run.dir": str(other)}))
    runs.assert_same_bits(runs.saved_tensors(other), runs.saved_tensors(tmp_path / "run"))


@pytest.mark.lane("quick")
@pytest.mark.parametrize(
    "options",
    [
        {"patch_size": 2, **SKIP},
        {"patch_time": 2},
        {"merge": 2, **SKIP, "resolution": {"name": "budget", "budget": EIGHT}},
    ],
    ids=["patch_size", "patch_time", "merge"],
)
def test_patches_of_another_encoder_are_rejected(tmp_path: Path, options: dict[str, Any]) -> None:
    key = f"data.sources.squares.options.{next(iter(options))}"
    with rejects(key, 2, "encoder", ConfigError):
        Trainer(load_job(packed_job(tmp_path), strips(tmp_path, options)))
    assert not (tmp_path / "run").exists()


def test_images_of_one_size_are_rejected(tmp_path: Path) -> None:
    """A source of `images` for an encoder of `patches`."""
    with rejects("model.name", ..., "extras", ConfigError):
        Trainer(load_job(packed_job(tmp_path)))


def test_a_flag_makes_it_of_a_vit_and_keeps_its_sizes(tmp_path: Path) -> None:
    keys = {"model.vision.name": "packed_vit", "model.vision.vit.merge": 2}
    config = load_job(write_vlm_job(tmp_path), keys).config
    assert config.model.vision == load_job(packed_job(tmp_path), keys).config.model.vision
    assert config.model.vision.vit.patch_size == 4


@pytest.mark.slow
def test_it_is_planned_at_the_size_of_the_config(tmp_path: Path) -> None:
    job = packed_job(tmp_path)
    sizes: tuple[tuple[str, ...], ...] = ((), ("--model.pixels_per_image", str(64 * 8**2)))
    said = [forge_train("plan", job, "--gpus", "8", "--json", *size) for size in sizes]
    assert [s.code for s in said] == [0, 0], said[0].err + said[1].err
    first, larger = (json.loads(s.out) for s in said)
    assert first["fits"]
    assert first != larger
