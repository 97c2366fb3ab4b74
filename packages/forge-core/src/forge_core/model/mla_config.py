"""Widths of multi-head latent attention, validated when made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from forge_core._config import size_problems, switch_problems
from forge_core._shared.fields import field
from forge_core._shared.problems import Problem, raise_problems

_SIZES = dict.fromkeys(
    ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 2**16
)


@dataclass(frozen=True)
class MLAConfig:
    """Widths of multi-head latent attention (DeepSeek-V2, 2024), by Hugging Face's names; defaults are DeepSeek-V3's.

    MLAConfig(q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16)
    """

    q_lora_rank: int | None = field(
        None, "width of the latent that queries come from; empty: they come from the stream"
    )
    kv_lora_rank: int = field(512, "width of the latent that keys and values come from")
    qk_nope_head_dim: int = field(128, "dims of a query's and a key's head that do not turn")
    qk_rope_head_dim: int = field(64, "dims that turn, which the keys of all heads share")
    v_head_dim: int = field(128, "width of a value's head")
    rope_interleave: bool = field(
        False, "dims turn in pairs of neighbors (DeepSeek's weights), not of halves"
    )

    def __post_init__(self) -> None:
        raise_problems("mla", _problems(self))

    @property
    def qk_head_dim(self) -> int:
        """Width of a query's and a key's head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


def _problems(c: MLAConfig) -> Iterator[Problem]:
    sizes = list(size_problems(c, _SIZES))
    yield from sizes
    if not sizes and c.qk_rope_head_dim % 2:
        rule = "must be even: rotary embedding rotates pairs"
        yield Problem("qk_rope_head_dim", "even", c.qk_rope_head_dim, rule, "use 64")
    yield from switch_problems(c, "rope_interleave")
