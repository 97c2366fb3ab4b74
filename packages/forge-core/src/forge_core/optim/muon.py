"""Muon: the momentum of a hidden matrix, orthogonalized in full however it is sharded; AdamW for the rest.

Shapes: R rows and C columns of a matrix, E matrices of a stack, B matrices of one batch, sides m <= n.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from forge_core._renamed import config_form
from forge_core._shared.problems import invalid
from forge_core._shared.shards import local_tensor
from forge_core.optim.adamw import AdamW, can_fuse
from forge_core.optim.base import (
    Group,
    NamedOptimizer,
    Params,
    Slots,
    as_groups,
    count_step,
    is_rounded,
    local_gradient,
)
from forge_core.optim.config import DTYPES, MuonConfig
from forge_core.optim.full_matrices import FullMatrices, axes_of
from forge_core.optim.groups import in_block

#: Coefficients of Keller Jordan's iteration, chosen for the steepest rise at zero: singular values end in about 0.7 to 1.2.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_EPS = 1e-7  # a zero matrix stays zero
#: Elements of a batch at most, if a matrix has fewer: bounds the temporary tensors of an iteration to 3 x 64 MiB in bf16.
_BATCH = 2**25
#: Elements of the full matrices that are gathered at once; they and their updates take 4 GiB on all ranks together in bf16.
_BUCKET = 2**30
#: Rows of a block of a symmetric matmul on a CPU.
_ROWS = 128


class _Bucket(NamedTuple):
    """Matrices that are gathered and updated at once; or one alone, which needs no communication."""

    parameters: list[Tensor]
    full: FullMatrices
    alone: bool


class Muon(AdamW):
    """MomentUm Orthogonalized by Newton-Schulz (Keller Jordan 2024) for the matrices of a model's blocks.

        optimizer = Muon(param_groups(model, muon=True), lr=1e-3)     # AdamW trains embeddings, head, norms, biases
        optimizer = Muon([p for p in model.layers.parameters() if p.ndim == 2], lr=1e-3)       # as torch.optim.Muon

    With gradient G, momentum B and mu, as in torch.optim.Muon (Keller's B is 1 / (1 - mu) times this one, a factor that
    the orthogonalization drops):

        B <- mu B + (1 - mu) G;   O = orthogonalize(nesterov ? mu B + (1 - mu) G : B)
        W <- W - lr weight_decay W - lr s O

    s depends on the matrix (out, in): "match_rms_adamw" 0.2 sqrt(max(out, in)) (Liu et al. 2025, equation 4), for the
    learning rates and decay of AdamW; "original" sqrt(max(1, out / in)). Each matrix of a stack of experts (E, in, out)
    counts for itself. Groups, named state, the mask and errors: see `NamedOptimizer`.

    Args:
        params: groups with the key "muon": True for matrices and stacks of matrices that Muon updates, False for the
            parameters of AdamW. Without the key all are Muon's: ValueError unless each has 2 or 3 dims and, if it has a
            name, is below a block.
        adjust_lr_fn: s, as in torch.optim.Muon; torch's None is "original".
        ns_dtype: dtype of the Newton-Schulz iterations, and of what ranks exchange for them.
        betas, eps, adamw_lr_multiplier: of AdamW, whose learning rate is `adamw_lr_multiplier` times `lr`.
        state_dtype: "bf16" stores momentum and moments in bf16, rounded stochastically.

    A sharded matrix is gathered in `ns_dtype` on one of its ranks, orthogonalized there and sent back (`FullMatrices`),
    so the update is that of the full matrix in any layout. A parameter without a gradient on this rank does not change
    here, and counts as zero for the others.

    Cost: 4 bytes of momentum for a parameter of Muon, 8 of moments for the others (in bf16 half). A step
    of one process does not communicate. On several ranks it does two all-to-alls for each mesh axis that shards matrices
    and an all-gather for each that replicates them, for 2^30 elements of a mesh together. No host sync.
    """

    splits_matrices = True
    _known: tuple[list[Tensor], list[_Bucket]] = ([], [])
    _scratch: dict[Any, Tensor]  # within a step
    _crossed: frozenset[str] = frozenset()

    @config_form
    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        *,
        ns_steps: int = 5,
        ns_dtype: Literal["bf16", "fp32"] = "bf16",
        adjust_lr_fn: Literal["match_rms_adamw", "original"] = "match_rms_adamw",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        adamw_lr_multiplier: float = 1.0,
        state_dtype: Literal["fp32", "bf16"] = "fp32",
        fused: bool | None = None,
    ) -> None:
        groups = as_groups(params)
        own = MuonConfig(momentum, nesterov, ns_steps, ns_dtype, adjust_lr_fn, adamw_lr_multiplier)
        fused = can_fuse(groups) if fused is None else fused
        settings = {"betas": betas, "eps": eps, "fused": fused, **asdict(own)}
        NamedOptimizer.__init__(self, groups, lr, weight_decay, state_dtype=state_dtype, **settings)
        names = [n for g in self.param_groups if g["muon"] for n in g.get("param_names", ())]
        self._crossed = frozenset(name for name in names if ".cross_" in name)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as `NamedOptimizer` does; without the key "muon" all parameters must be matrices of blocks."""
        (given,) = as_groups([param_group])
        if given.setdefault("muon", True):
            _check_matrices(given["params"], by_name="muon" not in param_group)
        else:
            given.setdefault("lr_scale", self.defaults["adamw_lr_multiplier"])
        super().add_param_group(given)

        # settings are kept in the groups: a copy of an optimizer has those, and no attributes
        group = self.param_groups[-1]
        for key in ["adamw_lr_multiplier"] if group["muon"] else asdict(MuonConfig()):
            del group[key]

    def slots(self, group: Group) -> Slots:
        if not group["muon"]:
            return super().slots(group)
        return Slots(("momentum_buffer",), ("step",) if is_rounded(group) else ())

    def outdated_slots(self, name: str, saved: Collection[str]) -> set[str]:
        """Return the saved slots of a parameter that the other optimizer trained in an earlier version.

        It is a stack of vectors, then taken for a matrix (F146), or a matrix of a cross-attention block (F218). Its moments start from zero; `load_named_state` and a checkpoint leave these slots out.
        """
        to_adamw = name in self._stacked_vectors and "momentum_buffer" in saved
        to_muon = name in self._crossed and "exp_avg" in saved
        slots = {"momentum_buffer", "exp_avg", "exp_avg_sq", "step"}
        return slots.intersection(saved) if to_adamw or to_muon else set()

    def load_named_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Copy in a named state, as `NamedOptimizer` does; a parameter with `outdated_slots` starts from zero."""
        found = dict(state)
        for name, (parameter, group) in self._named_members():
            if self.outdated_slots(name, state.get(name, ())):
                found[name] = self.fresh(parameter, group)
        super().load_named_state(found)

    def update_groups(self, skip: Tensor | None) -> None:
        """Update the matrices by buckets, then the groups of AdamW."""
        groups = {p: g for g in self.param_groups if g["muon"] for p in g["params"]}
        groups = {p: g for p, g in groups.items() if p.requires_grad and _updates_this_step(p)}
        self._scratch = {}
        for bucket in self._buckets(list(groups)):
            self._update_hidden(bucket, groups, skip)
        self._scratch = {}

        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters and not group["muon"]:
                self.update(group, parameters, skip)

    def _update_hidden(
        self, bucket: _Bucket, groups: Mapping[Tensor, Group], skip: Tensor | None
    ) -> None:
        """Update the matrices of a bucket: gather, orthogonalize and scatter them at once."""
        settings = groups[bucket.parameters[0]]  # the same in all groups
        dtype = DTYPES[settings["ns_dtype"]]
        out = self._temporary(bucket.parameters[0]) if bucket.alone else None
        parts = [
            self._direction(p, groups[p], skip, out).to(_device(p), dtype)
            for p in bucket.parameters
        ]
        options = {"steps": settings["ns_steps"], "dtype": dtype, "overwrite": True}
        updates = bucket.full.work(parts, partial(orthogonalize, **options))

        for parameter, update in zip(bucket.parameters, updates):
            group = groups[parameter]
            if parameter.grad is not None and is_rounded(group):
                weights = [local_tensor(parameter)]
                # first=1: the momentum was rounded by the bits of number 0 in this step
                for piece, part in self.in_fp32(parameter, group, weights, [update], first=1):
                    _apply(piece, parameter, group, part, skip)
                count_step(self.state_of(parameter, group), skip)
            elif parameter.grad is not None:
                _apply(local_tensor(parameter), parameter, group, update, skip, out)

    def _temporary(self, parameter: Tensor) -> Tensor:
        """Memory of the shape and dtype of a matrix, the same for all of a step: the system clears new pages each time."""
        own = local_tensor(parameter)
        key = own.shape, own.dtype
        if key not in self._scratch:
            self._scratch[key] = torch.empty_like(own)
        return self._scratch[key]

    def _buckets(self, parameters: list[Tensor]) -> list[_Bucket]:
        """Buckets, the same on all ranks; they change when groups are frozen."""
        # compared by identity: tensors of one shape may be placed differently
        known, found = self._known
        if list(map(id, known)) == list(map(id, parameters)):
            return found

        # A plain matrix on a CPU alone: it stays in the cache from its momentum to its weights, and memory is used again.
        alone = [p for p in parameters if _device(p).type == "cpu" and not axes_of(p)]
        found = [_Bucket([p], FullMatrices([p], cost=flops), True) for p in alone]
        rest = set(map(id, parameters)).difference(map(id, alone))
        for some in _by_size([p for p in parameters if id(p) in rest]):
            found.append(_Bucket(some, FullMatrices(some, cost=flops), False))
        self._known = parameters, found
        return found

    def _direction(
        self, parameter: Tensor, group: Group, skip: Tensor | None, out: Tensor | None
    ) -> Tensor:
        """Move the momentum; return this rank's part of the matrix to orthogonalize."""
        momentum = local_tensor(self.state_of(parameter, group)["momentum_buffer"])
        if parameter.grad is None:
            return torch.zeros_like(momentum)
        gradient = local_gradient(parameter)
        if not is_rounded(group):
            return _move(momentum, gradient, group, skip, out)

        found = torch.empty_like(momentum, dtype=DTYPES[group["ns_dtype"]])
        for own, part, result in self.in_fp32(parameter, group, [momentum], [gradient, found]):
            result.copy_(_move(own, part.float(), group, skip))
        return found


