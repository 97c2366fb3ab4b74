"""The data of a cell: what each rank that reads sees in each micro-batch of each step.

Shapes: B rows of a micro-batch, S tokens of a row.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from cells import FEATURES, LAYOUTS, Cell
from torch import Tensor

from forge_data import Ragged, filler_batch

STEPS, ROWS, SEQ, VOCAB = 3, 2, 16, 99  # 99: no number of ranks here divides it
# A picture has so many pixels in a row, and the last id of the vocabulary at so many places of its row.
PIXELS, PICTURE = 4, VOCAB - 1
IGNORED = -100
# Where the documents of each row of a packed micro-batch end.
DOCUMENT_ENDS = ((5, 6, SEQ), (11, SEQ))
# Where the pictures of the two rows begin, each within a document: at both ends of a row, too.
PICTURES = ((0, 8, 12), (6,))
# Of a padded row: how many tokens it has.
EPOCH_END = 7


@dataclass(frozen=True)
class MicroBatch:
    """tokens, labels, positions and document_ids, each (B, S) int64; the last two only if packed. Extras are pictures
    (N, 3, PIXELS, PIXELS).

    Several joined (`together`) are what `Compute` takes.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor | None = None
    document_ids: Tensor | None = None
    weights: Tensor | None = None
    extras: Mapping[str, Ragged] = field(default_factory=dict)

    @property
    def num_valid(self) -> int:
        return int((self.labels != IGNORED).sum())

    @property
    def num_tokens(self) -> int:
        """Without padding."""
        ids = self.document_ids
        return self.tokens.numel() if ids is None else int((ids >= 0).sum())

    @property
    def keywords(self) -> dict[str, Tensor]:
        """What the model is told about the tokens."""
        found = {"positions": self.positions, "document_ids": self.document_ids}
        return {name: value for name, value in found.items() if value is not None}

    def rows(self, chosen: slice) -> MicroBatch:
        """Some of its rows, in order."""
        named = {name: value[chosen] for name, value in self.keywords.items()}
        extras = {name: value[chosen] for name, value in self.extras.items()}
        return MicroBatch(self.tokens[chosen], self.labels[chosen], **named, extras=extras)

    def with_positions(self) -> MicroBatch:
        """With those of rows of one document, where there are none."""
        if self.positions is not None:
            return self
        return replace(self, positions=torch.arange(SEQ).repeat(len(self.tokens), 1))

    def split(self, micro_batch: int, /) -> list[MicroBatch]:
        """Parts of `micro_batch` rows, in order."""
        starts = range(0, len(self.tokens), micro_batch)
        return [self.rows(slice(i, i + micro_batch)) for i in starts]

    def to(self, device: torch.device, stay: Sequence[str] = ()) -> MicroBatch:
        """On `device`, but the fields in `stay`."""

        def moved(name: str, value: Any) -> Any:
            return value if value is None or name in stay else value.to(device)

        rows = ("tokens", "labels", "positions", "document_ids", "weights")
        extras = {name: moved(name, value) for name, value in self.extras.items()}
        return MicroBatch(*(moved(name, getattr(self, name)) for name in rows), extras=extras)


def together(parts: Sequence[MicroBatch]) -> MicroBatch:
    """The rows of several as one."""
    named = {name: torch.cat([p.keywords[name] for p in parts]) for name in parts[0].keywords}
    tokens, labels = torch.cat([p.tokens for p in parts]), torch.cat([p.labels for p in parts])
    extras = {
        name: functools.reduce(Ragged.followed_by, (p.extras[name] for p in parts))
        for name in parts[0].extras
    }
    return MicroBatch(tokens, labels, **named, extras=extras)


def batches(cell: Cell) -> list[list[list[MicroBatch]]]:
    """[step][data rank][micro-batch], the same wherever it is called; filler is not among them."""
    readers, total = LAYOUTS[cell.layout].readers, FEATURES[cell.feature].total
    if total is not None:
        return [_dealt(cell, step, total, readers) for step in range(STEPS)]
    return [
        [
            [_micro_batch(cell, step, rank, index) for index in range(cell.micro_batches)]
            for rank in range(readers)
        ]
        for step in range(STEPS)
    ]


