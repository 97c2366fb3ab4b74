"""Which kernel torch's scaled_dot_product_attention may take, for as long as a block runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from forge_parallel._shared.problems import Problem

#: On a CPU torch has these two.
_ON_CPU = ("flash", "math")
#: On CUDA these compute in 16 bits alone.
_HALF_ONLY = ("flash", "cudnn")


def sdpa_problem(name: str, device: torch.device, precision: str) -> Problem | None:
    """A problem if the device does not have the kernel, or does not have it in this precision."""
    if name == "auto":
        return None
    if device.type == "cpu" and name not in _ON_CPU:
        fix = f"use {' or '.join(_ON_CPU)}, or auto"
        return Problem("sdpa", "device", name, "is a kernel of CUDA, and the device is cpu", fix)
    if device.type == "cuda" and name in _HALF_ONLY and precision == "fp32":
        rule, fix = (
            "computes in 16 bits on CUDA, and precision is fp32",
            "use efficient or math, or auto",
        )
        return Problem("sdpa", "precision", name, rule, fix)
    return None


@contextmanager
def sdpa_kernel(name: str) -> Iterator[None]:
    """Let torch's attention take this kernel alone: flash, efficient, cudnn or math; "auto" leaves it to choose.

    The setting is the process's, as `torch.nn.attention.sdpa_kernel`'s is, and is put back at the end. A call that
    the kernel cannot compute (a window has a mask, which CUDA's flash has not) raises torch's "No viable backend".
    """
    if name == "auto":
        yield
        return
    cuda = torch.backends.cuda
    switches = {
        "flash": (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
        "efficient": (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
        "cudnn": (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
        "math": (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    }
    before = {kind: enabled() for kind, (enabled, _) in switches.items()}
    try:
        for kind, (_, enable) in switches.items():
            enable(kind == name)
        yield
    finally:
        for kind, (_, enable) in switches.items():
            enable(before[kind])
