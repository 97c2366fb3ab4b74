"""`import`, `run` and `export` of models with images: what transformers opens, with the same logits."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_testing.problems import rejects
from forge_testing.runs import fit_on_ranks
from forge_testing.squares import IMAGE, SIDE
from forge_testing.vlm_jobs import CLIP, VLM_JOB
from forge_train import ConfigError, Trainer, load_job
from forge_train.hf.exporting import export_run
from forge_train.hf.importing import import_folder

pytestmark = pytest.mark.lane("test")

transformers = pytest.importorskip("transformers")
TEXT = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": 0,
}
LLAVA = {
    "text_config": TEXT,
    "vision_config": {**CLIP, "num_hidden_layers": 3},
    "image_token_index": IMAGE,
    "image_seq_length": 4,
}
SIGLIP = {**CLIP, "model_type": "siglip_vision_model"}
CASES = {
    "clip": LLAVA,
    "siglip": {
        **LLAVA,
        "text_config": {**TEXT, "model_type": "qwen2", "tie_word_embeddings": True},
        "vision_config": SIGLIP,
        "vision_feature_select_strategy": "full",
        "vision_feature_layer": -1,
    },
}
#: The job of squares without a model of its own.
JOB = VLM_JOB[: VLM_JOB.index("[model]")] + VLM_JOB[VLM_JOB.index("[data]") :]


def save(folder: Path, keys: dict[str, Any]) -> Any:
    """A LLaVA of transformers with random parameters, and its files."""
    torch.manual_seed(0)
    transformers.utils.logging.disable_progress_bar()
    model = transformers.LlavaForConditionalGeneration(transformers.LlavaConfig(**keys)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.1)
    model.save_pretrained(folder)
    return model


def logits(model: Any, name: str) -> torch.Tensor:
    tokens = torch.randint(3, 30, (2, 9), generator=torch.Generator().manual_seed(1))
    tokens[:, 2:6] = IMAGE
    images = torch.randn(2, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        out = model(tokens, **{name: images})
    return getattr(out, "logits", out)


def opened(folder: Path) -> Any:
    """The model that transformers makes of a folder, which lacks nothing and holds nothing else."""
    model, info = transformers.LlavaForConditionalGeneration.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(info.values()), info
    return model.eval()


def job(folder: Path) -> Path:
    path = folder / "job.toml"
    path.write_text(JOB.replace("RUN", str(folder / "run")))
    return path


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", CASES)
def test_a_llava_comes_in_trains_and_goes_out(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = save(tmp_path / "hf", CASES[name])
    assert import_folder(tmp_path / "hf", run_dir=tmp_path / "run", check=True) == 0
    assert re.search("tokens, .*image.*, fp32", capsys.readouterr().out)
    export_run(tmp_path / "run", tmp_path / "same", check=True)
    same = opened(tmp_path / "same")
    assert torch.equal(logits(same, "pixel_values"), logits(theirs, "pixel_values"))
    before, after = (json.loads((tmp_path / f / "config.json").read_text()) for f in ("hf", "same"))
    assert {k: v for k, v in after["text_config"].items() if k in before["text_config"]} == before["text_config"]  # fmt: skip

    ranks = fit_on_ranks(2, job(tmp_path), None, train__steps=2)
    assert {(r.step, r.problems) for r in ranks} == {(2, ())}
    export_run(tmp_path / "run", tmp_path / "out", check=True)
    trained = opened(tmp_path / "out")
    found = logits(trained, "pixel_values")
    assert (found - logits(same, "pixel_values")).abs().max() > 1e-3
    os.environ.pop("WORLD_SIZE", None)
    again = Trainer(load_job(job(tmp_path), {"run.dir": str(tmp_path / "run"), "train.steps": 3}))
    again.fit()
    assert (again.progress.step, again.config.model.name) == (3, "vlm")


@pytest.mark.slow
def test_files_of_transformers_4_and_of_a_processor_are_read(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    save(tmp_path / "hf", LLAVA)
    path = tmp_path / "hf/model.safetensors"
    tensors = safetensors.load_file(path)
    older = {
        n.replace("vision_tower.", "vision_tower.vision_model."): t for n, t in tensors.items()
    }
    safetensors.save_file(older, path)
    means = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}
    (tmp_path / "hf/preprocessor_config.json").write_text(json.dumps(means))
    import_folder(tmp_path / "hf", run_dir=tmp_path / "run")
    trainer = Trainer(load_job(job(tmp_path)))
    assert trainer.config.model.vision.mean == (0.1, 0.2, 0.3)
    assert trainer.config.model.vision.std == (0.4, 0.5, 0.6)
    export_run(tmp_path / "run", tmp_path / "out")
    assert (tmp_path / "out/preprocessor_config.json").is_file()
    opened(tmp_path / "out")


def test_models_of_no_family_are_reported(tmp_path: Path) -> None:
    save(tmp_path / "hf", LLAVA)
    import_folder(tmp_path / "hf", run_dir=tmp_path / "run")
    with rejects("model.adapter.name", "mlp", "family", ConfigError):
        export_run(tmp_path / "run", tmp_path / "out", family="smolvlm")
    with rejects("--family", "llama", "unknown", ConfigError):
        export_run(tmp_path / "run", tmp_path / "out", family="llama")
    config = json.loads((tmp_path / "hf/config.json").read_text())
    (tmp_path / "hf/config.json").write_text(json.dumps({**config, "spatial_merge": 2}))
    with rejects("spatial_merge", 2, "unknown_key", ConfigError):
        import_folder(tmp_path / "hf", run_dir=tmp_path / "other")
