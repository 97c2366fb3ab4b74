"""Dense families of transformers on odd random shapes: equal logits, and each option is seen to matter.

Every parameter is drawn, norms and biases too, so that no option hides behind its initial value. Error:
max|a - b| / max|b|, fp32, bound 1e-5. A mutant is the same model with one option of its config back at the
default: it must miss the bound by a factor of 100, or the comparison could not tell that the option is there.
"""

from collections.abc import Iterator
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from forge_ckpt.hf import to_forge, to_hf
from forge_core import SamplingConfig, Transformer, TransformerConfig, generate
from forge_core.families import Family, find_family

BOUND = 1e-5
SEEDS = (0, 1, 2)
ROPE = {"rope_type": "default", "rope_theta": 300.0}
LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 300.0, "factor": 8.0, "low_freq_factor": 1.0},
    **{"high_freq_factor": 4.0, "original_max_position_embeddings": 16},
}
LINEAR = {"rope_type": "linear", "rope_theta": 300.0, "factor": 4.0}
BIASED = {"attention_bias": True, "mlp_bias": True}
NEAR, FAR = "sliding_attention", "full_attention"
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": LLAMA3, **BIASED}),
    "mistral": ("Mistral", {"sliding_window": 5, "rope_parameters": ROPE}),
    "qwen2": ("Qwen2", {"rope_parameters": LINEAR}),
    "qwen2_windows": (
        "Qwen2",
        {
            **{"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
            "rope_parameters": ROPE,
        },
    ),
    "qwen3_windows": (
        "Qwen3",
        {
            **{"use_sliding_window": True, "sliding_window": 6, "layer_types": [NEAR, FAR, FAR]},
            "rope_parameters": ROPE,
        },
    ),
    "qwen3": ("Qwen3", {"rope_parameters": ROPE, "attention_bias": True}),
    "olmo2": ("Olmo2", {"rope_parameters": ROPE, "attention_bias": True}),
    "gemma3": (
        "Gemma3Text",
        {
            **{"sliding_window": 5, "layer_types": [NEAR, NEAR, FAR], "query_pre_attn_scalar": 17},
            **{"final_logit_softcapping": 3.0, "attention_bias": True},
            "rope_parameters": {FAR: LINEAR, NEAR: {"rope_type": "default", "rope_theta": 50.0}},
        },
    ),
    "granite": (
        "Granite",
        {
            **{"embedding_multiplier": 5.0, "logits_scaling": 49.0, "residual_multiplier": 0.3},
            **{"attention_multiplier": 0.15, "rope_parameters": ROPE, **BIASED},
        },
    ),
    "phi3": (
        "Phi3",
        {"sliding_window": 5, "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}},
    ),
    "smollm3": (
        "SmolLM3",
        {"no_rope_layers": [1, 0, 1], "rope_parameters": LINEAR, **BIASED},
    ),
    "smollm3_windows": (
        "SmolLM3",
        {
            **{"use_sliding_window": True, "sliding_window": 5, "no_rope_layers": [1, 0, 0]},
            **{"layer_types": [FAR, NEAR, FAR], "rope_parameters": ROPE},
        },
    ),
}
#: Fields that shape weights or say how training begins; the others are options.
SHAPE = (
    *("vocab_size", "dim", "num_layers", "num_heads", "num_kv_heads", "head_dim", "hidden_dim"),
    *("tie_embeddings", "init_std", "max_seq_len", "qk_norm_over", "layer_types", "attention"),
)


def shape_of(seed: int, whole: bool) -> dict[str, Any]:
    """Sizes that share few factors: grouped heads, a head width that is not hidden_size / heads.

    `whole`: whole heads turn, else half of one must be even.
    """
    draw = Random(seed)
    groups, kv_heads = draw.choice((1, 2, 3)), draw.choice((1, 3))
    return {
        "vocab_size": draw.choice((97, 101, 131)),
        "hidden_size": groups * kv_heads * draw.choice((5, 7)),
        "intermediate_size": draw.choice((37, 53)),
        "num_hidden_layers": 3,
        "num_attention_heads": groups * kv_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": draw.choice((6, 10, 14)) if whole else draw.choice((4, 8, 12)),
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-2,
        "tie_word_embeddings": draw.choice((True, False)),
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        "attn_implementation": "eager",
    }


@cache
def built(case: str, seed: int) -> tuple[Family, Any, TransformerConfig, dict[str, Tensor]]:
    """The family, transformers' model with drawn parameters, our config, and its tensors under our names."""
    name, options = CASES[case]
    config_class = getattr(transformers, f"{name}Config")
    config = config_class(**{**shape_of(seed, case != "phi3"), **options})
    reference = transformers.AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in reference.parameters():
            drawn = torch.randn(p.shape, generator=generator)
            p.copy_(drawn * p.size(-1) ** -0.5 if p.dim() == 2 else p + 0.3 * drawn)
    hf = reference.config.to_dict()
    family = find_family(hf)
    own = family.config_from_hf(hf)
    return family, reference, own, dict(to_forge(family.rows_of(own), tensors(reference)))


def tensors(model: Any) -> list[tuple[str, Tensor]]:
    return [(name, p.detach()) for name, p in model.named_parameters()]


def ours(case: str, seed: int, config: TransformerConfig | None = None) -> Transformer:
    """Our model; of another config with those weights that it has a place for."""
    _, _, own, state = built(case, seed)
    model = Transformer(config or own).eval()
    model.load_state_dict(state, strict=config is None)
    return model


def tokens_of(seed: int, config: TransformerConfig, size: int = 33) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, config.vocab_size, (2, size), generator=generator)


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_logits_equal(case: str, seed: int) -> None:
    _, reference, config, _ = built(case, seed)
    tokens = tokens_of(seed, config)
    assert error(ours(case, seed)(tokens), reference(tokens).logits) < BOUND


