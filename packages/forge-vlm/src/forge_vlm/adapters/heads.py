"""How heads share a width."""

from __future__ import annotations

from forge_vlm._shared.problems import invalid

__all__ = ["width_of_heads"]


def width_of_heads(adapter: str, num_heads: int, width: int) -> int:
    """width / num_heads; ValueError where it is no whole number."""
    if width % num_heads:
        rule = f"must divide the width {width} that the heads share"
        raise invalid(f"adapter.{adapter}.num_heads", "divides", num_heads, rule, "use a divisor")
    return width // num_heads
