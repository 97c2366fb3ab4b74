"""`from_pretrained` and `save_pretrained` next to the verb `import` and to transformers: tiny random models."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import forge_train
from forge_core import Transformer, TransformerConfig
from forge_parallel import ParallelConfig
from forge_testing import run_on_ranks
from forge_testing.problems import ANY, rejects
from forge_train import ConfigError
from forge_train.build.hf_models import read_model
from forge_vlm import VLM

pytestmark = pytest.mark.lane("test")

TEXT: dict[str, Any] = {
    **{"vocab_size": 96, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
    "pad_token_id": None,
}
DECODERS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "Gemma3Text": {
        **{"head_dim": 16, "query_pre_attn_scalar": 20, "sliding_window": 9},
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "Phi3": {"sliding_window": 9},
    "Olmo2": {},
}
CLIP = {
    **{"model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 24},
    **{"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16, "patch_size": 8},
}


def save(model: Any, folder: Path) -> Any:
    """Save a model of transformers whose values are spread, in shards."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.eval().save_pretrained(folder, max_shard_size="40KB")
    return model


def decoder(kind: str, folder: Path) -> Any:
    config = getattr(transformers, f"{kind}Config")(**{**TEXT, **DECODERS[kind]})
    return save(transformers.AutoModelForCausalLM.from_config(config), folder)


def llava(folder: Path) -> Any:
    text = transformers.LlamaConfig(**TEXT)
    options: dict[str, Any] = {"image_token_index": 95, "vision_feature_layer": -2}
    config = transformers.LlavaConfig(vision_config=CLIP, text_config=text.to_dict(), **options)
    theirs = save(transformers.LlavaForConditionalGeneration(config), folder)
    processor = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.4]}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return theirs


def assert_same(model: torch.nn.Module, other: torch.nn.Module) -> None:
    ours, theirs = (
        {**dict(m.named_parameters()), **dict(m.named_buffers())} for m in (model, other)
    )
    assert ours.keys() == theirs.keys()
    assert [n for n in ours if not torch.equal(ours[n], theirs[n])] == []


@pytest.mark.parametrize("kind", DECODERS)
def test_a_decoder_has_the_bits_of_an_import(kind: str, tmp_path: Path) -> None:
    theirs = decoder(kind, tmp_path / "in")
    model = Transformer.from_pretrained(tmp_path / "in")
    assert type(model) is Transformer
    assert not model.training
    assert_same(model, read_model(tmp_path / "in").build())

    tokens = torch.arange(22).view(2, 11)
    with torch.no_grad():
        wanted = theirs(tokens).logits
        assert float((model(tokens) - wanted).abs().max() / wanted.abs().max()) < 1e-5
        model.save_pretrained(tmp_path / "out")
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        assert torch.equal(again(tokens).logits, wanted)
    assert_same(model, Transformer.from_pretrained(tmp_path / "out"))


