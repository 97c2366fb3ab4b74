"""Layers of several types in one decoder: windows, rotary bases and layers without rotary positions.

Gemma 3 has five local layers for a global one, gpt-oss one for one, SmolLM3 turns no positions in each fourth.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from forge_core._config import is_finite, is_size, switch_problems
from forge_core._shared.fields import field
from forge_core._shared.problems import Problem, raise_problems

#: The type of a layer that is as the model's own keys say; it has no table.
GLOBAL = "global"


@dataclass(frozen=True)
class LayerType:
    """What the attention of some layers has of its own; a field at its default is as in the model.

    LayerType(window=512, rope_theta=1e4, rope_scaling=False)   # local layers of Gemma 3
    LayerType(rope=False)                                       # NoPE (Kazemnejad et al. 2023)
    """

    window: int | None = field(
        None, "tokens that one sees, itself among them; empty: as model.attention.window"
    )
    rope_theta: float | None = field(
        None, "base of the rotary wavelengths; empty: as model.rope_theta"
    )
    rope_scaling: bool = field(True, "model.rope_scaling holds; false: wavelengths are plain")
    rope: bool = field(True, "queries and keys are turned by their positions; false: NoPE")

    def __post_init__(self) -> None:
        raise_problems("layer_types", _problems(self))


def _problems(c: LayerType) -> Iterator[Problem]:
    if all(getattr(c, f.name) == f.default for f in fields(c)):
        fix = f"give it a key, or put {GLOBAL!r} into layer_pattern"
        yield Problem("", "missing", ..., f"a type without any key is {GLOBAL!r}", fix)
    if c.window is not None and not is_size(c.window, 2**31):
        rule = "must be a whole number, at least 1"
        yield Problem("window", "range", c.window, rule, "use 512, or leave it out")
    if c.rope_theta is not None and not (is_finite(c.rope_theta) and c.rope_theta > 1.0):
        rule = "must be a finite number above 1"
        yield Problem("rope_theta", "range", c.rope_theta, rule, "use 10000, or leave it out")
    yield from switch_problems(c, "rope_scaling", "rope")
    if c.rope is False and (c.rope_theta is not None or c.rope_scaling is False):
        rule = "must go without rope_theta and rope_scaling, which nothing reads then"
        yield Problem("rope", "excludes", c.rope, rule, "remove them")


def pattern_problems(
    pattern: tuple[str, ...], types: dict[str, LayerType], num_layers: Any
) -> Iterator[Problem]:
    """Problems of names of a pattern without a table, tables that no layer has, and the like."""
    if not (isinstance(pattern, tuple) and all(isinstance(name, str) for name in pattern)):
        fix = f"use ('local', {GLOBAL!r})"
        yield Problem("layer_pattern", "type", pattern, "must be a tuple of names", fix)
        return

    if GLOBAL in types:
        rule = "must not be there: such layers are as the model's keys set them"
        yield Problem(f"layer_types.{GLOBAL}", "reserved", ..., rule, "use another name")
    for name in sorted({name for name in pattern if name != GLOBAL and name not in types}):
        rule, fix = f"must be {GLOBAL!r} or have a table", f"write [model.layer_types.{name}]"
        yield Problem("layer_pattern", "unknown", name, rule, fix)
    for name in sorted(types.keys() - {*pattern, GLOBAL}):
        fix = f"put {name!r} into layer_pattern, or remove it"
        yield Problem(f"layer_types.{name}", "unused", ..., "is the type of no layer", fix)

    if isinstance(num_layers, int) and len(pattern) > num_layers:
        rule = f"has {len(pattern)} types and must not be longer than num_layers {num_layers}"
        yield Problem("layer_pattern", "length", pattern, rule, "shorten it")
