"""Axes of the decoder: what a model computes."""

from __future__ import annotations

from typing import Any

from tests.fuzz.job import NO, NONE, Axis, Job, table


def _mla(job: Job, **more: Any) -> dict[str, Any]:
    """Widths of latent attention, none of them a multiple of another."""
    widths = {"kv_lora_rank": 12, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 8}
    return {"model.mixer": "mla", **table("model.mla", **widths, **more)}


def _window(job: Job) -> dict[str, Any]:
    # over one key there is no gradient, so that Lion moves by the sign of rounding
    widths = (3, 5, 7) if job["optimizer"] == "lion" else (1, 3, 5, 7)
    return {"model.attention.window": job.pick("window", widths)}


def _layer_types(**types: dict[str, Any]) -> Any:
    """Layers of these types in turn, then one of the model's own."""

    def keys(job: Job) -> dict[str, Any]:
        found: dict[str, Any] = {
            "model.layer_pattern": [*types, "global"][: job.sizes["num_layers"]]
        }
        for name in found["model.layer_pattern"]:
            found |= table(f"model.layer_types.{name}", **types.get(name, {}))
        return found

    return keys


def _scaling(name: str, **keys: Any) -> dict[str, Any]:
    return table("model.rope_scaling", name=name, **keys)


def _yarn(job: Job) -> dict[str, Any]:
    more = {"mscale": 0.7, "mscale_all_dim": 0.5} if job.has("mixer") else {"attention_factor": 1.2}
    return _scaling("yarn", factor=4.0, original_max_position=8, truncate=False, **more)


def _mup(job: Job) -> dict[str, Any]:
    return {"model.parametrization": "mup", "model.mup.base_dim": 8}


def _deep_mup(job: Job) -> dict[str, Any]:
    heads = {} if job.has("mixer") else {"model.mup.base_head_dim": 4}
    return {**_mup(job), "model.mup.base_num_layers": 1, **heads}


def _mtp(modules: int) -> Any:
    return lambda job: {
        "model.mtp.num_modules": modules,
        "model.mtp.weight": job.pick("mtp", (0.3, 0.7)),
    }


MODEL = {
    "sizes": Axis("model", {"even": NO, "odd": NO}, {"odd": 2.0}),
    "kv heads": Axis("model", {"all": NO, "grouped": NO, "one": NO}),
    "mixer": Axis(
        "model",
        {
            "attention": NO,
            "mla": _mla,
            "mla, latent queries": lambda job: _mla(job, q_lora_rank=20),
            "mla, interleaved": lambda job: _mla(job, rope_interleave=True),
        },
        {"attention": 8.0},
    ),
    "window": Axis("model", {"no": NO, "yes": _window}, {"no": 3.0}),
    "sinks": Axis("model", {"no": NO, "yes": {"model.attention.sinks": True}}, {"no": 3.0}),
    "attention softcap": Axis(
        "model", {"no": NO, "yes": {"model.attention.softcap": 1.5}}, {"no": 3.0}
    ),
    "attention scale": Axis(
        "model", {"no": NO, "yes": {"model.attention.scale": 0.3}}, {"no": 2.0}
    ),
    "layer types": Axis(
        "model",
        {
            **NONE,
            "windows": _layer_types(local={"window": 4}),
            "rope bases": _layer_types(short={"rope_theta": 100.0, "rope_scaling": False}),
            "without rope": _layer_types(nope={"rope": False}),
            "mixed": _layer_types(
                local={"window": 3, "rope_theta": 100.0}, nope={"rope": False, "window": 6}
            ),
        },
        {"none": 4.0},
    ),
    "rope": Axis(
        "model",
        {
            "plain": NO,
            "partial": {"model.partial_rotary_factor": 0.5},
            **{"none": {"model.partial_rotary_factor": 0.0}},
            "small base": {"model.rope_theta": 50.0},
            "linear": _scaling("linear", factor=3.0),
            "llama3": _scaling("llama3", factor=4.0, original_max_position=16),
            "yarn": _yarn,
        },
        {"plain": 3.0},
    ),
    "norm": Axis(
        "model",
        {
            name: {"model.norm": name, "model.norm_eps": 1e-3 if name == "layer_norm" else 1e-5}
            for name in ("rms_norm", "layer_norm", "rms_norm_plus_one")
        },
        {"rms_norm": 2.0},
    ),
    "block": Axis(
        "model",
        {name: {"model.block": name} for name in ("pre_norm", "post_norm", "sandwich")},
        {"pre_norm": 2.0},
    ),
    "feed-forward": Axis(
        "model",
        {
            name: {"model.feed_forward": name}
            for name in (
                "swiglu",
                "geglu",
                "geglu_tanh",
                "gelu",
                "gelu_tanh",
                "relu",
                "relu2",
                "silu",
            )
        },
        {"swiglu": 3.0},
    ),
    "qk norm": Axis(
        "model",
        {
            **NONE,
            "head": {"model.qk_norm": True},
            "all heads": {"model.qk_norm": True, "model.qk_norm_over": "all_heads"},
        },
        {"none": 2.0},
    ),
    "biases": Axis(
        "model",
        {
            **NONE,
            "qkv": {"model.qkv_bias": True},
            "qkv and o": {"model.qkv_bias": True, "model.o_bias": True},
            "feed-forward": {"model.feed_forward_bias": True},
            "all": {"model.qkv_bias": True, "model.o_bias": True, "model.feed_forward_bias": True},
        },
        {"none": 3.0},
    ),
    "embeddings": Axis(
        "model", {"untied": NO, "tied": {"model.tie_embeddings": True}}, {"untied": 2.0}
    ),
    "multipliers": Axis(
        "model",
        {
            **NONE,
            "embedding": {"model.embedding_scale": 4.7},
            "all": table("model", embedding_scale=2.0, residual_scale=0.4, logits_scale=0.3),
            "logits softcap": {"model.logits_softcap": 2.0},
        },
        {"none": 3.0},
    ),
    "parametrization": Axis(
        "model", {"standard": NO, "mup": _mup, "mup, depth": _deep_mup}, {"standard": 6.0}
    ),
    "mtp": Axis("model", {**NONE, "1": _mtp(1), "2": _mtp(2)}, {"none": 6.0}),
}