def _by_size(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    """Lists of consecutive parameters of at most `_BUCKET` elements, or of one."""
    found: list[list[Tensor]] = []
    elements = 0
    for parameter in parameters:
        elements += parameter.numel()
        if not found or elements > _BUCKET:
            found.append([])
            elements = parameter.numel()
        found[-1].append(parameter)
    return found


def _check_matrices(members: list[Any], by_name: bool) -> None:
    """ValueError for parameters that are no matrices or stacks; `by_name`, also for those whose name is in no block."""
    for i, entry in enumerate(members):
        name, parameter = entry if isinstance(entry, tuple) else (f"params[{i}]", entry)
        outside = by_name and isinstance(entry, tuple) and not in_block(name)
        if parameter.ndim not in (2, 3) or outside:
            rule = "is not a matrix of a block, and Muon would update it"
            fix = "build Muon over param_groups(model, muon=True), or set 'muon' to True or False in each group"
            raise invalid(name, "no_matrix", tuple(parameter.shape), rule, fix, where="parameter")


def _updates_this_step(parameter: Tensor) -> bool:
    """Sharded parameters always: another rank may hold a gradient. A plain tensor if it has a gradient."""
    return hasattr(parameter, "placements") or parameter.grad is not None


def _device(parameter: Tensor) -> torch.device:
    """Device to compute on: that of the mesh for a DTensor, whose shard may be offloaded to the CPU."""
    mesh: Any = getattr(parameter, "device_mesh", None)
    return parameter.device if mesh is None else torch.device(mesh.device_type)


def _move(
    momentum: Tensor,
    gradient: Tensor,
    group: Mapping[str, Any],
    skip: Tensor | None,
    out: Tensor | None = None,
) -> Tensor:
    """Move the momentum in place; return the matrix to orthogonalize, in `out` or new memory."""
    if skip is not None:  # then the momentum, mixed with itself, stays as it is
        gradient = torch.where(skip != 0, momentum, gradient)
    momentum.lerp_(gradient, 1 - group["momentum"])
    if group["nesterov"]:
        return torch.lerp(gradient, momentum, group["momentum"], out=out)
    return momentum.clone() if out is None else out.copy_(momentum)


def _apply(
    weights: Tensor,
    parameter: Tensor,
    group: Mapping[str, Any],
    update: Tensor,
    skip: Tensor | None,
    out: Tensor | None = None,
) -> None:
    """Decay `weights` of a parameter and add the scaled update, in place; by factors of 1 and 0 where `skip` is 1.

    The scaled update is computed in `out` or in new memory.
    """
    lr = group["lr"]
    decay: Any = 1 - lr * group["weight_decay"]
    rate: Any = -lr * scale(parameter, group["adjust"])
    if skip is not None:
        decay, rate = torch.where(skip != 0, 1.0, decay), torch.where(skip != 0, 0.0, rate)
    update = update.to(weights.device, weights.dtype) if out is None else out.copy_(update)
    weights.mul_(decay).add_(torch.mul(update, rate, out=out))


def scale(parameter: Tensor, adjust: str) -> float:
    """Factor of the learning rate for a matrix (out, in), or for the matrices of a stack (E, in, out)."""
    out, into = parameter.shape[-2:] if parameter.ndim == 2 else parameter.shape[:-3:-1]
    if adjust == "original":
        return max(1.0, out / into) ** 0.5
    return 0.2 * max(out, into) ** 0.5


def orthogonalize(
    matrices: list[Tensor], steps: int, dtype: torch.dtype, overwrite: bool = False
) -> list[Tensor]:
    """Return about U V^T of each matrix U S V^T, by Newton-Schulz: singular values become nearly 1, directions stay.

        orthogonalize([torch.randn(64, 256)], steps=5, dtype=torch.float32)

    Keller Jordan, "Muon: An optimizer for hidden layers in neural networks" (2024). Any shapes (R, C); results have the
    same shapes and `dtype`, in which all of it is computed. A zero matrix stays zero. On an accelerator matrices of one
    shape, or its transpose, share batched matmuls: 3 of them per step and shape.

    Cost: 2 m^2 (2 n + m) FLOPs per step; memory of four times a batch, on a CPU of a matrix, or three with `overwrite`,
    which may change `matrices`.
    """
    batches: dict[tuple[int, int], list[int]] = {}
    found: dict[int, Tensor] = {}
    for i, matrix in enumerate(matrices):
        if matrix.device.type == "cpu":  # a batch takes 1.15 of the time of its matrices in bf16
            x = _wide(matrix).to(dtype, copy=not overwrite)
            result = _iterate_on_cpu(x, steps)
            found[i] = result if matrix.shape == result.shape else result.mT
        else:
            batches.setdefault((min(matrix.shape), max(matrix.shape)), []).append(i)

    for (m, n), members in batches.items():
        size = max(1, _BATCH // max(1, m * n))
        for first in range(0, len(members), size):
            some = members[first : first + size]
            wide = torch.stack([_wide(matrices[i]).to(dtype) for i in some])  # (B, m, n)
            for i, result in zip(some, _iterate(wide, steps).unbind()):
                found[i] = result if matrices[i].shape == result.shape else result.mT
    return [found[i] for i in range(len(matrices))]


def flops(rows: int, columns: int) -> int:
    """FLOPs of one step of the iteration for a matrix of this shape."""
    m, n = min(rows, columns), max(rows, columns)
    return 2 * m * m * (2 * n + m)


def _wide(matrix: Tensor) -> Tensor:
    """The matrix, or its transpose, with no more rows than columns."""
    return matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT


def _iterate(x: Tensor, steps: int) -> Tensor:
    """(B, m, n), over their Frobenius norms, through `steps` of X <- a X + b (X X^T) X + c (X X^T)^2 X."""
    # singular values must be in [0, 1] for the iteration to converge: the Frobenius norm bounds the largest
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=_EPS)
    for _ in range(steps):
        gram = x @ x.mT  # (B, m, m)
        factor = torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C)
        x = torch.baddbmm(x, factor, x, beta=_A)
    return x


