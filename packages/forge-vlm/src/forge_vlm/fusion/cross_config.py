"""Options of the fusion cross_attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from forge_vlm._config import is_size
from forge_vlm._shared.problems import Problem, raise_problems

__all__ = ["CrossAttentionConfig"]

SEES = ("last", "group", "all")


@dataclass(frozen=True)
class CrossAttentionConfig:
    """Where blocks of cross-attention stand, and which images a token sees.

        CrossAttentionConfig()                                            # before every second text layer
        CrossAttentionConfig(every_n_layers=4, qk_norm=True)              # Llama 3.2 Vision
        CrossAttentionConfig(every_n_layers=1, sees="last")               # Flamingo

    Text layers keep their numbers: a decoder of `num_layers` has these blocks besides. The cross layers 3, 8, 13, ...
    of all 40 of Llama 3.2 Vision 11B stand before its text layers 3, 7, 11, ... of 32.
    """

    every_n_layers: int = 2
    """a block stands before the last of every n text layers; layers overrides it"""
    layers: tuple[int, ...] = ()
    """text layers with a block before them, from 0; empty: by every_n_layers"""
    sees: Literal["last", "group", "all"] = "group"
    """images that a token sees: last (the one before it), group (with those side by side with that one), all"""
    qk_norm: bool = False
    """RMSNorm on queries and keys of each head (Llama 3.2 Vision)"""

    def __post_init__(self) -> None:
        raise_problems("cross_attention", _problems(self))

    def before(self, num_layers: int) -> tuple[int, ...]:
        """Text layers of a decoder of `num_layers` with a block before them, in order."""
        if self.layers:
            return tuple(sorted(self.layers))
        return tuple(range(self.every_n_layers - 1, num_layers, self.every_n_layers))

    def problems(self, num_layers: int) -> Iterator[Problem]:
        """Problems of places that a decoder of `num_layers` does not have."""
        where = self.before(num_layers)
        if not where:
            rule = f"must be at most num_layers {num_layers}, or no block sees images"
            fix = f"use {num_layers} or less"
            value = self.every_n_layers
            yield Problem("fusion.cross_attention.every_n_layers", "range", value, rule, fix)
        elif where[-1] >= num_layers:
            rule = f"must be below num_layers {num_layers}, the number of text layers"
            fix = "correct them"
            yield Problem("fusion.cross_attention.layers", "range", self.layers, rule, fix)


def _problems(c: CrossAttentionConfig) -> Iterator[Problem]:
    if not is_size(c.every_n_layers, 2**16):
        rule = "must be a whole number, at least 1"
        yield Problem("every_n_layers", "size", c.every_n_layers, rule, "use 4")
    wrong = [n for n in c.layers if isinstance(n, bool) or not isinstance(n, int) or n < 0]
    if wrong or len(set(c.layers)) != len(c.layers):
        rule = "must be different whole numbers from 0"
        yield Problem("layers", "duplicate", c.layers, rule, "use [3, 7]")
    if c.sees not in SEES:
        rule = f"must be {', '.join(SEES[:-1])} or {SEES[-1]}"
        yield Problem("sees", "unknown", c.sees, rule, "use 'group'")
    if not isinstance(c.qk_norm, bool):
        yield Problem("qk_norm", "type", c.qk_norm, "must be true or false", "use true")
