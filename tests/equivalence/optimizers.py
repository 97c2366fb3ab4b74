"""Optimizers of the cells beside torch's SGD and AdamW: plain ones for the truth, Forge's, and Lion's gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from forge_core import OptimizerConfig, build_optimizer
from forge_core.optim import EMAConfig, MuonConfig
from forge_testing.decay import groups_by_decay

# fp32: in bf16 a gradient that differs by rounding would change by 2^-9. AdamW's part as in ADAMW.
MUON: dict[str, Any] = {"lr": 2e-3, "betas": (0.9, 0.95), "eps": 1e-4, "weight_decay": 0.1}
MUON_OWN = MuonConfig(ns_dtype="fp32", adamw_lr_multiplier=0.5)
LION: dict[str, Any] = {"lr": 2e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}


EMA_DECAY = 0.6


def forges(name: str, model: nn.Module) -> Any:
    """Forge's optimizer over a model in its layout."""
    if name == "schedule_free":
        return build_optimizer(model, OptimizerConfig("schedule_free_adamw", **MUON))
    if name == "ema":
        return build_optimizer(model, OptimizerConfig(**MUON, ema=EMAConfig(EMA_DECAY)))
    if name == "adamw_bf16":
        return build_optimizer(model, OptimizerConfig(**MUON, state_dtype="bf16"))
    if name == "muon":
        return build_optimizer(model, OptimizerConfig("muon", **MUON, muon=MUON_OWN))
    return build_optimizer(model, OptimizerConfig("lion", **LION))


def is_hidden(name: str, parameter: Tensor) -> bool:
    """Whether a parameter of the cells' model is Muon's."""
    return name.startswith("layers.") and parameter.ndim >= 2 and "bias" not in name.split(".")[-1]


class PlainMuon(torch.optim.Optimizer):
    """Keller Jordan's Muon, a matrix at a time, with the update of AdamW's size (Liu et al. 2025)."""

    def __init__(self, parameters: list[Tensor], lr: float, weight_decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                matrices = parameter if parameter.ndim == 3 else parameter[None]
                state = self.state[parameter]
                momentum = state.setdefault("momentum", torch.zeros_like(matrices))
                for w, g, b in zip(matrices, parameter.grad.view_as(matrices), momentum):
                    b.mul_(0.95).add_(g)
                    update = 0.2 * max(w.shape) ** 0.5 * newton_schulz(g + 0.95 * b)
                    w.sub_(group["lr"] * (group["weight_decay"] * w + update))


def newton_schulz(x: Tensor) -> Tensor:
    """Five steps of the quintic iteration in the matrix's dtype."""
    if x.shape[0] > x.shape[1]:
        return newton_schulz(x.T).T
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


class Averaged:
    """AdamW and an average of the weights, by its formula."""

    def __init__(self, named: dict[str, Tensor]) -> None:
        self._parameters, self._updates = list(named.values()), 0
        groups = groups_by_decay(named.items(), MUON["weight_decay"])
        own = {key: MUON[key] for key in ("lr", "betas", "eps")}
        self._adamw = torch.optim.AdamW(groups, **own)
        self._averages: list[Tensor] = []

    @torch.no_grad()
    def step(self) -> None:
        self._adamw.step()
        decay = min(EMA_DECAY, self._updates / (self._updates + 9))
        before = self._averages or self._parameters
        self._averages = [
            decay * a + (1 - decay) * p for a, p in zip(before, self._parameters, strict=True)
        ]
        self._updates += 1

    def zero_grad(self) -> None:
        self._adamw.zero_grad()

    @torch.no_grad()
    def eval(self) -> None:
        for parameter, average in zip(self._parameters, self._averages, strict=True):
            parameter.copy_(average)


class Several:
    """Optimizers that step together."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self._optimizers = optimizers

    def step(self) -> None:
        for optimizer in self._optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad()


def plain(name: str, model: nn.Module) -> Any:
    """The truth's optimizer over a whole model."""
    named = dict(model.named_parameters())
    if name == "lion":
        from lion_pytorch import Lion

        return Lion(groups_by_decay(named.items(), LION["weight_decay"]), LION["lr"], LION["betas"])
    if name == "ema":
        return Averaged(named)
    if name == "adamw_bf16":
        own = {key: MUON[key] for key in ("lr", "betas", "eps")}
        return torch.optim.AdamW(groups_by_decay(named.items(), MUON["weight_decay"]), **own)
    if name == "schedule_free":
        from schedulefree import AdamWScheduleFree

        own = {key: MUON[key] for key in ("lr", "eps")}
        groups = groups_by_decay(named.items(), MUON["weight_decay"])
        optimizer = AdamWScheduleFree(groups, betas=MUON["betas"], **own)
        optimizer.train()
        return optimizer
    hidden = [p for n, p in named.items() if is_hidden(n, p)]
    others = [(n, p) for n, p in named.items() if not is_hidden(n, p)]
    lr, decay = MUON["lr"] * MUON_OWN.adamw_lr_multiplier, MUON["weight_decay"]
    adamw = torch.optim.AdamW(
        groups_by_decay(others, decay), lr=lr, betas=MUON["betas"], eps=MUON["eps"]
    )
    return Several(PlainMuon(hidden, MUON["lr"], decay), adamw)


class Recorded:
    """Gradients for Lion, put in place of the real ones before an update; on ranks, parts of the same tensors.

    The sign of a sum near zero is rounding, and moves a weight by 2 lr: two correct programs with gradients
    that differ by rounding disagree there. These are made of the first weights element by element, by exact
    operations, so all layouts have the same bits. The first step's are large, the others' small: then the
    sign is that of the momentum, never near zero, and a lost momentum shows.
    """

    def __init__(self, model: nn.Module) -> None:
        self._starts = [(p, _local(p).detach().clone()) for p in model.parameters()]
        self._size = 1.0

    def __call__(self) -> None:
        for parameter, start in self._starts:
            if parameter.grad is not None:
                places = start * 1024 - (start * 1024).floor() - 0.5  # exact, in [-0.5, 0.5)
                gradient = torch.copysign(0.5 + places.abs(), places)
                _local(parameter.grad).copy_(self._size * gradient)
        self._size = -1 / 64


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
