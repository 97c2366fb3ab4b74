"""Length of a run and learning rate of each step.

A job whose phases change the sequence length or the batch counts tokens: the position of a step is
the number of tokens up to its end, divided by the tokens of the first step and rounded up. Else it
is the number of the step, from 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import islice

from torch import Tensor


def token_target(job: dict, weights: Mapping[str, Tensor]) -> int | None:
    """Return the tokens after which the run ends, or None where `train.steps` sets its length.

    `weights` are all parameters of the model, frozen ones included, without adapters.
    """
    train = job["train"]
    if train["tokens"] is not None:
        return train["tokens"]
    if train["tokens_per_parameter"] is not None:
        count = sum(weight.numel() for weight in weights.values())
        return math.ceil(train["tokens_per_parameter"] * count)
    return None


def token_counts(job: dict, tokens: Iterable[int], target: int | None) -> list[int]:
    """Return the tokens at the end of each step of the run.

    `tokens` are the cumulative tokens of the steps of the data, perhaps without end.
    """
    if target is None:
        return list(islice(tokens, job["train"]["steps"]))
    counts = []
    for count in tokens:
        counts.append(count)
        if count >= target:
            break
    return counts


def counts_tokens(job: dict) -> bool:
    """Return whether a phase sets the sequence length or the batch."""
    phases = (job["data"].get("phases") or {}).values()
    return any(p["seq_len"] is not None or p["global_batch"] is not None for p in phases)


def rate_factors(job: dict, tokens: list[int]) -> list[float]:
    """Return the factor of the peak learning rate of each step, without that of its phase."""
    if counts_tokens(job):
        first = job["train"]["global_batch"] * job["data"]["seq_len"]
        positions = [math.ceil(count / first) for count in tokens]
    else:
        positions = list(range(1, len(tokens) + 1))
    return [schedule_factor(job["schedule"], t, positions[-1]) for t in positions]


def schedule_factor(keys: dict, t: int, total: int) -> float:
    """Return the factor of the peak learning rate at position `t` of `total`, counted from 1."""
    name, warmup, floor = keys["name"], keys["warmup_steps"], keys["min_lr_ratio"]
    if name == "none":
        return 1.0
    if t < warmup:
        return t / warmup
    if name == "constant":
        return 1.0
    if name == "inverse_sqrt":  # Vaswani et al. 2017
        return math.sqrt(max(warmup, 1) / t)

    start = warmup
    if name == "wsd":  # Hu et al. 2024
        steps = keys["wsd"]["decay_steps"]
        if steps is None:
            steps = max(1, round(keys["wsd"]["decay_fraction"] * total))
        start = total - steps
    x = min(1.0, max(0.0, (t - start) / (total - start)))

    shape = keys["wsd"]["decay"] if name == "wsd" else name
    if shape == "cosine":
        left = 0.5 * (1 + math.cos(math.pi * x))
    elif shape == "linear":
        left = 1 - x
    elif shape == "sqrt":  # Haegele et al. 2024
        left = 1 - math.sqrt(x)
    elif shape == "rex":  # Chen et al. 2021
        left = (1 - x) / (0.5 + 0.5 * (1 - x))
    else:
        raise ValueError(f"schedule {name} is not built in")
    return floor + (1 - floor) * left
