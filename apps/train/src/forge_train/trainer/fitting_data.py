"""Whether the rows of sources are what a model takes, and whether their labels are to be learnt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy
from torch import nn

from forge_data import Batch, InvalidData, Loader, batch_of
from forge_data.mixed_stream import MixedStream
from forge_data.phased_stream import parts_of
from forge_data.places import num_shards_of
from forge_data.protocols import Stream
from forge_train._shared.problems import Problem, invalid
from forge_train.config.schema import JobConfig
from forge_train.errors import DataError
from forge_vlm.data import InvalidSample, check_labels
from forge_vlm.plan import IGNORE

__all__ = ["GuardedLoader", "fitting_problems", "refuse_without_labels"]

_ENOUGH = 64  # labels before they are judged: fewer may be equal at random


def fitting_problems(
    config: JobConfig, model: nn.Module, stream: Stream, held_out: Mapping[str, Stream]
) -> list[Problem]:
    """Problems of the training stream and those of held-out rows, by the keys of their tables: of streams that know of models (`model_problems(model, where)`), with the table of their options."""
    found: dict[str, Problem] = {}
    for where, own in _streams(config, stream, held_out):
        ask = getattr(own, "model_problems", None)
        problems = [
            *(() if ask is None else ask(model, where)),
            *_group_problems(config, own, where),
        ]
        found |= {str(problem): problem for problem in problems}
    return list(found.values())


def refuse_without_labels(config: JobConfig, key: str, stream: Stream, rows: int) -> None:
    """Raise DataError if none of the first `rows` rows of a stream has a label: its loss would be a mean over nothing.

    Reads up to the first label, so usually a row. A row that cannot be read is left to who needs it, streams that are read from
    front to back to the run, and an objective counts for itself.
    """
    if config.train.objective is not None or num_shards_of(stream):
        return
    rows, begin = min(rows, len(stream)), 0
    while begin < rows:
        end = min(rows, 2 * begin + 1)
        try:
            batch = batch_of(stream, range(begin, end))
        except (InvalidData, OSError, ValueError):
            return
        if batch.label_weight:
            return
        begin = end
    if rows:
        rule = "must have a label: all would be padding, masked or of weight 0"
        fix = "train on answers that fit into data.seq_len, with weights above 0"
        raise invalid(key, "no_labels", f"{rows} sequences", rule, fix, kind=DataError)


def _group_problems(config: JobConfig, stream: Stream, where: str) -> Iterator[Problem]:
    """Of a stream whose batches are drawn together (`group`): they must be the batches of the run."""
    group, batch = getattr(stream, "group", None), config.train.global_batch
    if group is None or not where.startswith("data.sources."):
        return
    if len(config.data.sources) > 1:
        rule = f"draws batches of one source, and there are {len(config.data.sources)}"
        yield Problem(f"{where}.group", "sources", group, rule, "remove it")
    elif group != batch:
        rule = f"must be train.global_batch {batch}"
        yield Problem(f"{where}.group", "mismatch", group, rule, f"use {batch}")


def _streams(
    config: JobConfig, stream: Stream, held_out: Mapping[str, Stream]
) -> Iterator[tuple[str, Any]]:
    for part in parts_of(stream):
        own = part.stream
        streams = own.streams if isinstance(own, MixedStream) else (own,)
        for name, each in zip(config.data.sources, streams):
            yield f"data.sources.{name}.options", each
    for key, stream in held_out.items():
        yield f"{key}.options", stream


class GuardedLoader(Loader):
    """A Loader whose first rows are judged: InvalidData where over 90 % of 64 labels or more are the tokens of their own
    positions, which a model would learn to copy. Rows of text have the labels of their packing, and need no guard; those of
    sources with pictures have their own."""

    _seen: list[tuple[numpy.ndarray, numpy.ndarray]] | None = None  # None behind the judgement

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._seen = []

    def __next__(self) -> Batch:
        batch = super().__next__()
        if self._seen is not None:
            self._seen.append((batch.tokens.numpy().ravel(), batch.labels.numpy().ravel()))
            tokens, labels = map(numpy.concatenate, zip(*self._seen))
            if numpy.count_nonzero(labels != IGNORE) >= _ENOUGH:
                self._seen = None
                try:
                    check_labels(tokens, labels)
                except InvalidSample as error:
                    raise InvalidData(f"data.sources: {error}") from error
        return batch
