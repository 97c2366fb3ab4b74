"""The device of this process."""

from __future__ import annotations

import os

import torch

from forge_parallel.config import DEVICES


def select_device(name: str = "auto") -> torch.device:
    """`auto` is this process's GPU if there is one, else the CPU; `cpu` and `cuda` are themselves.

    A GPU is chosen by LOCAL_RANK (default 0) and made the current device. Raises ValueError for an
    unknown name and for `cuda` on a machine without one. Usage: `device = select_device("auto")`.
    """
    if name not in DEVICES:
        raise ValueError(f"device {name!r} must be one of {', '.join(DEVICES)}; use auto")
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ValueError(
            "device 'cuda' must have a CUDA GPU and this machine shows none; use cpu or auto"
        )
    if name == "cpu" or not available:
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device
