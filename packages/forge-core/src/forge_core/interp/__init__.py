"""A model seen from outside: what it computes inside, read and changed. `forge_core.interp.points` has the names."""

from forge_core.interp.attention import attention_weights
from forge_core.interp.intervene import intervene
from forge_core.interp.points import points_of
from forge_core.interp.similarity import debiased_linear_cka, linear_cka, svcca
from forge_core.interp.store import ActivationStore

__all__ = [
    "ActivationStore",
    "attention_weights",
    "debiased_linear_cka",
    "intervene",
    "linear_cka",
    "points_of",
    "svcca",
]
