"""Which hidden states of an encoder are its features.

Shapes: N images, T tokens, W width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forge_vlm.vision.config import VisionConfig

__all__ = ["select"]


def select(states: Sequence[Tensor], last: Tensor, config: VisionConfig, *, front: int) -> Tensor:
    """The states of `select_layer` side by side, or `last` without any: (N, T, W) each -> (N, T, W * number).

    `front` tokens before the patches, a class token and registers, are left out by "patch"."""
    try:
        chosen = [states[layer] for layer in config.select_layer] or [last]
    except IndexError:
        raise ValueError(
            f"vision.select_layer {list(config.select_layer)} must be hidden states of the encoder, from "
            f"{-len(states)} to {len(states) - 1}; correct it"
        ) from None
    if config.select_feature == "patch":
        chosen = [state[:, front:] for state in chosen]
    return chosen[0] if len(chosen) == 1 else torch.cat(chosen, dim=-1)
