"""`import` compares logits with transformers' on text of two lengths and on each modality that a family has."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.vlm.qwen3_vl_folder import save as save_qwen3_vl

from forge_ckpt.hf import BOUND
from forge_testing.problems import ANY, rejects
from forge_train.build.hf_models import read_model
from forge_train.errors import JobError
from forge_train.hf.exporting import export_run
from forge_train.hf.importing import check_logits, import_folder

pytestmark = pytest.mark.lane("test")

transformers = pytest.importorskip("transformers")

TEXT = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128},
    "pad_token_id": 0,
}
VISION = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "image_size": 32, "patch_size": 8},
}
TILES = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_global_layers": 1},
    **{"attention_heads": 4, "image_size": 16, "patch_size": 8, "vision_output_dim": 64},
    **{"intermediate_layers_indices": [0], "max_num_tiles": 3},
    "supported_aspect_ratios": [[1, 1], [1, 2], [1, 3], [2, 1], [3, 1]],
}


def saved(name: str, folder: Path, config: Any) -> None:
    torch.manual_seed(0)
    transformers.utils.logging.disable_progress_bar()
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.2)
    model.save_pretrained(folder)


def save_mllama(folder: Path) -> None:
    text = {**TEXT, "cross_attention_layers": [1]}
    config = transformers.MllamaConfig(vision_config=TILES, text_config=text, image_token_index=64)
    saved("Mllama", folder, config)


def save_smolvlm(folder: Path) -> None:
    text = {**TEXT, "model_type": "llama"}
    keys = {"vision_config": VISION, "text_config": text, "image_token_id": 63, "scale_factor": 2}
    saved("SmolVLM", folder, transformers.SmolVLMConfig(**keys))


def save_llava(folder: Path) -> None:
    vision = {**VISION, "model_type": "clip_vision_model", "num_hidden_layers": 3}
    keys = {"vision_config": vision, "text_config": {**TEXT, "model_type": "llama"}}
    saved("Llava", folder, transformers.LlavaConfig(**keys, image_token_index=63))


#: What saves a folder, and parts of the encoder that text alone does not reach.
FAMILIES: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "llava": (save_llava, ("vision.*self_attn.q_proj.weight", "adapter.linear_1.weight")),
    "smolvlm": (save_smolvlm, ("vision.*position_embedding.weight",)),
    "qwen3_vl": (
        save_qwen3_vl,
        ("vision.*pos_embed.weight", "vision.*deepstack_merger_list.1.linear_fc2.weight"),
    ),
    "mllama": (
        save_mllama,
        (
            r"vision.*post_tile_positional_embedding.embedding.weight",
            r"layers.cross_1.mixer.v_proj.weight",
        ),
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_F137_a_check_sees_each_part_of_an_encoder(name: str, tmp_path: Path) -> None:
    """`--check` of Qwen3-VL and Llama 3.2 Vision compared text only."""
    save, parts = FAMILIES[name]
    save(tmp_path)
    found = read_model(tmp_path)
    model = found.build()
    line = check_logits(model, found)
    assert float(re.findall(r"\d\.\d\de[-+]\d\d", line)[1]) < 1e-5
    assert len(re.findall(r"2 x \d+ tokens", line)) == 3
    assert "with images" in line
    tensors = model.state_dict()
    for part in parts:
        changed, *_ = [tensor for n, tensor in tensors.items() if re.fullmatch(part, n)]
        before = changed.clone()
        changed.copy_(before.roll(1, 0))
        with rejects("difference", ANY, "range", JobError, where=tmp_path) as caught:
            check_logits(model, found)
        assert caught.value.problems[0].value > BOUND
        changed.copy_(before)


def test_a_model_with_ids_after_its_vocabulary_goes_in_and_out(tmp_path: Path) -> None:
    """An export of Llama 3.2 Vision raised an error for the id of its images."""
    save_mllama(tmp_path / "hf")
    import_folder(tmp_path / "hf", tmp_path / "run", check=False)
    export_run(tmp_path / "run", tmp_path / "out")
    before, after = (dict(read_model(tmp_path / name).tensors()) for name in ("hf", "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
