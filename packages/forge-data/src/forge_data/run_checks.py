"""Checks of the sources of a run: they can be opened and tokenized, and have the ids and the lengths that it needs.

Problems have the keys of the tables that the sources are from, such as "data.sources.books".
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from forge_data._shared.limits import limit_problem, problems_under
from forge_data._shared.problems import Problem, problems_of, raise_problems
from forge_data.batch import IGNORE, Batch
from forge_data.collate import batch_of
from forge_data.config import SourceConfig
from forge_data.errors import InvalidData
from forge_data.kinds import CACHED
from forge_data.loader import Loader
from forge_data.phased_stream import parts_of
from forge_data.places import num_shards_of
from forge_data.protocols import Source, Stream
from forge_data.sources.open import open_header, open_source, tokenizer_of, training_tokenizer

__all__ = [
    "GuardedLoader",
    "group_problems",
    "has_label",
    "label_problem",
    "open_table",
    "streams_by_source",
    "token_id_problems",
    "tokenize_sources",
    "tokenizer_of",
    "training_tokenizer",
]
_ENOUGH = 64  # labels before they are checked: fewer may be equal at random


def open_table(
    key: str, table: SourceConfig, problems: list[Any], fix: str = "", *, check: bool = False
) -> Any:
    """The source of a table as `open_header` opens it; None if it cannot be opened, with the problems added to the list.

    `fix` is another one than those that the source names.
    """
    try:
        return open_header(table, check=check)
    except (ValueError, OSError) as error:
        either = [(p, (p.fix, fix)) for p in _problems_of_source(error, key)]
        problems += [replace(p, fix="; or ".join(filter(None, fixes))) for p, fixes in either]
        return None


def token_id_problems(
    key: str,
    source: Source,
    vocab_size: int,
    input_only_ids: int = 0,
    more_ids: Callable[[int], str] = "set model.vocab_size = {}".format,
) -> list[Problem]:
    """The problem of a source with ids that a model does not have. `input_only_ids` follow the vocabulary.

    `more_ids(size)` tells how the model gets so many ids. May read the tokens of files without a sidecar.
    """
    try:
        highest = source.max_token_id
    except (ValueError, OSError) as error:
        return _problems_of_source(error, key)
    if highest < vocab_size + input_only_ids:
        return []
    and_more = f" and model.input_only_ids {input_only_ids}" if input_only_ids else ""
    rule = f"is its highest token id and must be below model.vocab_size {vocab_size}{and_more}"
    size = max(highest + 1, source.vocab_size or 0)
    fix = f"{more_ids(size)} or prepare the data with the model's tokenizer"
    return [Problem(key, "token_id", highest, rule, fix)]


def tokenize_sources(
    tables: Mapping[str, tuple[SourceConfig, Collection[int]]], fixes: Mapping[str, str] = {}
) -> None:
    """Tokenize the sources that are not in a cache yet; InvalidData with the problems of all of them.

    `tables` are {key: (source, lengths of sequences that are read of it)}, `fixes` by key as of `open_table`. Everything
    that shows without reading text is looked at before the first source is tokenized, which may take hours.
    """
    cached = {key: pair for key, pair in tables.items() if pair[0].name in CACHED}
    missing: list[Problem] = []
    for key, (table, _) in cached.items():
        open_table(key, table, missing, fixes.get(key, ""), check=True)
    raise_problems("", missing, InvalidData)
    unfit = [p for key, pair in cached.items() for p in _length_problems(key, *pair)]
    raise_problems("", unfit, InvalidData)


def _length_problems(key: str, table: SourceConfig, lengths: Collection[int]) -> list[Problem]:
    """What is wrong with a source's text, or with sequences of these lengths."""
    try:
        check = getattr(open_source(table), "row_problems", lambda length: ())
    except (ValueError, OSError) as error:
        return problems_under(error, key)
    return [problem.under(key) for length in sorted(lengths) for problem in check(length)]


def _problems_of_source(error: ValueError | OSError, key: str) -> list[Problem]:
    if not isinstance(error, OSError) or not error.strerror or limit_problem(error):
        return problems_under(error, key)
    rule, fix = f"cannot be read: {error.strerror}", "name an existing path"
    return [Problem(key, "not_found", error.filename or ..., rule, fix)]


def streams_by_source(stream: Stream, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """(name of a source, its stream) of the stream that training reads, for each length of sequences. `names` as configured."""
    for part in parts_of(stream):
        yield from zip(names, getattr(part.stream, "streams", (part.stream,)))


def group_problems(
    stream: Stream, where: str, global_batch: int, num_sources: int = 1
) -> Iterator[Problem]:
    """Why a stream whose batches are drawn together (`stream.group`) does not fit a run with other batches."""
    group = getattr(stream, "group", None)
    if group is not None and num_sources > 1:
        rule = f"draws batches of one source, and there are {num_sources}"
        yield Problem(f"{where}.group", "sources", group, rule, "remove it")
    elif group not in (None, global_batch):
        rule = f"must be train.global_batch {global_batch}"
        yield Problem(f"{where}.group", "mismatch", group, rule, f"use {global_batch}")


def has_label(stream: Stream, count: int) -> bool:
    """Whether a label of the first `count` sequences has a weight above 0; also True if they cannot be read.

    Reads up to the first label, so usually one sequence.
    """
    begin = 0
    while begin < count:
        end = min(count, 2 * begin + 1)
        try:
            if batch_of(stream, range(begin, end)).label_weight:
                return True
        except (InvalidData, OSError, ValueError):
            return True
        begin = end
    return False


def label_problem(key: str, stream: Stream, count: int) -> Problem | None:
    """Why the loss of the first sequences of a stream would be a mean over nothing: none has a label. None otherwise.

    Streams that are read from front to back (`num_shards`) are not looked at. Cost as `has_label`.
    """
    count = 0 if num_shards_of(stream) else min(count, len(stream))
    if not count or has_label(stream, count):
        return None
    rule = "must have a label: all would be padding, masked or of weight 0"
    fix = "train on answers that fit into data.seq_len, with weights above 0"
    return Problem(key, "no_labels", f"{count} sequences", rule, fix)


class GuardedLoader(Loader):
    """A Loader whose first sequences are checked: `check(tokens, labels)` of int64 arrays (N,) with 64 labels or more.

    A ValueError of `check` becomes InvalidData below `key`. For sources whose labels are not those of a packing.
    """

    def __init__(
        self,
        *arguments: Any,
        check: Callable[[np.ndarray, np.ndarray], None],
        key: str = "",
        **keywords: Any,
    ) -> None:
        super().__init__(*arguments, **keywords)
        self._check, self._key = check, key
        # None after the check, so that batches are not kept
        self._seen: list[tuple[np.ndarray, np.ndarray]] | None = []

    def __next__(self) -> Batch:
        batch = super().__next__()
        if self._seen is None:
            return batch
        self._seen.append((batch.tokens.numpy().ravel(), batch.labels.numpy().ravel()))
        tokens, labels = map(np.concatenate, zip(*self._seen))
        if np.count_nonzero(labels != IGNORE) >= _ENOUGH:
            self._seen = None
            try:
                self._check(tokens, labels)
            except ValueError as error:
                raise InvalidData([p.under(self._key) for p in problems_of(error)]) from error
        return batch