def _dealt(cell: Cell, step: int, total: int, readers: int) -> list[list[MicroBatch]]:
    """`total` micro-batches in order, one more for the first readers where they do not divide."""
    parts = iter([_micro_batch(cell, step, index, 0) for index in range(total)])
    shares = [total // readers + (reader < total % readers) for reader in range(readers)]
    return [[next(parts) for _ in range(share)] for share in shares]


def filler() -> MicroBatch:
    """What a reader runs that has no more micro-batches, as forge_data makes it."""
    batch = filler_batch(ROWS, SEQ)
    return MicroBatch(batch.tokens, batch.labels, batch.positions, batch.document_ids)


def _micro_batch(cell: Cell, step: int, rank: int, index: int) -> MicroBatch:
    feature = FEATURES[cell.feature]
    generator = torch.Generator().manual_seed(1000 * cell.seed + 100 * step + 10 * rank + index)
    row = torch.randint(0, VOCAB, (ROWS, SEQ + 1), generator=generator)
    tokens, labels = row[:, :-1].contiguous(), row[:, 1:].clone()
    share = _ignored_share(cell, step, rank, index)
    labels[torch.rand(labels.shape, generator=generator) < share] = IGNORED
    extras = {}
    if feature.pictures is not None:
        where = () if rank == LAYOUTS[cell.layout].readers - 1 and index == 0 else PICTURES
        extras["images"] = _put_pictures(tokens, labels, where, feature.places, generator)
    if not feature.packed:
        return MicroBatch(tokens, labels, extras=extras)
    document_ids, positions = _documents()
    for number, ends in enumerate(DOCUMENT_ENDS):
        labels[number, [end - 1 for end in ends]] = IGNORED  # the next document is not predicted
    last = LAYOUTS[cell.layout].readers - 1, cell.micro_batches - 1
    if feature.padded and (step, rank, index) == (1, *last):
        tokens[-1, EPOCH_END:], document_ids[-1, EPOCH_END:] = 0, -1
        labels[-1, EPOCH_END - 1 :] = IGNORED
    return MicroBatch(tokens, labels, positions, document_ids, extras=extras)


def _put_pictures(
    tokens: Tensor,
    labels: Tensor,
    where: Sequence[Sequence[int]],
    places: int,
    generator: torch.Generator,
) -> Ragged:
    """Put the places of pictures among text, which has none then, and return their pixels. No place is predicted."""
    tokens[tokens == PICTURE], labels[labels == PICTURE] = 0, 0
    for row, starts in enumerate(where):
        for start in starts:
            tokens[row, start : start + places] = PICTURE
            labels[row, max(0, start - 1) : start + places - 1] = IGNORED
    counts = [len(starts) for starts in where] or [0] * len(tokens)
    pixels = torch.rand(sum(counts), 3, PIXELS, PIXELS, generator=generator)
    return Ragged(pixels, torch.tensor([0, *counts]).cumsum(0))


def _ignored_share(cell: Cell, step: int, rank: int, index: int) -> float:
    """How large a part of the labels is ignored."""
    last_rank = LAYOUTS[cell.layout].readers - 1
    match FEATURES[cell.feature].labels:
        case "all":
            return 0.0
        case "uneven":  # from a tenth to nine tenths, differently on each rank and micro-batch
            return (0.1, 0.6, 0.9, 0.3)[(rank + index) % 4]
        case "none_on_last_rank":
            return 1.0 if rank == last_rank else 0.2
        case "none_in_a_micro_batch":  # the first on one rank, the last on another
            empty = (rank, index) == (0, 0) or (last_rank > 0 and (rank, index) == (last_rank, 1))
            return 1.0 if empty else 0.2
        case "none_in_second_step":
            return 1.0 if step == 1 else 0.2
    raise AssertionError(FEATURES[cell.feature].labels)


def _documents() -> tuple[Tensor, Tensor]:
    """document_ids and positions (B, S) of `DOCUMENT_ENDS`."""
    ids, positions = [], []
    for ends in DOCUMENT_ENDS:
        lengths = [end - start for start, end in zip((0, *ends), ends)]
        ids.append(torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)]))
        positions.append(torch.cat([torch.arange(n) for n in lengths]))
    return torch.stack(ids), torch.stack(positions)
