"""The sign of a momentum, with decoupled decay (Bernstein et al. 2018)."""

from typing import Any

import torch


class SignMomentum(torch.optim.Optimizer):
    def __init__(
        self, params: Any, lr: float, weight_decay: float = 0.0, momentum: float = 0.9
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["average"] = torch.zeros_like(p)
                state["average"].lerp_(p.grad, 1 - group["momentum"])
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(state["average"].sign(), alpha=group["lr"])
