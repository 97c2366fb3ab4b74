"""The function that an attention computes, independent of its implementation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from forge_core._config import is_finite, is_size, switch_problems
from forge_core._shared.fields import field
from forge_core._shared.problems import Problem, raise_problems
from forge_core.registry import Registry


@dataclass(frozen=True)
class AttentionSpec:
    """Softmax attention of each token to tokens of its document, as plain data.

        AttentionSpec(window=4096)                    # Mistral
        AttentionSpec(scale=1 / 64, softcap=50.0)     # Gemma 2

    An implementation computes a field or refuses it by its name; fields at their defaults need no support.
    """

    scale: float | None = field(None, "factor of the scores; empty: head_dim ** -0.5")
    window: int | None = field(
        None, "how many tokens one sees, itself and those before it; empty: all of its document"
    )
    softcap: float | None = field(
        None,
        "scores x become softcap * tanh(x / softcap); holds the scores of a row; empty: no cap",
    )
    sinks: bool = field(
        False, "a learned logit per head that takes part of the softmax; holds the scores of a row"
    )
    mask: str = field(
        "causal",
        "who sees whom: causal, or the import path of mask(ctx, queries, keys); holds a row's scores",
    )

    def __post_init__(self) -> None:
        raise_problems("attention", _problems(self))

    @property
    def needs_scores(self) -> bool:
        """Whether no fused kernel computes it, so that the scores of a row are held."""
        return self.softcap is not None or self.sinks or self.mask != "causal"

    def beyond(self, computed: tuple[str, ...]) -> dict[str, Any]:
        """Fields off their defaults that are not among those computed, with their values."""
        return {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if f.name not in computed and getattr(self, f.name) != f.default
        }


def _problems(c: AttentionSpec) -> Iterator[Problem]:
    for name, value, example in (
        ("scale", c.scale, "0.125 for a head width of 64"),
        ("softcap", c.softcap, "50"),
    ):
        if value is not None and not (is_finite(value) and value > 0.0):
            fix = f"use {example}, or leave it out"
            yield Problem(name, "range", value, "must be a finite number above 0", fix)
    if c.window is not None and not is_size(c.window, 2**31):
        rule = "must be a whole number, at least 1"
        yield Problem("window", "range", c.window, rule, "use 4096, or leave it out")
    yield from switch_problems(c, "sinks")
    if not isinstance(c.mask, str) or (c.mask != "causal" and ":" not in c.mask):
        yield Problem("mask", "unknown", c.mask, "must be 'causal' or module:attr", "use 'causal'")


def causal_mask(ctx: Any, queries: Tensor, keys: Tensor) -> Tensor:
    """Each token sees itself and those before it: (1, queries, keys) bool."""
    return (keys <= queries[:, None])[None]


MASKS = Registry(
    "model.attention.mask", "forge.masks", ("ctx", "queries", "keys"), {"causal": causal_mask}
)
