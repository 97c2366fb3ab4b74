"""What Forge's step on several ranks costs over a loop written by hand on torch's FSDP2.

    python benchmarks/overhead.py                  # starts two gloo ranks on this machine
    torchrun --nproc-per-node 8 benchmarks/overhead.py --device cuda --precision bf16

Both sides train the same model (`forge_core.Transformer`) with the same loss on the same tokens.

Forge's is the runner's step: `parallelize`, one vote on the host lane, the gradient norm with the loss
riding along, clipping, AdamW masked where numbers are not finite. It divides by nothing and knows the
global loss. The hand-written one calls `fully_shard` on each block and the root, all-reduces the label count,
clips with `torch.nn.utils.clip_grad_norm_` and steps `torch.optim.AdamW(fused=True)`; its loss is that of
its rank.

Prints one JSON line: `ratio` is Forge's seconds over the other's, round by round, a round's order turning
around each time and all ranks waiting for each other before and after each step. 1.03 or less is the goal.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
from torch import Tensor, nn

Step = Callable[[], Tensor]
LR, MAX_NORM = 1e-4, 1.0


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nproc", type=int, default=2, help="ranks, where no launcher says so")
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--batch", type=int, default=2, help="rows of a rank")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    return parser.parse_args(given)


def forge_step(args: argparse.Namespace, meshes: Any, tokens: Tensor, labels: Tensor) -> Step:
    """The life of a batch as the runner lives it."""
    from forge_core import OptimizerConfig, build_optimizer, cross_entropy, initialize
    from forge_parallel import (
        ParallelConfig,
        accumulate,
        clip_grads_,
        global_grad_norm,
        parallelize,
    )
    from forge_resilience import Agreement, Vote, nonfinite

    config = ParallelConfig(device=args.device, precision=args.precision)
    model = parallelize(_on_meta(args), config, meshes)
    initialize(model, seed=0)
    parameters = list(model.parameters())
    optimizer = build_optimizer(model, OptimizerConfig(lr=LR))
    agreement = Agreement(meshes.host_group)
    num_valid = int((labels != -100).sum())

    def step() -> Tensor:
        pending = agreement.start(Vote(count=num_valid))
        accumulate(model, last=True)
        logits = model(tokens)
        labels_of_all = max(1, pending.wait().count)
        loss = cross_entropy(logits, labels).sum / labels_of_all
        loss.backward()
        norm, sums = global_grad_norm(parameters, sums=loss.detach().reshape(1))
        assert sums is not None
        clip_grads_(parameters, norm, MAX_NORM)
        optimizer.set_lr(LR)
        optimizer.step(skip=nonfinite(sums[0], norm))
        optimizer.zero_grad()
        return sums[0]

    return step


def hand_written_step(args: argparse.Namespace, mesh: Any, tokens: Tensor, labels: Tensor) -> Step:
    """What somebody would write who has torch, this model and its loss."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from forge_core import cross_entropy, initialize

    dtype = torch.bfloat16 if args.precision == "bf16" else torch.float32
    model = _on_meta(args)
    for module in [*model.blocks(), model]:
        root = module is model
        policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=root)
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=not root)
    model.to_empty(device=tokens.device)
    initialize(model, seed=0)
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), fused=True)
    world = mesh.size()

    def step() -> Tensor:
        count = (labels != -100).sum()
        dist.all_reduce(count)
        loss = cross_entropy(model(tokens), labels).sum * world / count  # FSDP2 takes the mean
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _on_meta(args: argparse.Namespace) -> Any:
    from forge_core import Transformer, TransformerConfig

    with torch.device("meta"):
        return Transformer(
            TransformerConfig(
                vocab_size=args.vocab,
                dim=args.dim,
                num_layers=args.layers,
                num_heads=args.heads,
                max_seq_len=args.seq,
            )
        )


def build(args: argparse.Namespace, meshes: Any) -> dict[str, Step]:
    """Both steps, from the same weights, on this rank's own tokens; a tenth of the labels is ignored."""
    generator = torch.Generator().manual_seed(meshes.rank)
    rows = torch.randint(0, args.vocab, (args.batch, args.seq + 1), generator=generator)
    tokens, labels = rows[:, :-1].contiguous(), rows[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=generator) < 0.1] = -100
    tokens, labels = tokens.to(meshes.device), labels.to(meshes.device)
    return {
        "forge": forge_step(args, meshes, tokens, labels),
        "by_hand": hand_written_step(args, meshes.dense, tokens, labels),
    }


def interleave(
    steps: dict[str, Step], rounds: int, warmup: int, device: torch.device
) -> dict[str, list[float]]:
    """As `harness.interleave`, and all ranks together: seconds until the last one is done."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for index in range(-warmup, rounds):
        for name in list(steps) if index % 2 else list(steps)[::-1]:
            _meet(device)
            start = time.perf_counter()
            steps[name]()
            _meet(device)
            if index >= 0:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def _meet(device: torch.device) -> None:
    harness.synchronise(device)
    dist.barrier()


def work(args: argparse.Namespace) -> None:
    """One rank of the measurement; rank 0 prints."""
    from forge_parallel import ParallelConfig, launch

    with launch(ParallelConfig(device=args.device, precision=args.precision)) as meshes:
        if meshes.world_size == 1:
            raise SystemExit("one rank shards nothing and has nothing to compare; use --nproc 2")
        steps = build(args, meshes)
        seconds = interleave(steps, args.rounds, args.warmup, meshes.device)
        counts = {name: harness.count(step, meshes.device) for name, step in steps.items()}
        losses = [float(steps["forge"]()), _global_loss(steps["by_hand"], meshes.world_size)]
        if meshes.rank == 0:
            harness.emit(
                "overhead",
                meshes.device,
                settings={**vars(args), "nproc": meshes.world_size},
                seconds={name: harness.spread(values) for name, values in seconds.items()},
                ratio=harness.ratios(seconds["forge"], seconds["by_hand"]),
                counts=counts,
                loss=dict(zip(steps, losses)),
            )


def _global_loss(step: Step, world: int) -> float:
    loss = step()
    dist.all_reduce(loss)
    return float(loss) / world


def main() -> None:
    args = arguments()
    from forge_parallel import find_world, leave
    from forge_resilience import run_local_workers

    if find_world().launcher == "none":
        sys.exit(
            run_local_workers([sys.executable, str(Path(__file__)), *sys.argv[1:]], args.nproc)
        )
    work(args)
    leave(0)


if __name__ == "__main__":
    main()
