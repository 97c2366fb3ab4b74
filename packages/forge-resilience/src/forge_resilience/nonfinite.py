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


class Skips:
    """Counts masked steps where the verdicts are, and is read once in a while.

    skips = Skips()
    skips.add(flag)                       # each step, on the device
    skipped, longest = skips.read()       # one host sync, when a row is logged anyway
    """

    def __init__(self) -> None:
        self._counts: Any = None  # skipped, longest run of them, current run

    def add(self, flag: Any) -> None:
        """Count one step's verdict; no sync."""
        import torch

        if self._counts is None:
            self._counts = torch.zeros(3, device=flag.device)
        skipped, longest, current = self._counts.unbind()
        current = (current + 1) * flag
        self._counts = torch.stack([skipped + flag, torch.maximum(longest, current), current])

    def read(self) -> tuple[int, int]:
        """(steps skipped, longest run of them) since the last read; a run of skips continues across reads."""
        if self._counts is None:
            return 0, 0
        skipped, longest = (int(n) for n in self.take().tolist())
        return skipped, longest

    def take(self) -> Any:
        """The same as a tensor (2,) fp32 where the verdicts are, at least one; no sync."""
        taken = self._counts[:2].clone()
        self._counts[:2].zero_()
        return taken
