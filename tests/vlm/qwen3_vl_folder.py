"""A tiny Qwen3-VL as transformers saves it, with random weights, tokenizer, chat template and processor; and conversations
about coloured pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

MARKS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
IDS = {mark: 256 + i for i, mark in enumerate(MARKS)}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VISION = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 1],
}
TEXT = {
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "head_dim": 8,
    "eos_token_id": IDS["<|im_end|>"],
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
}
COLOURS = {"red": (230, 30, 30), "green": (30, 200, 30), "blue": (40, 60, 240)}


def save(folder: Path, patch: int = 4) -> Any:
    """The model of transformers, and its files at `folder`; tokens of pictures are 2 * 2 patches."""
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
    config = transformers.Qwen3VLConfig(
        text_config=TEXT,
        vision_config={**VISION, "patch_size": patch},
        image_token_id=IDS["<|image_pad|>"],
        video_token_id=IDS["<|video_pad|>"],
        vision_start_token_id=IDS["<|vision_start|>"],
        vision_end_token_id=IDS["<|vision_end|>"],
    )
    torch.manual_seed(0)
    model = transformers.Qwen3VLForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # ones and zeros would hide what they do
            parameter.normal_(0.0, 0.1)
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    sizes = {"shortest_edge": 4 * patch**2, "longest_edge": 64 * patch**2}
    (folder / "preprocessor_config.json").write_text(
        json.dumps({**PROCESSOR, "patch_size": patch, "size": sizes})
    )
    return model


def _tokenizer() -> Any:
    transformers, tokenizers = map(pytest.importorskip, ("transformers", "tokenizers"))
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[])
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(list(MARKS))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=TEMPLATE,
    )


def write_talks(
    path: Path, count: int = 12, answer: bool = True, caps: tuple[int, int] = (64, 192)
) -> Path:
    """Conversations of one or two pictures of a colour; those of every third have bounds of their own."""
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    for i in range(count):
        name, colour = [*COLOURS.items()][i % len(COLOURS)]
        parts: list[dict[str, Any]] = []
        for j in range(1 + i % 2):
            Image.new("RGB", (16 + 8 * (i % 3), 24), colour).save(path.parent / f"{i}-{j}.png")
            parts.append({"type": "image", "image": f"{i}-{j}.png"})
            if i % 3 == 0:
                parts[-1] |= dict(zip(("min_pixels", "max_pixels"), caps))
        said: list[Any] = [
            {"role": "user", "content": [*parts, {"type": "text", "text": "colour?"}]}
        ]
        if answer:
            said.append({"role": "assistant", "content": name})
        lines.append(json.dumps({"messages": said}))
    path.write_text("\n".join(lines) + "\n")
    return path
