"""Conversations as training sequences: the tokenizer's own template, labels on the assistant's messages."""

__all__: list[str] = []
