"""The documents of a batch: which ones a step saw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from forge_data.batch import Batch
from forge_data.mixed_stream import MixedStream
from forge_data.phased_stream import part_at
from forge_data.protocols import Stream

__all__ = ["RowDocuments", "documents_of"]


@dataclass(frozen=True)
class RowDocuments:
    """The documents of one row, in order: `documents` are their numbers in the source, None where the source does
    not number them, and `tokens` the ids of each one's part of the row."""

    instance: int
    source: str
    documents: Sequence[int] | None
    tokens: Sequence[Sequence[int]]


def documents_of(stream: Stream, batch: Batch) -> list[RowDocuments]:
    """The documents of each row of a batch of this stream; filler has none. Only the tokens of the batch are read.

    for row in documents_of(loader.stream, next(loader)):
        print(row.instance, row.source, row.documents, tokenizer.decode(row.tokens[0]))
    """
    found = []
    for instance, tokens, ids in zip(batch.instance_ids.tolist(), batch.tokens, batch.document_ids):
        if instance < 0:
            continue
        source, documents = _locate(stream, instance)
        pieces = [tokens[ids == number].tolist() for number in ids[ids >= 0].unique().tolist()]
        if documents is not None and len(documents) != len(pieces):
            documents = None
        found.append(RowDocuments(instance, source, documents, pieces))
    return found


def _locate(stream: Stream, instance: int) -> tuple[str, list[int] | None]:
    """The name of the source of an instance, and the numbers of its documents there."""
    part = part_at(stream, instance)
    leaf: Any = part.stream
    own = instance - part.start
    source = type(getattr(leaf, "source", leaf)).__name__
    if isinstance(leaf, MixedStream):
        numbers, ids = leaf.mixture.locate(np.array([own]))
        number, own = int(numbers[0]), int(ids[0])
        source, leaf = leaf.names[number], leaf.streams[number]
    numbered = getattr(leaf, "documents_of", None)
    return source, None if numbered is None else numbered(own)
