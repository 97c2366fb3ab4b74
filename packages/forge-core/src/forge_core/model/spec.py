"""What an attention computes, apart from how."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any

from torch import Tensor

from forge_core._rules import Rule, check
from forge_core.registry import Registry


def _field(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


def _not_positive(value: object) -> bool:
    good = isinstance(value, Real) and not isinstance(value, bool)
    return value is not None and not (good and 0.0 < float(value) < math.inf)  # type: ignore[arg-type]


def _no_window(c: Mapping[str, Any]) -> bool:
    window = c["window"]
    whole = isinstance(window, Integral) and not isinstance(window, bool)
    return window is not None and not (whole and 1 <= window <= 2**31)


ATTENTION_RULES: tuple[Rule, ...] = (
    Rule(
        "attention_scale",
        lambda c: _not_positive(c["scale"]),
        "scale {scale!r} must be a finite number above 0",
        "use 0.125 for a head width of 64, or leave it out",
    ),
    Rule(
        "attention_window",
        _no_window,
        "window {window!r} must be a whole number, at least 1",
        "use 4096, or leave it out",
    ),
    Rule(
        "attention_softcap",
        lambda c: _not_positive(c["softcap"]),
        "softcap {softcap!r} must be a finite number above 0",
        "use 50, or leave it out",
    ),
    Rule(
        "attention_sinks",
        lambda c: not isinstance(c["sinks"], bool),
        "sinks {sinks!r} must be true or false",
        "use false",
    ),
    Rule(
        "attention_mask",
        lambda c: (
            not isinstance(c["mask"], str) or (c["mask"] != "causal" and ":" not in c["mask"])
        ),
        "mask {mask!r} must be 'causal' or module:attr",
        "use 'causal'",
    ),
)


@dataclass(frozen=True)
class AttentionSpec:
    """Softmax attention of each token to tokens of its document, as plain data.

        AttentionSpec(window=4096)                    # Mistral
        AttentionSpec(scale=1 / 64, softcap=50.0)     # Gemma 2

    An implementation computes a field or refuses it by its name; a field at its default asks nothing of it.
    """

    scale: float | None = _field(None, "factor of the scores; empty: head_dim ** -0.5")
    window: int | None = _field(
        None, "how many tokens one sees, itself and those before it; empty: all of its document"
    )
    softcap: float | None = _field(
        None,
        "scores x become softcap * tanh(x / softcap); holds the scores of a row; empty: no cap",
    )
    sinks: bool = _field(
        False, "a learned logit per head that takes part of the softmax; holds the scores of a row"
    )
    mask: str = _field(
        "causal",
        "who sees whom: causal, or the import path of mask(ctx, queries, keys); holds a row's scores",
    )

    def __post_init__(self) -> None:
        check(vars(self), ATTENTION_RULES, "attention")

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


def causal_mask(ctx: Any, queries: Tensor, keys: Tensor) -> Tensor:
    """Each token sees itself and those before it: (1, queries, keys) bool."""
    return (keys <= queries[:, None])[None]


MASKS = Registry(
    "model.attention.mask", "forge.masks", ("ctx", "queries", "keys"), {"causal": causal_mask}
)
