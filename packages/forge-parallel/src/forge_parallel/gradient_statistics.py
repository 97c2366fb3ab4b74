"""Norm and noise of the gradient of each block of a model, measured on micro-batches while they are computed.

Let h_i be the gradient of the mean loss of micro-batch i over its n_i labels, and N the labels of the step. The step's
gradient is G = sum of g_i = (n_i / N) h_i. Where labels are drawn independently, h_i is the expected gradient g plus
noise of variance S / n_i, so

    E |G|^2            = |g|^2                        + S / N
    E sum of |g_i|^2   = |g|^2 sum of (n_i / N)^2     + S / N

Two unbiased estimates follow: the signal |g|^2, and the noise S / N of the step's gradient. With n_i = N / M they are
those of McCandlish et al. 2018 (arXiv 1812.06162, appendix A.1) for the batches N / M and N. Their ratio is the
gradient's signal-to-noise ratio, and N over it the simple noise scale S / |g|^2, the batch in labels at which signal
and noise are equal. Ratios of single steps scatter: average `signal` and `norm`^2 over steps first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forge_parallel._shared.shards import local_tensor
from forge_parallel.grad_norm import local_norm
from forge_parallel.meshes import Meshes
from forge_parallel.structure import structure_of

__all__ = ["GradientStatistics"]

#: Parameters outside of the blocks.
REST = "rest"


class GradientStatistics:
    """Gradients of the blocks of a parallelized model, numbered from 0, and of the `rest` of the model.

        statistics = GradientStatistics(model, meshes)
        with statistics.watch():                                        # on every rank
            local = compute.gradients(batch, lambda: count)
        numbers = statistics.take([n for each micro-batch])             # before clipping and zero_grad
        row |= statistics.columns(numbers.tolist())                     # when the metrics are written

    The same numbers in each layout of data, sharding and tensor parallelism, as micro-batches are those of one process.
    They see the gradients of parameters that a module's own forward reads. Not for pipelines, context and expert
    parallelism, or compiled blocks, where a rank never has a micro-batch's gradient of a parameter.

    Cost of a watched step: a pass over each micro-batch's gradients, with tensor parallelism an all-reduce of each
    gradient that is a partial sum (norms), and one all-reduce of 2 numbers a block. No host sync; nothing is changed.
    """

    def __init__(self, model: nn.Module, meshes: Meshes) -> None:
        blocks = structure_of(model).blocks
        self.parts = (*map(str, range(len(blocks))), REST)
        self._model, self._meshes = model, meshes
        self._blocks = {name: number for number, name in enumerate(blocks)}
        self._squares: dict[str, Tensor] = {}

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Add up squared norms of the gradients of the micro-batches inside."""
        zero = torch.zeros((), dtype=torch.float64, device=self._meshes.device)
        self._squares = dict.fromkeys(self.parts, zero)
        handles: list[Any] = []
        seen: set[int] = set()

        def enter(owners: Sequence[tuple[str, Any]], *_: Any) -> None:
            """Before a forward, where FSDP2 has gathered the parameters that it reads."""
            for name, owner in owners:
                if hasattr(owner, "forward_methods") and hasattr(owner, "unshard"):
                    owner.unshard()  # its methods are called from outside of its forward
                for parameter in owner.parameters(recurse=False):
                    if parameter.requires_grad and id(parameter) not in seen:
                        seen.add(id(parameter))
                        add = partial(self._add, self._part_of(name))
                        handles.append(parameter.register_hook(add))

        for caller, owners in self._owners().items():
            handles.append(caller.register_forward_pre_hook(partial(enter, owners)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def take(self, labels: Sequence[float]) -> Tensor:
        """Sums over all ranks, fp64 on the device, of the step that was watched: the gradients are in the parameters.

        `labels` are those of each of this rank's micro-batches, 0 on a rank whose sequences another one counts.
        """
        device = self._meshes.device
        gradients: dict[str, list[Tensor]] = {part: [] for part in self.parts}
        for name, parameter in self._model.named_parameters():
            if parameter.grad is not None:
                gradients[self._part_of(name)].append(parameter.grad)
        step = [local_norm(of_part, 2.0, device) for of_part in gradients.values()]
        counts = torch.tensor([sum(labels), sum(n * n for n in labels)], dtype=torch.float64)
        if device.type == "cuda":  # a copy from pageable memory would wait for the device
            counts = counts.pin_memory().to(device, non_blocking=True)
        sums = torch.cat([torch.stack([*step, *self._squares.values()]), counts])
        if self._meshes.world_size > 1:
            dist.all_reduce(sums)
        return sums

    def columns(self, sums: Sequence[float]) -> dict[str, float]:
        """`gradient.<part>.norm`, `signal`, `snr` and `noise_scale` of the sums that `take` gave; the latter three are nan
        for a step of one micro-batch, and the ratios also where an estimate is not positive."""
        found: dict[str, float] = {}
        num, (labels, squares) = len(self.parts), sums[-2:]
        # sum of (n_i / N)^2 of the module's docstring; 1 for a single micro-batch
        fraction = squares / labels**2 if labels else 1.0
        for part, large, small in zip(self.parts, sums[:num], sums[num : 2 * num], strict=True):
            signal = (large - small) / (1 - fraction) if fraction < 1 else math.nan
            noise = large - signal
            snr = signal / noise if signal > 0 and noise > 0 else math.nan
            values = {"norm": math.sqrt(large) if large >= 0 else math.nan, "signal": signal}
            values |= {"snr": snr, "noise_scale": labels / snr}
            found |= {f"gradient.{part}.{name}": value for name, value in values.items()}
        return found

    def _add(self, part: str, gradient: Tensor) -> None:
        """Add a micro-batch's gradient of a parameter, of which tp ranks may hold shards, replicas or partial sums."""
        replicas, given = 1, gradient
        if hasattr(gradient, "device_mesh"):
            from torch.distributed.tensor import DTensor, Replicate

            assert isinstance(given, DTensor)
            placed = [Replicate() if p.is_partial() else p for p in given.placements]
            given = given.redistribute(placements=placed)
            mesh = given.device_mesh
            replicas = math.prod(mesh.size(d) for d, p in enumerate(placed) if p.is_replicate())
        norm = torch.linalg.vector_norm(local_tensor(given.detach()), dtype=torch.float32)
        device = self._meshes.device
        self._squares[part] = self._squares[part] + norm.double().square().to(device) / replicas

    def _part_of(self, name: str) -> str:
        """The part that a module or parameter of this name belongs to."""
        while name and name not in self._blocks:
            name = name.rpartition(".")[0]
        return str(self._blocks[name]) if name else REST

    def _owners(self) -> dict[nn.Module, list[tuple[str, nn.Module]]]:
        """{module: modules whose own parameters are ready before its forward}: itself, or a child with
        `forward_methods`, whose forward need not be called."""
        found: dict[nn.Module, list[tuple[str, nn.Module]]] = {}
        for name, module in self._model.named_modules():
            if any(p.requires_grad for p in module.parameters(recurse=False)):
                by_parent = name and hasattr(module, "forward_methods")
                caller = self._model.get_submodule(name.rpartition(".")[0]) if by_parent else module
                found.setdefault(caller, []).append((name, module))
        return found
