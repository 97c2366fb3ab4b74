"""Counters of a layer: choices per expert, for balance within a step and for statistics.

Shapes: E experts.
"""

import torch
from torch import Tensor


class RoutingCounters:
    """Sums on the device, created in the first forward; not part of the module's state.

    `step_counts` (E,) int64: choices since the last end of step, in training forwards. The others are sums
    since the last `reset`, over all forwards: `counts` (E,), `tokens`, `dropped` int64, `entropy` fp64.
    """

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts
        self.step_counts: Tensor | None = None
        self.global_step_counts: Tensor | None = None
        self.reset()

    def reset(self) -> None:
        """Reset the statistics; the counts of the step stay."""
        self.counts: Tensor | None = None
        self.tokens: Tensor | None = None
        self.dropped: Tensor | None = None
        self.entropy: Tensor | None = None

    def add(
        self, counts: Tensor, tokens: Tensor, dropped: Tensor, entropy: Tensor, *, training: bool
    ) -> None:
        """Add one forward. Sums are new tensors: those made under inference_mode cannot be changed later."""
        if training:
            self.step_counts = _add(self.step_counts, counts)
        self.counts, self.tokens = _add(self.counts, counts), _add(self.tokens, tokens)
        self.dropped = _add(self.dropped, dropped)
        self.entropy = _add(self.entropy, entropy.double())  # fp32 would lose small terms in a sum

    def add_global(self, counts: Tensor) -> Tensor:
        """Add one micro-batch's counts over all data ranks; the sum of the step so far, (E,) int64."""
        total = counts if self.global_step_counts is None else self.global_step_counts + counts
        self.global_step_counts = total
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
        """Choices of the step (E,) int64; the counts of the next step start at 0."""
        counts = self.step_counts
        self.step_counts = self.global_step_counts = None
        if counts is None:
            return torch.zeros(self.num_experts, dtype=torch.int64, device=device)
        return counts.to(device)


def _add(total: Tensor | None, value: Tensor) -> Tensor:
    return value.clone() if total is None else total.to(value.device) + value
