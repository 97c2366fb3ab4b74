"""Weights of a text model, or of a smaller mixture, as the beginning of a model with more parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from forge_vlm._shared.names import matches
from forge_vlm._shared.problems import Problem, raise_problems

__all__ = ["WarmStart", "warm_start"]

#: Tensors with a row for each token id, of which a model may have more than the weights that it begins from.
_BY_TOKEN = ("embedding.weight", "lm_head.weight")


class WarmStart(NamedTuple):
    """What `warm_start` did, in names: tensors of the model that were `copied`, that are further copies of a weight
    (`duplicated`), that keep what they had (`fresh`; `embedding.weight[96:]` are rows), and weights that are `unused`."""

    copied: tuple[str, ...]
    duplicated: tuple[str, ...]
    fresh: tuple[str, ...]
    unused: tuple[str, ...]


@torch.no_grad()
def warm_start(
    model: nn.Module,
    weights: Mapping[str, Tensor],
    *,
    keep: Sequence[str] = (),
    allow_unused: Sequence[str] = (),
) -> WarmStart:
    """Fill `model` from weights by Forge's names, before it is sharded, and say what came from where.

        report = warm_start(VLM(config), text_model.state_dict())

    A tensor takes the weight of its name. Without one, it takes that which its module names in an optional
    `warm_sources() -> {own tensor: (candidates,)}`: towers of a mixture of transformers begin as copies of text's,
    experts of a group as copies of the feed-forward, or of the only expert that the group had ("upcycling"). A stack
    of experts (E, in, out) repeats a matrix (out, in), or a stack of one. Embedding and head may have more rows than
    their weights, and those keep what they had.

    keep: patterns of tensors that keep what they have although there is a weight, such as "*.router.weight" of groups
    of one expert. allow_unused: patterns of weights that need not be used (a head that is now tied).

    Raises ValueError, with nothing changed, for weights that nothing uses, for shapes that do not fit, and for tensors
    that are sharded or have no storage yet.
    """
    targets = {name: t for name, t in model.state_dict(keep_vars=True).items()}
    sources = _sources(model)
    found: dict[str, tuple[str, Tensor]] = {}
    used, problems = set(), []

    for name, target in targets.items():
        if matches(name, keep):
            continue
        source = next((s for s in (name, *sources.get(name, ())) if s in weights), None)
        if source is None:
            continue
        used.add(source)
        value = _fitted(name, weights[source], target)
        if value is None:
            problems.append(_misfit(name, target, source, weights[source]))
        else:
            found[name] = (source, value)

    unused = tuple(n for n in weights if n not in used and not matches(n, keep))
    problems += _placement_problems(targets)
    lost = [name for name in unused if not matches(name, allow_unused)]
    if lost:
        rule = "are used by no part of the model"
        fix = "correct its config, or name them in allow_unused"
        problems.append(Problem("weights", "unused", lost, rule, fix))

    raise_problems("warm_start", problems)
    for name, (_, value) in found.items():
        targets[name][: len(value)].copy_(value) if value.ndim else targets[name].copy_(value)
    return _report(targets, found, unused)


def _report(
    targets: Mapping[str, Tensor], found: Mapping[str, tuple[str, Tensor]], unused: tuple[str, ...]
) -> WarmStart:
    copied = tuple(
        name for name, (source, v) in found.items() if name == source and not _repeats(v)
    )
    fresh = [name for name in targets if name not in found]
    for name, (_, value) in found.items():
        if value.ndim and len(value) < len(targets[name]):
            fresh.append(f"{name}[{len(value)}:]")
    again = tuple(name for name in found if name not in copied)
    return WarmStart(copied, again, tuple(fresh), unused)


def _repeats(value: Tensor) -> bool:
    """Whether a stack is one matrix repeated."""
    return value.ndim > 0 and len(value) > 1 and value.stride(0) == 0


def _sources(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """{tensor: weights that it may begin as, the best first}, by what modules say."""
    found: dict[str, tuple[str, ...]] = {}
    for prefix, module in model.named_modules():
        offer: Any = getattr(module, "warm_sources", None)
        dot = f"{prefix}." if prefix else ""
        for name, candidates in ({} if offer is None else offer()).items():
            found[dot + name] = tuple(dot + candidate for candidate in candidates)
    return found


def _fitted(name: str, weight: Tensor, target: Tensor) -> Tensor | None:
    """The weight in the shape of the target, or the first rows of it; None where it has another."""
    if weight.shape == target.shape:
        return weight
    if target.ndim == 3 and weight.ndim == 2:  # a stack of matrices that are right factors
        weight = weight.mT
    if weight.ndim == target.ndim - 1:
        weight = weight[None]
    if target.ndim == weight.ndim == 0 or weight.shape[1:] != target.shape[1:]:
        return None
    if name in _BY_TOKEN and len(weight) < len(target):
        return weight
    stacked = target.ndim == 3 or name.endswith("_bias")
    return weight.expand(len(target), *weight.shape[1:]) if stacked and len(weight) == 1 else None


def _misfit(name: str, target: Tensor, source: str, weight: Tensor) -> Problem:
    shape, rule = tuple(target.shape), f"cannot begin as the weight {source} {tuple(weight.shape)}"
    return Problem(name, "shape", shape, rule, "correct the config, or name it in keep")


def _placement_problems(targets: Mapping[str, Tensor]) -> Iterator[Problem]:
    for name, target in targets.items():
        if target.is_meta or hasattr(target, "device_mesh"):
            where = "on the meta device" if target.is_meta else "sharded"
            rule = f"is {where}, and weights are copied into full tensors on a device"
            yield Problem(name, "placement", ..., rule, "copy before, or build it plainly")
            return
