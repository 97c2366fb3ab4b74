"""Combinations of values that no job has: what Forge rejects, and what says nothing.

A draw that Forge rejects all the same is counted and drawn anew; these rules keep such draws few.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping

from tests.fuzz.job import axes, layout_keys, readers_of, size_of, world_of

MOST_RANKS = 6
#: Any value but the default, and the default alone.
ANY, OFF = "any", "off"
Values = str | tuple[str, ...]

_SPLIT = ("interleaved_zero_bubble", "zbv_zero_bubble", "dualpipev")
_V = ("zbv_zero_bubble", "dualpipev")
_MLA = ("mla", "mla, latent queries", "mla, interleaved")
_CHAT = (
    "chat", "chat, last", "chat, all", "chat, truncated", "chat, skipped", "chat, weighted",
)  # fmt: skip
_BF16 = ("bf16", "bf16, reduced", "bf16 weights")
_FREE = ("schedule_free_adamw", "schedule_free_adamw, r")
_MUON = ("muon", "muon, original", "muon, bf16")
_MOMA = ("moma", "moma, expert choice", "moma, auxiliary router")
_ENCODED = (
    "encoder", "adapter", "image positions", "sees both ways", "weights of answers", "image rows", "image files",
    "branches",
)  # fmt: skip
_AGAINST_ONE = (("encoder", "transformers"), ("image files", "videos"))
_LATER = ("rows", "batches")

#: All of these values together are no job.
RULES: tuple[Mapping[str, Values], ...] = (
    # the decoder
    {"mixer": _MLA, "kv heads": ANY},
    {"mixer": _MLA, "qk norm": ANY},
    {"mixer": _MLA, "sinks": ANY},
    {"mixer": _MLA, "rope": ("partial",)},
    {"parametrization": ANY, "experts": ANY},
    {"parametrization": ANY, "mixer": ANY},
    {"parametrization": ANY, "optimizer": _MUON},
    {"parametrization": ANY, "attention scale": ANY},  # mup with depth sets it
    {"mtp": ANY, "experts": ANY},
    {"rope": ("none",), "layer types": ("rope bases", "without rope", "mixed")},
    # mixtures of experts: their axes need one
    *({"experts": OFF, name: ANY} for name in (
        "router losses", "expert bias", "capacity", "expert", "shared experts", "mixture layers", "dispatch",
        "expert backend",
    )),
    {"experts": OFF, "ep": ANY, "images": ("none", "joint_decoder", "cross_attention", "mixture_of_transformers")},
    {"expert": ("clamped_swiglu",), "shared experts": ANY},
    {"expert backend": ("grouped_mm",), "sizes": ANY},  # it needs widths that are multiples of 4
    {"capacity": ANY, "tp": ANY},
    {"capacity": ANY, "cp": ANY},
    {"experts": ("expert choice", "uniform"), "tp": ANY},
    {"experts": ("expert choice", "uniform"), "cp": ANY},
    {"experts": ("uniform",), "expert bias": ANY},
    {"experts": ("expert choice",), "expert bias": ANY},
    {"experts": ("expert choice",), "capacity": ANY},
    {"dispatch": ("hierarchical",), "ep": OFF},
    # images: their axes need some
    *({"images": OFF, name: ANY} for name in ("image tokens", *_ENCODED)),
    *({"image tokens": ANY, name: ANY} for name in _ENCODED),
    {"images": ANY, "mtp": ANY},
    {"images": ANY, "parametrization": ANY},
    {"images": (*_MOMA, "cross_attention", "mixture_of_transformers"), "experts": ANY},
    {"images": ("cross_attention",), "image tokens": ANY},
    {"images": ("cross_attention",), "pp": ANY},
    {"images": ("cross_attention",), "encoder": ("packed_vit", "packed_vit, merged")},
    {"image files": ("streamed",), "image rows": ("groups",)},
    {"image files": ("streamed", "videos"), "branches": ANY},
    {"image files": ("streamed",), "sources": ("by size", "temperature", "ending")},
    {"image files": ("videos",), "encoder": ANY},
    # one process tells no margins of routes
    *({name: (value,), "images": _MOMA} for name, value in _AGAINST_ONE),
    *({name: (value,), "experts": ANY} for name, value in _AGAINST_ONE),
    {"image files": ("videos",), "sources": ANY},
    {"images": ("cross_attention",), "image positions": ANY},
    {"images": ("cross_attention",), "sees both ways": ANY},
    {"images": ("cross_attention",), "adapter": ("resampler",)},  # its one placeholder is not four tokens
    {"images": ("mixture_of_transformers",), "mixer": ANY},
    {"images": ("mixture_of_transformers",), "sinks": ANY},
    {"images": ANY, "image tokens": OFF, "cp": ANY, "tp": ANY},
    {"sees both ways": ANY, "cp": ANY},
    {"branches": ANY, "cp": ANY},
    {"branches": ANY, "sees both ways": ("prefix_lm",)},
    {"images": _MOMA[1:], "cp": ANY},
    {"images": ("moma, expert choice",), "validation": ANY},
    {"images": _MOMA, "ep": ANY, "tp": ANY},
    {"images": _MOMA, "ep": ANY, "feed-forward": ("geglu", "geglu_tanh", "gelu_tanh", "relu", "relu2", "silu")},
    {"encoder": ("packed_vit", "packed_vit, merged"), "adapter": (
        "pixel_shuffle", "pixel_shuffle_mlp", "average_pool", "attentional_pool", "resampler",
    )},
    {"encoder": ("packed_vit, merged", "transformers"), "adapter": ("none",)},
    {"image files": ("streamed",), "validation": ANY},
    {"image positions": ("mrope",), "mixer": ANY},
    {"image positions": ("mrope",), "layer types": ("without rope", "mixed")},
    {"image positions": ("mrope",), "rope": ("partial", "none", "linear", "llama3", "yarn")},
    # all sources give the same arrays, and text has positions of one axis and no ids of images
    *({"sources": ANY, name: values} for name, values in (
        ("image positions", ("mrope",)), ("sees both ways", ANY), ("branches", ANY), ("image rows", ("groups",)),
    )),
    {"images": ANY, "image tokens": OFF, "source": ANY},
    {"images": ANY, "image tokens": OFF, "packing": ANY},
    {"images": ANY, "image tokens": OFF, "phases": ("rows",)},
    {"image tokens": ANY, "source": _CHAT},
    # data
    {"phases": ("weights",), "sources": OFF},
    {"phases": _LATER, "pp": ANY},
    {"source": _CHAT, "packing": ANY},
    # optimizers
    {"schedule": ("none",), "warm-up": ANY},
    {"optimizer": _FREE, "ema": ANY},
    {"groups": OFF, "stages": ANY},
    {"groups": ("rates",), "stages": ("thaw",)},
    {"groups": ("decay", "muon"), "stages": ANY},
    {"groups": ("frozen",), "stages": ("freeze",)},
    {"groups": ("muon",), "optimizer": ("adamw", "adamw, betas", "lion", *_FREE)},
    {"lora": ANY, "groups": ANY},
    {"lora": ANY, "precision": ("bf16 weights",)},
    {"optimizer": _FREE, "precision": ("bf16 weights",)},
    {"embeddings": ("tied",), "groups": ("rates", "frozen")},  # a tied table is in one group
    # layouts
    {"pp": _V, "embeddings": ("tied",)},
    {"pp": _SPLIT, "mtp": ANY},
    {"pp": _SPLIT, "compile": ANY},
    {"compile": ANY, "recompute": ("selective",)},
    # a graph for each number of tokens of a modality, which takes minutes
    {"compile": ANY, "images": ("mixture_of_transformers", *_MOMA)},
    *({"shards": ("offloaded",), axis: ANY} for axis in ("tp", "cp", "pp", "ep")),
    {"sdpa": ANY, "cp": ANY},
    {"sinks": ANY, "cp": ANY},
    {"attention softcap": ANY, "cp": ANY},
    # events
    {"restart": OFF, "after the restart": ANY},
    {"bad step": ANY, "phases": _LATER},  # the rows of a step are counted for one size of batches
    # what says nothing: rounding in bf16 chooses other experts, and moves Lion and Muon by full steps
    {"experts": ANY, "precision": _BF16},
    {"optimizer": ("lion",), "precision": _BF16},
    # mathematically without a gradient, so that all of its entries move by the sign of rounding
    {"optimizer": ("lion",), "biases": ("qkv", "qkv and o", "all")},
    {"optimizer": ("lion",), "images": ANY, "image tokens": OFF},  # encoders have such biases
)  # fmt: skip


def broken_rule(choice: Mapping[str, str]) -> Mapping[str, Values] | None:
    """The first list of values that a job has and must not have."""
    return next((rule for rule in RULES if _holds(rule, choice)), None)


def allowed(choice: Mapping[str, str]) -> bool:
    """Whether a job may have these values, with the default on all other axes."""
    return broken_rule(choice) is None and all(function(choice) for function in FUNCTIONS)


def _holds(rule: Mapping[str, Values], choice: Mapping[str, str]) -> bool:
    return all(_matches(axis, choice.get(axis), values) for axis, values in rule.items())


def _matches(axis: str, value: str | None, values: Values) -> bool:
    """Whether a value, None for the default, is among those of a rule."""
    if values == ANY:
        return value is not None
    if values == OFF:
        return value is None
    return (value or default(axis)) in values


def open_values(choice: Mapping[str, str], axis: str) -> Iterator[str]:
    """Values of an axis that no rule about the chosen axes excludes; an axis that is not chosen yet may become any.

    `choice` has all axes that were chosen, also those at their defaults.
    """
    for value in axes()[axis].values:
        chosen = {**choice, axis: value}
        if not any(_is_broken(rule, chosen) for rule in RULES if axis in rule):
            yield value


def is_possible(chosen: Mapping[str, str]) -> bool:
    """Whether no rule about these axes alone excludes their values."""
    return not any(_is_broken(rule, chosen) for rule in RULES)


def _is_broken(rule: Mapping[str, Values], chosen: Mapping[str, str]) -> bool:
    """Whether all axes of a rule are chosen, and as it excludes; `chosen` has defaults, too."""
    return all(
        axis in chosen
        and _matches(axis, None if chosen[axis] == default(axis) else chosen[axis], values)
        for axis, values in rule.items()
    )


@functools.cache
def default(axis: str) -> str:
    """The value of an axis that is not chosen."""
    return next(iter(axes()[axis].values))


def _few_ranks(choice: Mapping[str, str]) -> bool:
    return world_of(layout_keys(choice)) <= MOST_RANKS


def _ep_borrows(choice: Mapping[str, str]) -> bool:
    """ep must divide the ranks that it borrows, of one copy of a stage."""
    keys = layout_keys(choice)
    return math.prod(size_of(keys, a) for a in ("dp_shard", "cp", "tp")) % size_of(keys, "ep") == 0


def _dividing_readers(choice: Mapping[str, str]) -> bool:
    """Micro-batches are uneven where there are two readers or more."""
    return choice.get("micro-batches") != "uneven" or readers_of(layout_keys(choice)) > 1


#: Axes whose values need others of the layout.
NEEDS = ("ep", "micro-batches")
#: Rules about several axes that are no list of values.
FUNCTIONS: tuple[Callable[[Mapping[str, str]], bool], ...] = (
    _few_ranks, _ep_borrows, _dividing_readers,
)  # fmt: skip


def depends_on_micro_batches(choice: Mapping[str, str]) -> bool:
    """Whether a job computes other numbers with other micro-batches."""
    return (
        "capacity" in choice
        or choice.get("experts") == "expert choice"
        or choice.get("images") in _MOMA
        or choice.get("router losses") in ("micro_batch", "global_batch")
    )
