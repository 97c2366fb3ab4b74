"""Which learning rate is best at two widths, in the standard parametrization and in maximal-update's.

    python benchmarks/parametrization.py --out parametrization.json

Trains the built-in decoder on the built-in corpus of Python's documentation (bytes) with AdamW for a fixed number of
steps, at each width and each rate of a grid of factor 2, and takes the mean loss of the last steps over seeds.
A parametrization transfers the rate if the best of the wide model is that of the narrow one, or next to it. Leaves
with 0 if mup does and standard does not. Every run is written to --out when it is done, and not run again. Prints
one JSON line.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import harness
import torch


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--widths", type=int, nargs=2, default=[64, 256])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=32)
    parser.add_argument("--init-std", type=float, default=0.1)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument(
        "--exponents", type=int, nargs=2, default=[-10, -3], help="rates 2 ** these"
    )
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--last", type=int, default=20, help="steps whose mean loss counts")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=None)
    return parser.parse_args()


def train(args: argparse.Namespace, kind: str, width: int, lr: float, seed: int) -> float:
    """Mean loss of the last steps; infinite where it is not finite."""
    import forge_core
    from forge_core.model import MuPConfig
    from forge_data import Loader, SourceConfig, open_stream

    options: dict[str, Any] = {}
    if kind == "mup":
        options = {"parametrization": "mup", "mup": MuPConfig(args.widths[0])}
    config = forge_core.TransformerConfig(
        vocab_size=257,
        dim=width,
        num_layers=args.layers,
        num_heads=width // args.head_dim,
        hidden_dim=4 * width,
        max_seq_len=args.seq,
        init_std=args.init_std,
        **options,
    )
    model = forge_core.Transformer(config)
    forge_core.initialize(model, seed)
    loader = Loader(open_stream(SourceConfig("builtin"), args.seq, seed=seed), args.batch)
    optimizer = forge_core.build_optimizer(model, forge_core.OptimizerConfig(lr=lr))
    schedule = forge_core.build_schedule(
        forge_core.ScheduleConfig(warmup_steps=args.steps // 10), args.steps
    )
    losses = []
    for step in range(1, args.steps + 1):
        batch = next(loader)
        loss = forge_core.cross_entropy(model(batch.tokens), batch.labels).mean
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.set_lr(lr * schedule(step))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    mean = sum(losses[-args.last :]) / args.last
    return mean if math.isfinite(mean) else math.inf


def main() -> int:
    args = arguments()
    torch.set_num_threads(args.threads)
    known: dict[str, float] = {}
    if args.out is not None and args.out.exists():
        known = json.loads(args.out.read_text())
    exponents = range(args.exponents[0], args.exponents[1] + 1)
    best: dict[str, dict[int, int]] = {}
    started = time.perf_counter()
    for kind in ("mup", "standard"):
        for width in args.widths:
            means = {}
            for exponent in exponents:
                rows = []
                for seed in range(args.seeds):
                    # at the base both are the same, bit for bit
                    name = "base" if width == args.widths[0] else kind
                    shape = f"{args.steps}x{args.batch}x{args.seq} {args.init_std}"
                    key = f"{name} {width} {exponent} {seed} {shape}"
                    if key not in known:
                        known[key] = train(args, kind, width, 2.0**exponent, seed)
                        if args.out is not None:
                            args.out.write_text(json.dumps(known, indent=1))
                    rows.append(known[key])
                means[exponent] = sum(rows) / len(rows)
            best.setdefault(kind, {})[width] = min(means, key=lambda e: means[e])
    narrow, wide = args.widths
    moved = {kind: rates[wide] - rates[narrow] for kind, rates in best.items()}
    passed = abs(moved["mup"]) <= 1 < abs(moved["standard"])
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    harness.emit(
        "parametrization",
        torch.device("cpu"),
        settings=settings,
        losses=known,
        best_exponents=best,
        moved=moved,
        passed=passed,
        seconds=time.perf_counter() - started,
    )
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