def test_a_vision_language_model_has_the_bits_of_an_import(tmp_path: Path) -> None:
    theirs = llava(tmp_path / "in")
    model = VLM.from_pretrained(tmp_path / "in")
    assert_same(model, read_model(tmp_path / "in").build())
    assert model.config.vision.pixels[0] == (0.5, 0.4, 0.3)

    images = torch.randn(2, 3, 16, 16)
    tokens = torch.tensor([[1, 95, 95, 95, 95, 2], [95, 95, 95, 95, 3, 4]])
    with torch.no_grad():
        wanted = theirs(input_ids=tokens, pixel_values=images).logits
        found = model(tokens, images=images)
    assert float((found - wanted).abs().max() / wanted.abs().max()) < 1e-5
    model.save_pretrained(tmp_path / "out")
    again = transformers.LlavaForConditionalGeneration.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(again(input_ids=tokens, pixel_values=images).logits, wanted)
    half = VLM.from_pretrained(tmp_path / "in", dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert half(tokens, images=images).isfinite().all()


def test_dtype_and_device_are_those_of_the_parameters(tmp_path: Path) -> None:
    decoder("Llama", tmp_path)
    assert {p.dtype for p in Transformer.from_pretrained(tmp_path).parameters()} == {torch.float32}
    half = Transformer.from_pretrained(tmp_path, device="cpu", dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    half.save_pretrained(tmp_path / "half")
    config = json.loads((tmp_path / "half/config.json").read_text())
    assert (config["dtype"], config["model_type"]) == ("bfloat16", "llama")


def test_a_folder_that_does_not_fit_is_an_error_before_weights_are_read(tmp_path: Path) -> None:
    decoder("Llama", tmp_path)
    path = tmp_path / "config.json"
    hf = json.loads(path.read_text())
    for key, value, code in (
        ("model_type", "gpt2", "unknown"),
        ("model_type", "mixtral", "unknown"),
        ("hidden_act", "relu", "unsupported"),
    ):
        path.write_text(json.dumps({**hf, key: value}))
        with rejects(key, value, code):
            Transformer.from_pretrained(tmp_path)

    index = tmp_path / "model.safetensors.index.json"
    for changed, key, code in (
        ({"num_hidden_layers": 3}, "layers.2.feed_forward.down_proj.weight", "model_only"),
        ({"num_hidden_layers": 1}, "layers.1.feed_forward.down_proj.weight", "file_only"),
        ({"intermediate_size": 48}, "layers.0.feed_forward.down_proj.weight", "shape"),
    ):
        path.write_text(json.dumps({**hf, **changed}))
        with rejects(key, ANY, code):
            Transformer.from_pretrained(tmp_path)
    path.write_text(json.dumps(hf))
    shutil.move(index, tmp_path / "elsewhere")
    with rejects("path", str(tmp_path), "missing"):
        Transformer.from_pretrained(tmp_path)


def test_a_model_that_no_family_holds_is_not_written(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"vocab_size": 32, "dim": 16, "num_layers": 1, "num_heads": 2}
    plain = Transformer(TransformerConfig(**sizes))
    plain.save_pretrained(tmp_path / "plain")
    assert json.loads((tmp_path / "plain/config.json").read_text())["model_type"] == "llama"
    with rejects("path", str(tmp_path / "plain"), "exists"):
        plain.save_pretrained(tmp_path / "plain")
    with rejects("family", "gpt2", "unknown"):
        plain.save_pretrained(tmp_path / "other", family="gpt2")
    odd = Transformer(TransformerConfig(**sizes, norm="layer_norm"))
    with rejects("norm", "layer_norm", "family"):
        odd.save_pretrained(tmp_path / "odd")
    assert not (tmp_path / "odd").exists()


def test_experts_are_read_by_forge_train(tmp_path: Path) -> None:
    config = transformers.MixtralConfig(**TEXT, num_local_experts=4)
    theirs = save(transformers.AutoModelForCausalLM.from_config(config), tmp_path)
    model = forge_train.from_pretrained(tmp_path)
    tokens: Tensor = torch.arange(22).view(2, 11)
    with torch.no_grad():
        wanted = theirs(tokens).logits
        assert float((model(tokens) - wanted).abs().max() / wanted.abs().max()) < 1e-5
    half = forge_train.from_pretrained(tmp_path, dtype=torch.bfloat16)
    dtypes = {name: p.dtype for name, p in half.named_parameters()}
    assert dtypes["embedding.weight"] == torch.bfloat16


def full_values(folder: Path, parallel: ParallelConfig, dims: dict[str, int]) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", tuple(dims.values()), mesh_dim_names=tuple(dims))
    model = forge_train.from_pretrained(folder, mesh, parallel=parallel)
    assert not model.training
    found: dict[str, Any] = model.state_dict()
    assert any(isinstance(value, DTensor) for value in found.values())
    return {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in found.items()}


@pytest.mark.distributed
@pytest.mark.parametrize(("options", "dims"), [({"ep": 2}, {"dp": 2}), ({}, {"tp": 2})])
def test_a_mesh_shards_the_same_values(
    options: dict[str, int], dims: dict[str, int], tmp_path: Path
) -> None:
    config = transformers.MixtralConfig(**TEXT, num_local_experts=4)
    save(transformers.AutoModelForCausalLM.from_config(config), tmp_path)
    wanted = forge_train.from_pretrained(tmp_path).state_dict()
    parallel: Any = ParallelConfig(precision="fp32", **options)  # type: ignore[arg-type]
    for found in run_on_ranks(2, full_values, tmp_path, parallel, dims):
        assert [n for n, v in wanted.items() if not torch.equal(found[n], v)] == []
    with rejects("parallel", ..., "excludes", ConfigError):
        forge_train.from_pretrained(tmp_path, parallel=parallel)
    with rejects("dtype", torch.float16, "unsupported", ConfigError):
        forge_train.from_pretrained(tmp_path, dtype=torch.float16)


def test_only_the_own_package_is_imported(tmp_path: Path) -> None:
    decoder("Llama", tmp_path)
    program = f"""
import sys
sys.modules.update(dict.fromkeys(["transformers", "safetensors", "numpy"]))
from forge_core import Transformer
Transformer.from_pretrained({str(tmp_path)!r})
print(sorted(n for n in sys.modules if n.startswith("forge_") and "." not in n))
"""
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == "['forge_core']\n", done.stderr
