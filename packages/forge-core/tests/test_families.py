"""Translation of config.json: what is refused by name.."""

import pytest

from forge_core import RopeScaling, TransformerConfig
from forge_core.families import LLAMA, QWEN2, QWEN3

HF = {
    "vocab_size": 8,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"model_type": "mistral"}, "model_type 'mistral'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"attention_dropout": 0.1}, r"attention_dropout 0\.1"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_type 'yarn'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_type 'linear'"),
        ({"rope_parameters": {"rope_type": "llama3", **LLAMA3}}, "needs original_max_position"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor 0\.5"),
    ],
)
def test_what_cannot_be_represented_is_refused_by_name(keys: dict, words: str) -> None:
    for family in (LLAMA, QWEN2, QWEN3):
        with pytest.raises(ValueError, match=f"{family.name}: .*{words}"):
            family.config_from_hf({**HF, **keys})


def test_all_problems_in_one_message() -> None:
    with pytest.raises(ValueError, match="vocab_size is missing") as caught:
        LLAMA.config_from_hf({"hidden_act": "relu", "rope_scaling": {"rope_type": "su"}})
    assert len(str(caught.value).splitlines()) == 8  # six keys, the activation, the rope type


def test_config_that_a_family_cannot_express_is_refused() -> None:
    with pytest.raises(ValueError, match="llama: norm 'layer_norm' must be 'rms_norm'"):
        LLAMA.config_to_hf(TransformerConfig(8, norm="layer_norm"))
    with pytest.raises(ValueError, match="qwen2: qkv_bias False must be True"):
        QWEN2.config_to_hf(TransformerConfig(8))
    with pytest.raises(ValueError, match="qwen3: qk_norm False must be True"):
        QWEN3.config_to_hf(TransformerConfig(8))
    with pytest.raises(ValueError, match="llama: o_bias True must be False"):
        LLAMA.config_to_hf(TransformerConfig(8, o_bias=True))


def test_both_forms_of_rotary_keys() -> None:
    scaling = {"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": 32}
    old = LLAMA.config_from_hf({**HF, "rope_theta": 5e5, "rope_scaling": scaling})
    new = LLAMA.config_from_hf({**HF, "rope_parameters": {"rope_theta": 5e5, **scaling}})
    assert old == new
    assert (new.rope_theta, new.rope_scaling) == (5e5, RopeScaling(8.0, 1.0, 4.0, 32))


def test_head_width_of_qwen3_is_its_own() -> None:
    assert QWEN3.config_from_hf(HF).head_dim == 128
    assert QWEN3.config_from_hf({**HF, "head_dim": 8}).head_dim is None
