"""Low-rank adapters of encoders: of CLIP, SigLIP and Qwen3-VL, whose own weights stay, on one rank and on two."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.vlm.file_jobs import OF_QWEN, OF_TRANSFORMERS, qwen3_vl_job, write_qwen3_vl
from tests.vlm.qwen3_vl_folder import IDS, save
from tests.vlm.test_hugging_face import JOB as LLAVA_JOB
from tests.vlm.test_hugging_face import LLAVA, logits, opened
from tests.vlm.test_hugging_face import save as save_llava

from forge_ckpt import read_tensors
from forge_testing import runs
from forge_testing.problems import rejects
from forge_testing.vlm_jobs import CLIP, TRANSFORMERS, flags, write_vlm_job
from forge_train import ConfigError, Trainer, load_job
from forge_train.build.hf_models import modules_of
from forge_train.config.model import VLMModelConfig
from forge_train.hf.exporting import export_run
from forge_train.jobs import load_model
from forge_vlm import ModalityConfig

pytestmark = pytest.mark.lane("test")

pytest.importorskip("transformers")
LORA = {
    "lora.rank": 4,
    "lora.base_dtype": "fp32",
    "checkpoint.every_steps": 1,
    "checkpoint.keep_last": 9,
}
PATTERNS = {"clip": OF_TRANSFORMERS, "siglip": OF_TRANSFORMERS, "qwen3_vl": OF_QWEN}
#: Linear layers of the encoder that get an adapter: of two blocks, or of three with their mergers.
COUNTS = {"clip": 2 * 4, "siglip": 2 * 4, "qwen3_vl": 3 * 3 + 3 * 2}


def job_of(name: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """A job, and its keys."""
    keys = {**LORA, "lora.patterns": PATTERNS[name]}
    if name == "qwen3_vl":
        write_qwen3_vl(folder)
        return qwen3_vl_job(folder, folder), keys
    model = {
        "model.vision.transformers": {**CLIP, "model_type": f"{name}_vision_model"},
        "model.vision.select_layer": [-1],  # below it adapters would learn nothing
    }
    return write_vlm_job(folder), {**TRANSFORMERS, **model, **keys, "eval.every_steps": 0}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", PATTERNS)
def test_an_encoder_is_tuned_by_only_adapters(tmp_path: Path, name: str) -> None:
    alone, keys = job_of(name, tmp_path / "alone")
    many, _ = job_of(name, tmp_path / "many")
    wanted = runs.fit_alone(alone, **keys)
    got = runs.together(runs.fit_on_ranks(2, many, None, **flags(keys)))
    runs.assert_close(got, wanted.weights)
    runs.assert_same_rows(runs.columns(many), runs.columns(alone))
    losses = runs.columns(alone)["loss"]
    assert losses[-1] < losses[0]

    run = tmp_path / "alone/run"
    last, first = runs.saved_tensors(run), runs.saved_tensors(run, 1)
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
    again = runs.fit_alone(alone, **{**keys, "run.dir": str(other)})
    assert again.step == 6
    runs.assert_same_bits(runs.saved_tensors(other), last)
    runs.assert_same_bits(dict(read_tensors(other / "base")), base)

    model, _, step = load_model(run)
    assert step == 6
    moved = dict(model.named_parameters())
    layers = {n.removeprefix("model.").rpartition(".")[0] for n in of_encoder}
    assert all(not torch.equal(moved[f"{n}.weight"], base[f"model.{n}.weight"]) for n in layers)


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_the_base_is_that_of_the_folder(tmp_path: Path) -> None:
    """Frozen weights have the bits of the file, in the order in which transformers has them."""
    job, keys = job_of("qwen3_vl", tmp_path)
    runs.fit_alone(job, **{**keys, "train.steps": 1})
    base = dict(read_tensors(tmp_path / "run/base"))
    theirs = save(tmp_path / "again").state_dict()
    for name, value in theirs.items():
        if name.startswith("model.visual."):
            ours = base[name.replace("model.visual.", "model.vision.model.")]
            assert torch.equal(ours, value), name


def test_modules_that_are_no_linear_layer_are_rejected(tmp_path: Path) -> None:
    job, keys = job_of("qwen3_vl", tmp_path)
    for pattern, code in (
        ("vision.model.patch_embed.*", "type"),
        ("vision.model.encoder.*.q_proj", None),
    ):
        with rejects("lora.patterns", pattern, code, ConfigError):
            Trainer(load_job(job, {**keys, "lora.patterns": [pattern]}))


def pixels_of() -> tuple[torch.Tensor, dict[str, Any], dict[str, Any]]:
    """Tokens of two pictures and text, and the media as Forge and as transformers takes them."""
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 250, (1, 12), generator=draw)
    tokens[0, 2:6] = IDS["<|image_pad|>"]
    patches, grids = torch.randn(16, 96, generator=draw), torch.tensor([[1, 4, 4]])
    theirs = {
        "pixel_values": patches,
        "image_grid_thw": grids,
        "mm_token_type_ids": (tokens == IDS["<|image_pad|>"]).int(),
    }
    return tokens, {"patches": patches, "grids": grids}, theirs


@pytest.mark.slow
def test_both_exports_are_the_trained_qwen3_vl(tmp_path: Path) -> None:
    """Merged, and as a folder of peft on the folder that it began from."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    job, keys = job_of("qwen3_vl", tmp_path)
    run = tmp_path / "run"
    runs.fit_alone(job, **keys)
    export_run(run, tmp_path / "merged", check=True)
    export_run(run, tmp_path / "adapter", adapter=True)
    load = transformers.Qwen3VLForConditionalGeneration.from_pretrained
    merged, said = load(tmp_path / "merged", output_loading_info=True)
    assert not any(said.values()), said
    plain, model = load(tmp_path / "hf"), load_model(run)[0]
    tokens, ours, theirs = pixels_of()
    with torch.no_grad():
        wanted = model(tokens, **ours)
        before = plain(tokens, **theirs).logits
        both = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter")
        for found in (merged.eval(), both.eval()):
            assert (found(tokens, **theirs).logits - wanted).abs().max() < 1e-5
    assert (before - wanted).abs().max() > 1e-2
    new = {"max_new_tokens": 5, "do_sample": False}
    both, merged = (m.generate(input_ids=tokens, **theirs, **new) for m in (both, merged))
    assert torch.equal(both, merged)


