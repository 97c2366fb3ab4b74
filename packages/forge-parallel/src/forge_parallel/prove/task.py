"""The task of a proof: a builder and batches.

Shapes: B rows, S tokens of a row.
"""

from __future__ import annotations

import inspect
import random
import sys
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from forge_parallel._shared.problems import invalid
from forge_parallel.prove.settings import ProveError, Settings
from forge_parallel.structure import Blocks, Structure

ROWS, IGNORED = 8, -100


@dataclass(frozen=True)
class Batch:
    """Rows as `Compute` takes them, (B, S) int64 each; None for inputs that the model does not take."""

    tokens: Tensor
    labels: Tensor
    positions: Tensor | None = None
    document_ids: Tensor | None = None
    weights: Tensor | None = None
    extras: Mapping[str, Any] = field(default_factory=dict)

    @property
    def keywords(self) -> dict[str, Tensor]:
        """Keyword arguments of the model, besides its tokens."""
        named = {"positions": self.positions, "document_ids": self.document_ids}
        return {name: value for name, value in named.items() if value is not None}

    @property
    def inputs(self) -> dict[str, Any]:
        """The same with extras."""
        return {**self.keywords, **self.extras}

    def map(self, change: Callable[[Any], Any]) -> Batch:
        """A batch of `change` of every tensor."""
        named: dict[str, Any] = {name: change(value) for name, value in self.keywords.items()}
        extras = {name: change(value) for name, value in self.extras.items()}
        return Batch(change(self.tokens), change(self.labels), **named, extras=extras)

    def split(self, micro_batch: int, /) -> list[Batch]:
        """Parts of `micro_batch` rows, in order."""
        starts = range(0, len(self.tokens), micro_batch)
        return [self.map(itemgetter(slice(i, i + micro_batch))) for i in starts]

    def to(self, device: torch.device, stay: Sequence[str] = ()) -> Batch:
        """Its tensors on `device`, but those of these names."""
        moved = self.map(lambda x: x.to(device) if isinstance(x, Tensor) else x)
        kept = {name: value for name, value in self.extras.items() if name in stay}
        named = {name: value for name, value in self.keywords.items() if name in stay}
        return replace(moved, **named, extras={**moved.extras, **kept})

    @property
    def num_valid(self) -> int:
        return int((self.labels != IGNORED).sum())


@dataclass(frozen=True)
class Task:
    """A model by its builder, its roles and blocks, the sizes of its input, and a function that adds `media` to tokens."""

    build: Callable[[], nn.Module]
    roles: Mapping[str, Any] | None
    blocks: Blocks | None
    vocab_size: int
    seq_len: int
    seed: int
    media: Callable[[Tensor], Mapping[str, Any]] | None = None
    branches: bool = False
    rows: int = ROWS
    settings: Settings = field(default_factory=Settings)

    def model(self) -> nn.Module:
        """A new one, on the host, fp32 and training but for its dropout, after all known generators were seeded."""
        random.seed(self.seed)
        torch.manual_seed(self.seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(self.seed)
        model = self.build()
        if not isinstance(model, nn.Module):
            rule = "must be an nn.Module, as the result of build"
            raise invalid(
                "build", "type", type(model).__name__, rule, "correct it", kind=ProveError
            )
        if self.roles is not None:
            table = dict(self.roles)
            model.parallel_roles = lambda: table  # type: ignore[assignment]
        model = model.to("cpu").float().train()  # complex buffers stay as they are
        for module in model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.eval()
        return model

    def batch(self, step: int, keywords: Container[str]) -> Batch:
        """The global batch of a step: the same wherever it is asked for, unevenly labelled.

        With `branches` the first half of the rows has ids of the lower half of the vocabulary, the other half those of
        the upper, and one row has no labels at all.
        """
        generator = torch.Generator().manual_seed(1000 * self.seed + step)
        row = torch.randint(0, self.vocab_size, (self.rows, self.seq_len + 1), generator=generator)
        if self.branches:
            row = row % (self.vocab_size // 2)
            row[self.rows // 2 :] += self.vocab_size // 2
        tokens, labels = row[:, :-1].contiguous(), row[:, 1:].clone()
        shares = torch.linspace(0.05, 0.9, self.rows)[:, None]
        labels[torch.rand(labels.shape, generator=generator) < shares] = IGNORED
        if self.branches:
            labels[self.rows // 2] = IGNORED
        extras = {} if self.media is None else self.media(tokens)
        index = torch.arange(self.seq_len).expand(self.rows, -1)
        known: dict[str, Any] = {"positions": index.contiguous()}
        if "document_ids" in keywords:  # each row holds two documents, which end anywhere
            ends = 1 + torch.arange(self.rows)[:, None] * (self.seq_len - 2) // self.rows
            later = index >= ends
            labels[index == ends - 1] = IGNORED  # the next document is not predicted
            known = {"positions": index - later * ends, "document_ids": later.long()}
        named = {n: v for n, v in known.items() if n in keywords}
        return Batch(tokens, labels, **named, extras=extras)


def keywords_of(model: nn.Module) -> frozenset[str]:
    """Names of the parameters of the model's forward; of one that no step has changed."""
    return frozenset(inspect.signature(model.forward).parameters)


def layers_of(model: nn.Module, structure: Structure) -> dict[str, nn.Module]:
    """The blocks that this part of the model has, by their full names, but those that are used twice."""
    named = dict(model.named_modules(remove_duplicate=False))
    times = Counter(named.values())
    return {n: named[n] for n in structure.blocks if n in named and times[named[n]] == 1}
