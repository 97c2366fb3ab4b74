"""forge_vlm and forge_parallel in programs of others, without the packages that these do not need."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
pytestmark = pytest.mark.lane("test")


def run(program: str, *arguments: object) -> str:
    command = [sys.executable, "-W", "ignore", HERE / program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def write_llava(folder: Path) -> None:
    """A tiny random LLaVA with its processor and a tokenizer of bytes."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    clip = {"model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 24}
    clip |= {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16, "patch_size": 8}
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2}
    text = transformers.LlamaConfig(**sizes, vocab_size=264, num_attention_heads=2)
    config = transformers.LlavaConfig(
        vision_config=clip, text_config=text.to_dict(), image_token_index=257
    )
    model = transformers.LlavaForConditionalGeneration(config)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)

    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["</s>", "<image>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    size = '{"height": 16, "width": 16}'
    pixels = f'{{"do_center_crop": true, "crop_size": {size}, "size": {{"shortest_edge": 16}}}}'
    (folder / "preprocessor_config.json").write_text(pixels)


def test_a_script_that_answers_questions_about_images(tmp_path: Path) -> None:
    write_llava(tmp_path / "llava")
    assert run("vlm_answers.py", tmp_path / "llava", tmp_path / "out") == "answers 2"


@pytest.mark.slow
@pytest.mark.distributed
def test_a_llama_on_two_ranks_is_proved_and_trains(tmp_path: Path) -> None:
    assert run("llama_ranks.py", tmp_path / "store") == "['green']"
