"""Token ids that stand for media, and the loss of each modality.

Shapes: B sequences, S tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from forge_vlm._config import is_size
from forge_vlm._renamed import renamed
from forge_vlm._shared.problems import Problem, invalid, raise_problems

__all__ = [
    "ModalityConfig",
    "ModalityLoss",
    "discrete_ranges",
    "modality_ids",
    "modality_losses",
    "numbers",
    "numbers_by_id",
    "trained_modalities",
]


@dataclass(frozen=True)
class ModalityConfig:
    """Token ids of a modality: a placeholder that features of an encoder replace, or a range of discrete tokens.

    ModalityConfig(first_id=151655)                                  # a placeholder
    ModalityConfig(first_id=4, num_ids=8192, discrete=True)          # images as tokens (Chameleon)
    """

    first_id: int = 0
    """the token id, or the first of a range of discrete ones"""
    num_ids: int = 1
    """how many ids; above 1 they are discrete tokens"""
    discrete: bool = False
    """the ids are tokens of their own, embedded and trained like text; else features replace them"""

    def __post_init__(self) -> None:
        raise_problems("modality", _problems(self))


def _problems(c: ModalityConfig) -> Iterator[Problem]:
    if isinstance(c.first_id, bool) or not isinstance(c.first_id, int) or c.first_id < 0:
        rule = "must be a token id, 0 or more"
        yield Problem("first_id", "range", c.first_id, rule, "give the placeholder's")
    if not is_size(c.num_ids, 2**31):
        rule = "must be a whole number, at least 1"
        yield Problem("num_ids", "size", c.num_ids, rule, "use 1 for a placeholder")
    elif c.num_ids > 1 and not c.discrete:
        fix = "set discrete = true, or use 1"
        yield Problem("num_ids", "placeholder", c.num_ids, "must be 1 for a placeholder", fix)


def numbers(modalities: Mapping[str, ModalityConfig]) -> dict[str, int]:
    """The number of each modality, from 1, by name: the order of declaration does not enter."""
    return {name: number for number, name in enumerate(sorted(modalities), 1)}


def trained_modalities(modalities: Mapping[str, ModalityConfig]) -> tuple[int, ...]:
    """The numbers of text and of discrete modalities, whose tokens are targets of the loss."""
    return (0, *(n for name, n in numbers(modalities).items() if modalities[name].discrete))


def discrete_ranges(modalities: Mapping[str, ModalityConfig]) -> dict[str, tuple[int, int]]:
    """(first id, one after the last) of each discrete modality, in the order of `numbers`."""
    own = ((name, modalities[name]) for name in numbers(modalities))
    return {name: (m.first_id, m.first_id + m.num_ids) for name, m in own if m.discrete}


def numbers_by_id(modalities: Mapping[str, ModalityConfig]) -> dict[int, int]:
    """The number of each token id that is not text, for `SequencePlan.of`."""
    return {
        modalities[name].first_id + i: number
        for name, number in numbers(modalities).items()
        for i in range(modalities[name].num_ids)
    }


def modality_ids(
    tokens: Tensor,
    document_ids: Tensor | None,
    modalities: Mapping[str, ModalityConfig],
    only: Collection[str] | None = None,
) -> Tensor:
    """(B, S) int64 on the device of tokens: -1 padding, 0 text, others by `numbers`. No host sync.

    Of modalities that are not among `only`, if that is given, tokens are text. ValueError for document_ids of another
    shape.
    """
    found = torch.zeros_like(tokens)
    for name, number in numbers(modalities).items():
        if only is not None and name not in only:
            continue
        first = modalities[name].first_id
        found = found.masked_fill(
            (tokens >= first) & (tokens < first + modalities[name].num_ids), number
        )
    if document_ids is None:
        return found
    if document_ids.shape != tokens.shape:
        rule = f"must have the shape {tuple(tokens.shape)} of tokens, as padding has no modality"
        value = tuple(document_ids.shape)
        raise invalid("document_ids", "shape", value, rule, "give those of the same rows")
    return found.masked_fill(document_ids.to(tokens.device, non_blocking=True) < 0, -1)


@dataclass(frozen=True)
class ModalityLoss:
    """The sum of losses of one modality's targets and what they weigh, 0-dim and without a graph."""

    sum: Tensor
    count: Tensor


def modality_losses(
    token_losses: Tensor,
    labels: Tensor,
    modalities: Mapping[str, ModalityConfig],
    *,
    weights: Tensor | None = None,
    ignore_index: int = -100,
) -> dict[str, ModalityLoss]:
    """{"text" and each discrete modality: the losses of its targets}, which add up to the full loss.

        loss = cross_entropy(model(tokens), labels)
        parts = modality_losses(loss.token_losses, labels, config.modalities)
        mean = parts["image"].sum / parts["image"].count

    token_losses (B, S) as `TokenLoss` has them, weighted; labels (B, S), by whose ids a target is of a modality;
    weights (B, S) of labels. No host sync.
    """
    valid = labels != ignore_index
    weigh = valid.double() if weights is None else weights.double().where(valid, 0.0)
    ids = modality_ids(labels, None, modalities)
    named = {"text": 0} | {n: i for n, i in numbers(modalities).items() if modalities[n].discrete}
    found = {}
    for name, number in named.items():
        here = valid & (ids == number)
        losses = token_losses.detach().where(here, 0.0)
        found[name] = ModalityLoss(losses.sum(dtype=torch.float64), weigh.where(here, 0.0).sum())
    return found


__getattr__ = renamed(__name__)
