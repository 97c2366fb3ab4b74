"""Tiny models with random weights, in folders as transformers saves them: guides and tests use them in place of downloads.

    python -m examples.tiny_models qwen3 Qwen3-0.6B
    python -m examples.tiny_models qwen3_vl Qwen3-VL-2B-Instruct

Nothing is written to a folder that exists, so a downloaded one stays. The tokenizer has a token for each byte, and the
special tokens and the chat template of Qwen.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")  # fmt: skip
#: Special token -> id, after the 256 bytes.
IDS = {token: 256 + i for i, token in enumerate(SPECIAL)}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "head_dim": 8,
    "eos_token_id": IDS["<|im_end|>"],
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "mrope_interleaved": True}  # fmt: skip
VISION: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 1],
}
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "merge_size": 2,
    "temporal_patch_size": 2,
}


def write_qwen3(folder: Path) -> Any:
    """Write a Qwen3 for text; return the model of transformers."""
    import transformers

    config = transformers.Qwen3Config(**TEXT)
    return _save(folder, transformers.Qwen3ForCausalLM, config)


def write_qwen3_moe(folder: Path) -> Any:
    """Write a Qwen3 with eight experts in each layer."""
    import transformers

    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = transformers.Qwen3MoeConfig(**TEXT, **experts, norm_topk_prob=True)
    return _save(folder, transformers.Qwen3MoeForCausalLM, config)


def write_qwen3_vl(folder: Path, patch: int = 16) -> Any:
    """Write a Qwen3-VL with its processor; a token of an image stands for 2 x 2 patches."""
    import transformers

    config = transformers.Qwen3VLConfig(
        text_config={**TEXT, "rope_parameters": ROPE},
        vision_config={**VISION, "patch_size": patch},
        image_token_id=IDS["<|image_pad|>"],
        video_token_id=IDS["<|video_pad|>"],
        vision_start_token_id=IDS["<|vision_start|>"],
        vision_end_token_id=IDS["<|vision_end|>"],
    )
    model = _save(folder, transformers.Qwen3VLForConditionalGeneration, config)
    sizes = {"shortest_edge": 4 * patch**2, "longest_edge": 64 * patch**2}
    processor = {**PROCESSOR, "patch_size": patch, "size": sizes}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return model


KINDS = {"qwen3": write_qwen3, "qwen3_moe": write_qwen3_moe, "qwen3_vl": write_qwen3_vl}


def _save(folder: Path, kind: Any, config: Any) -> Any:
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    model = kind(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # ones and zeros would hide what they do
            parameter.normal_(0.0, 0.1)
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return model


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(SPECIAL))
    ends = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, chat_template=TEMPLATE, **ends)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    if not arguments.folder.exists():
        KINDS[arguments.kind](arguments.folder)
