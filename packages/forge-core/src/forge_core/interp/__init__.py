"""A model seen from outside: its attention, its activations, and how alike two of them are."""

from forge_core.interp.attention import attention_weights

__all__ = ["attention_weights"]
