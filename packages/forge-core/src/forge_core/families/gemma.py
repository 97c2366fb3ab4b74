"""Gemma 3 (text): norms before and after sublayers with weights around 0, local layers with their own rotary base."""

from collections.abc import Mapping
from typing import Any

from forge_core._shared.problems import Problem, problems_of, raise_problems
from forge_core.families.family import OUTSIDE_LAYERS, QK_NORMS, Family, layer_rows, sublayers
from forge_core.families.keys import Spelling, given_values
from forge_core.families.layers import (
    FULL,
    SLIDING,
    LayerSpec,
    layer_specs,
    local_options,
    names_of,
)
from forge_core.families.rope_keys import rope_table
from forge_core.model.attention_ops import AttentionSpec
from forge_core.model.config import TransformerConfig

_NAME = "gemma3_text"
_ACTIVATIONS = {"gelu_pytorch_tanh": "geglu_tanh", "gelu": "geglu", "silu": "swiglu"}
_SPELLING = Spelling(
    _NAME,
    "Gemma3ForCausalLM",
    fixed={"block": "sandwich", "norm": "rms_norm_plus_one", "qk_norm": True},
    switches={"attention_bias": ("qkv_bias", "o_bias")},
    defaults={
        "head_dim": 256,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "rope_theta": 1e6,
    },
    reads=(
        *("attn_logit_softcapping", "cache_implementation", "final_logit_softcapping"),
        *("hidden_activation", "query_pre_attn_scalar", "rope_local_base_freq", "sliding_window"),
        *("sliding_window_pattern", "_sliding_window_pattern", "use_bidirectional_attention"),
    ),
    sliding=True,
)
_NOT_READ = "is not read by transformers 5 in this family"


def _gemma3_from_hf(hf: Mapping[str, Any]) -> TransformerConfig:
    given = {**_SPELLING.defaults, **given_values(hf)}
    rule = "is not supported"
    problems = [
        Problem(key, "unsupported", given[key], rule, "use a model without it")
        for key in ("attn_logit_softcapping", "use_bidirectional_attention")
        if given.get(key)
    ]
    activation = given.get("hidden_activation", "gelu_pytorch_tanh")
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        fix = f"use {', '.join(_ACTIVATIONS)}"
        problems.append(Problem("hidden_activation", "unknown", activation, rule, fix))

    # transformers writes it next to the layer_types that it made, and does not read it
    every, written = given.get("sliding_window_pattern", 6), given.get("_sliding_window_pattern")
    if not given.get("layer_types") and written not in (None, every):
        fix = "write it as sliding_window_pattern"
        problems.append(Problem("_sliding_window_pattern", "spelling", written, _NOT_READ, fix))

    given, local = _rope_of_layers(given, problems)
    raise_problems(_NAME, problems)

    def own() -> dict[str, Any]:
        count, head_dim = given["num_hidden_layers"], given["head_dim"]
        scalar = given.get("query_pre_attn_scalar", 256)
        names = names_of(
            given, _NAME, [FULL if (i + 1) % every == 0 else SLIDING for i in range(count)]
        )

        # layers with a window have their own base, and no scaling
        rope = rope_table(given)
        layers = local_options(
            *(hf, _NAME, names, hf.get("sliding_window", 4096)),
            rope_theta=None if local == rope["rope_theta"] else local,
            rope_scaling=rope["rope_type"] == "default",
        )
        return {
            "embedding_scale": given["hidden_size"] ** 0.5,
            "attention": AttentionSpec(scale=None if scalar == head_dim else scalar**-0.5),
            **layers,
        }

    return _SPELLING.read(
        given,
        own,
        feed_forward=_ACTIVATIONS[activation],
        logits_softcap=given.get("final_logit_softcapping"),
    )


