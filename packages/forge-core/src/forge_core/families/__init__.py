"""Hugging Face families of dense decoders: names of tensors and keys of configurations, as data."""

from forge_core.families.dense import LLAMA, MISTRAL, QWEN2, QWEN3, Family

__all__ = ["LLAMA", "MISTRAL", "QWEN2", "QWEN3", "Family"]
