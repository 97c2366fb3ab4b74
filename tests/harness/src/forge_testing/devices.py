"""Where ranks compute: on CPUs with gloo, or on CUDA devices with NCCL, rank r on cuda:r.

`choose` is called once, by `pytest --device cuda --nproc N` and `hatch run matrix`. The choice is in two environment
variables, so that processes that are started by others have it, too.
"""

from __future__ import annotations

import os
import unittest
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

DEVICE, NPROC = "FORGE_TEST_DEVICE", "FORGE_TEST_NPROC"
DEVICES = ("cpu", "cuda")

_of_this_rank: torch.device | None = None


class NotOnThisDevice(unittest.SkipTest):
    """A call that the chosen devices cannot run, or that never used them. pytest skips a test that raises it."""


def choose(device: str, nproc: int | None = None) -> None:
    """Make the ranks of this process's calls `device`: "cpu", or "cuda" on `nproc` devices (all that there are).

    Raises ValueError before any rank starts: for a device that this machine or this torch has not, for more
    devices than there are, for nproc on CPUs, where any number of ranks runs.
    """
    if device not in DEVICES:
        raise ValueError(f"device {device!r} is unknown; use {', '.join(DEVICES)}")
    if device == "cpu":
        if nproc is not None:
            raise ValueError(
                f"nproc {nproc} must go with device cuda; on CPUs as many ranks run as are asked for"
            )
        os.environ.pop(DEVICE, None)
        os.environ.pop(NPROC, None)
        return
    import torch

    found = torch.cuda.device_count()
    if not found:
        raise ValueError(
            f"device cuda must have a CUDA GPU and this machine (torch {torch.__version__}) shows none; use cpu"  # prose: a message of its own
        )
    nproc = found if nproc is None else nproc
    if not 1 <= nproc <= found:
        raise ValueError(
            f"nproc {nproc} must be at least 1 and at most the {found} CUDA devices here: NCCL refuses two "  # prose: a message of its own
            "ranks on one device"
        )
    os.environ.update({DEVICE: device, NPROC: str(nproc)})


def chosen() -> tuple[str, int | None]:
    """What was chosen: the kind of device, and how many ranks it has; None for any number."""
    nproc = os.environ.get(NPROC)
    return os.environ.get(DEVICE, "cpu"), nproc and int(nproc)  # type: ignore[return-value]


def device() -> torch.device:
    """This rank's device; outside of ranks the CPU, where results of ranks arrive.

    Usage, in a function that ranks call: `ParallelConfig(device=device().type)`, `tokens.to(device())`.
    """
    import torch

    return _of_this_rank or torch.device("cpu")


def take(kind: str, rank: int) -> torch.device:
    """Make this process rank `rank` of devices of a kind, before it touches any."""
    global _of_this_rank
    import torch

    if kind == "cpu":
        # a layout on device "auto" means the CPU, too, where there are GPUs
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    else:
        if torch.cuda._is_in_bad_fork():
            raise RuntimeError(
                "CUDA was asked something before the ranks were forked, so they cannot use it; import "
                "nothing into tests that calls torch.cuda when it is imported"
            )
        # read when cuBLAS starts; with it, its sums have one order
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.cuda.set_device(rank)
    _of_this_rank = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    return _of_this_rank


def allocations() -> int:
    """How many tensors this rank has had on its CUDA device; 0 on a CPU."""
    import torch

    if device().type == "cpu":
        return 0
    found: int = torch.cuda.memory_stats().get("allocation.all.allocated", 0)
    return found