def _rope_of_layers(given: dict[str, Any], problems: list[Problem]) -> tuple[dict[str, Any], float]:
    """Return the keys with only the rotary table of global layers, as in other families, and the base of local layers.

    transformers 4 has `rope_scaling` and `rope_local_base_freq`, 5 a table for each type of layer, which it updates with
    `rope_scaling`. It ignores a flat `rope_parameters`, and a `type` in `rope_scaling`.
    """
    local = given.get("rope_local_base_freq", 1e4)
    tables, scaling = given.get("rope_parameters", {}), given.get("rope_scaling", {})
    if not isinstance(tables, Mapping) or not isinstance(scaling, Mapping):
        return given, local  # of wrong types, which `Spelling.read` reports

    near, far = (tables.get(kind) or {} for kind in (SLIDING, FULL))
    nested = (
        isinstance(near, Mapping) and isinstance(far, Mapping) and tables.keys() <= {FULL, SLIDING}
    )
    if not nested or rope_table({"rope_parameters": near})["rope_type"] != "default":
        rule = f"must have tables {FULL} and {SLIDING}, the latter of rope_type 'default'"
        fix = f"write the keys in a table {FULL}"
        problems.append(Problem("rope_parameters", "tables", ..., rule, fix))
        return given, local
    if "rope_type" not in scaling and (kind := scaling.get("type", "default")) != "default":
        fix = "write it as rope_type"
        problems.append(Problem("rope_scaling.type", "spelling", kind, _NOT_READ, fix))

    for name in sorted(near.keys() - {"rope_type", "type", "rope_theta"}):
        key = f"rope_parameters.{SLIDING}.{name}"
        problems.append(Problem(key, "unknown_key", near[name], "is unknown", "remove it"))

    where = "rope_scaling" if scaling else "rope_parameters"
    table = {**far, **scaling}
    if table.get("truncate", True) is False:  # it looks for the key next to the tables of layers
        problems.append(Problem("truncate", "unsupported", False, _NOT_READ, "remove it"))
    flat = {"rope_scaling": {}, "rope_parameters": {}, where: table}
    return {**given, **flat}, near.get("rope_theta", local)


def _gemma3_to_hf(config: TransformerConfig) -> dict[str, Any]:
    specs = layer_specs(config)
    near = {spec for spec in specs if spec.window is not None}
    far = {spec for spec in specs if spec.window is None}
    problems: list[Problem] = []
    full = LayerSpec(None, config.rope_theta, True, True)
    if len(near) > 1 or not far <= {full} or not all(spec.rope for spec in near):
        here = f"and here are {sorted(set(map(str, specs)))}"
        rule = f"must be one with a window and one without, both with rope, {here}"
        problems.append(Problem("layer_types", "kinds", ..., rule, "choose another family"))

    if config.rope_scaling is not None and any(spec.scaled for spec in near):
        rule, fix = "of layers with a window must be off", "set it in their layer_types"
        problems.append(Problem("rope_scaling", "window", ..., rule, fix))

    if config.rope_scaling is not None and not config.rope_scaling.truncate:
        problems.append(Problem("rope_scaling.truncate", "family", False, _NOT_READ, "use true"))

    scalar, scale = round(_scalar(config)), config.attention.scale
    if abs(_scalar(config) / scalar - 1.0) > 1e-9:
        rule = "must be n ** -0.5 of a whole n"
        problems.append(Problem("attention.scale", "family", scale, rule, "choose another"))

    activations = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}
    known = config.feed_forward in activations
    try:
        hf = _SPELLING.write(
            config,
            ("scale", "window"),
            feed_forward=config.feed_forward if known else "geglu_tanh",
            embedding_scale=config.dim**0.5,
            logits_softcap=config.logits_softcap,
            layer_pattern=config.layer_pattern,
        )
    except ValueError as error:
        problems += problems_of(error)
    raise_problems(_NAME, problems)

    del hf["hidden_act"]
    window = next((spec.window for spec in near), None)
    local = next((spec.rope_theta for spec in near), 1e4)
    plain = {"rope_type": "default", "rope_theta": local}
    return {
        **hf,
        "hidden_activation": activations[config.feed_forward],
        "query_pre_attn_scalar": scalar,
        "final_logit_softcapping": config.logits_softcap,
        "sliding_window": 4096 if window is None else window,
        "layer_types": [FULL if spec.window is None else SLIDING for spec in specs],
        "rope_local_base_freq": local,
        "rope_parameters": {FULL: hf["rope_parameters"], SLIDING: plain},
    }


def _scalar(config: TransformerConfig) -> float:
    """The number whose inverse square root is the scale of the scores."""
    scale = config.attention.scale
    return float(config.resolved_head_dim) if scale is None else scale**-2


GEMMA3 = Family(
    _NAME,
    OUTSIDE_LAYERS
    + layer_rows("input_layernorm", "mixer_norm")
    + layer_rows("post_attention_layernorm", "mixer_post_norm")
    + layer_rows("pre_feedforward_layernorm", "feed_forward_norm")
    + layer_rows("post_feedforward_layernorm", "feed_forward_post_norm")
    + QK_NORMS
    + sublayers(o_bias=True, feed_forward_bias=False),
    _gemma3_from_hf,
    _gemma3_to_hf,
)
