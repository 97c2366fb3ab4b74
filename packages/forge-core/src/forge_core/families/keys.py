"""Keys of a Hugging Face `config.json` that the dense families share."""

from collections.abc import Mapping
from typing import Any

from forge_core.model.config import RopeScaling, TransformerConfig

_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)


def read_common(hf: Mapping[str, Any], model_type: str, **options: Any) -> TransformerConfig:
    """TransformerConfig of a `config.json` as a dict; `options` are the family's own fields.

    Rotary keys are read in the form of transformers 4 (`rope_theta`, `rope_scaling`) and of 5
    (`rope_parameters`). Raises ValueError with one line for each key that is missing or says
    something that Forge's transformer cannot do.
    """
    problems = [
        f"{key} is missing; give a complete config.json" for key in _REQUIRED if key not in hf
    ]
    problems += _unlike(hf, model_type) + _unlike_rope(_rope_keys(hf))
    if problems:
        raise ValueError("\n".join(f"{model_type}: {text}" for text in problems))
    rope = _rope_keys(hf)
    return TransformerConfig(
        vocab_size=hf["vocab_size"],
        dim=hf["hidden_size"],
        num_layers=hf["num_hidden_layers"],
        num_heads=hf["num_attention_heads"],
        num_kv_heads=hf.get("num_key_value_heads"),
        head_dim=_head_dim(hf),
        hidden_dim=hf["intermediate_size"],
        norm_eps=hf.get("rms_norm_eps", 1e-6),
        rope_theta=float(rope["rope_theta"]),
        rope_scaling=_scaling(rope),
        tie_embeddings=bool(hf.get("tie_word_embeddings", False)),
        init_std=hf.get("initializer_range", 0.02),
        max_seq_len=hf["max_position_embeddings"],
        **options,
    )


def _head_dim(hf: Mapping[str, Any]) -> int | None:
    """None where the width of a head is the usual one: a written default makes no other config."""
    given: int | None = hf.get("head_dim")
    usual = given is not None and given * hf["num_attention_heads"] == hf["hidden_size"]
    return None if usual else given


def write_common(
    config: TransformerConfig, model_type: str, architecture: str, wanted: Mapping[str, Any]
) -> dict[str, Any]:
    """The shared part of `config.json`, rotary keys in the forms of transformers 4 and 5.

    `wanted` are fields that the family fixes. Raises ValueError with a line for each field whose
    value the family cannot express.
    """
    fixed = {"norm": "rms_norm", "feed_forward": "swiglu", **wanted}
    problems = [
        f"{model_type}: {name} {getattr(config, name)!r} must be {value!r} in this family; "
        "choose another family"
        for name, value in fixed.items()
        if getattr(config, name) != value
    ]
    if problems:
        raise ValueError("\n".join(problems))
    scaling = _scaling_to_hf(config.rope_scaling)
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": config.resolved_hidden_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.resolved_num_kv_heads,
        "head_dim": config.resolved_head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_seq_len,
        "initializer_range": config.init_std,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {
            "rope_theta": config.rope_theta,
            **(scaling or {"rope_type": "default"}),
        },
    }


def _unlike(hf: Mapping[str, Any], model_type: str) -> list[str]:
    """What a configuration says outside rotary embedding that Forge's transformer cannot do."""
    layer_types = {kind for kind in hf.get("layer_types") or () if kind != "full_attention"}
    refused = {
        f"model_type {hf.get('model_type')!r}": hf.get("model_type", model_type) != model_type,
        f"hidden_act {hf.get('hidden_act')!r}": hf.get("hidden_act", "silu") != "silu",
        "use_sliding_window true": bool(hf.get("use_sliding_window", False)),
        f"layer_types with {', '.join(sorted(layer_types))}": bool(layer_types),
        f"attention_dropout {hf.get('attention_dropout')}": bool(hf.get("attention_dropout")),
    }
    return [
        f"{what} is not supported; use a dense {model_type} model with silu and full attention"
        for what, broken in refused.items()
        if broken
    ]


def _rope_keys(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary keys flat, those of transformers 5 before those of 4."""
    rope = {"rope_theta": hf.get("rope_theta") or 10000.0}
    rope.update(hf.get("rope_scaling") or {})
    rope.update(hf.get("rope_parameters") or {})
    rope.setdefault("rope_type", rope.get("type", "default"))
    rope.setdefault("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0))
    return rope


def _unlike_rope(rope: Mapping[str, Any]) -> list[str]:
    problems = []
    if rope["rope_type"] not in ("default", "llama3"):
        problems.append(
            f"rope_type {rope['rope_type']!r} is not supported; use 'default' or 'llama3'"
        )
    if rope["partial_rotary_factor"] != 1.0:
        problems.append(
            f"partial_rotary_factor {rope['partial_rotary_factor']} is not supported; use 1"
        )
    if rope["rope_type"] == "llama3":
        keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        missing = [key for key in keys if key not in rope]
        problems += [f"rope_type 'llama3' needs {key}; give it" for key in missing]
    return problems


def _scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    if rope["rope_type"] == "default":
        return None
    return RopeScaling(
        factor=rope["factor"],
        low_freq_factor=rope["low_freq_factor"],
        high_freq_factor=rope["high_freq_factor"],
        original_max_position=rope["original_max_position_embeddings"],
    )


def _scaling_to_hf(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_position,
    }
