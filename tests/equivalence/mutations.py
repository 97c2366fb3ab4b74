"""What a mistake looks like: each must turn its cells red."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any
from unittest import mock

import candidate
import torch
import torch.distributed as dist
from batches import MicroBatch
from cells import Cell
from torch import Tensor, nn
from torch.distributed.tensor import Replicate

import forge_parallel
from forge_core.optim import full_matrices
from forge_parallel import Meshes, compute
from forge_parallel.axes import collectives, fsdp, tensor


@contextlib.contextmanager
def mutated(name: str | None) -> Any:
    """Make one classic mistake while the block runs."""
    if name is None:
        yield
        return
    target, attribute, wrong = MUTATIONS[name]
    with mock.patch.object(target, attribute, wrong):
        yield


def _local_count(num_valid: int, meshes: Meshes) -> Tensor:
    return torch.tensor(float(max(1, num_valid)))


def _local_norm(parameters: Any, norm_type: float = 2.0, sums: Any = None) -> Any:
    parameters = list(parameters)
    norms = [torch.linalg.vector_norm(p.grad.to_local()) for p in parameters]
    right = forge_parallel.global_grad_norm(parameters, 2.0, sums)[1]
    return torch.linalg.vector_norm(torch.stack(norms)), right


def _norm_without_last_stage(parameters: Any, norm_type: float = 2.0, sums: Any = None) -> Any:
    parameters = list(parameters)
    right = forge_parallel.global_grad_norm(parameters, 2.0, sums)[1]
    last = dist.get_rank() >= dist.get_world_size() // 2
    return forge_parallel.global_grad_norm([] if last else parameters, 2.0, sums)[0], right


def _other_seed(cell: Cell, meshes: Meshes) -> int:
    return cell.seed + (meshes.rank == meshes.world_size - 1)


def _leave_division(module: Any) -> None:
    """FSDP2 as it comes: gradients are averaged over ranks."""


_sum_gradients = fsdp.sum_gradients


def _keep_expert_gradients(module: Any) -> None:
    """Each rank of efsdp keeps its own gradients of the experts it shards."""
    _sum_gradients(module)
    if type(module).__name__.endswith("Experts"):
        module.set_custom_reduce_scatter(_OwnPart())


class _OwnPart:
    """In place of a sum over ranks: this rank's part of what it has itself."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:  # fmt: skip
        rank = dist.get_rank(group)
        output_tensor.copy_(input_tensor.chunk(dist.get_world_size(group))[rank])


def _twice(x: Tensor, ranks: collectives.NamedGroup, dim: int) -> Tensor:
    return _reduced(_reduced(x, ranks, dim), ranks, dim)


_reduced = collectives._all_reduce


def _tied_twice(model: Any, meshes: Meshes) -> None:
    for _ in range(2):
        forge_parallel.pipeline.sync_tied_gradients(model, meshes)


def _bias_of_this_rank(model: Any, step: int, steps: int, groups: Any, skip: Tensor) -> None:
    from forge_moe import update_expert_bias

    update_expert_bias(model, step, steps, groups=(), skip=skip)


def _nothing(_: Any) -> None:
    """FSDP2 as it comes: each rank reduces what it used, and weights stay gathered after an evaluation."""


def _whole_already(_: Tensor) -> tuple[()]:
    """Each rank orthogonalizes what it holds."""
    return ()


def _filler_that_counts() -> MicroBatch:
    """Rows without labels that experts take for tokens."""
    return replace(_filler(), document_ids=torch.zeros_like(_filler().tokens))


_filler = candidate.filler


def _whole_layers_of_this_rank(
    module: Any, role: str, tokens_cut: bool, mesh: Any, sharded: Any
) -> None:
    """Each tp rank keeps what it has put at its own tokens: gradients of linear layers that it holds whole (an encoder's)."""
    whole = role == "sequence" and isinstance(module, nn.Linear)
    _shard_parameters(module, role, tokens_cut and not whole, mesh, sharded)


_shard_parameters = tensor._shard_parameters


MUTATIONS: dict[str, tuple[Any, str, Any]] = {
    "local label count": (candidate, "global_count", _local_count),
    "gradients averaged over ranks": (fsdp, "sum_gradients", _leave_division),
    "clipping by the local norm": (candidate, "global_grad_norm", _local_norm),
    "another seed on one rank": (candidate, "_seed", _other_seed),
    "a norm without the last stage": (  # prose: the name of a mistake
        candidate,
        "global_grad_norm",
        _norm_without_last_stage,
    ),
    "experts' gradients not summed": (fsdp, "sum_gradients", _keep_expert_gradients),
    "a sum over tp made twice": (collectives, "_all_reduce", _twice),
    "gradients of head norms not summed": (tensor, "_SUMMED", (Replicate(),)),
    "tied ends synchronised twice": (compute, "sync_tied_gradients", _tied_twice),
    "biases from one rank's counts": (candidate, "update_expert_bias", _bias_of_this_rank),
    "each rank reduces what it used": (fsdp, "reduce_unused_parameters", _nothing),
    "weights gathered after an evaluation": (candidate, "reshard", _nothing),
    "Muon of shards": (full_matrices, "axes_of", _whole_already),
    "filler that counts": (candidate, "filler", _filler_that_counts),
    "gradients of an encoder not summed": (  # prose: the name of a mistake
        tensor,
        "_shard_parameters",
        _whole_layers_of_this_rank,
    ),
}
