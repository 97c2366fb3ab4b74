"""Folders of Hugging Face through rows of a family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_ckpt import load_hf
from forge_ckpt.hf import save_hf
from forge_core import initialize
from forge_vlm import VLM
from forge_vlm.families import QWEN3_VL

pytestmark = pytest.mark.lane("test")

transformers = pytest.importorskip("transformers")
TEXT = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16},
    "max_position_embeddings": 64,
    "rope_parameters": {
        **{"rope_type": "default", "rope_theta": 1e4},
        **{"mrope_section": [4, 2, 2], "mrope_interleaved": True},
    },
}
VISION = {
    **{"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2},
    **{"out_hidden_size": 32, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
}


@pytest.fixture(scope="module")
def theirs() -> Any:
    config = transformers.Qwen3VLConfig(
        text_config=TEXT, vision_config=VISION, image_token_id=62, video_token_id=63
    )
    model = transformers.Qwen3VLForConditionalGeneration(config).eval()
    return model


def test_a_saved_folder_opens_and_comes_back(theirs: Any, tmp_path: Path) -> None:
    config: Any = QWEN3_VL.config_from_hf(json.loads(theirs.config.to_json_string()))
    model, rows = VLM(config), QWEN3_VL.rows_of(config)
    initialize(model, seed=3)
    files = {"config.json": json.dumps(QWEN3_VL.config_to_hf(config)).encode()}
    save_hf(tmp_path / "out", rows, model.state_dict(), files=files, max_shard_bytes=20000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    kind = transformers.Qwen3VLForConditionalGeneration
    opened, info = kind.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    tokens = torch.randint(1, 60, (2, 9))
    with torch.no_grad():
        wanted, found = opened(tokens).logits, model(tokens)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    again = VLM(config)
    load_hf(tmp_path / "out", rows, again)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters()))
