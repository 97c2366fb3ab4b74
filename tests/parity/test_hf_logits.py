"""Forge's dense models against transformers: same weights through the maps, same logits.

Error of a tensor: max|a - b| / max|b|, fp32, bound 1e-5.
"""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from forge_ckpt.hf import to_forge, to_hf
from forge_core import RopeScaling, SamplingConfig, Transformer, generate
from forge_core.families import LLAMA, MISTRAL, QWEN2, QWEN3, Family
from forge_core.model import Attention, TokenContext

SHAPE: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "attn_implementation": "eager",
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 6.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 2.0,
    "beta_slow": 0.2,
    "truncate": True,
}
CASES: dict[str, tuple[Family, type, dict[str, Any]]] = {
    "llama": (LLAMA, LlamaConfig, {}),
    "llama_tied_biased": (
        LLAMA,
        LlamaConfig,
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "llama_rope_scaling": (LLAMA, LlamaConfig, {"rope_parameters": LLAMA3}),
    "llama_rope_linear": (
        LLAMA,
        LlamaConfig,
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "llama_yarn": (LLAMA, LlamaConfig, {"rope_parameters": YARN}),
    "llama_yarn_mscale": (
        LLAMA,
        LlamaConfig,
        {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.4}},
    ),
    "qwen3_yarn_not_truncated": (
        QWEN3,
        Qwen3Config,
        {
            "head_dim": 16,
            "rope_parameters": {**YARN, "truncate": False, "attention_factor": 1.3},
        },
    ),
    "llama_head_dim": (LLAMA, LlamaConfig, {"head_dim": 20}),
    "mistral": (MISTRAL, MistralConfig, {"sliding_window": None}),
    "mistral_window": (MISTRAL, MistralConfig, {"sliding_window": 5}),
    "qwen2": (QWEN2, Qwen2Config, {}),
    "qwen2_tied": (QWEN2, Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (QWEN3, Qwen3Config, {"head_dim": 16}),
    "qwen3_tied": (QWEN3, Qwen3Config, {"head_dim": 16, "tie_word_embeddings": True}),
}


def build(case: str) -> tuple[Family, Any, Transformer]:
    family, config_class, options = CASES[case]
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(config_class(**SHAPE, **options)).eval()
    with torch.no_grad():
        for parameter in reference.parameters():  # norms and biases off their trivial values
            parameter.add_(torch.randn_like(parameter) * 0.1)
    config = family.config_from_hf(reference.config.to_dict())
    model = Transformer(config).eval()
    model.load_state_dict(dict(to_forge(family.rows, weights(reference))))
    return family, reference, model


def weights(reference: Any) -> list[tuple[str, Tensor]]:
    """Tensors as a safetensors file has them: tied ones once."""
    return [(name, p.detach()) for name, p in reference.named_parameters()]


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("case", CASES)
def test_logits_equal(case: str) -> None:
    _, reference, model = build(case)
    tokens = torch.randint(0, 160, (2, 100), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert error(model(tokens), reference(tokens).logits) < 1e-5


@pytest.mark.parametrize("case", CASES)
def test_gradients_equal(case: str) -> None:
    family, reference, model = build(case)
    tokens = torch.randint(0, 160, (2, 40), generator=torch.Generator().manual_seed(1))
    for some in (model(tokens), reference(tokens).logits):
        torch.nn.functional.cross_entropy(some.flatten(0, 1), tokens.flatten()).backward()
    grads = [(name, p.grad) for name, p in reference.named_parameters()]
    wanted = dict(to_forge(family.rows, grads))
    for name, parameter in model.named_parameters():
        assert error(parameter.grad, wanted[name]) < 1e-5, name


@pytest.mark.parametrize("case", CASES)
def test_maps_round_trip_bit_equal(case: str) -> None:
    family, reference, model = build(case)
    back = dict(to_hf(family.rows, model.state_dict().items()))
    wanted = dict(weights(reference))
    assert back.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(back[name], tensor), name


@pytest.mark.parametrize("case", CASES)
def test_config_round_trip(case: str) -> None:
    family, reference, model = build(case)
    written = family.config_to_hf(model.config)
    assert family.config_from_hf(written) == model.config
    assert type(reference.config)(**written).rope_parameters == reference.config.rope_parameters
    config = type(reference.config)(**written, attn_implementation="eager")
    theirs = AutoModelForCausalLM.from_config(config)
    theirs.load_state_dict(reference.state_dict())
    tokens = torch.arange(60).unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(theirs.eval()(tokens).logits, reference(tokens).logits)
    old = {key: value for key, value in written.items() if key != "rope_parameters"}
    new = {
        key: value for key, value in written.items() if key not in ("rope_theta", "rope_scaling")
    }
    assert family.config_from_hf(old) == family.config_from_hf(new) == model.config


@pytest.mark.lane("test")
@pytest.mark.parametrize("case", [case for case in CASES if "yarn" in case])
@pytest.mark.parametrize("key", ["beta_fast", "beta_slow", "factor", "mscale", "truncate"])
def test_yarn_tables(case: str, key: str) -> None:
    """Those of transformers, for each key at another value too."""
    family, config_class, options = CASES[case]
    rope = options["rope_parameters"]
    other = {"mscale": 0.9, "truncate": not rope["truncate"]}.get(key, rope.get(key, 0.0) * 1.7)
    for changed in (rope, {**rope, key: other} if key in rope else rope):
        theirs = config_class(**{**SHAPE, **options, "rope_parameters": changed})
        frequencies, factor = ROPE_INIT_FUNCTIONS["yarn"](theirs)
        mixer = Attention(family.config_from_hf(theirs.to_dict()))
        positions = torch.arange(20)[None]
        tables = mixer.prepare(TokenContext(positions=positions), torch.zeros(1, 20, 48))
        angles = positions[0, :, None] * frequencies
        for got, wanted in zip(tables, (angles.cos() * factor, angles.sin() * factor)):
            assert (got[0, :, 0] - wanted).abs().max() < 20 * 2**-23


@pytest.mark.lane("test")
def test_yarn_moves_logits() -> None:
    """Each key, taken back to its default, by far more than the bound."""
    _, reference, model = build("llama_yarn_mscale")
    tokens = torch.randint(0, 160, (2, 100), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = reference(tokens).logits
        for key in ("factor", "beta_fast", "beta_slow", "mscale", "original_max_position"):
            other = 1.0 if key in ("factor", "mscale") else getattr(RopeScaling, key)
            scaling = dataclasses.replace(model.config.rope_scaling, **{key: other})
            mutant = Transformer(dataclasses.replace(model.config, rope_scaling=scaling))
            mutant.load_state_dict(model.state_dict())
            assert error(mutant(tokens), wanted) > 100 * 1e-5, key


@pytest.mark.parametrize("case", ["llama_rope_scaling", "qwen3", "llama_yarn"])
def test_greedy_generation_equal(case: str) -> None:
    _, reference, model = build(case)
    tokens = torch.randint(0, 160, (2, 9), generator=torch.Generator().manual_seed(2))
    wanted = reference.generate(tokens, max_new_tokens=16, do_sample=False)[:, 9:]
    assert torch.equal(generate(model, tokens, 16, SamplingConfig(temperature=0.0)), wanted)
