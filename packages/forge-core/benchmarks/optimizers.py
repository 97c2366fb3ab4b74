"""A step of each optimizer against its reference: seconds, and their ratio within a round.

    python packages/forge-core/benchmarks/optimizers.py --threads 1
    python packages/forge-core/benchmarks/optimizers.py --only muon --dtype fp32

References are torch.optim.AdamW (fused), lion-pytorch, torch.optim.Muon (bf16) with fused AdamW for embedding, head and
norms, and schedulefree. The parameters are those of a decoder of 24M: 12 layers of dim 384, 128 for keys and values, feed-forwards
of 1,024, a vocabulary of 4,096 in embedding and head. Gradients are random and stay; `skip` is a step with
a mask of zero, as forge-train makes it. `difference` is that of the weights after three steps with new
gradients, before the rounds, max|a - b| / max|b|.
Prints one JSON line.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

import harness
import torch
from torch import Tensor, nn

from forge_core.optim import OPTIMIZERS, MuonConfig, OptimizerConfig, build_optimizer

LR, DECAY, BETAS, EPS = 1e-4, 0.1, (0.9, 0.95), 1e-8
#: The package that has the reference, by optimizer.
PACKAGES = {"adamw": "torch", "lion": "lion_pytorch", "muon": "torch", "schedule_free_adamw": "schedulefree"}  # fmt: skip


class Shapes(nn.Module):
    """The parameters of a decoder."""

    def __init__(self, layers: int, dim: int = 384, kv: int = 128, hidden: int = 1024) -> None:
        super().__init__()
        torch.manual_seed(0)
        matrices = {"q": (dim, dim), "k": (kv, dim), "v": (kv, dim), "o": (dim, dim),
                    "gate": (hidden, dim), "up": (hidden, dim), "down": (dim, hidden)}  # fmt: skip
        self.embedding = nn.Embedding(4096, dim)
        self.layers = nn.ModuleList(
            nn.ParameterDict(
                {**{n: 0.02 * torch.randn(s) for n, s in matrices.items()}, "norm": torch.ones(dim)}
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(dim, 4096, bias=False)


def by_decay(parameters: list[Tensor]) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": DECAY},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def reference(name: str, model: nn.Module) -> list[Any]:
    """Optimizers that step one after the other."""
    parameters = list(model.parameters())
    if name == "lion":
        from lion_pytorch import Lion

        return [Lion(by_decay(parameters), lr=LR, betas=(0.9, 0.99))]
    if name == "schedule_free_adamw":
        from schedulefree import AdamWScheduleFree

        optimizer = AdamWScheduleFree(by_decay(parameters), lr=LR, betas=BETAS, eps=EPS)
        optimizer.train()
        return [optimizer]
    hidden = [p for n, p in model.named_parameters() if n.startswith("layers.") and p.ndim == 2]
    hidden = hidden if name == "muon" else []
    taken = set(map(id, hidden))
    rest = by_decay([p for p in parameters if id(p) not in taken])
    adamw = torch.optim.AdamW(rest, lr=LR, betas=BETAS, eps=EPS, fused=True)
    if name == "adamw":
        return [adamw]
    adjust = "match_rms_adamw"
    return [torch.optim.Muon(hidden, lr=LR, weight_decay=DECAY, adjust_lr_fn=adjust), adamw]


def ours(name: str, model: nn.Module, dtype: Any) -> Any:
    settings: dict[str, Any] = {} if name == "lion" else {"betas": BETAS, "eps": EPS}
    if name == "muon":
        settings["muon"] = MuonConfig(ns_dtype=dtype)
    optimizer = build_optimizer(model, OptimizerConfig(name, lr=LR, weight_decay=DECAY, **settings))
    getattr(optimizer, "train", lambda: None)()  # of a schedule-free one
    return optimizer


def case(name: str, args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    models = {side: Shapes(args.layers).to(device) for side in ("ours", "skip", "reference")}
    theirs = reference(name, models["reference"])
    mine, masked = (ours(name, models[side], args.dtype) for side in ("ours", "skip"))
    zero = torch.zeros((), device=device)
    steps: dict[str, Callable[[], Any]] = {
        "ours": mine.step,
        "skip": lambda: masked.step(skip=zero),
        "reference": lambda: [optimizer.step() for optimizer in theirs],
    }
    for number in range(3):  # new ones each time: schedulefree writes in place
        for side, model in models.items():
            draw_gradients(model, number)
            steps[side]()
    off = {side: difference(models[side], models["reference"]) for side in ("ours", "skip")}
    seconds = harness.interleave(steps, args.rounds, args.warmup, device)
    return {
        **{side: harness.spread(times) for side, times in seconds.items()},
        "ours_over_reference": harness.ratios(seconds["ours"], seconds["reference"]),
        "skip_over_reference": harness.ratios(seconds["skip"], seconds["reference"]),
        "difference": off,
    }


def draw_gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = gradient.to(parameter.device)


def difference(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a - b).detach().abs().max() / b.detach().abs().max()) for a, b in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = [name for name in PACKAGES if name in OPTIMIZERS.built_in]
    parser.add_argument("--only", nargs="+", choices=known, default=known)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16", help="of our Muon")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads of torch")
    args = parser.parse_args()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    missing = [name for name in args.only if find_spec(PACKAGES[name]) is None]
    if missing:
        sys.exit(f"install {', '.join(PACKAGES[name] for name in missing)} for the references")
    count = sum(p.numel() for p in Shapes(args.layers).parameters())
    cases = {name: case(name, args, device) for name in args.only}
    harness.emit("optimizers", device, parameters=count, layers=args.layers, cases=cases)


if __name__ == "__main__":
    main()