@pytest.mark.parametrize("case", CASES)
def test_gradients_equal(case: str) -> None:
    family, reference, config, _ = built(case, 2)
    model, tokens = ours(case, 2), tokens_of(2, config)
    for some in (model(tokens), reference(tokens).logits):
        torch.nn.functional.cross_entropy(some.flatten(0, 1), tokens.flatten()).backward()
    grads = [(name, p.grad) for name, p in reference.named_parameters()]
    reference.zero_grad()
    wanted = dict(to_forge(family.rows_of(config), grads))
    for name, parameter in model.named_parameters():
        if wanted[name].abs().max() < 1e-7:  # keys that do not turn: a bias moves all scores alike
            assert parameter.grad.abs().max() < 1e-7, name
        else:
            assert error(parameter.grad, wanted[name]) < BOUND, name


def mutants(config: TransformerConfig) -> Iterator[tuple[str, TransformerConfig]]:
    """The config with one option at its default, for each option that is not."""
    for f in fields(config):
        default = f.default
        if f.name in SHAPE or f.name.endswith("_options") or getattr(config, f.name) == default:
            continue
        also = {"layer_types": {}} if f.name == "layer_pattern" else {}
        also |= {"qk_norm_over": "head"} if f.name == "qk_norm" else {}
        yield f.name, replace(config, **{f.name: default, **also})
    for key in config.attention.beyond(()):
        plain = type(config.attention)
        spec = replace(config.attention, **{key: getattr(plain(), key)})
        yield f"attention.{key}", replace(config, attention=spec)
    for name, kind in config.layer_types.items():
        for f in fields(kind):
            if getattr(kind, f.name) == f.default:
                continue
            try:
                types = {**config.layer_types, name: replace(kind, **{f.name: f.default})}
                yield f"{name}.{f.name}", replace(config, layer_types=types)
            except ValueError:  # nothing else is of its own: it is global
                pattern = tuple("global" if n == name else n for n in config.layer_pattern)
                types = {n: k for n, k in config.layer_types.items() if n != name}
                yield f"{name}.{f.name}", replace(config, layer_pattern=pattern, layer_types=types)


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_without_one_of_its_options_logits_differ(case: str) -> None:
    _, reference, config, _ = built(case, 0)
    tokens = tokens_of(0, config)
    wanted = reference(tokens).logits
    moved = {name: error(ours(case, 0, m)(tokens), wanted) for name, m in mutants(config)}
    assert len(moved) >= 3, moved
    assert min(moved.values()) > 100 * BOUND, moved


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_an_export_is_the_model_that_was_imported(case: str, seed: int, tmp_path: Path) -> None:
    """Config and weights there and back: transformers' own class computes the same bits from them."""
    family, reference, config, _ = built(case, seed)
    written = family.config_to_hf(config)
    assert family.config_from_hf(written) == config
    back = dict(to_hf(family.rows_of(config), ours(case, seed).state_dict().items()))
    wanted = dict(tensors(reference))
    assert back.keys() == wanted.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in wanted.items())
    # as transformers reads it from a file
    theirs = type(reference.config).from_dict(written, attn_implementation="eager")
    theirs.save_pretrained(tmp_path)
    theirs = type(reference.config).from_pretrained(tmp_path, attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(theirs).eval()
    model.load_state_dict(back, strict=not config.tie_embeddings)
    tokens = tokens_of(seed, config)
    assert torch.equal(model(tokens).logits, reference(tokens).logits)


@pytest.mark.parametrize(
    "case", ["gemma3", "olmo2", "granite", "smollm3_windows", "qwen2_windows", "phi3"]
)
def test_greedy_generation_equal(case: str) -> None:
    """With a cache that goes beyond the window."""
    _, reference, config, _ = built(case, 1)
    tokens = tokens_of(1, config, 7)
    wanted = reference.generate(tokens, max_new_tokens=16, do_sample=False)[:, 7:]
    assert torch.equal(generate(ours(case, 1), tokens, 16, SamplingConfig(temperature=0.0)), wanted)
