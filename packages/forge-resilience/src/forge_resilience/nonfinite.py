"""The device lane: a verdict on a step's numbers that nobody reads on the way."""

from __future__ import annotations

from typing import Any


def nonfinite(*values: Any) -> Any:
    """1.0 if any of the 0-dim tensors is nan or inf, else 0.0; a 0-dim fp32 tensor on their device.

    Made from values that are equal on all ranks (the global loss and gradient norm), so the verdict
    is too. Handed to an optimizer that masks its update by it, a bad step changes nothing on any
    rank; no host sync. Usage: `optimizer.step(skip=nonfinite(loss, norm))`.
    """
    import torch

    return 1.0 - torch.isfinite(torch.stack([v.float() for v in values])).all().float()
