"""Which hidden states of an encoder are its features.

Shapes: N images, T tokens, W width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forge_vlm._shared.problems import invalid
from forge_vlm.vision.config import VisionConfig

__all__ = ["select"]


def select(states: Sequence[Tensor], last: Tensor, config: VisionConfig, *, front: int) -> Tensor:
    """The states of `select_layer` side by side, or `last` without any: (N, T, W) each -> (N, T, W * number).

    `front` tokens before the patches, a class token and registers, are left out by "patch"."""
    try:
        chosen = [states[layer] for layer in config.select_layer] or [last]
    except IndexError:
        rule = f"must be hidden states of the encoder, from {-len(states)} to {len(states) - 1}"
        value = config.select_layer
        raise invalid("vision.select_layer", "range", value, rule, "correct it") from None
    if config.select_feature == "patch":
        chosen = [state[:, front:] for state in chosen]
    return chosen[0] if len(chosen) == 1 else torch.cat(chosen, dim=-1)
