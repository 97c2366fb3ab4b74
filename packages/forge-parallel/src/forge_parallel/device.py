"""The device of this process."""

from __future__ import annotations

import torch

from forge_parallel.config import DEVICES
from forge_parallel.start import find_world


def select_device(name: str = "auto") -> torch.device:
    """`auto` is this process's GPU if there is one, else the CPU; `cpu` and `cuda` are themselves.

    The GPU is that of this process's local rank (see `find_world`), or the only one that it is shown, and
    becomes the current device. Raises ValueError for an
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
    # a scheduler that gives each task a GPU of its own shows it as number 0
    index = find_world().local_rank if torch.cuda.device_count() > 1 else 0
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device
