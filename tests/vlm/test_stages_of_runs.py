"""LLaVA's stages in the runner: the adapter alone, then the text model beside it; killed inside each and resumed."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_core import initialize
from forge_testing import runs
from forge_testing.problems import rejects
from forge_testing.processes import start
from forge_testing.vlm_jobs import TRANSFORMERS, flags, write_vlm_job
from forge_train import Callback, ConfigError, Trainer, load_job, read_run
from forge_vlm import VLM

pytestmark = pytest.mark.lane("test")

STAGES = """
[optimizer.groups]
vision = { patterns = ["vision.*"], lr_multiplier = 0.0 }
text = { patterns = ["embedding.*", "layers.*", "norm.*", "lm_head.*"], lr_multiplier = 0.0 }
[train.stages]
whole = { start_step = 4, lr_multipliers = { text = 0.1 } }
"""
SAVED = {"checkpoint.every_steps": 1, "checkpoint.keep_last": 9}
TEXT = {"data.sources.squares.options": {"group": 12, "text": 6}}


def moved(run: Path, before: int, after: int) -> set[str]:
    """First words of the weights that differ between two checkpoints."""
    one, two = runs.saved_tensors(run, before), runs.saved_tensors(run, after)
    names = [n for n in one if n.startswith("model.") and not torch.equal(one[n], two[n])]
    return {name.split(".")[1] for name in names}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("encoder", [{}, TRANSFORMERS], ids=["vit", "transformers"])
@pytest.mark.parametrize("world", [1, 2])
def test_F69_each_stage_trains_its_part_and_resumes_with_the_same_bits(
    tmp_path: Path, world: int, encoder: dict[str, Any]
) -> None:
    if encoder:
        pytest.importorskip("transformers")
    keys = {**SAVED, **TEXT, **encoder}
    job, run = write_vlm_job(tmp_path, STAGES), tmp_path / "run"
    ran = runs.fit_on_ranks(world, job, None, **flags(keys))
    assert {(r.code, r.step) for r in ran} == {(0, 6)}
    assert moved(run, 1, 3) == {"adapter"}
    assert moved(run, 3, 6) == {"adapter", "embedding", "layers", "norm", "lm_head"}
    assert not [n for n in runs.saved_tensors(run) if "vision" in n and not n.startswith("model.")]
    for step in (2, 5):
        other = tmp_path / f"from{step}"
        (other / "checkpoints").mkdir(parents=True)
        shutil.copy(run / "config.toml", other)
        shutil.copytree(
            run / f"checkpoints/step-{step:08d}", other / f"checkpoints/step-{step:08d}"
        )
        again = runs.fit_on_ranks(world, job, None, **flags({**keys, "run.dir": str(other)}))
        assert {r.problems for r in again} == {()}
        assert read_run(other).events[0]["event"] == "resume"
        runs.assert_same_bits(runs.saved_tensors(other), runs.saved_tensors(run))


#: LLaVA's third stage: the encoder too, at a tenth of the rate.
THIRD = """
[train.stages.encoder]
start_step = 6
lr_multipliers = { vision = 0.1, text = 1.0 }
"""


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("world", [1, 2])
def test_the_third_stage_trains_the_encoder_and_resumes_with_the_same_bits(
    tmp_path: Path, world: int
) -> None:
    """Resumed before it, at its first step and inside, where the encoder has moments."""
    keys = {**SAVED, **TEXT, "train.steps": 8}
    job, run = write_vlm_job(tmp_path, STAGES + THIRD), tmp_path / "run"
    runs.fit_on_ranks(world, job, None, **flags(keys))
    assert "vision" not in moved(run, 1, 5)
    assert {"vision", "adapter", "layers"} <= moved(run, 5, 6)
    stages = [e["lr_multipliers"] for e in read_run(run).events if e["event"] == "stage"]
    assert stages[-1] == {"vision": 0.1, "text": 1.0}
    for step in (4, 5, 7):
        other = tmp_path / f"from{step}"
        (other / "checkpoints").mkdir(parents=True)
        shutil.copy(run / "config.toml", other)
        name = f"checkpoints/step-{step:08d}"
        shutil.copytree(run / name, other / name)
        again = runs.fit_on_ranks(world, job, None, **flags({**keys, "run.dir": str(other)}))
        assert {r.problems for r in again} == {()}
        runs.assert_same_bits(runs.saved_tensors(other), runs.saved_tensors(run))


@pytest.mark.lane("quick")
def test_F77_a_stage_at_the_first_step_holds(tmp_path: Path) -> None:
    """The multipliers of groups are those of step 1: no weight with 0 has moved after it, and those of a stage come with it."""
    job = write_vlm_job(tmp_path, STAGES)
    keys = {**SAVED, "init.seed": 2, "train.steps": 2, "train.stages.whole.start_step": 2}
    runs.fit_alone(job, **keys)
    config = load_job(job, keys).config
    start = VLM(config.model)
    initialize(start, 2)
    first, second = (runs.saved_tensors(tmp_path / "run", step) for step in (1, 2))
    names = [name for name, _ in start.named_parameters()]
    changed = {n for n in names if not torch.equal(start.get_parameter(n), first[f"model.{n}"])}
    assert {n.partition(".")[0] for n in changed} == {"adapter"}
    changed = {n for n in names if not torch.equal(first[f"model.{n}"], second[f"model.{n}"])}
    assert {n.partition(".")[0] for n in changed} >= {"adapter", "layers", "lm_head"}
    with pytest.raises(ConfigError, match="start_step 0 must"):
        load_job(job, {"train.stages.whole.start_step": 0})


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_F77_a_stage_that_starts_with_the_run_holds_from_the_first_step(tmp_path: Path) -> None:
    """Its multipliers stand in place of those of groups, as if groups had them."""
    job, other = (write_vlm_job(tmp_path / name, STAGES) for name in ("staged", "plain"))
    runs.fit_alone(job, **{"train.steps": 2, "train.stages.whole.start_step": 1})
    runs.fit_alone(
        other, **{"train.steps": 2, "train.stages": {}, "optimizer.groups.text.lr_multiplier": 0.1}
    )
    assert runs.columns(job)["loss"] == runs.columns(other)["loss"]
    mine, wanted = (runs.saved_tensors(tmp_path / name / "run") for name in ("staged", "plain"))
    weights = [name for name in wanted if name.startswith("model.")]
    runs.assert_same_bits({n: mine[n] for n in weights}, {n: wanted[n] for n in weights})


#: Of the encoder's two blocks the last one is trained, and its patches are frozen.
PARTLY = """
[optimizer.groups.frozen]
patterns = ["vision.patches.*", "vision.positions.*", "vision.layers.0.*"]
lr_multiplier = 0.0
"""


@pytest.mark.slow
@pytest.mark.distributed
def test_F78_a_partly_frozen_encoder_is_sharded_and_its_gradients_are_summed(
    tmp_path: Path,
) -> None:
    alone, many = (write_vlm_job(tmp_path / name, PARTLY) for name in ("alone", "many"))
    keys = {**SAVED, **TEXT, "model.vision.vit.num_layers": 2}
    wanted = runs.fit_alone(alone, **keys)
    got = runs.together(runs.fit_on_ranks(2, many, None, **flags(keys)))
    runs.assert_close(got, wanted.weights)
    runs.assert_same_rows(runs.columns(many), runs.columns(alone))
    one, six = (runs.saved_tensors(tmp_path / "many/run", step) for step in (1, 6))
    still = {n for n in one if ".vision." in n and torch.equal(one[n], six[n])}
    assert {n.split(".")[2] for n in still} == {"patches", "positions", "layers"}
    assert not [n for n in still if ".layers.1." in n]


@pytest.mark.slow
@pytest.mark.parametrize("step", [3, 6])
def test_a_run_that_is_killed_goes_on_with_the_same_bits(tmp_path: Path, step: int) -> None:
    """SIGKILL in each stage, behind its third step, of a process as a user starts it."""
    whole, job = (write_vlm_job(tmp_path / name, STAGES) for name in ("whole", "killed"))
    keys = {**SAVED, "checkpoint.wait": True}
    runs.fit_alone(whole, **keys)
    death = {
        "callbacks.end.name": "forge_testing.vlm_jobs:Killed",
        "callbacks.end.options.at": step,
    }
    given = {**keys, **death, "checkpoint.wait": "true"}
    process = start(
        "run", job, *(str(w) for key, value in given.items() for w in (f"--{key}", value))
    )
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    assert runs.fit_alone(job, **keys).step == 6
    (resumed,) = (e for e in read_run(tmp_path / "killed/run").events if e["event"] == "resume")
    assert resumed["step"] == step - 1
    runs.assert_same_bits(
        runs.saved_tensors(tmp_path / "killed/run"), runs.saved_tensors(tmp_path / "whole/run")
    )


def test_a_frozen_encoder_is_in_eval_mode_whenever_it_is(tmp_path: Path) -> None:
    plan = STAGES.replace("text = 0.1", "vision = 0.1")
    modes = []

    class Watch(Callback):
        def around_backward(self, step: int) -> None:
            model = self.trainer.model
            modes.append((model.training, model.vision.training))

    Trainer(load_job(write_vlm_job(tmp_path, plan)), [Watch()]).fit()
    assert modes == [(True, False)] * 3 + [(True, True)] * 3


ADAPTERS = {
    "lora.rank": 2,
    "lora.whole": ["adapter.*"],
    "lora.base_dtype": "fp32",
    "schedule.name": "constant",
}


@pytest.mark.slow
@pytest.mark.distributed
def test_low_rank_adapters_of_the_text_model_with_a_trained_adapter(tmp_path: Path) -> None:
    """The encoder and the text's own weights stay as they are; the projector learns, and so do the low-rank matrices."""
    alone, many = (write_vlm_job(tmp_path / name) for name in ("alone", "many"))
    keys = {**SAVED, **TEXT, **ADAPTERS}
    wanted = runs.fit_alone(alone, **keys)
    got = runs.together(runs.fit_on_ranks(2, many, None, **flags(keys)))
    runs.assert_close(got, wanted.weights)
    runs.assert_same_rows(runs.columns(many), runs.columns(alone))
    run = tmp_path / "many/run"
    saved = runs.saved_tensors(run)
    assert {n.split(".")[1] for n in saved if n.startswith("model.")} == {"adapter", "layers"}
    assert all("lora" in n for n in saved if n.startswith("model.layers."))
    assert moved(run, 1, 6) == {"adapter", "layers"}
    other = tmp_path / "other"
    shutil.copytree(run, other)
    for step in range(3, 7):
        shutil.rmtree(other / f"checkpoints/step-{step:08d}")
    runs.fit_on_ranks(2, many, None, **flags({**keys, "run.dir": str(other)}))
    runs.assert_same_bits(runs.saved_tensors(other), saved)


@pytest.mark.parametrize(
    ("patterns", "value", "code"),
    [
        (["adaptor.*"], "adaptor.*", "not_found"),
        (["layers.*"], "layers.0.mixer.k_proj.weight", "excludes"),
    ],
)
def test_wrong_names_of_full_weights_are_rejected(
    tmp_path: Path, patterns: list[str], value: str, code: str
) -> None:
    with rejects("lora.whole", value, code, ConfigError):
        Trainer(load_job(write_vlm_job(tmp_path), {**ADAPTERS, "lora.whole": patterns}))
