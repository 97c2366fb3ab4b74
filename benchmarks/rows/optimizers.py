"""An optimizer's step next to its reference, on the parameters of a decoder of 24M."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from benchmarks.rows import Row, Setting
from torch import Tensor, nn

LR, DECAY, BETAS = 1e-4, 0.1, (0.9, 0.95)


class Shapes(nn.Module):
    """The parameters of a decoder: matrices and a norm per layer, embedding and head."""

    def __init__(self, layers: int, dim: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        kv, hidden = dim // 3, dim // 3 * 8
        shapes = {"q": (dim, dim), "k": (kv, dim), "v": (kv, dim), "o": (dim, dim),
                  "gate": (hidden, dim), "up": (hidden, dim), "down": (dim, hidden)}  # fmt: skip
        self.embedding = nn.Embedding(4096, dim)
        self.layers = nn.ModuleList(
            nn.ParameterDict(
                {**{n: 0.02 * torch.randn(s) for n, s in shapes.items()}, "norm": torch.ones(dim)}
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(dim, 4096, bias=False)
        for parameter in self.parameters():
            parameter.grad = torch.randn_like(parameter)


class Optimized(NamedTuple):
    """Case: an optimizer's name and how its parameters are made."""

    name: str
    make: Callable[[], nn.Module]


def optimized(setting: Setting, name: str) -> Optimized:
    layers, dim = setting.of((12, 384), (1, 12), (24, 1536))

    def make() -> nn.Module:
        model = Shapes(layers, dim)
        for parameter in model.parameters():
            gradient = parameter.grad
            parameter.data, parameter.grad = parameter.data.to(setting.device), None
            parameter.grad = gradient.to(setting.device)  # type: ignore[union-attr]
        return model

    return Optimized(name, make)


def weights_after(model: nn.Module, update: Callable[[], object]) -> Callable[[], list[Tensor]]:
    """A step that returns the weights."""
    weights: list[Tensor] = list(model.parameters())

    def step() -> list[Tensor]:
        update()
        return weights

    return step


def forge(case: Optimized) -> Callable[[], list[Tensor]]:
    from forge_core import OptimizerConfig, build_optimizer

    model = case.make()
    own = {"lion": {}}.get(case.name, {"betas": BETAS, "eps": 1e-8})
    optimizer = build_optimizer(model, OptimizerConfig(case.name, lr=LR, weight_decay=DECAY, **own))
    getattr(optimizer, "train", lambda: None)()  # of a schedule-free one
    return weights_after(model, optimizer.step)


def by_decay(parameters: list[Any]) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": DECAY},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def fused_adamw(parameters: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(by_decay(parameters), lr=LR, betas=BETAS, fused=True)


def reference(case: Optimized) -> Callable[[], list[Tensor]]:
    """torch's AdamW and Muon (with AdamW for the rest), lion-pytorch, schedulefree."""
    model = case.make()
    parameters = list(model.parameters())
    if case.name == "lion":
        from lion_pytorch import Lion

        return weights_after(model, Lion(by_decay(parameters), lr=LR, betas=(0.9, 0.99)).step)
    if case.name == "schedule_free_adamw":
        from schedulefree import AdamWScheduleFree

        free = AdamWScheduleFree(by_decay(parameters), lr=LR, betas=BETAS)
        free.train()
        return weights_after(model, free.step)
    if case.name == "adamw":
        return weights_after(model, fused_adamw(parameters).step)
    hidden = [p for n, p in model.named_parameters() if n.startswith("layers.") and p.ndim == 2]
    taken = set(map(id, hidden))
    muon = torch.optim.Muon(hidden, lr=LR, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw")
    rest = fused_adamw([p for p in parameters if id(p) not in taken])
    return weights_after(model, lambda: (muon.step(), rest.step()))


_MUON_CAUSE = (
    "both spend 81 % in the same 1,260 products. Forge copies and scales each update in passes of its own (10 % in copies, 7 % there), "
    "so that a step with a bad-step check has the bits of one without"
)

ROWS = [
    Row(
        f"optimizer-{name.replace('_', '-')}", optimized, {"forge": forge, "reference": reference},
        f"24M parameters, 12 layers of dim 384 (h100: 24 of 1,536); reference: {peer}", {"name": name},
        {"reference": 0.98 if name in {"adamw", "muon"} else 1.0}, tolerance=1e-5,
        causes={"reference": _MUON_CAUSE} if name == "muon" else {},
    )
    for name, peer in {
        "adamw": "torch.optim.AdamW(fused=True)",
        "muon": "torch.optim.Muon (bf16), with fused AdamW for embedding, head and norms",
        "lion": "lion-pytorch",
        "schedule_free_adamw": "schedulefree.AdamWScheduleFree, foreach",
    }.items()
]  # fmt: skip
