"""model.name = "vlm" in the runner: one process, FSDP2 and HSDP, resumed, and what is refused before anything starts."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forge_core import initialize
from forge_data import Loader
from forge_testing.problems import ANY, rejects
from forge_testing.processes import forge_train
from forge_testing.runs import assert_same_bits, columns, fit_alone, fit_on_ranks, saved_tensors
from forge_testing.squares import Squares
from forge_testing.vlm_jobs import CLIP, TRANSFORMERS, flags, write_vlm_job
from forge_train import ConfigError, DataError, Trainer, load_job, load_trained
from forge_train.report.summary import sample_text
from forge_vlm import VLM

pytestmark = pytest.mark.lane("test")

#: Of each twelve rows the last six have no image: with two ranks one of them has none at all.
TEXT = {"data.sources.squares.options": {"group": 12, "text": 6}}
PARTED = {"model.fusion.name": "mixture_of_transformers"}
CROSS = {
    "model.fusion.name": "cross_attention",
    "data.sources.squares.options": {"group": 12, "text": 6, "places": 1},
}
MOMA = {"model.fusion.name": "moma", "train.micro_batch": 3}
CHOICE = {
    "eval.every_steps": 0,
    "model.fusion.moma.router": "expert_choice",
    "model.fusion.moma.gumbel_noise": 1.0,
}


@pytest.mark.slow
def test_the_answer_is_learned_from_the_image(tmp_path: Path) -> None:
    """Without squares the colours are even: the loss of answer and end stays above ln(4) / 2."""
    found = {}
    for seen in (True, False):
        job = write_vlm_job(tmp_path / str(seen))
        shown = {f"data.{of}.options": {"seen": seen} for of in ("sources.squares", "validation")}
        shown |= {f"data.validation.{k}": v for k, v in {"name": "forge_testing.squares:Squares", "split": "validation"}.items()}  # fmt: skip
        fit_alone(job, **shown, **{"train.steps": 60, "eval.every_steps": 20})
        found[seen] = [loss for loss in columns(job)["val_loss"] if loss is not None]
    assert found[True][-1] < 0.1 < 0.65 < found[False][-1]
    assert found[True] == sorted(found[True], reverse=True)


@pytest.mark.lane("quick")
@pytest.mark.parametrize("encoder", [{}, TRANSFORMERS], ids=["vit", "transformers"])
def test_initial_values_are_a_function_of_the_seed(tmp_path: Path, encoder: dict[str, Any]) -> None:
    if encoder:
        pytest.importorskip("transformers")
    states = []
    for seed in (1, 1, 2):
        trainer = Trainer(load_job(write_vlm_job(tmp_path), {**encoder, "init.seed": seed}))
        assert all(p.is_meta for p in trainer.model.parameters())
        trainer.prepare()
        states.append(dict(trainer.model.state_dict()))
    plain = VLM(trainer.config.model)
    initialize(plain, 2)
    assert_same_bits(states[0], states[1])
    assert_same_bits(states[2], dict(plain.state_dict()))
    moved = [n for n in states[0] if not torch.equal(states[0][n], states[2][n])]
    assert {"vision", "adapter", "layers"} <= {n.partition(".")[0] for n in moved}
    for name, buffer in plain.named_buffers():
        assert torch.equal(dict(trainer.model.named_buffers())[name], buffer), name


def test_ids_that_are_only_inputs_are_those_of_the_data_too(tmp_path: Path) -> None:
    job = write_vlm_job(tmp_path)
    keys = {"model.vocab_size": 14, "model.input_only_ids": 2}
    assert load_job(job, keys).config.model.vocab_size == 14
    with rejects("data.sources.squares", 15, "token_id", DataError):
        load_job(job, {**keys, "model.input_only_ids": 1})


def test_a_rank_of_two_has_no_image_at_all() -> None:
    stream = Squares(type("C", (), {"split": "train"}), group=12, text=6).stream(8, 0)
    counts = [len(next(Loader(stream, 12, rank, 2)).extras["images"].values) for rank in (0, 1)]
    assert counts == [6, 0]
    assert np.all(next(Loader(stream, 12, 1, 2)).tokens.numpy() != 2)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("encoder", [{}, TRANSFORMERS], ids=["vit", "transformers"])
def test_a_resumed_run_has_the_same_bits(tmp_path: Path, encoder: dict[str, Any]) -> None:
    if encoder:
        pytest.importorskip("transformers")
    keys = {**TEXT, **encoder, "checkpoint.every_steps": 1, "checkpoint.keep_last": 9}
    job = write_vlm_job(tmp_path)
    fit_on_ranks(2, job, None, **flags(keys))
    other = tmp_path / "other"
    (other / "checkpoints").mkdir(parents=True)
    shutil.copy(tmp_path / "run/config.toml", other)
    step = "checkpoints/step-00000002"
    shutil.copytree(tmp_path / "run" / step, other / step)
    fit_on_ranks(2, job, None, **flags({**keys, "run.dir": str(other)}))
    assert_same_bits(saved_tensors(other), saved_tensors(tmp_path / "run"))


@pytest.mark.parametrize(
    ("keys", "key", "code"),
    [
        ({**PARTED, "parallel.ep": 2}, "parallel.ep", "fusion"),
        (
            {**MOMA, "parallel.ep": 2, "model.fusion.moma.experts": {"image": 3}},
            *("parallel.ep", "divides"),
        ),
        (
            {**MOMA, "parallel.ep": 2, "model.feed_forward": "relu2"},
            *("parallel.ep", "feed_forward"),
        ),
        ({**MOMA, **CHOICE, "parallel.cp": 2}, "parallel.cp", "router"),
        ({**PARTED, "model.moe.num_experts": 4}, "model.moe.num_experts", "fusion"),
        (
            {**MOMA, "model.fusion.moma.router": "expert_choice"},
            *("model.fusion.moma.router", "evaluation"),
        ),
        ({"data.sources.squares.options": {"axes": 3}}, "model.mrope", "missing"),
        (
            {**CROSS, "parallel.pp": 2, "train.micro_batch": 3},
            *("pipeline_parts", "unsupported"),
        ),
        ({"model.vision.name": "swin"}, "model.vision.name", "unknown"),
        ({"model.vision.name": "my_lab:no"}, "model.vision.name", "import"),
        ({"model.adapter.name": "my_lab:no"}, "model.adapter.name", "import"),
        (
            {"model.vision.vit.image_sise": 3},
            *("model.vision.vit.image_sise", "unknown_key"),
        ),
        ({"model.parametrization": "mup"}, "model.parametrization", "vision"),
        (
            {"data.sources.squares.name": "builtin", "model.vocab_size": 300},
            *("model.name", "extras"),
        ),
        (
            {**TRANSFORMERS, "model.vision.transformers": {**CLIP, "hiden_size": 3}},
            *("vision.transformers.hiden_size", "unknown_key"),
        ),
    ],
    ids=str,
)
def test_jobs_that_cannot_run_are_rejected_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], key: str, code: str
) -> None:
    if "model.vision.transformers" in keys:
        pytest.importorskip("transformers")
    world = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}  # type: ignore[dict-item]
    for name, value in world.items():
        monkeypatch.setenv(name, str(value))
    with rejects(key, keys.get(key, ANY) if code != "unknown_key" else ANY, code, ConfigError):
        Trainer(load_job(write_vlm_job(tmp_path), keys))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_verbs_report_what_they_do_with_it(tmp_path: Path) -> None:
    job = write_vlm_job(tmp_path)
    explained = forge_train("explain", job)
    assert explained.code == 0, explained.err
    assert "model.vision.vit.image_size" in explained.out
    assert "model.modalities.image.first_id" in explained.out
    planned = forge_train("plan", job, "--gpus", "8")
    assert planned.code == 0, planned.err
    assert "fits" in planned.out


class Bytes(Squares):
    """The same rows under a tokenizer of bytes."""

    vocab_size = 300
    tokenizer = {"name": "byte"}  # noqa: RUF012 - never changed


@pytest.mark.lane("quick")
def test_only_text_is_continued_at_the_end_of_a_run_and_from_its_folder(tmp_path: Path) -> None:
    keys = {"data.sources.squares.name": f"{__name__}:Bytes", "train.steps": 1}
    keys |= {"sample.max_new_tokens": 4, "sample.prompt": "ab"}
    trainer = Trainer(load_job(write_vlm_job(tmp_path), keys))
    trainer.fit()
    assert sample_text(trainer).startswith("ab")
    model, _, step = load_trained(tmp_path / "run")
    assert (type(model).__name__, step) == ("VLM", 1)
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
