"""Layers of several types in a Hugging Face `config.json`: `layer_types`, `sliding_window`, `no_rope_layers`."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from forge_core._shared.problems import invalid
from forge_core.model.config import TransformerConfig
from forge_core.model.layer_types import GLOBAL, LayerType

SLIDING, FULL = "sliding_attention", "full_attention"
LOCAL = "local"


class Kind(NamedTuple):
    """What the attention of one layer has: a window, a base, plain wavelengths, and whether it turns at all."""

    window: int | None
    rope_theta: float
    scaled: bool
    rope: bool


def kinds_of(config: TransformerConfig) -> list[Kind]:
    """What each layer of a config has, whatever its types are called."""
    found = []
    for layer in range(config.num_layers):
        own = config.of_layer(layer)
        rope = own.partial_rotary_factor > 0.0
        scaled = rope and own.rope_scaling == config.rope_scaling
        found.append(Kind(own.attention.window, own.rope_theta, scaled, rope))
    return found


def windows_of(kinds: Sequence[Kind]) -> set[int]:
    """The windows that occur."""
    return {kind.window for kind in kinds if kind.window is not None}


def repeated(names: Sequence[str]) -> tuple[str, ...]:
    """The shortest pattern that gives these names, repeated; () where all are global."""
    pattern = next(
        tuple(names[:size])
        for size in range(1, len(names) + 1)
        if all(name == names[i % size] for i, name in enumerate(names))
    )
    return () if pattern == (GLOBAL,) else pattern


def pattern_options(names: Sequence[str], types: Mapping[str, LayerType]) -> dict[str, Any]:
    """`layer_pattern` and `layer_types` of a config, with the types that occur."""
    pattern = repeated(names)
    return {
        "layer_pattern": pattern,
        "layer_types": {name: types[name] for name in types if name in pattern},
    }


def names_of(hf: Mapping[str, Any], model_type: str, default: Sequence[str]) -> list[str]:
    """The type of each layer in our words; ValueError for another number of them, or another kind."""
    given = list(hf.get("layer_types") or default)
    words = {FULL: GLOBAL, SLIDING: LOCAL}
    count = hf["num_hidden_layers"]
    if len(given) != count or not set(given) <= words.keys():
        here = f"and there are {len(given)} of {sorted(set(given))}"
        rule = f"must be one of {', '.join(words)} for each of {count} layers, {here}"
        raise invalid("layer_types", "unknown", ..., rule, "correct it", where=model_type)
    return [words[kind] for kind in given]


def needed_window(
    hf: Mapping[str, Any], model_type: str, names: Sequence[str], window: int | None
) -> int | None:
    """`window`; ValueError without one for `names` that have local layers, where transformers raises as well."""
    if window is None and LOCAL in names:
        rule = f"is null or off, and layer_types has {SLIDING}"
        fix = "set it, and use_sliding_window = true where the family reads that"
        value = hf.get("sliding_window")
        raise invalid("sliding_window", "layers", value, rule, fix, where=model_type)
    return window


def local_options(
    hf: Mapping[str, Any], model_type: str, names: Sequence[str], window: int | None, **own: Any
) -> dict[str, Any]:
    """`pattern_options` whose local layers have `window` and fields of their `own`."""
    if LOCAL not in names:
        return {}
    window = needed_window(hf, model_type, names, window)
    return pattern_options(names, {LOCAL: LayerType(window=window, **own)})


def sliding_to_hf(config: TransformerConfig, model_type: str) -> dict[str, Any]:
    """`layer_types` and `sliding_window`; ValueError for layers that differ in more than one window."""
    kinds = kinds_of(config)
    windows = windows_of(kinds)
    whole = Kind(None, config.rope_theta, True, True)
    if len(windows) > 1 or {kind._replace(window=None) for kind in kinds} != {whole}:
        here = f"and here are {sorted(set(map(str, kinds)))}"
        rule, fix = f"may differ only in one window in this family, {here}", "choose another family"
        raise invalid("layer_types", "family", ..., rule, fix, where=model_type)
    return {
        "layer_types": [FULL if kind.window is None else SLIDING for kind in kinds],
        "sliding_window": max(windows) if windows else None,
    }
