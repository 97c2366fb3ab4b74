"""How heads share a width."""

from __future__ import annotations

__all__ = ["width_of_heads"]


def width_of_heads(adapter: str, num_heads: int, width: int) -> int:
    """width / num_heads; ValueError where it is no whole number."""
    if width % num_heads:
        raise ValueError(
            f"adapter.{adapter}.num_heads {num_heads} must divide the width {width} that the heads share; use a divisor"
        )
    return width // num_heads
