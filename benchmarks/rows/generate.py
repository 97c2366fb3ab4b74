"""Greedy decoding next to transformers with its dynamic and its static cache; all sides write the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from benchmarks.rows import Row, Setting
from torch import Tensor


class Decoding(NamedTuple):
    """Case: both models with the same weights, prompts (B, S), and how many tokens to write."""

    ours: Any
    theirs: Any
    prompts: Tensor
    new: int


def load_from_hf(ours: Any, theirs: Any, family: Any, layers: int) -> None:
    """Give our model the weights of a transformers model."""
    names = {
        hf.format(i=i): forge.format(i=i)
        for hf, forge, _ in family.rows
        for i in range(layers if "{i}" in hf else 1)
    }
    ours.load_state_dict({names[name]: value for name, value in theirs.state_dict().items()})


def decoding(setting: Setting, batch: int) -> Decoding:
    import transformers

    from forge_core import Transformer, families

    transformers.logging.set_verbosity_error()
    dim, layers, vocab = setting.of((256, 8, 32_000), (32, 1, 100), (2048, 16, 32_000))
    prompt, new = setting.of((64, 64), (4, 4))
    config = transformers.LlamaConfig(
        vocab_size=vocab, hidden_size=dim, intermediate_size=3 * dim, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=prompt + new,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs: Any = transformers.LlamaForCausalLM(config)
    ours = Transformer(families.LLAMA.config_from_hf(config.to_dict()))
    load_from_hf(ours, theirs, families.LLAMA, layers)
    prompts = torch.randint(1, vocab, (batch, prompt)).to(setting.device)
    dtype = setting.of(torch.float32, torch.float32, torch.bfloat16)
    ours, theirs = (m.to(setting.device, dtype).eval() for m in (ours, theirs))
    return Decoding(ours, theirs, prompts, new)


def forge(case: Decoding) -> Callable[[], Tensor]:
    from forge_core import SamplingConfig, generate

    greedy = SamplingConfig(temperature=0.0)
    return lambda: generate(case.ours, case.prompts, case.new, greedy)


def cached(kind: str) -> Callable[[Decoding], Callable[[], Tensor]]:
    """transformers' `generate` with one of its caches."""

    def make(case: Decoding) -> Callable[[], Tensor]:
        mask, length = torch.ones_like(case.prompts), case.prompts.size(1)
        return lambda: case.theirs.generate(
            case.prompts, attention_mask=mask, cache_implementation=kind,
            max_new_tokens=case.new, do_sample=False, use_cache=True,
        )[:, length:]  # fmt: skip

    return make


ROWS = [
    Row(
        f"generate-batch{batch}", decoding,
        {"forge": forge, "dynamic": cached("dynamic"), "static": cached("static")},
        "dim 256, 8 layers, V 32,000, fp32, 64 tokens after prompts of 64 (h100: dim 2,048, 16 layers, bf16); transformers' "
        "generate, SDPA, greedy, with its dynamic and static cache",
        {"batch": batch}, {"static": 0.98}, tolerance=0.0 if batch == 1 else None,
    )
    for batch in (1, 8)
]  # fmt: skip
