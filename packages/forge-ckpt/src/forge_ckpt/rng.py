"""The random states of a job as checkpoint state: one stream for each rank."""

import hashlib
import logging
import random
import sys
from typing import Any

import torch
import torch.distributed as dist

from forge_ckpt.tree import Path

logger = logging.getLogger("forge_ckpt")


class RNGState:
    """Python's, torch's CPU and CUDA generators; numpy's when it is imported. Of each rank its own.

    Usage: ``state = {"model": model, "rng": RNGState()}``. Ranks are those of ``group`` (give the
    store's, where it has one), else of the default group; one process is rank 0 of 1. One process
    keeps the generators of all CUDA devices that it sees, a rank of several that of its current one.

    On as many ranks as saved, each gets its own state back and continues bit-equal. On another
    number, every rank gets a new stream: seeds from the sha256 of (the saved stream of rank
    ``rank % saved``, the number of ranks now, the rank). So all differ, also from those of any other
    number of ranks, and the same move gives the same streams again.

    Torch's states are uint8 tensors, the others plain tuples. A load reads one saved stream.
    Reading the state costs no device sync of consequence and draws no number.
    """

    # The saved structure (ranks, devices, numpy) may differ from this one: take it as it was saved.
    load_replaces = True

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group

    def state_dict(self) -> dict[str, Any]:
        """``{"world_size": n, "streams": {rank: stream}}`` with this rank's stream only.

        A stream is ``{"python", "torch", "cuda": {device: state} | None, "numpy": tuple | None}``.
        """
        rank, size = self._place()
        return {"world_size": size, "streams": {rank: _stream(alone=size == 1)}}

    def load_selects(self, saved: list[Path]) -> list[Path]:
        """Of the saved paths, those that this rank loads: one stream, its own where there is one."""
        ranks = {path[1] for path in saved if path[0] == "streams"}
        if not ranks:
            return saved  # format of 0.1: one stream
        source = self._place()[0] % len(ranks)
        return [path for path in saved if path[0] != "streams" or path[1] == source]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the saved stream, or begin one that is derived from it (see the class)."""
        rank, size = self._place()
        saved = state_dict.get("world_size", 1)
        stream = state_dict["streams"][rank % saved] if "streams" in state_dict else state_dict
        if saved == size:
            _continue(stream, alone=size == 1)
        else:
            _begin(stream, rank, size)

    def _place(self) -> tuple[int, int]:
        if not (dist.is_available() and dist.is_initialized()):
            return 0, 1
        return dist.get_rank(self._group), dist.get_world_size(self._group)


def _stream(alone: bool) -> dict[str, Any]:
    cuda = None
    if torch.cuda.is_available():
        states = torch.cuda.get_rng_state_all() if alone else [torch.cuda.get_rng_state()]
        cuda = dict(enumerate(states))
    numpy = sys.modules.get("numpy")
    return {
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
        "cuda": cuda,
        "numpy": None if numpy is None else numpy.random.get_state(),
    }


def _continue(stream: dict[str, Any], alone: bool) -> None:
    random.setstate(stream["python"])
    torch.set_rng_state(stream["torch"])
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    used = here if alone else min(here, 1)
    saved = stream["cuda"] or {}
    for device, state in saved.items():
        if device < used:
            torch.cuda.set_rng_state(state, device if alone else "cuda")
    if len(saved) != used:
        logger.warning(
            "random states of %d CUDA devices were saved, %d devices are here: the others keep "
            "their own, so the run will not be bit-equal",
            len(saved),
            used,
        )
    if stream["numpy"] is not None:
        sys.modules["numpy"].random.set_state(stream["numpy"])


def _begin(stream: dict[str, Any], rank: int, size: int) -> None:
    digest = hashlib.sha256(f"forge-ckpt stream {rank} of {size}\n".encode())
    digest.update(repr(stream["python"]).encode())
    digest.update(bytes(stream["torch"].tolist()))
    seed = digest.digest()
    random.seed(seed)
    torch.manual_seed(int.from_bytes(seed[:8], "big"))  # of every device
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed([int.from_bytes(seed[i : i + 4], "big") for i in range(0, 32, 4)])
