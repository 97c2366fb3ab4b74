"""Keys of a Hugging Face `config.json` that describe expert blocks, one table per family."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forge_moe._shared.hf_keys import HARMLESS, TRAINING
from forge_moe._shared.problems import Problem, invalid, raise_problems
from forge_moe.config import MoEConfig

# Fields that a family's own table does not set.
_DEFAULTS: dict[str, Any] = {
    "router": "softmax_topk",
    "normalize": "after_top_k",
    "num_groups": 1,
    "top_groups": 1,
    "route_scale": 1.0,
    "expert_bias": False,
    "activation": "swiglu",
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "router_bias": False,
    "bias": False,
    "num_shared_experts": 0,
    "shared_gate": False,
    "capacity_factor": None,
}
# Keys of other layers, which do not change the function of the block. A key that is in
# no list of this file may change it, and is refused.
_IGNORED_NAMES = """
    attention_bias aux_loss_alpha decoder_sparse_step ep_size first_k_dense_replace head_dim
    initializer_range intermediate_size kv_lora_rank max_position_embeddings max_window_layers
    mlp_only_layers model_type num_attention_heads num_hidden_layers num_key_value_heads
    num_nextn_predict_layers output_router_logits partial_rotary_factor q_lora_rank qk_head_dim
    qk_nope_head_dim qk_rope_head_dim qkv_bias rms_norm_eps rope_interleave rope_parameters
    rope_scaling rope_theta router_aux_loss_coef seq_aux tie_word_embeddings use_qk_norm
    use_sliding_window v_head_dim vocab_size
