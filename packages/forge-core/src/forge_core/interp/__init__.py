"""Read, change and compare activations of a model. `forge_core.interp.points` has the names of the hook points."""

from forge_core.interp.attention import attention_weights, draw_attention
from forge_core.interp.intervene import intervene
from forge_core.interp.points import points_of
from forge_core.interp.probe import LinearProbe, fit_classifier, fit_ridge, logit_lens
from forge_core.interp.similarity import MinibatchCKA, debiased_linear_cka, linear_cka, svcca
from forge_core.interp.store import ActivationStore

__all__ = [
    "ActivationStore",
    "LinearProbe",
    "MinibatchCKA",
    "attention_weights",
    "debiased_linear_cka",
    "draw_attention",
    "fit_classifier",
    "fit_ridge",
    "intervene",
    "linear_cka",
    "logit_lens",
    "points_of",
    "svcca",
]
