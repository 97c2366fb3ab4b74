"""Layers of several types in one decoder: windows, rotary bases and layers without rotary positions.

Gemma 3 has five local layers for a global one, gpt-oss one for one, SmolLM3 turns no positions in each fourth.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from forge_core._config import is_finite, is_size, raise_problems, setting

#: The type of a layer that is as the model's own keys say; it has no table.
GLOBAL = "global"


@dataclass(frozen=True)
class LayerType:
    """What the attention of some layers has of its own; a field at its default is as in the model.

    LayerType(window=512, rope_theta=1e4, rope_scaling=False)   # local layers of Gemma 3
    LayerType(rope=False)                                       # NoPE (Kazemnejad et al. 2023)
    """

    window: int | None = setting(
        None, "tokens that one sees, itself among them; empty: as model.attention.window"
    )
    rope_theta: float | None = setting(
        None, "base of the rotary wavelengths; empty: as model.rope_theta"
    )
    rope_scaling: bool = setting(True, "model.rope_scaling holds; false: wavelengths are plain")
    rope: bool = setting(True, "queries and keys are turned by their positions; false: NoPE")

    def __post_init__(self) -> None:
        raise_problems("layer_types", _problems(self))


def _problems(c: LayerType) -> Iterator[str]:
    if all(getattr(c, f.name) == f.default for f in fields(c)):
        yield f"a type without any key is {GLOBAL!r}; give it a key, or put {GLOBAL!r} into layer_pattern"
    if c.window is not None and not is_size(c.window, 2**31):
        yield f"window {c.window!r} must be a whole number, at least 1; use 512, or leave it out"
    if c.rope_theta is not None and not (is_finite(c.rope_theta) and c.rope_theta > 1.0):
        yield f"rope_theta {c.rope_theta!r} must be a finite number above 1; use 10000, or leave it out"
    for name in ("rope_scaling", "rope"):
        if not isinstance(getattr(c, name), bool):
            yield f"{name} {getattr(c, name)!r} must be true or false; use true"
    if c.rope is False and (c.rope_theta is not None or c.rope_scaling is False):
        yield "rope false must go without rope_theta and rope_scaling, which nothing reads then; remove them"


def pattern_problems(
    pattern: tuple[str, ...], types: dict[str, LayerType], num_layers: Any
) -> Iterator[str]:
    """Sentences for names of a pattern without a table, tables that no layer has, and the like."""
    if not (isinstance(pattern, tuple) and all(isinstance(name, str) for name in pattern)):
        yield f"layer_pattern {pattern!r} must be a tuple of names; use ('local', {GLOBAL!r})"
        return
    if GLOBAL in types:
        yield f"layer_types.{GLOBAL} must not be there: such layers are as the model says; use another name"
    for name in sorted({name for name in pattern if name != GLOBAL and name not in types}):
        yield (
            f"layer_pattern has {name!r}, which must be {GLOBAL!r} or have a table; write "
            f"[model.layer_types.{name}]"
        )
    for name in sorted(types.keys() - {*pattern, GLOBAL}):
        yield f"layer_types.{name} is the type of no layer; put {name!r} into layer_pattern, or remove it"
    if isinstance(num_layers, int) and len(pattern) > num_layers:
        yield (
            f"layer_pattern of {len(pattern)} types must not be longer than num_layers {num_layers}; shorten it"
        )
