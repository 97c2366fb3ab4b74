"""Counting: parameters, floating-point operations per token, and the peak of a device.

Model FLOPs utilization is `tokens_per_second * flops_per_token(model, seq_len) / peak_flops(device)`.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from forge_core._shared.problems import invalid
from forge_core.kinds import own_kinds

__all__ = ["flops_per_token", "parameter_count", "peak_flops", "spared_flops"]

# Dense bf16 peak in FLOP/s without sparsity, from the vendors' datasheets. The first key found in the
# device's name counts, so the special form of a card comes before its general one.
_BF16_PEAKS: tuple[tuple[str, float], ...] = (
    ("GB200", 2500e12),
    ("B200", 2250e12),
    ("H200 NVL", 835.5e12),
    ("GH200", 989.5e12),
    ("H200", 989.5e12),
    ("H100 NVL", 835.5e12),
    ("H100 PCIe", 756.5e12),
    ("H100", 989.5e12),
    ("A100", 312e12),
    ("L40S", 362e12),
    ("MI300X", 1307e12),
)


def parameter_count(model: nn.Module) -> int:
    """Number of trained and frozen parameters; a tied one counts once, a DTensor in full."""
    return sum(parameter.numel() for parameter in model.parameters())


def flops_per_token(model: nn.Module, seq_len: int) -> float:
    """FLOPs of one training step per token: three times the forward's.

    `tokens_per_second * flops_per_token(model, 2048)`

    A multiplication and an addition are two operations. A module with a method `flops_per_token(seq_len)` (of its
    forward, everything inside included) is counted by that. Elsewhere each `nn.Linear` counts `2 * weight.numel()` and
    everything else nothing: a lower bound, without attention.

    The backward counts as twice the forward, less 2 per weight for the gradients of frozen matrices. The gradients of
    frozen stacks of experts, and of the activations of frozen first layers, are counted: an upper bound there. A module
    with a method `spared_flops_per_token(seq_len)` reports the operations of its backward that are not computed.

    A dense decoder counts 2 per weight of its matrices, the output head included even where it is tied,
    plus attention's `2 * num_heads * head_dim * seq_len` per layer: scores and weighted sum cost
    `4 * num_heads * head_dim * seq_len`, and a causal mask needs half. Never counted: the embedding
    lookup, norms, softmax, padding, and a second forward under recomputation.
    """
    if seq_len < 1:
        fix = "give the tokens per sequence"
        raise invalid("seq_len", "range", seq_len, "must be at least 1", fix)
    return 3.0 * forward_flops(model, seq_len) - spared_flops(model, seq_len)


def linear_flops(*layers: Any) -> float:
    """Forward FLOPs of linear layers for one token, by their own method if they have one (LoRA); None counts 0."""
    total = 0.0
    for layer in layers:
        if hasattr(layer, "flops_per_token"):
            total += layer.flops_per_token(1)
        elif layer is not None:
            total += 2.0 * layer.in_features * layer.out_features
    return total


def spared_flops(module: nn.Module, seq_len: int) -> float:
    """FLOPs per token that the backward of `module` does not compute because matrices are frozen: 2 per weight.

    A module with a method `spared_flops_per_token(seq_len)` is counted by that; elsewhere each frozen matrix counts
    once that is multiplied, not looked up.
    """
    seen: set[nn.Parameter] = set()  # a tied one counts once

    def spared(module: nn.Module) -> float:
        method = getattr(module, "spared_flops_per_token", None)
        if callable(method):
            return float(method(seq_len))
        kinds = own_kinds(module)
        own = {p for n, p in module.named_parameters(recurse=False) if kinds[n] == "matrix"}
        frozen = {p for p in own - seen if not p.requires_grad}
        seen.update(frozen)
        return 2.0 * sum(p.numel() for p in frozen) + sum(map(spared, module.children()))

    return spared(module)


def forward_flops(module: nn.Module, seq_len: int) -> float:
    """Forward FLOPs of a module for one token: by its method `flops_per_token`, else of its linear layers.

    Warns of a module with matrices of its own and no such method.
    """
    method = getattr(module, "flops_per_token", None)
    if callable(method):
        return float(method(seq_len))
    if isinstance(module, nn.Linear):
        return 2.0 * module.weight.numel()
    if {"matrix", "stacked_matrix"} & {*own_kinds(module).values()}:
        name = type(module).__name__
        warnings.warn(
            f"{name} has matrices and no flops_per_token: they are not counted", stacklevel=2
        )
    return sum(forward_flops(child, seq_len) for child in module.children())


def peak_flops(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> float | None:
    """Return the dense peak of `device` in FLOP/s by its vendor's datasheet, or None if it is not in the table.

    The table has the bf16 and fp16 peaks of common data-center GPUs at their full power; a CPU has none.
    """
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in _BF16_PEAKS if key in name), None)
