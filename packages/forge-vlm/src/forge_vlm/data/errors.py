"""Errors of multimodal data."""

from __future__ import annotations

from functools import partial

from forge_vlm._shared import problems

__all__ = ["InvalidSample", "invalid"]


class InvalidSample(problems.WithProblems, ValueError):
    """A sample, a picture or a file that cannot be read; `where` names it."""


#: The InvalidSample of one problem, or, with `kind`, another error.
invalid = partial(problems.invalid, kind=InvalidSample)
