"""What a layer counts: choices per expert, for balance within a step and for statistics.

Shapes: E experts.
"""

import torch
from torch import Tensor


class Tally:
    """Sums on the device, made at the first forward; outside the module's state.

    `step` (E,) int64 are the choices since the last end of step, of training forwards alone. The others are
    sums since the last `reset`, of all forwards: `counts` (E,), `tokens`, `dropped` int64, `entropy` fp64.
    """

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts
        self.step: Tensor | None = None
        self.global_step: Tensor | None = None
        self.reset()

    def reset(self) -> None:
        """Begin the statistics anew; the step goes on."""
        self.counts: Tensor | None = None
        self.tokens: Tensor | None = None
        self.dropped: Tensor | None = None
        self.entropy: Tensor | None = None

    def add(
        self, counts: Tensor, tokens: Tensor, dropped: Tensor, entropy: Tensor, *, training: bool
    ) -> None:
        """Add one forward; sums are new tensors, as a forward under inference_mode leaves frozen ones."""
        if training:
            self.step = _plus(self.step, counts)
        self.counts, self.tokens = _plus(self.counts, counts), _plus(self.tokens, tokens)
        self.dropped, self.entropy = (
            _plus(self.dropped, dropped),
            _plus(self.entropy, entropy.double()),
        )

    def add_global(self, counts: Tensor) -> Tensor:
        """Choices of the step over all data ranks up to this micro-batch, (E,) int64."""
        total = counts if self.global_step is None else self.global_step + counts
        self.global_step = total
        return total

    def read(self) -> dict[str, Tensor]:
        """The sums, and the entropy as a mean over tokens; zeros before the first forward."""
        if self.counts is None or self.tokens is None:
            zero = torch.zeros((), dtype=torch.int64)
            none = torch.zeros(self.num_experts, dtype=torch.int64)
            return {"counts": none, "tokens": zero, "dropped": zero, "entropy": zero.float()}
        assert self.dropped is not None
        assert self.entropy is not None
        entropy = (self.entropy / self.tokens.clamp_min(1)).float()
        sums = {"counts": self.counts, "tokens": self.tokens, "dropped": self.dropped}
        return {**{k: v.clone() for k, v in sums.items()}, "entropy": entropy}

    def take_step(self, device: torch.device) -> Tensor:
        """Choices of the step (E,) int64; the next step begins at 0."""
        step = self.step
        self.step = self.global_step = None
        if step is None:
            return torch.zeros(self.num_experts, dtype=torch.int64, device=device)
        return step.to(device)


def _plus(total: Tensor | None, more: Tensor) -> Tensor:
    return more.clone() if total is None else total.to(more.device) + more
