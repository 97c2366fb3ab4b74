"""Hugging Face families of expert blocks: keys of `config.json` and names of tensors, as data.

Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, DeepSeek-V3, GLM4-MoE and gpt-oss. A row is (Hugging Face pattern, Forge pattern,
operations); `{i}` stands for the layer, `{e}` for an expert. Operations come from a closed reversible set, here
`("transpose", 0, 1)`, as a linear layer of Hugging Face is (out, in) and an expert of Forge (in, out), and
`("stack_experts", E)`, as a file stores each expert separately. The code that reads checkpoints applies the rows. Rows of
attention, norms and dense layers are in forge_core.

The rows are those of checkpoint files (`save_pretrained`, the hub). In memory transformers 5 packs gate and up projection
of all experts into one tensor; no file has that form.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from forge_moe._shared.hf_keys import HARMLESS, TRAINING
from forge_moe._shared.problems import Problem, invalid, problems_of, raise_problems
from forge_moe.config import MoEConfig, MoEOptions

__all__ = [
    "DEEPSEEK_V3",
    "FAMILIES",
    "GLM4_MOE",
    "GPT_OSS",
    "LAYERS",
    "MIXTRAL",
    "OLMOE",
    "QWEN2_MOE",
    "QWEN3_MOE",
    "BlockFamily",
    "ExpertLayers",
    "LayersFamily",
]

Row = tuple[str, str, tuple[tuple[Any, ...], ...]]

# Fields that change the function; a family that has no key for one, nor a fixed value, has its default.
_FIELDS = """
    router normalize num_groups top_groups route_scale expert_bias activation swiglu_alpha swiglu_limit router_bias bias
    num_shared_experts shared_gate capacity_factor
