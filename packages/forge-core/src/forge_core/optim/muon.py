"""Muon: momentum of a hidden matrix, orthogonalised as a whole however it is sharded; AdamW for the rest."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from forge_core._shared.problems import invalid
from forge_core.kinds import is_matrix, parameter_kinds, stacked_vectors
from forge_core.optim.adamw import AdamW
from forge_core.optim.base import Group, Slots, count_step, rounds
from forge_core.optim.config import OptimizerConfig
from forge_core.optim.groups import match_groups, parameter_groups
from forge_core.optim.local import gradient_shard, shard
from forge_core.optim.newton_schulz import flops, orthogonalise
from forge_core.optim.whole import WholeMatrices

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
#: A block of a list of layers: a part of a name that is a number, or a cross-attention block before one.
_BLOCK = re.compile(r"(^|\.)(cross_)?\d+\.")


class Muon(AdamW):
    """MomentUm Orthogonalized by Newton-Schulz (Keller Jordan 2024) for the matrices of a model's blocks.

    `optimizer = Muon(model, OptimizerConfig("muon", lr=1e-3, muon=MuonConfig(momentum=0.95)))`

    With gradient G, momentum B and mu, as in torch.optim.Muon (Keller's B is 1 / (1 - mu) times this one, a
    factor that the orthogonalisation drops):

        B <- mu B + (1 - mu) G;   O = orthogonalise(nesterov ? mu B + (1 - mu) G : B)
        W <- W - lr weight_decay W - lr s O

    s depends on the matrix (out, in): "match_rms_adamw" 0.2 sqrt(max(out, in)) (Liu et al. 2025), with which
    rates and decay of AdamW fit; "original" sqrt(max(1, out / in)). Each matrix of a stack of experts
    (E, in, out) is one of its own. Which parameters these are: `hidden_matrices`. All others are AdamW's,
    with the config's betas and eps, and `adamw_lr_multiplier` times the rate. Groups, named state, the
    mask and what is refused: see `NamedOptimizer`.

    A sharded matrix is gathered in `ns_dtype` on one of the ranks that share it, orthogonalised there and sent
    back (`WholeMatrices`), so the update is that of the whole matrix on any layout. A parameter without a
    gradient on this rank is not touched here, and counts as zero for the others.

    Cost: 4 bytes of momentum for a parameter of Muon, 8 of moments for the others (in bf16 half), made here. A step of one
    process does not communicate. On ranks it does two all-to-alls for each axis of a mesh that cuts matrices and an
    all-gather for each that copies them, for all matrices of a mesh together. No host sync.
    """

    _whole: tuple[list[Tensor], WholeMatrices] | None = None
    _stacked_vectors: frozenset[str] = frozenset()
    _crossed: frozenset[str] = frozenset()

    def __init__(self, model: nn.Module, config: OptimizerConfig) -> None:
        names, self._stacked_vectors = hidden_matrices(model, config), stacked_vectors(model)
        self._crossed = frozenset(name for name in names if ".cross_" in name)
        # in groups, as copies of an optimizer keep these and no attributes
        settings = asdict(config.muon)
        scale = {"lr_scale": settings.pop("adamw_lr_multiplier")}
        groups = []
        for group in parameter_groups(model, config, rounds=True):
            hidden = [(name, p) for name, p in group["params"] if name in names]
            others = [(name, p) for name, p in group["params"] if name not in names]
            groups.append({**group, "params": hidden, "muon": True, **settings})
            groups.append({**group, "params": others, "muon": False, **scale})
        super().__init__(model, config, [group for group in groups if group["params"]])

    def slots(self, group: Group) -> Slots:
        if not group["muon"]:
            return super().slots(group)
        return Slots(("momentum_buffer",), ("step",) if rounds(group) else ())

    def outdated_slots(self, name: str, saved: Collection[str]) -> set[str]:
        """Saved slots of a parameter that a version before gave to the other optimizer: a stack of vectors, which it took
        for a matrix (F146), or a matrix of a cross-attention block (F218).

        Its moments start anew; `load_named_state` and a checkpoint leave these slots out.
        """
        to_adamw = name in self._stacked_vectors and "momentum_buffer" in saved
        to_muon = name in self._crossed and "exp_avg" in saved
        slots = {"momentum_buffer", "exp_avg", "exp_avg_sq", "step"}
        return slots.intersection(saved) if to_adamw or to_muon else set()

    def load_named_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """As `NamedOptimizer.load_named_state`; a parameter with `outdated_slots` starts anew."""
        found = dict(state)
        for name, (parameter, group) in self._members():
            if self.outdated_slots(name, state.get(name, ())):
                found[name] = self.fresh(parameter, group)
        super().load_named_state(found)

    def update_groups(self, skip: Tensor | None) -> None:
        rows = [(p, g) for g in self.param_groups if g["muon"] for p in g["params"]]
        # known from the layout and not from gradients, which ranks may have differently
        rows = [(p, g) for p, g in rows if p.requires_grad and _takes_part(p)]
        if rows:
            self._update_hidden(rows, skip)
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters and not group["muon"]:
                self.update(group, parameters, skip)

    def _update_hidden(self, rows: Sequence[tuple[Tensor, Group]], skip: Tensor | None) -> None:
        settings = rows[0][1]  # the same in all groups
        dtype = _DTYPES[settings["ns_dtype"]]
        parts = [self._direction(p, group, skip).to(_device(p), dtype) for p, group in rows]
        work = partial(orthogonalise, steps=settings["ns_steps"], dtype=dtype)
        updates = self._matrices([p for p, _ in rows]).work(parts, work)
        for (parameter, group), update in zip(rows, updates):
            if parameter.grad is not None and rounds(group):
                weights = [shard(parameter)]
                for piece, part in self.widened(parameter, group, weights, [update], first=1):
                    _apply(piece, parameter, group, part, skip)
                count_step(self.state_of(parameter, group), skip)
            elif parameter.grad is not None:
                _apply(shard(parameter), parameter, group, update, skip)

    def _matrices(self, parameters: list[Tensor]) -> WholeMatrices:
        """Of parameters, which change with the groups that are frozen."""
        known = self._whole
        if known is None or list(map(id, known[0])) != list(map(id, parameters)):
            self._whole = known = (parameters, WholeMatrices(parameters, cost=flops))
        return known[1]

    def _direction(self, parameter: Tensor, group: Group, skip: Tensor | None) -> Tensor:
        """This rank's part of what is orthogonalised; moves the momentum."""
        momentum = shard(self.state_of(parameter, group)["momentum_buffer"])
        if parameter.grad is None:
            return torch.zeros_like(momentum)
        gradient = gradient_shard(parameter)
        if not rounds(group):
            return _move(momentum, gradient, group, skip)
        found = torch.empty_like(momentum, dtype=_DTYPES[group["ns_dtype"]])
        for own, part, result in self.widened(parameter, group, [momentum], [gradient, found]):
            result.copy_(_move(own, part.float(), group, skip))
        return found


