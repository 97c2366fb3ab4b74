"""Assemble the output from chunk files: drop duplicates, deal documents to splits, count them, in the order of the plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from forge_data.config import SPLITS
from forge_data.errors import invalid_data
from forge_data.prepare.chunks import ChunkFile, Counts
from forge_data.prepare.plan import Plan, Settings
from forge_data.tokens.format import STATISTICS, write_json
from forge_data.tokens.writer import TokenWriter

__all__ = ["QUANTILES", "SplitStatistics", "assemble", "find_duplicates"]

# of the lengths of documents: most of them near the ends, to show outliers
QUANTILES = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)
_DROPPED = -1  # in place of the number of a writer, which is at least 0


def assemble(
    plan: Plan,
    chunk_folder: Path,
    folder: Path,
    tokenizer: dict[str, Any],
    report: Callable[[Counts], None],
) -> dict[str, Any]:
    """Write token files into `folder` from the files of all chunks in `chunk_folder`; returns the statistics.

    `tokenizer` is a spec for the sidecar, whose file is copied.
    Memory is a MB of tokens, 32 bytes for each document of a chunk, and with `deduplicate` what
    `find_duplicates` needs. Raises InvalidData for a damaged chunk and for a split without a document.
    """
    settings = plan.settings
    files = [ChunkFile(chunk_folder, chunk) for chunk in plan.chunks]
    split = bool(settings.validation_every or settings.validation_fraction)
    folders = {s: folder / s for s in SPLITS} if split else {"train": folder}

    duplicates = np.empty(0, np.int64)
    if settings.deduplicate:
        count = sum(file.num_documents for file in files)
        duplicates = find_duplicates(lambda: (file.rows()["digest"] for file in files), count)

    writers = {
        name: TokenWriter(path, settings.vocab_size, tokenizer) for name, path in folders.items()
    }
    try:
        dealer = _Dealer(settings, duplicates, list(writers.values()))
        done = Counts(0, 0, 0)
        for file, chunk in zip(files, plan.chunks, strict=True):
            dealer.deal(file)
            done += Counts(chunk.size, file.num_documents, file.num_tokens)
            report(done)

        _check_not_empty(writers, settings, sum(file.num_documents for file in files))
        for writer in writers.values():
            writer.finish()
    finally:
        for writer in writers.values():
            writer.close()

    statistics = dealer.summary(list(writers))
    write_json(folder / STATISTICS, statistics)
    return statistics


class _Dealer:
    """Deal the documents of the files, in order, to the writers of the splits, or drop them."""

    def __init__(
        self, settings: Settings, duplicates: np.ndarray, writers: list[TokenWriter]
    ) -> None:
        self._settings, self._duplicates, self._writers = settings, duplicates, writers
        self._statistics = [SplitStatistics() for _ in writers]
        self._dropped = SplitStatistics()
        self._seen = self._kept = 0
        self._not_read: Counter[str] = Counter()

    def deal(self, file: ChunkFile) -> None:
        self._not_read.update(file.not_read)
        file.check()  # before anything of it is used; the tokens are read again from the page cache
        rows = file.rows()
        target = self._targets(rows)  # (num_documents,)
        lengths = rows["tokens"]
        for number, writer in enumerate(self._writers):
            mine = lengths[(target == number) & (lengths > 0)]
            writer.begin_documents(writer.num_tokens + np.cumsum(mine) - mine)
        for number, statistics in [*enumerate(self._statistics), (_DROPPED, self._dropped)]:
            statistics.add(lengths[target == number], rows["bytes"][target == number])
        for number, ids in _runs(file.tokens(), lengths, target):
            if number != _DROPPED:
                self._writers[number].add_tokens(ids)

    def _targets(self, rows: np.ndarray) -> np.ndarray:
        """The number of a writer for each document: 1 is validation."""
        target = np.zeros(len(rows), np.int8)
        first, last = np.searchsorted(self._duplicates, (self._seen, self._seen + len(rows)))
        target[self._duplicates[first:last] - self._seen] = _DROPPED
        self._seen += len(rows)
        kept = np.flatnonzero(target != _DROPPED)
        if every := self._settings.validation_every:
            place = self._kept + np.arange(len(kept))
            target[kept] = place % every == every - 1
        elif fraction := self._settings.validation_fraction:
            # By the text only: a document is held out whatever its neighbors are, and so are its copies.
            digests = np.ascontiguousarray(rows["digest"]).view(">u8").reshape(-1, 2)[kept]
            target[kept] = digests[:, 0] < np.uint64(int(fraction * 2.0**64))
        self._kept += len(kept)
        return target

    def summary(self, names: list[str]) -> dict[str, Any]:
        """The content of statistics.json."""
        found: dict[str, Any] = {
            "splits": {n: s.summary() for n, s in zip(names, self._statistics, strict=True)}
        }
        if self._settings.deduplicate:
            found["duplicates"] = self._dropped.summary()
        if self._not_read:
            found["not_read"] = dict(self._not_read)
        return found


def _runs(
    blocks: Iterator[np.ndarray], lengths: np.ndarray, target: np.ndarray
) -> Iterator[tuple[int, np.ndarray]]:
    """Divide the tokens into runs of consecutive documents with one target."""
    if len(target) == 0:
        return
    last = np.append(np.flatnonzero(target[1:] != target[:-1]), len(target) - 1)
    ends, targets = np.cumsum(lengths)[last].tolist(), target[last].tolist()
    run = position = 0
    for block in blocks:
        while len(block):
            while ends[run] <= position:
                run += 1
            size = min(len(block), ends[run] - position)
            yield targets[run], block[:size]
            block, position = block[size:], position + size


def _check_not_empty(
    writers: Mapping[str, TokenWriter], settings: Settings, num_documents: int
) -> None:
    """Raise InvalidData for a split without a document."""
    for split, writer in writers.items():
        if writer.num_tokens == 0 and num_documents == 0:
            rule = "must hold text, but every document is empty"
            raise invalid_data("inputs", "empty", ..., rule, "check the paths")
        if writer.num_tokens == 0:
            name = "validation_fraction" if settings.validation_fraction else "validation_every"
            rule = f"would leave split {split} empty with {num_documents} documents"
            fix = "use another, or document line or blank_line for more documents"
            raise invalid_data(name, "empty_split", getattr(settings, name), rule, fix)


def find_duplicates(tables: Callable[[], Iterable[np.ndarray]], num_documents: int) -> np.ndarray:
    """Positions of the documents whose digest an earlier document has, rising, (num_duplicates,) int64.

    `tables()` gives the digests of all documents in order, as arrays of 16 bytes an item; it is called
    twice. Memory: 8 bytes a document, and about 60 for each that shares its first 64 bits with another.
    """
    prefixes = np.empty(num_documents, np.uint64)
    at = 0
    for table in tables():
        prefixes[at : at + len(table)] = _halves(table)[:, 0]
        at += len(table)
    assert at == num_documents
    prefixes.sort()
    shared = np.unique(prefixes[1:][prefixes[1:] == prefixes[:-1]])
    del prefixes
    # Few documents share half a digest: only those are compared in full.
    halves, positions, at = [np.empty((0, 2), np.uint64)], [np.empty(0, np.int64)], 0
    for table in tables():
        found = _halves(table)
        if len(shared):
            where = np.minimum(np.searchsorted(shared, found[:, 0]), len(shared) - 1)
            candidates = np.flatnonzero(shared[where] == found[:, 0])
            halves.append(found[candidates])
            positions.append(candidates + at)
        at += len(table)
    return _later(np.concatenate(halves), np.concatenate(positions))


def _halves(table: np.ndarray) -> np.ndarray:
    """Digests as (n, 2) uint64."""
    return np.ascontiguousarray(table).view(np.uint64).reshape(-1, 2)


def _later(digests: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Positions of digests (n, 2) that are equal to one at an earlier position; `positions` rise."""
    order = np.lexsort((positions, digests[:, 1], digests[:, 0]))
    ranked = digests[order]
    same = (ranked[1:] == ranked[:-1]).all(axis=1)
    return np.sort(positions[order[1:][same]])


class SplitStatistics:
    """Counts of documents of one split; memory grows with the number of different lengths only."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._lengths: Counter[int] = Counter()

    def add(self, tokens: np.ndarray, num_bytes: np.ndarray) -> None:
        """Count documents of these lengths (n,) in tokens and in bytes of text; those without a token are left out."""
        values, counts = np.unique(tokens[tokens > 0], return_counts=True)
        self._lengths.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))
        self.num_bytes += int(num_bytes[tokens > 0].sum())

    def summary(self) -> dict[str, Any]:
        """Plain data; a quantile is the length of a document, the smallest that at least this share do not exceed."""
        documents = sum(self._lengths.values())
        tokens = sum(length * count for length, count in self._lengths.items())
        lengths = sorted(self._lengths)
        reached = np.cumsum([self._lengths[length] for length in lengths])
        places = [int(np.searchsorted(reached, max(1, q * documents))) for q in QUANTILES]
        return {
            "documents": documents,
            "tokens": tokens,
            "bytes": self.num_bytes,
            "tokens_per_byte": round(tokens / max(1, self.num_bytes), 6),
            "length_quantiles": {str(q): lengths[i] for q, i in zip(QUANTILES, places, strict=True)}
            if documents
            else {},
        }
