"""Sequences of text and media tokens: segments, attention masks, positions, features at placeholders."""

from forge_vlm.sequence.plan import Segment, SequencePlan

__all__ = ["Segment", "SequencePlan"]
