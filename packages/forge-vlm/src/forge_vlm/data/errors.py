"""Errors of multimodal data."""

from __future__ import annotations

__all__ = ["InvalidSample"]


class InvalidSample(ValueError):
    """A sample, a picture or a file that cannot be read; the message names it."""