"""
_DEFAULTS: dict[str, Any] = {name: getattr(MoEOptions, name) for name in _FIELDS.split()}
# Keys of other layers, which do not change the function of the block. A key that is in
# no list of this file may change it, and raises ValueError.
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


@dataclass(frozen=True, eq=False)
class BlockFamily:
    """The expert block of a family, in both directions.

        config = MIXTRAL.config_from_hf(json.load(open("config.json")))   # -> MoEConfig
        rows = MIXTRAL.rows_of(config)                                    # of every sparse layer
        MIXTRAL.sparse_layers(hf)                                         # -> (0, 1, 2, ...)

    Training options (auxiliary losses and their weights) are not read: they change no output, and Hugging Face defines
    them differently. Both directions raise ValueError with a line for each key without an equivalent, and for each
    unknown one that may change the function.

    name: the `model_type`. keys: key -> field of MoEConfig. rows_of: config -> rows. fixed: fields without a key.
    optional: values of missing keys. aliases: other spelling -> key. required: keys with a single supported value.
    ignored: further keys that change nothing in the block. first_dense: dense layers below the mixtures where
    `first_k_dense_replace` is missing (DeepSeek, GLM). stepped: every `decoder_sparse_step`-th layer but none of
    `mlp_only_layers` is a mixture (Qwen); else all layers are.
    """

    name: str
    keys: Mapping[str, str]
    rows_of: Callable[[MoEConfig], tuple[Row, ...]]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    optional: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    required: Mapping[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    first_dense: int | None = None
    stepped: bool = False

    @property
    def rows(self) -> Callable[[MoEConfig], tuple[Row, ...]]:
        """`rows_of`, by its name of 0.1."""
        return self.rows_of

    def config_from_hf(self, hf: Mapping[str, Any]) -> MoEConfig:
        """MoEConfig of a `config.json` as a dict; ValueError with a line for each problem.

        Problems are another model_type (then only this), missing keys, values of another type, and keys that change the
        function or may do so.
        """
        own, other = self.name, hf.get("model_type", self.name)
        if other != own:
            fix = f"give a config.json of {own!r}, or use the map of {other!r} if there is one"
            raise invalid("model_type", "mismatch", other, "is not supported", fix, where=own)

        given = {self.aliases.get(key, key): value for key, value in hf.items()}
        found = {**self.optional, **given}
        raise_problems(self.name, [*self._wrong_types(found), *self._unsupported(hf)])
        values = {
            name: _NORMALIZE[found[key]] if key == "norm_topk_prob" else found[key]
            for key, name in self.keys.items()
        }
        return MoEConfig(**{**_DEFAULTS, **self.fixed, **values})

    def config_to_hf(self, config: MoEConfig) -> dict[str, Any]:
        """The keys of `config.json` about experts; ValueError for fields without an equivalent."""
        # bias_update_rate adds a bias too, and Hugging Face only knows whether there is one.
        values = {**vars(config), "expert_bias": config.router_config.expert_bias}
        fix = "choose another family"
        problems = (
            Problem(name, "fixed", values[name], f"must be {value!r} in this family", fix)
            for name, value in {**_DEFAULTS, **self.fixed}.items()
            if name not in self.keys.values() and values[name] != value
        )
        raise_problems(self.name, problems)
        written = {key: values[name] for key, name in self.keys.items()}
        if "norm_topk_prob" in written:
            written["norm_topk_prob"] = config.normalize == "after_top_k"
        return {"model_type": self.name, "hidden_act": "silu", **written}

    def sparse_layers(self, hf: Mapping[str, Any]) -> tuple[int, ...]:
        """The layers that are mixtures, of a `config.json` as a dict."""
        layers = range(_count(hf, "num_hidden_layers", None, 1))
        if self.first_dense is not None:
            return tuple(layers[_count(hf, "first_k_dense_replace", self.first_dense, 0) :])
        if not self.stepped:
            return tuple(layers)
        dense, step = hf.get("mlp_only_layers") or [], _count(hf, "decoder_sparse_step", 1, 1)
        if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
            raise invalid("mlp_only_layers", "type", dense, "must be a list of layers", _PUBLISHED)
        return tuple(i for i in layers if i not in dense and (i + 1) % step == 0)

    def layers_to_hf(self, layers: Sequence[int], num_layers: int) -> dict[str, Any]:
        """The keys of `config.json` about the layers that are mixtures; ValueError for others than the family has."""
        if self.stepped:
            dense = [i for i in range(num_layers) if i not in layers]
            return {"decoder_sparse_step": 1, "mlp_only_layers": dense}
        first = 0 if self.first_dense is None else num_layers - len(layers)
        if list(layers) != list(range(first, num_layers)):
            wanted = "all of them" if self.first_dense is None else "the upper ones"
            rule, fix = f"with mixtures must be {wanted} in this family", "choose another family"
            raise invalid("layers", "unsupported", list(layers), rule, fix, where=self.name)
        return {} if self.first_dense is None else {"first_k_dense_replace": first}

    def _wrong_types(self, found: Mapping[str, Any]) -> Iterator[Problem]:
        """A problem for each key that is missing or has a value of another type."""
        for key, name in self.keys.items():
            text, types = _TYPES.get(name, ("an integer", (int,)))
            if found.get(key) is None:
                yield Problem(key, "missing", ..., "is missing", "give a complete config.json")
            elif type(found[key]) not in types:
                yield Problem(key, "type", found[key], f"must be {text}", _PUBLISHED)

    def _unsupported(self, hf: Mapping[str, Any]) -> Iterator[Problem]:
        """A problem for each key that the layer does not support, or that is unknown."""
        required = {**_REQUIRED, **self.required}
        known = _IGNORED | self.keys.keys() | self.aliases.keys() | set(self.ignored)
        for key, value in hf.items():
            if key in known or value is None or value is False or value in ([], {}):
                continue
            # Values that mean full attention, which every family has.
            if key == "sliding_window" and (value == 0 or hf.get("use_sliding_window") is False):
                continue
            full = key == "layer_types" and isinstance(value, list)
            if full and all(kind == "full_attention" for kind in value):
                continue

            if key not in required:
                fix = "use a model without it, or take it out of the dict if you know that nothing changes"
                rule = "is unknown and may change the function"
                yield Problem(key, "unknown_key", value, rule, fix)
            elif value != required[key]:
                fix = f"use a model with {required[key]!r}"
                yield Problem(key, "unsupported", value, "is not supported", fix)


def _count(hf: Mapping[str, Any], key: str, default: int | None, minimum: int) -> int:
    value = hf.get(key, default)
    if type(value) is not int or not minimum <= value <= 2**16:
        rule = f"must be an integer from {minimum} to {2**16}"
        raise invalid(key, "range", value, rule, _PUBLISHED)
    return value


class ExpertLayers(NamedTuple):
    """The mixtures of a model: the config of each, and the layers that have one, of `num_layers`."""

    config: MoEConfig
    layers: tuple[int, ...]
    num_layers: int

    def first_and_step(self) -> tuple[int, int]:
        """(first layer, step) of layers that are every n-th from a first one on; ValueError for others."""
        layers, count = self.layers, self.num_layers
        first = layers[0] if layers else count
        step = layers[1] - first if len(layers) > 1 else count
        if not layers or layers != tuple(range(first, count, step)):
            rule = "are the layers with mixtures, and must be every n-th from a first one on"
            fix = "use a model whose mlp_only_layers leave such a pattern"
            raise invalid("mlp_only_layers", "pattern", list(layers), rule, fix)
        return first, step


class LayersFamily(NamedTuple):
    """The mixtures of a family's models, in the form of the entry point "experts" of `forge.hf_families`."""

    block: BlockFamily

    def config_from_hf(self, hf: Mapping[str, Any]) -> ExpertLayers:
        """The mixtures of a `config.json` as a dict."""
        config, layers = self.block.config_from_hf(hf), self.block.sparse_layers(hf)
        return ExpertLayers(config, layers, _count(hf, "num_hidden_layers", None, 1))

    def config_to_hf(self, found: ExpertLayers) -> dict[str, Any]:
        """All keys about experts; ValueError with a problem for each option that the family cannot hold."""
        written: dict[str, Any] = {}
        problems: list[Problem] = []
        for keys_of in (
            lambda: self.block.config_to_hf(found.config),
            lambda: self.block.layers_to_hf(found.layers, found.num_layers),
        ):
            try:
                written |= keys_of()
            except ValueError as error:
                problems += problems_of(error)
        raise_problems(self.block.name, problems)
        return written

    def rows_of(self, found: ExpertLayers) -> tuple[Row, ...]:
        """The rows of all mixtures."""
        return self.block.rows_of(found.config)


