"""Layers of several types in a Hugging Face `config.json`: `layer_types`, `sliding_window`, `no_rope_layers`."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from forge_core._shared.problems import invalid
from forge_core.model.config import GLOBAL, LayerType, TransformerConfig

SLIDING, FULL = "sliding_attention", "full_attention"
LOCAL = "local"


class LayerSpec(NamedTuple):
    """Attention of one layer: its window, rotary base, whether its wavelengths are scaled, and whether it has RoPE."""

    window: int | None
    rope_theta: float
    scaled: bool
    rope: bool


def layer_specs(config: TransformerConfig) -> list[LayerSpec]:
    """Return the spec of each layer of a config, whatever the names of its types."""
    found = []
    for layer in range(config.num_layers):
        own = config.of_layer(layer)
        rope = own.partial_rotary_factor > 0.0
        scaled = rope and own.rope_scaling == config.rope_scaling
        found.append(LayerSpec(own.attention.window, own.rope_theta, scaled, rope))
    return found


def windows_of(specs: Sequence[LayerSpec]) -> set[int]:
    """Return the different windows of layers."""
    return {spec.window for spec in specs if spec.window is not None}


def repeated(names: Sequence[str]) -> tuple[str, ...]:
    """Return the shortest pattern that repeats to these names; () if all are global."""
    pattern = next(
        tuple(names[:size])
        for size in range(1, len(names) + 1)
        if all(name == names[i % size] for i, name in enumerate(names))
    )
    return () if pattern == (GLOBAL,) else pattern


def pattern_options(names: Sequence[str], types: Mapping[str, LayerType]) -> dict[str, Any]:
    """Return `layer_pattern` and `layer_types` of a config, with the types that occur."""
    pattern = repeated(names)
    return {
        "layer_pattern": pattern,
        "layer_types": {name: types[name] for name in types if name in pattern},
    }


def names_of(hf: Mapping[str, Any], model_type: str, default: Sequence[str]) -> list[str]:
    """Return Forge's type of each layer; ValueError for another number of layers, or an unknown type."""
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
    """Return `window`; ValueError if it is None and there are local layers, as in transformers."""
    if window is None and LOCAL in names:
        rule = f"is null or off, and layer_types has {SLIDING}"
        fix = "set it, and use_sliding_window = true where the family reads that"
        value = hf.get("sliding_window")
        raise invalid("sliding_window", "layers", value, rule, fix, where=model_type)
    return window


def local_options(
    hf: Mapping[str, Any], model_type: str, names: Sequence[str], window: int | None, **own: Any
) -> dict[str, Any]:
    """Return `pattern_options` whose local layers have `window` and the fields `own`."""
    if LOCAL not in names:
        return {}
    window = needed_window(hf, model_type, names, window)
    return pattern_options(names, {LOCAL: LayerType(window=window, **own)})


def sliding_to_hf(config: TransformerConfig, model_type: str) -> dict[str, Any]:
    """Return `layer_types` and `sliding_window`; ValueError for layers that differ in more than one window."""
    specs = layer_specs(config)
    windows = windows_of(specs)
    full = LayerSpec(None, config.rope_theta, True, True)
    if len(windows) > 1 or {spec._replace(window=None) for spec in specs} != {full}:
        here = f"and here are {sorted(set(map(str, specs)))}"
        rule, fix = f"may differ only in one window in this family, {here}", "choose another family"
        raise invalid("layer_types", "family", ..., rule, fix, where=model_type)
    return {
        "layer_types": [FULL if spec.window is None else SLIDING for spec in specs],
        "sliding_window": max(windows) if windows else None,
    }