def _iterate_on_cpu(x: Tensor, steps: int) -> Tensor:
    """As `_iterate`, of one matrix (m, n), which it overwrites."""
    x = x.div_(torch.linalg.vector_norm(x).clamp(min=_EPS))
    for _ in range(steps):
        gram = _symmetric(x, x.mT)  # (m, m)
        factor = _symmetric(gram, gram, gram)  # b gram + c gram^2
        x = torch.addmm(x, factor, x, beta=_A)
    return x


def _symmetric(a: Tensor, b: Tensor, gram: Tensor | None = None) -> Tensor:
    """a @ b, or with a Gram matrix b gram + c a @ b of the iteration; (m, m), known to be symmetric.

    A CPU spends all its time in matmuls, so in fp32 only the blocks on and below the diagonal are computed, and mirrored:
    from half (many blocks) to all (one) of the FLOPs. In bf16 the blocks are too small to be as fast as one matmul.
    """
    if a.dtype == torch.bfloat16 or len(a) <= _ROWS:
        return a @ b if gram is None else torch.addmm(gram, a, b, beta=_B, alpha=_C)

    out = a.new_empty(len(a), len(a))
    for start in range(0, len(a), _ROWS):
        rows, end = slice(start, start + _ROWS), start + _ROWS
        left, right = a[rows], b[:, :end]
        if gram is None:
            block = left @ right
        else:
            block = torch.addmm(gram[rows, :end], left, right, beta=_B, alpha=_C)

        out[rows, :end] = block
        out[:start, rows] = block[:, :start].mT
    return out
