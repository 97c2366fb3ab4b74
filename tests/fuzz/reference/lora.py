"""Low-rank adapters (Hu et al. 2021): which weights are trained, and the merged weights."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch
from torch import Tensor


def matches(name: str, patterns: list[str]) -> bool:
    """Return whether a name matches a pattern, and none of those that start with "!"."""
    excluded = [p[1:] for p in patterns if p.startswith("!")]
    included = [p for p in patterns if not p.startswith("!")]
    return any(fnmatchcase(name, p) for p in included) and not any(
        fnmatchcase(name, p) for p in excluded
    )


def trained_names(job: dict, weights: Mapping[str, Tensor]) -> list[str]:
    """Return the names of trained weights: with `lora.rank` the adapters and `lora.whole`."""
    if not job["lora"]["rank"]:
        return list(weights)
    whole = job["lora"]["whole"]
    return [
        name for name in weights if name.endswith((".lora_a", ".lora_b")) or matches(name, whole)
    ]


def round_base(job: dict, weights: dict[str, Tensor], trained: list[str]) -> None:
    """Round frozen weights to `lora.base_dtype`, in place; no arithmetic is in bf16."""
    if job["lora"]["rank"] and job["lora"]["base_dtype"] == "bf16":
        for name, weight in weights.items():
            if name not in trained:
                weights[name] = weight.to(torch.bfloat16).to(weight.dtype)


def merged(job: dict, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights without adapters: W + alpha / rank * B A."""
    merged = {name: w for name, w in weights.items() if not name.endswith((".lora_a", ".lora_b"))}
    for name, a in weights.items():
        if name.endswith(".lora_a"):
            layer = name.removesuffix("lora_a")
            scale = job["lora"]["alpha"] / job["lora"]["rank"]
            product = weights[f"{layer}lora_b"] @ a
            merged[f"{layer}weight"] = merged[f"{layer}weight"] + scale * product
    return merged