"""
_IGNORED = HARMLESS | TRAINING | set(_IGNORED_NAMES.split())
# Keys with a single supported value; None, False and empty lists count as absent.
_REQUIRED: dict[str, Any] = {"hidden_act": "silu", "moe_layer_freq": 1}
# Types of a field's key in `config.json`; all others are integers.
_TYPES: dict[str, tuple[str, tuple[type, ...]]] = {
    "normalize": ("true or false", (bool,)),
    **dict.fromkeys(("route_scale", "swiglu_alpha", "swiglu_limit"), ("a number", (int, float))),
}
_PUBLISHED = "give the published config.json"
_NORMALIZE = {True: "after_top_k", False: "before_top_k"}


@dataclass(frozen=True)
class ConfigKeys:
    """The keys of one family.

    names: key -> field of MoEConfig. fixed: fields without a key. optional: values of missing keys.
    aliases: other spelling -> key. required: keys with a single supported value. ignored: further keys that change
    nothing in the block.
    """

    model_type: str
    names: Mapping[str, str]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    optional: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    required: Mapping[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    def from_hf(self, hf: Mapping[str, Any]) -> MoEConfig:
        """MoEConfig of a `config.json` as a dict; ValueError with a line for each problem.

        Problems are another model_type (then this alone), missing keys, values of another type, and keys that
        change the function or may do so.
        """
        other = hf.get("model_type", self.model_type)
        if other != self.model_type:
            fix = f"give a config.json of {self.model_type!r}, or use the map of {other!r} if there is one"
            rule, where = "is not supported", self.model_type
            raise invalid("model_type", "mismatch", other, rule, fix, where=where)
        found = {
            **self.optional,
            **{self.aliases.get(key, key): value for key, value in hf.items()},
        }
        raise_problems(self.model_type, [*self._wrong_types(found), *self._unsupported(hf)])
        values = {name: _from_hf(key, found[key]) for key, name in self.names.items()}
        return MoEConfig(**{**_DEFAULTS, **self.fixed, **values})

    def to_hf(self, config: MoEConfig) -> dict[str, Any]:
        """The keys of `config.json` about experts; ValueError for fields without an equivalent."""
        # bias_update_rate adds a bias too, and Hugging Face only knows whether there is one.
        values = {**vars(config), "expert_bias": config.router_config.expert_bias}
        fix = "choose another family"
        problems = (
            Problem(name, "fixed", values[name], f"must be {value!r} in this family", fix)
            for name, value in {**_DEFAULTS, **self.fixed}.items()
            if name not in self.names.values() and values[name] != value
        )
        raise_problems(self.model_type, problems)
        return {
            "model_type": self.model_type,
            "hidden_act": "silu",
            **{key: _to_hf(key, values[name]) for key, name in self.names.items()},
        }

    def _wrong_types(self, found: Mapping[str, Any]) -> Iterator[Problem]:
        """A problem for each key that is missing or has a value of another type."""
        for key, name in self.names.items():
            text, types = _TYPES.get(name, ("an integer", (int,)))
            if found.get(key) is None:
                yield Problem(key, "missing", ..., "is missing", "give a complete config.json")
            elif type(found[key]) not in types:
                yield Problem(key, "type", found[key], f"must be {text}", _PUBLISHED)

    def _unsupported(self, hf: Mapping[str, Any]) -> Iterator[Problem]:
        """A problem for each key that the layer does not support, or that is unknown."""
        required = {**_REQUIRED, **self.required}
        known = _IGNORED | self.names.keys() | self.aliases.keys() | set(self.ignored)
        for key, value in hf.items():
            if key in known or value is None or value is False or value in ([], {}):
                continue
            if key == "sliding_window" and (value == 0 or hf.get("use_sliding_window") is False):
                continue
            if key == "layer_types" and isinstance(value, list) and not _other_kinds(value):
                continue
            if key not in required:
                fix = "use a model without it, or take it out of the dict if you know that nothing changes"
                rule = "is unknown and may change the function"
                yield Problem(key, "unknown_key", value, rule, fix)
            elif value != required[key]:
                fix = f"use a model with {required[key]!r}"
                yield Problem(key, "unsupported", value, "is not supported", fix)


def _other_kinds(layer_types: list[Any]) -> list[Any]:
    return [kind for kind in layer_types if kind != "full_attention"]


def _from_hf(key: str, value: Any) -> Any:
    return _NORMALIZE[bool(value)] if key == "norm_topk_prob" else value


def _to_hf(key: str, value: Any) -> Any:
    return value == "after_top_k" if key == "norm_topk_prob" else value


def every_layer(hf: Mapping[str, Any]) -> tuple[int, ...]:
    """All layers (Mixtral, OLMoE)."""
    return tuple(range(_count(hf, "num_hidden_layers", None, 1)))


def stepped_layers(hf: Mapping[str, Any]) -> tuple[int, ...]:
    """Every `decoder_sparse_step`-th layer, but none of `mlp_only_layers` (Qwen)."""
    dense, step = hf.get("mlp_only_layers") or [], _count(hf, "decoder_sparse_step", 1, 1)
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise invalid("mlp_only_layers", "type", dense, "must be a list of layers", _PUBLISHED)
    return tuple(i for i in every_layer(hf) if i not in dense and (i + 1) % step == 0)


def later_layers(hf: Mapping[str, Any]) -> tuple[int, ...]:
    """All but the first `first_k_dense_replace` (DeepSeek, GLM)."""
    default = 1 if hf.get("model_type") == GLM4_MOE.model_type else 3
    return every_layer(hf)[_count(hf, "first_k_dense_replace", default, 0) :]


def every_layer_to_hf(name: str, layers: Sequence[int], num_layers: int) -> dict[str, Any]:
    """No keys: all layers are mixtures (Mixtral, OLMoE)."""
    _refuse_layers(list(layers) != list(range(num_layers)), layers, name, "all of them")
    return {}


def stepped_layers_to_hf(name: str, layers: Sequence[int], num_layers: int) -> dict[str, Any]:
    """The dense layers by number (Qwen)."""
    dense = [i for i in range(num_layers) if i not in layers]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


def later_layers_to_hf(name: str, layers: Sequence[int], num_layers: int) -> dict[str, Any]:
    """The number of dense layers below the mixtures (DeepSeek, GLM)."""
    first = num_layers - len(layers)
    _refuse_layers(list(layers) != list(range(first, num_layers)), layers, name, "the upper ones")
    return {"first_k_dense_replace": first}


def _refuse_layers(wrong: bool, layers: Sequence[int], name: str, rule: str) -> None:
    if wrong:
        rule, fix = f"with mixtures must be {rule} in this family", "choose another family"
        raise invalid("layers", "unsupported", list(layers), rule, fix, where=name)


def _count(hf: Mapping[str, Any], key: str, default: int | None, minimum: int) -> int:
    value = hf.get(key, default)
    if type(value) is not int or not minimum <= value <= 2**16:
        rule = f"must be an integer from {minimum} to {2**16}"
        raise invalid(key, "range", value, rule, _PUBLISHED)
    return value


_SHAPE = {"hidden_size": "dim", "num_experts_per_tok": "top_k"}

MIXTRAL = ConfigKeys(
    "mixtral",
    {**_SHAPE, "intermediate_size": "hidden_dim", "num_local_experts": "num_experts"},
    aliases={"num_experts": "num_local_experts"},
)

_NORMALIZED = {**_SHAPE, "num_experts": "num_experts", "norm_topk_prob": "normalize"}
_QWEN = {**_NORMALIZED, "moe_intermediate_size": "hidden_dim"}
# Shared by Qwen2-MoE, Qwen3-MoE and OLMoE.
_NORMALIZED_OPTIONS: dict[str, Any] = {
    "optional": {"norm_topk_prob": False},
    "aliases": {"num_local_experts": "num_experts"},
}
QWEN2_MOE = ConfigKeys(
    "qwen2_moe",
    {**_QWEN, "shared_expert_intermediate_size": "shared_hidden_dim"},
    fixed={"num_shared_experts": 1, "shared_gate": True},
    **_NORMALIZED_OPTIONS,
)
QWEN3_MOE = ConfigKeys("qwen3_moe", _QWEN, **_NORMALIZED_OPTIONS)
OLMOE = ConfigKeys(
    "olmoe", {**_NORMALIZED, "intermediate_size": "hidden_dim"}, **_NORMALIZED_OPTIONS
)

_DEEPSEEK = {
    **_SHAPE,
    "moe_intermediate_size": "hidden_dim",
    "n_routed_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
    "n_group": "num_groups",
    "topk_group": "top_groups",
    "routed_scaling_factor": "route_scale",
    "norm_topk_prob": "normalize",
}
DEEPSEEK_V3 = ConfigKeys(
    "deepseek_v3",
    _DEEPSEEK,
    fixed={"router": "sigmoid_topk", "expert_bias": True, "group_score": "top2_sum"},
    aliases={"num_local_experts": "n_routed_experts"},
    required={"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
)
GLM4_MOE = ConfigKeys("glm4_moe", _DEEPSEEK, fixed=DEEPSEEK_V3.fixed, aliases=DEEPSEEK_V3.aliases)
GPT_OSS = ConfigKeys(
    "gpt_oss",
    {
        **_SHAPE,
        "intermediate_size": "hidden_dim",
        "num_local_experts": "num_experts",
        "swiglu_alpha": "swiglu_alpha",
        "swiglu_limit": "swiglu_limit",
    },
    fixed={"activation": "clamped_swiglu", "bias": True, "router_bias": True},
    # older files have them in the code alone
    optional={"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
    aliases={"num_experts": "num_local_experts"},
    ignored=("sliding_window", "layer_types", "experts_per_token", "initial_context_length"),
)
