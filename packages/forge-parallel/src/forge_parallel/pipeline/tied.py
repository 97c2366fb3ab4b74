"""Weights that the first and the last stage both hold: one parameter in two places."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forge_parallel._shared.shards import local_tensor
from forge_parallel.meshes import Meshes
from forge_parallel.pipeline.split import tied_names


@torch.no_grad()
def sync_tied_gradients(model: nn.Module, meshes: Meshes) -> None:
    """Give both copies of tied weights the sum of their gradients: once per step, before norm and update.

        loss = pipeline.step(tokens, labels, loss_fn)
        sync_tied_gradients(model, meshes)

    Copies that begin equal stay equal, bit by bit. Called twice it would count the gradients twice. Cost:
    the first and the last pp rank exchange their shards of these gradients; other ranks, and models
    without tied parts, do nothing.
    """
    tied = list(_tied_parameters(model, meshes))
    if not tied:
        return
    for parameter in tied:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    local = [local_tensor(parameter.grad) for parameter in tied]
    remote = [torch.empty_like(gradient) for gradient in local]
    # the two ends exchange alone: an all-reduce would need a group, or all stages to take part
    peer, group = meshes.pp.size - 1 - meshes.pp.rank, meshes.pp.group
    ops = [dist.P2POp(dist.isend, t.contiguous(), group=group, group_peer=peer) for t in local]
    ops += [dist.P2POp(dist.irecv, t, group=group, group_peer=peer) for t in remote]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    for gradient, copy in zip(local, remote):
        gradient.add_(copy)


def tied_copies(model: nn.Module, meshes: Meshes) -> set[Tensor]:
    """The parameters that a norm over all stages must leave out: the last stage's copies, elsewhere none.

    norm, _ = global_grad_norm(p for p in model.parameters() if p not in tied_copies(model, meshes))
    """
    last = meshes.pp.rank == meshes.pp.size - 1
    return set(_tied_parameters(model, meshes)) if last else set()


def _tied_parameters(model: nn.Module, meshes: Meshes) -> Iterator[nn.Parameter]:
    """Those that this rank and another both hold."""
    if meshes.pp.size == 1 or meshes.pp.rank not in (0, meshes.pp.size - 1):
        return
    for name in tied_names(model):
        part = model.get_submodule(name)
        yield from (p for p in part.parameters() if p.requires_grad)
