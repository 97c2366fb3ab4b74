"""Conversations as training rows: a tokenizer's own template, labels on what the assistant says."""

__all__: list[str] = []
