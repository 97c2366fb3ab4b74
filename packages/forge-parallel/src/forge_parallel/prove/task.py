"""The task of a proof: a model by its builder, and batches that depend only on the seed and the step.

Shapes: B sequences, S tokens of a sequence.
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

from forge_parallel.prove.settings import ProofSettings, prove_error
from forge_parallel.structure import Blocks, Structure

GLOBAL_BATCH, IGNORED = 8, -100


@dataclass(frozen=True)
class Batch:
    """Sequences as `Compute` takes them, (B, S) int64 each; None for inputs that the model does not take."""

    tokens: Tensor
    labels: Tensor
    positions: Tensor | None = None
    document_ids: Tensor | None = None
    weights: Tensor | None = None
    extras: Mapping[str, Any] = field(default_factory=dict)

    @property
    def keywords(self) -> dict[str, Tensor]:
        """Keyword arguments of the model, without `extras`."""
        named = {"positions": self.positions, "document_ids": self.document_ids}
        return {name: value for name, value in named.items() if value is not None}

    @property
    def inputs(self) -> dict[str, Any]:
        """Keyword arguments of the model, with `extras`."""
        return {**self.keywords, **self.extras}

    def map(self, change: Callable[[Any], Any]) -> Batch:
        """Return a batch with `change` applied to every tensor."""
        named: dict[str, Any] = {name: change(value) for name, value in self.keywords.items()}
        extras = {name: change(value) for name, value in self.extras.items()}
        return Batch(change(self.tokens), change(self.labels), **named, extras=extras)

    def split(self, micro_batch: int, /) -> list[Batch]:
        """Split into micro-batches of `micro_batch` sequences, in order."""
        starts = range(0, len(self.tokens), micro_batch)
        return [self.map(itemgetter(slice(i, i + micro_batch))) for i in starts]

    def to(self, device: torch.device, stay: Sequence[str] = ()) -> Batch:
        """Move the tensors to `device`, except those named in `stay`."""
        moved = self.map(lambda x: x.to(device) if isinstance(x, Tensor) else x)
        kept = {name: value for name, value in self.extras.items() if name in stay}
        named = {name: value for name, value in self.keywords.items() if name in stay}
        return replace(moved, **named, extras={**moved.extras, **kept})

    @property
    def num_valid(self) -> int:
        """Number of labels that count in the loss."""
        return int((self.labels != IGNORED).sum())


@dataclass(frozen=True)
class Task:
    """A model by its builder, its roles and blocks, the sizes of its input, and the source of its `media` inputs."""

    build: Callable[[], nn.Module]
    roles: Mapping[str, Any] | None
    blocks: Blocks | None
    vocab_size: int
    seq_len: int
    seed: int
    media: Callable[[Tensor], Mapping[str, Any]] | None = None
    branches: bool = False
    global_batch: int = GLOBAL_BATCH
    settings: ProofSettings = field(default_factory=ProofSettings)

    def model(self) -> nn.Module:
        """Build the model on the CPU, in fp32 and train mode with dropout off, after seeding random, torch and numpy."""
        random.seed(self.seed)
        torch.manual_seed(self.seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(self.seed)

        model = self.build()
        if not isinstance(model, nn.Module):
            rule = "must be an nn.Module, as the result of build"
            raise prove_error("build", "type", type(model).__name__, rule, "correct it")
        if self.roles is not None:
            table = dict(self.roles)
            model.parallel_roles = lambda: table  # type: ignore[assignment]
        model = model.to("cpu").float().train()  # complex buffers stay as they are
        for module in model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.eval()
        return model

    def batch(self, step: int, keywords: Container[str]) -> Batch:
        """Return the global batch of a step, the same in every process, with uneven numbers of labels per sequence.

        With `branches` the first half of the sequences has ids of the lower half of the vocabulary, the other half those
        of the upper, and one sequence has no labels.
        """
        generator = torch.Generator().manual_seed(1000 * self.seed + step)
        size, seq_len = self.global_batch, self.seq_len
        ids = torch.randint(0, self.vocab_size, (size, seq_len + 1), generator=generator)
        if self.branches:
            ids = ids % (self.vocab_size // 2)
            ids[size // 2 :] += self.vocab_size // 2
        tokens, labels = ids[:, :-1].contiguous(), ids[:, 1:].clone()  # (B, S) each

        # 5 % of the labels of the first sequence are masked, 90 % of the last: a mean per rank would show
        masked = torch.linspace(0.05, 0.9, size)[:, None]
        labels[torch.rand(labels.shape, generator=generator) < masked] = IGNORED
        if self.branches:
            labels[size // 2] = IGNORED
        extras = {} if self.media is None else self.media(tokens)

        index = torch.arange(seq_len).expand(size, -1)
        known: dict[str, Any] = {"positions": index.contiguous()}
        if "document_ids" in keywords:  # two documents per sequence, with another boundary in each
            ends = 1 + torch.arange(size)[:, None] * (seq_len - 2) // size
            later = index >= ends
            labels[index == ends - 1] = IGNORED  # the next document is not predicted
            known = {"positions": index - later * ends, "document_ids": later.long()}
        named = {n: v for n, v in known.items() if n in keywords}
        return Batch(tokens, labels, **named, extras=extras)


def keywords_of(model: nn.Module) -> frozenset[str]:
    """Parameter names of the model's forward. Call it before FSDP changes the model's class."""
    return frozenset(inspect.signature(model.forward).parameters)


def layers_of(model: nn.Module, structure: Structure) -> dict[str, nn.Module]:
    """Blocks present in this part of the model, by full name, without those that are used twice."""
    named = dict(model.named_modules(remove_duplicate=False))
    times = Counter(named.values())
    return {n: named[n] for n in structure.blocks if n in named and times[named[n]] == 1}
