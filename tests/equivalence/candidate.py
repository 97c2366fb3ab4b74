"""A cell on its ranks: the step of the runner, from the public parts of the packages."""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from batches import MicroBatch, batches
from cells import FEATURES, LAYOUTS, Cell
from torch import nn
from training import ADAMW, MAX_NORM, SGD, STD, Run, gradients, model_config, weights

import forge_parallel
from forge_core import OptimizerConfig, Transformer, build_optimizer, cross_entropy, initialise
from forge_parallel import (
    Meshes,
    ParallelConfig,
    accumulate,
    clip_grads_,
    global_count,
    global_grad_norm,
    make_meshes,
    parallelize,
)
from forge_resilience import nonfinite


def candidate(cell: Cell, mutation: str | None = None) -> Run:
    """What this rank of the cell's layout saw and holds."""
    with mutated(mutation):
        return _train(cell, batches(cell))


def _train(cell: Cell, data: list[list[list[MicroBatch]]]) -> Run:
    config = parallel_config(cell)
    meshes = _meshes(ParallelConfig(device="cpu", dp_replicate=config.dp_replicate,
                                    precision=config.precision, cpu_offload=config.cpu_offload))  # fmt: skip
    with torch.device("meta"):
        model = Transformer(model_config(cell))
    parallelize(model, config, meshes)
    initialise(model, _seed(cell, meshes), **STD)
    update = _Update(cell, model)
    run = Run([], [], [], {})
    for step in data:
        # one rank may stand for several (see compare.py): it takes all their micro-batches
        share = len(step) // meshes.batch_size
        mine = step[meshes.batch_rank * share : (meshes.batch_rank + 1) * share]
        loss = _forward_backward(cell, model, [part for rank in mine for part in rank], meshes)
        norm, sums = global_grad_norm(model.parameters(), sums=loss[None])
        assert sums is not None
        run.losses.append(sums[0])
        run.gradients.append(gradients(model))
        run.norms.append(norm)
        clip_grads_(model.parameters(), norm, MAX_NORM)
        update(nonfinite(sums[0], norm))
    run.weights = weights(model)
    return run


def _forward_backward(
    cell: Cell, model: Any, parts: list[MicroBatch], meshes: Meshes
) -> torch.Tensor:
    """This rank's share of the step's loss; gradients are those of the whole step."""
    labels = global_count(sum(part.num_valid for part in parts), meshes)
    total = torch.zeros(())
    for index, part in enumerate(parts):
        last = index == len(parts) - 1
        accumulate(model, last)
        if FEATURES[cell.feature].deferred:
            model.set_requires_gradient_sync(last)
        logits = model(part.tokens, positions=part.positions, document_ids=part.document_ids)
        loss = cross_entropy(logits, part.labels).sum / labels
        loss.backward()
        total += loss.detach()
    return total


class _Update:
    """torch's SGD, or Forge's AdamW with its mask."""

    def __init__(self, cell: Cell, model: nn.Module) -> None:
        self._masked = cell.optimizer == "adamw"
        if self._masked:
            self._optimizer: Any = build_optimizer(model, OptimizerConfig(**ADAMW))
        else:
            self._optimizer = torch.optim.SGD(model.parameters(), **SGD)

    def __call__(self, skip: torch.Tensor) -> None:
        self._optimizer.step(skip) if self._masked else self._optimizer.step()
        self._optimizer.zero_grad()


def parallel_config(cell: Cell) -> ParallelConfig:
    given = {"precision": "fp32", **FEATURES[cell.feature].parallel}
    layout = LAYOUTS[cell.layout]
    replicate = layout.dp_replicate if dist.get_world_size() == layout.world else 1
    return ParallelConfig(device="cpu", dp_replicate=replicate, **given)


@functools.cache
def _meshes(config: ParallelConfig) -> Meshes:
    """Once per process: groups cost threads and sockets."""
    return make_meshes(config)


def _seed(cell: Cell, meshes: Meshes) -> int:
    return cell.seed


# ---- what a mistake looks like: each must turn its cells red


@contextlib.contextmanager
def mutated(name: str | None) -> Any:
    """Make one classic mistake while the block runs."""
    if name is None:
        yield
        return
    target, attribute, wrong = MUTATIONS[name]
    with mock.patch.object(target, attribute, wrong):
        yield


def _local_count(num_valid: int, meshes: Meshes) -> torch.Tensor:
    return torch.tensor(float(max(1, num_valid)))


def _local_norm(parameters: Any, norm_type: float = 2.0, sums: Any = None) -> Any:
    parameters = list(parameters)
    norms = [torch.linalg.vector_norm(p.grad.to_local()) for p in parameters]
    return torch.linalg.vector_norm(torch.stack(norms)), forge_parallel.global_grad_norm(
        parameters, 2.0, sums
    )[1]


def _other_seed(cell: Cell, meshes: Meshes) -> int:
    return cell.seed + (meshes.rank == meshes.world_size - 1)


def _leave_division(module: Any) -> None:
    """FSDP2 as it comes: gradients are averaged over ranks."""


_HERE = sys.modules[__name__]
MUTATIONS: dict[str, tuple[Any, str, Any]] = {
    "local label count": (_HERE, "global_count", _local_count),
    "gradients averaged over ranks": (forge_parallel.axes.fsdp, "sum_gradients", _leave_division),
    "clipping by the local norm": (_HERE, "global_grad_norm", _local_norm),
    "another seed on one rank": (_HERE, "_seed", _other_seed),
}
