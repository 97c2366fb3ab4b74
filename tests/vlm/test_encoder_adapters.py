"""Low-rank adapters of encoders: of CLIP, SigLIP and Qwen3-VL, whose own weights stay, on one rank and on two."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.vlm.qwen3_vl_folder import save, write_talks

from forge_ckpt import read_tensors
from forge_testing.runs import (
    assert_close,
    assert_same_bits,
    assert_same_rows,
    columns,
    fit_alone,
    fit_on_ranks,
    saved_tensors,
    together,
)
from forge_testing.vlm_jobs import CLIP, TRANSFORMERS, flags, write_vlm_job
from forge_train import ConfigError, Trainer, load_job
from forge_train.jobs import load_model

pytest.importorskip("transformers")
QWEN_JOB = """
[run]
dir = "RUN"
[init]
from = "HF"
[data]
seq_len = 128
[data.sources.talks]
name = "forge_vlm.data:open_source"
path = "TALKS"
[data.sources.talks.options]
template = "tokenizer"
tokenizer = "HF"
image = "<|image_pad|>"
positions = "mrope"
patch_size = 4
resolution = { name = "budget", budget = { multiple = 8, min_pixels = 64, max_pixels = 1024 } }
[train]
steps = 6
global_batch = 4
[optimizer]
lr = 1e-2
eps = 1e-4
[schedule]
name = "constant"
[parallel]
device = "cpu"
precision = "fp32"
[eval]
every_steps = 0
[metrics]
every_steps = 1
console = "off"
[sample]
max_new_tokens = 0
"""
LORA = {
    "lora.rank": 4,
    "lora.base_dtype": "fp32",
    "checkpoint.every_steps": 1,
    "checkpoint.keep_last": 9,
}
OF_TRANSFORMERS = [
    "layers.*.mixer.*_proj",
    "vision.model.encoder.*.q_proj",
    "vision.model.encoder.*.v_proj",
    "vision.model.encoder.*.fc?",
]
OF_QWEN = ["layers.*.mixer.*_proj", "vision.model.*.qkv", "vision.model.*.linear_fc?"]
PATTERNS = {"clip": OF_TRANSFORMERS, "siglip": OF_TRANSFORMERS, "qwen3_vl": OF_QWEN}
#: Linear layers of the encoder that get an adapter: of two blocks, or of three with their mergers.
COUNTS = {"clip": 2 * 4, "siglip": 2 * 4, "qwen3_vl": 3 * 3 + 3 * 2}


def qwen_job(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save(folder / "hf")
    write_talks(folder / "data/talks.jsonl")
    text = QWEN_JOB.replace("RUN", str(folder / "run")).replace("HF", str(folder / "hf"))
    path = folder / "job.toml"
    path.write_text(text.replace("TALKS", str(folder / "data/talks.jsonl")))
    return path


def job_of(name: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """A job, and its keys."""
    keys = {**LORA, "lora.patterns": PATTERNS[name]}
    if name == "qwen3_vl":
        return qwen_job(folder), keys
    model = {
        "model.vision.transformers": {**CLIP, "model_type": f"{name}_vision_model"},
        "model.vision.select_layer": [-1],  # below it adapters would learn nothing
    }
    return write_vlm_job(folder), {**TRANSFORMERS, **model, **keys, "eval.every_steps": 0}


@pytest.mark.distributed
@pytest.mark.parametrize("name", PATTERNS)
def test_an_encoder_is_tuned_by_adapters_alone(tmp_path: Path, name: str) -> None:
    alone, keys = job_of(name, tmp_path / "alone")
    many, _ = job_of(name, tmp_path / "many")
    wanted = fit_alone(alone, **keys)
    got = together(fit_on_ranks(2, many, None, **flags(keys)))
    assert_close(got, wanted.weights)
    assert_same_rows(columns(many), columns(alone))
    losses = columns(alone)["loss"]
    assert losses[-1] < losses[0]

    run = tmp_path / "alone/run"
    last, first = saved_tensors(run), saved_tensors(run, 1)
    trained = {n for n in last if n.startswith("model.") and n.rpartition(".")[2][:4] == "lora"}
    of_encoder = {n for n in trained if n.startswith("model.vision.")}
    assert len(of_encoder) == 2 * COUNTS[name]
    assert all(not torch.equal(last[n], first[n]) for n in trained)
    base = dict(read_tensors(run / "base"))
    assert base.keys() & last.keys() == set()
    for key, value in base.items():
        assert torch.equal(wanted.weights.get(key.removeprefix("model."), value), value), key

    other = tmp_path / "other"
    shutil.copytree(run, other)
    for step in range(4, 7):
        shutil.rmtree(other / f"checkpoints/step-{step:08d}")
    again = fit_alone(alone, **{**keys, "run.dir": str(other)})
    assert again.step == 6
    assert_same_bits(saved_tensors(other), last)
    assert_same_bits(dict(read_tensors(other / "base")), base)

    model, _, step = load_model(run)
    assert step == 6
    moved = dict(model.named_parameters())
    layers = {n.removeprefix("model.").rpartition(".")[0] for n in of_encoder}
    assert all(not torch.equal(moved[f"{n}.weight"], base[f"model.{n}.weight"]) for n in layers)


def test_the_base_is_that_of_the_folder(tmp_path: Path) -> None:
    """Frozen weights have the bits of the file, in the order in which transformers has them."""
    job, keys = job_of("qwen3_vl", tmp_path)
    fit_alone(job, **{**keys, "train.steps": 1})
    base = dict(read_tensors(tmp_path / "run/base"))
    theirs = save(tmp_path / "again").state_dict()
    for name, value in theirs.items():
        if name.startswith("model.visual."):
            ours = base[name.replace("model.visual.", "model.vision.model.")]
            assert torch.equal(ours, value), name


def test_what_is_no_linear_layer_is_refused(tmp_path: Path) -> None:
    job, keys = job_of("qwen3_vl", tmp_path)
    for pattern, words in (
        ("vision.model.patch_embed.*", "must match nn.Linear alone, and matches .*Conv3d"),
        ("vision.model.encoder.*.q_proj", "the nearest names are"),
    ):
        with pytest.raises(ConfigError, match=words):
            Trainer(load_job(job, {**keys, "lora.patterns": [pattern]}))
