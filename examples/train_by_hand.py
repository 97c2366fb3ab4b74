"""The job of apps/train/configs/debug.toml with the packages alone; its losses are the runner's, bit for bit.

    python examples/train_by_hand.py runs/by_hand
    torchrun --nproc-per-node 2 examples/train_by_hand.py runs/by_hand

SIGTERM saves and ends with code 75; the same command goes on, on as many ranks as there are then.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forge_ckpt import RNGState, Store
from forge_core import (
    OptimizerConfig,
    ScheduleConfig,
    Transformer,
    TransformerConfig,
    build_optimizer,
    build_schedule,
    cross_entropy,
    initialize,
    set_lr,
)
from forge_data import BuiltinCorpus, ByteTokenizer, Loader, PackedStream
from forge_parallel import ParallelConfig, clip_grads_, global_grad_norm, launch, parallelize
from forge_parallel.compute import Compute
from forge_resilience import Agreement, Decision, ExitCode, PendingDecision, StopSignal, Vote

SEQ_LEN, BATCH, STEPS, SEED = 128, 8, 600, 0
PEAK_LR, MAX_NORM = 3e-3, 1.0


def loss_of(logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
    """The sum over the labels: what divides it is the count of the global batch."""
    return cross_entropy(logits, labels, weights=weights).sum


def train(folder: Path, steps: int) -> ExitCode:
    """Train to step `steps` of the 600, or to a stop."""
    parallel = ParallelConfig(precision="fp32")
    stream = PackedStream(BuiltinCorpus(), SEQ_LEN, seed=SEED)
    schedule = build_schedule(ScheduleConfig(warmup_steps=20), STEPS)

    with launch(parallel) as meshes, StopSignal() as stop, Store(folder / "checkpoints") as store:
        agreement = Agreement(meshes.host_group)
        loader = Loader(stream, BATCH, rank=meshes.batch_rank, world_size=meshes.batch_size)
        config = TransformerConfig(
            vocab_size=ByteTokenizer().vocab_size,
            dim=128,
            num_layers=4,
            num_heads=4,
            max_seq_len=SEQ_LEN,
        )
        model = parallelize(Transformer(config), parallel, meshes, seq_len=SEQ_LEN)
        initialize(model, SEED)
        optimizer = build_optimizer(model, OptimizerConfig(lr=PEAK_LR))
        compute = Compute(
            model,
            parallel,
            meshes,
            micro_batch=BATCH // meshes.batch_size,
            num_micro_batches=1,
            seq_len=SEQ_LEN,
            loss=loss_of,
        )

        state: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader}
        state["rng"] = RNGState()
        step = store.load(state) or 0
        while step < steps:
            step += 1
            batch = next(loader)

            # The ranks agree while the device computes: on the labels of the batch, and on a stop.
            vote = Vote(stop=stop.number, count=batch.label_weight, digest=batch.digest)
            pending = agreement.start(vote)
            decided: list[Decision] = []

            def labels(
                pending: PendingDecision = pending, decided: list[Decision] = decided
            ) -> float:
                decided.append(pending.wait())
                return decided[0].count

            local = compute.gradients(batch, labels)
            norm, sums = global_grad_norm(compute.counted, sums=local)
            assert sums is not None  # as `local` was given
            clip_grads_(compute.parameters, norm, MAX_NORM)
            set_lr(optimizer, PEAK_LR * schedule(step))
            optimizer.step()
            optimizer.zero_grad()

            if meshes.rank == 0 and (step % 10 == 0 or step == steps):
                row = {"step": step, "loss": float(sums[0]), "grad_norm": float(norm)}
                with (folder / "metrics.jsonl").open("a") as file:
                    print(json.dumps(row), file=file)
            if decided[0].stop is not None:
                store.save(step, state)
                return ExitCode.REQUEUE
        store.save(step, state)
    return ExitCode.DONE


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    torch.use_deterministic_algorithms(True)
    sys.exit(train(args.folder, args.steps))
