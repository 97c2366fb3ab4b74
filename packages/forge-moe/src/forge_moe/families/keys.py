"""Keys of a Hugging Face `config.json` that describe expert blocks, one table row a family."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from forge_moe.config import MoEConfig

# What every family here has; a family's own row wins.
_USUAL: dict[str, Any] = {
    "router": "softmax_topk",
    "normalize": "after_top_k",
    "num_groups": 1,
    "top_groups": 1,
    "route_scale": 1.0,
    "expert_bias": False,
    "activation": "swiglu",
    "bias": False,
    "num_shared_experts": 0,
    "shared_gate": False,
    "capacity_factor": None,
}
_NORMALIZE = {True: "after_top_k", False: "before_top_k"}


@dataclass(frozen=True)
class Keys:
    """How one family says an expert block.

    names: key there -> field here. aliases: other spellings of a key, by the key. fixed: fields that
    the family never says. optional: what a missing key means there.
    """

    model_type: str
    names: Mapping[str, str]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    optional: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)

    def from_hf(self, hf: Mapping[str, Any]) -> MoEConfig:
        """MoEConfig of a `config.json` as a dict; ValueError with a line for each problem."""
        found = {
            **self.optional,
            **{self.aliases.get(key, key): value for key, value in hf.items()},
        }
        problems = [
            f"{key} is missing; give a complete config.json"
            for key in self.names
            if found.get(key) is None
        ] + self._unlike(hf)
        if problems:
            raise ValueError("\n".join(f"{self.model_type}: {text}" for text in problems))
        said = {here: _here(there, found[there]) for there, here in self.names.items()}
        return MoEConfig(**{**_USUAL, **self.fixed, **said})

    def to_hf(self, config: MoEConfig) -> dict[str, Any]:
        """The keys of `config.json` that speak of experts; ValueError for what they cannot say."""
        # bias_update_rate brings a bias too, and only that there is one can be said there
        has = {**vars(config), "expert_bias": config.router_config.expert_bias}
        problems = [
            f"{self.model_type}: {name} {has[name]!r} must be {value!r} in this family; "
            "choose another family"
            for name, value in {**_USUAL, **self.fixed}.items()
            if name not in self.names.values() and has[name] != value
        ]
        if problems:
            raise ValueError("\n".join(problems))
        return {
            "model_type": self.model_type,
            "hidden_act": "silu",
            **{there: _there(there, has[here]) for there, here in self.names.items()},
        }

    def _unlike(self, hf: Mapping[str, Any]) -> list[str]:
        """What a configuration says that the layer cannot do."""
        other = hf.get("model_type", self.model_type)
        refused = {
            f"model_type {other!r}": other != self.model_type,
            f"hidden_act {hf.get('hidden_act')!r}": hf.get("hidden_act", "silu") != "silu",
            f"router_jitter_noise {hf.get('router_jitter_noise')}": bool(
                hf.get("router_jitter_noise")
            ),
        }
        return [
            f"{what} is not supported; use a {self.model_type} model with silu and no jitter"
            for what, broken in refused.items()
            if broken
        ]


def _here(key: str, value: Any) -> Any:
    return _NORMALIZE[bool(value)] if key == "norm_topk_prob" else value


def _there(key: str, value: Any) -> Any:
    return value == "after_top_k" if key == "norm_topk_prob" else value


def every_layer(hf: Mapping[str, Any]) -> tuple[int, ...]:
    """Sparse layers where all are."""
    return tuple(range(hf["num_hidden_layers"]))


def stepped_layers(hf: Mapping[str, Any]) -> tuple[int, ...]:
    """Every `decoder_sparse_step`-th layer, but none of `mlp_only_layers` (Qwen)."""
    dense, step = hf.get("mlp_only_layers") or (), hf.get("decoder_sparse_step", 1)
    return tuple(i for i in every_layer(hf) if i not in dense and (i + 1) % step == 0)


def later_layers(hf: Mapping[str, Any]) -> tuple[int, ...]:
    """All but the first `first_k_dense_replace` (DeepSeek)."""
    return every_layer(hf)[hf.get("first_k_dense_replace", 3) :]


_SHAPE = {"hidden_size": "dim", "num_experts_per_tok": "top_k"}

MIXTRAL = Keys(
    "mixtral",
    {**_SHAPE, "intermediate_size": "hidden_dim", "num_local_experts": "num_experts"},
    aliases={"num_experts": "num_local_experts"},
)
_QWEN = {
    **_SHAPE,
    "moe_intermediate_size": "hidden_dim",
    "num_experts": "num_experts",
    "norm_topk_prob": "normalize",
}
QWEN2_MOE = Keys(
    "qwen2_moe",
    {**_QWEN, "shared_expert_intermediate_size": "shared_hidden_dim"},
    fixed={"num_shared_experts": 1, "shared_gate": True},
    optional={"norm_topk_prob": False},
    aliases={"num_local_experts": "num_experts"},
)
QWEN3_MOE = Keys(
    "qwen3_moe",
    _QWEN,
    optional={"norm_topk_prob": False},
    aliases={"num_local_experts": "num_experts"},
)
OLMOE = Keys(
    "olmoe",
    {
        **_SHAPE,
        "intermediate_size": "hidden_dim",
        "num_experts": "num_experts",
        "norm_topk_prob": "normalize",
    },
    optional={"norm_topk_prob": False},
    aliases={"num_local_experts": "num_experts"},
)
DEEPSEEK_V3 = Keys(
    "deepseek_v3",
    {
        **_SHAPE,
        "moe_intermediate_size": "hidden_dim",
        "n_routed_experts": "num_experts",
        "n_shared_experts": "num_shared_experts",
        "n_group": "num_groups",
        "topk_group": "top_groups",
        "routed_scaling_factor": "route_scale",
        "norm_topk_prob": "normalize",
    },
    fixed={"router": "sigmoid_topk", "expert_bias": True, "group_score": "top2_sum"},
    aliases={"num_local_experts": "n_routed_experts"},
)