@pytest.mark.slow
def test_adapters_of_a_llava_go_to_peft(tmp_path: Path) -> None:
    """Whose modules have other names than its files."""
    peft = pytest.importorskip("peft")
    theirs = save_llava(tmp_path / "hf", LLAVA)
    path = tmp_path / "job.toml"
    path.write_text(LLAVA_JOB.replace("RUN", str(tmp_path / "run")))
    layers = ["layers.*.v_proj", "layers.*.o_proj", "vision.model.encoder.layers.0.*", "adapter.*"]
    layers += ["!*.*norm*", "!*.mlp", "!*.self_attn", "!*.*_fn"]
    keys = {"lora.patterns": layers, "optimizer.lr": 0.1}
    runs.fit_alone(path, **{**LORA, **keys, "init.from": str(tmp_path / "hf"), "train.steps": 4})
    export_run(tmp_path / "run", tmp_path / "merged")
    export_run(tmp_path / "run", tmp_path / "adapter", adapter=True)
    merged = opened(tmp_path / "merged")
    before = logits(theirs, "pixel_values")
    both = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    wanted = logits(merged, "pixel_values")
    assert (logits(both, "pixel_values") - wanted).abs().max() < 1e-5
    assert (before - wanted).abs().max() > 1e-3


def test_a_family_whose_modules_are_unknown_is_rejected() -> None:
    section = VLMModelConfig(vocab_size=8, modalities={"image": ModalityConfig(first_id=3)})
    with rejects("--family", "smolvlm", "adapter", ConfigError):
        modules_of(section, "smolvlm")
