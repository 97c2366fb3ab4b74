"""The random states of one process as checkpoint state."""

import logging
import random
import sys
from typing import Any

import torch

logger = logging.getLogger("forge_ckpt")


class RNGState:
    """Python's, torch's CPU and every visible CUDA device's generator; numpy's when it is imported.

    Usage: ``state = {"model": model, "rng": RNGState()}``. Torch's states are uint8 tensors, the
    others plain tuples. Reading them costs no device sync of consequence and draws no number.
    """

    # The saved structure (devices, numpy) may differ from this process's: take it as it was saved.
    load_replaces = True

    def state_dict(self) -> dict[str, Any]:
        """``{"python", "torch", "cuda": {device: state} | None, "numpy": tuple | None}``."""
        cuda = None
        if torch.cuda.is_available():
            cuda = dict(enumerate(torch.cuda.get_rng_state_all()))
        numpy = sys.modules.get("numpy")
        return {
            "python": random.getstate(),
            "torch": torch.get_rng_state(),
            "cuda": cuda,
            "numpy": None if numpy is None else numpy.random.get_state(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set what was saved; devices that are not here are named in a warning."""
        random.setstate(state_dict["python"])
        torch.set_rng_state(state_dict["torch"])
        here = torch.cuda.device_count() if torch.cuda.is_available() else 0
        saved = state_dict["cuda"] or {}
        for device, state in saved.items():
            if device < here:
                torch.cuda.set_rng_state(state, device)
        if len(saved) != here:
            logger.warning(
                "random states of %d CUDA devices were saved, %d devices are here: the others keep "
                "their own, so the run will not be bit-equal",
                len(saved),
                here,
            )
        if state_dict["numpy"] is not None:
            sys.modules["numpy"].random.set_state(state_dict["numpy"])