# ---- names of tensors

_FORGE = "layers.{i}.feed_forward"
_HF = "model.layers.{i}.mlp"
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def _experts(
    config: MoEConfig, block: str = _HF, names: Sequence[str] = _PROJECTIONS
) -> tuple[Row, ...]:
    ops = (("transpose", 0, 1), ("stack_experts", config.num_experts))
    experts = (
        (f"{block}.experts.{{e}}.{hf}.weight", f"{_FORGE}.experts.{forge}", ops)
        for hf, forge in zip(names, _PROJECTIONS)
    )
    return (f"{block}.gate.weight", f"{_FORGE}.router.weight", ()), *experts


def _shared(name: str) -> tuple[Row, ...]:
    rows = ((f"{_HF}.{name}.{p}.weight", f"{_FORGE}.shared.{p}.weight", ()) for p in _PROJECTIONS)
    return tuple(rows)


def _mixtral_rows(config: MoEConfig) -> tuple[Row, ...]:
    return _experts(config, "model.layers.{i}.block_sparse_moe", ("w1", "w3", "w2"))


def _qwen2_rows(config: MoEConfig) -> tuple[Row, ...]:
    gate = (f"{_HF}.shared_expert_gate.weight", f"{_FORGE}.shared.gate.weight", ())
    return (*_experts(config), *_shared("shared_expert"), gate)


