"""Proof that a model trains the same numbers in every layout: `python -m forge_parallel.prove my_lab.model:build`."""

from forge_parallel.prove.prove import Result, prove
from forge_parallel.prove.settings import ProveError

__all__ = ["ProveError", "Result", "prove"]
