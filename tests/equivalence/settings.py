"""How a rank on a GPU computes, so that two runs have the same bits, and products the precision that bounds assume."""

from __future__ import annotations

import os

import torch

from forge_testing import device


def set_up(tf32: bool) -> None:
    """Before a run in a rank; nothing on a CPU."""
    if device().type == "cpu":
        return
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def described(tf32: bool) -> dict[str, str]:
    """On a rank of GPUs: its device, and the settings that numbers depend on."""
    set_up(tf32)
    torch.ones((), device=device())
    cuda, nccl = torch.backends.cuda, torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    kernels = {
        "flash": cuda.flash_sdp_enabled(),
        "efficient": cuda.mem_efficient_sdp_enabled(),
        "cudnn": cuda.cudnn_sdp_enabled(),
        "math": cuda.math_sdp_enabled(),
    }
    found = {
        "TF32": cuda.matmul.allow_tf32,
        "bf16 sums in bf16": cuda.matmul.allow_bf16_reduced_precision_reduction,
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
    }
    settings = [f"{name} {'on' if on else 'off'}" for name, on in found.items()]
    settings += [f"CUBLAS_WORKSPACE_CONFIG {os.environ.get('CUBLAS_WORKSPACE_CONFIG', 'unset')}"]
    settings += [f"attention kernels {' '.join(name for name, on in kernels.items() if on)}"]
    settings += [f"NCCL {'.'.join(map(str, nccl))}"]
    return {"device": torch.cuda.get_device_name(), "settings": ", ".join(settings)}
