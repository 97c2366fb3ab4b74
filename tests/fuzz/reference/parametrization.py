"""Learning rates of maximal-update parametrization (Yang et al. 2022, 2023), by parameter name."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from .optimizers import is_matrix


def lr_scales(job: dict, weights: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the factors of the learning rate of blocks of the decoder and of MTP.

    Matrices have base_dim / dim. With `base_num_layers` all parameters of a block have
    sqrt(base_num_layers / num_layers). Other parameters, such as the embedding, the head, the
    last norm, an encoder and an adapter, have no factor.
    """
    model = job["model"]
    if model.get("parametrization", "standard") != "mup":
        return {}
    width = model["mup"]["base_dim"] / model["dim"]
    base = model["mup"]["base_num_layers"]
    depth = 1.0 if base is None else math.sqrt(base / model["num_layers"])
    scales = {}
    for name, weight in weights.items():
        in_mtp = name.startswith("mtp.")
        in_block = name.startswith("layers.") or (in_mtp and ".block." in name)
        if in_block or in_mtp:
            factor = depth if in_block else 1.0
            scales[name] = factor * width if is_matrix(name, weight) else factor
    return scales