def _deepseek_rows(config: MoEConfig) -> tuple[Row, ...]:
    bias = (f"{_HF}.gate.e_score_correction_bias", f"{_FORGE}.router.expert_bias", ())
    return (*_experts(config), bias, *_shared("shared_experts"))


def _gpt_oss_rows(config: MoEConfig) -> tuple[Row, ...]:
    """Names only: a file of it has stacks of experts, (in, out), with alternating columns of gate and up."""
    matrices = ("router.weight", "experts.gate_up_proj", "experts.down_proj")
    biases = ("router.bias", "experts.gate_up_proj_bias", "experts.down_proj_bias")
    return tuple((f"{_HF}.{name}", f"{_FORGE}.{name}", ()) for name in (*matrices, *biases))


# ---- the families

_SHAPE = {"hidden_size": "dim", "num_experts_per_tok": "top_k"}
_NORMALIZED = {**_SHAPE, "num_experts": "num_experts", "norm_topk_prob": "normalize"}
_QWEN = {**_NORMALIZED, "moe_intermediate_size": "hidden_dim"}
# Shared by Qwen2-MoE, Qwen3-MoE and OLMoE.
_NORMALIZED_OPTIONS: dict[str, Any] = {
    "optional": {"norm_topk_prob": False},
    "aliases": {"num_local_experts": "num_experts"},
}
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

MIXTRAL = BlockFamily(
    "mixtral",
    {**_SHAPE, "intermediate_size": "hidden_dim", "num_local_experts": "num_experts"},
    _mixtral_rows,
    aliases={"num_experts": "num_local_experts"},
)
QWEN2_MOE = BlockFamily(
    "qwen2_moe",
    {**_QWEN, "shared_expert_intermediate_size": "shared_hidden_dim"},
    _qwen2_rows,
    fixed={"num_shared_experts": 1, "shared_gate": True},
    stepped=True,
    **_NORMALIZED_OPTIONS,
)
QWEN3_MOE = BlockFamily("qwen3_moe", _QWEN, _experts, stepped=True, **_NORMALIZED_OPTIONS)
OLMOE = BlockFamily(
    "olmoe", {**_NORMALIZED, "intermediate_size": "hidden_dim"}, _experts, **_NORMALIZED_OPTIONS
)
DEEPSEEK_V3 = BlockFamily(
    "deepseek_v3",
    _DEEPSEEK,
    _deepseek_rows,
    fixed={"router": "sigmoid_topk", "expert_bias": True, "group_score": "top2_sum"},
    aliases={"num_local_experts": "n_routed_experts"},
    required={"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    first_dense=3,
)
GLM4_MOE = BlockFamily(
    "glm4_moe",
    _DEEPSEEK,
    _deepseek_rows,
    fixed=DEEPSEEK_V3.fixed,
    aliases=DEEPSEEK_V3.aliases,
    first_dense=1,
)
GPT_OSS = BlockFamily(
    "gpt_oss",
    {
        **_SHAPE,
        "intermediate_size": "hidden_dim",
        "num_local_experts": "num_experts",
        "swiglu_alpha": "swiglu_alpha",
        "swiglu_limit": "swiglu_limit",
    },
    _gpt_oss_rows,
    fixed={"activation": "clamped_swiglu", "bias": True, "router_bias": True},
    # older files have them only in the code
    optional={"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
    aliases={"num_experts": "num_local_experts"},
    ignored=("sliding_window", "layer_types", "experts_per_token", "initial_context_length"),
)

#: All families by `model_type`.
FAMILIES = {
    family.name: family
    for family in (MIXTRAL, QWEN2_MOE, QWEN3_MOE, OLMOE, DEEPSEEK_V3, GLM4_MOE, GPT_OSS)
}
#: All families as `forge_ckpt.hf` reads them: the mixtures of a model and their layers.
LAYERS = {name: LayersFamily(block) for name, block in FAMILIES.items()}