def hidden_matrices(model: nn.Module, config: OptimizerConfig) -> set[str]:
    """Names of the parameters that Muon updates.

    Matrices (R, C) and stacks of matrices (E, R, C), by `parameter_kinds`, below a block, which is a member of a list
    of modules: a part of the name is a number, or `cross_` and a number (forge_vlm's cross-attention blocks). So embedding
    and head of a model, which stand outside of its blocks, vectors, norms, biases and convolutions are AdamW's. `muon` of a group that a parameter is
    in decides otherwise about its matrices, embeddings included. Raises ValueError if there is no matrix for it, trained or not.
    """
    owners, kinds = match_groups(model, config.groups), parameter_kinds(model)
    found, matrices = set(), False
    for name, parameter in model.named_parameters():
        group = config.groups.get(owners.get(name, ""))
        chosen = None if group is None else group.muon
        hidden = in_block(name) and kinds[name] in ("matrix", "stacked_matrix")
        if parameter.ndim in (2, 3) and is_matrix(kinds[name]):
            matrices |= hidden or chosen is not None
            if hidden if chosen is None else chosen:
                found.add(name)
    if not matrices:
        rule = "must have a matrix below a block (layers.0.weight), and the model has none"
        fix = "name some in a group: [optimizer.groups.hidden] with patterns and muon = true, or use adamw"
        raise invalid("optimizer.name", "no_matrix", "muon", rule, fix)
    return found


def in_block(name: str) -> bool:
    """Whether a parameter is below a block: a member of a list of modules, or a cross-attention block before one."""
    return _BLOCK.search(name) is not None


def _takes_part(parameter: Tensor) -> bool:
    """A DTensor always, as other ranks may have a gradient; a plain tensor with one."""
    return hasattr(parameter, "placements") or parameter.grad is not None


def _device(parameter: Tensor) -> torch.device:
    """Where to compute: with a DTensor that is offloaded, the device of its mesh."""
    mesh: Any = getattr(parameter, "device_mesh", None)
    return parameter.device if mesh is None else torch.device(mesh.device_type)


def _move(
    momentum: Tensor, gradient: Tensor, group: Mapping[str, Any], skip: Tensor | None
) -> Tensor:
    """The momentum's step, in place; what is orthogonalised."""
    if skip is not None:  # then the momentum, mixed with itself, stays as it is
        gradient = torch.where(skip != 0, momentum, gradient)
    momentum.lerp_(gradient, 1 - group["momentum"])
    return gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum


def _apply(
    weights: Tensor,
    parameter: Tensor,
    group: Mapping[str, Any],
    update: Tensor,
    skip: Tensor | None,
) -> None:
    """Decay of a parameter's `weights`, and the update times its rate, in place; factors of 1 and 0 where `skip`
    is 1."""
    lr = group["lr"]
    decay: Any = 1 - lr * group["weight_decay"]
    rate: Any = -lr * scale(parameter, group["adjust"])
    if skip is not None:
        decay, rate = torch.where(skip != 0, 1.0, decay), torch.where(skip != 0, 0.0, rate)
    weights.mul_(decay).add_(update.to(weights.device, weights.dtype) * rate)


def scale(parameter: Tensor, adjust: str) -> float:
    """Factor of the rate for a matrix (out, in), or for those of a stack (E, in, out)."""
    out, into = parameter.shape[-2:] if parameter.ndim == 2 else parameter.shape[:-3:-1]
    if adjust == "original":
        return max(1.0, out / into) ** 0.5
    return 0.2 * max(out, into) ** 0.5


def build_muon(model: nn.Module, config: OptimizerConfig) -> Muon:
    """The builder behind the name `muon`."""
    return Muon(model, config)
