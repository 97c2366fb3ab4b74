"""Files of units become the output: duplicates dropped, documents dealt to splits, in the order of the plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from forge_data._shared.problems import invalid
from forge_data.config import SPLITS
from forge_data.errors import InvalidData
from forge_data.prepare.duplicates import find_duplicates
from forge_data.prepare.output import write_json
from forge_data.prepare.plan import Plan, Settings
from forge_data.prepare.statistics import STATISTICS, SplitStatistics
from forge_data.prepare.token_writer import TokenWriter
from forge_data.prepare.unit_file import Counts, UnitFile

__all__ = ["assemble"]

_DROPPED = -1


def assemble(
    plan: Plan,
    parts: Path,
    folder: Path,
    tokenizer: dict[str, Any],
    report: Callable[[Counts], None],
) -> dict[str, Any]:
    """Write token files into `folder` from the files of all units in `parts`; returns the statistics.

    `tokenizer` is a spec for the sidecar, whose file is copied.
    Memory is a MB of tokens, 32 bytes for each document of a unit, and with `deduplicate` what
    `find_duplicates` needs. Raises InvalidData for a damaged unit and for a split without a document.
    """
    settings = plan.settings
    files = [UnitFile(parts, unit) for unit in plan.units]
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
        for file, unit in zip(files, plan.units, strict=True):
            dealer.deal(file)
            done += Counts(unit.size, file.num_documents, file.num_tokens)
            report(done)
        _refuse_empty(writers, settings, sum(file.num_documents for file in files))
        for writer in writers.values():
            writer.finish()
    finally:
        for writer in writers.values():
            writer.close()
    statistics = dealer.summary(list(writers))
    write_json(folder / STATISTICS, statistics)
    return statistics


class _Dealer:
    """Gives each document of the files, one file behind the other, to a writer or to none."""

    def __init__(
        self, settings: Settings, duplicates: np.ndarray, writers: list[TokenWriter]
    ) -> None:
        self._settings, self._duplicates, self._writers = settings, duplicates, writers
        self._statistics = [SplitStatistics() for _ in writers]
        self._dropped = SplitStatistics()
        self._seen = self._kept = 0
        self._not_read: Counter[str] = Counter()

    def deal(self, file: UnitFile) -> None:
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
            # Of the text alone: a document is held out whatever stands beside it, and so are its copies.
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
    chunks: Iterator[np.ndarray], lengths: np.ndarray, target: np.ndarray
) -> Iterator[tuple[int, np.ndarray]]:
    """The tokens in pieces, each of consecutive documents of one target."""
    if len(target) == 0:
        return
    last = np.append(np.flatnonzero(target[1:] != target[:-1]), len(target) - 1)
    ends, targets = np.cumsum(lengths)[last].tolist(), target[last].tolist()
    run = position = 0
    for chunk in chunks:
        while len(chunk):
            while ends[run] <= position:
                run += 1
            size = min(len(chunk), ends[run] - position)
            yield targets[run], chunk[:size]
            chunk, position = chunk[size:], position + size


def _refuse_empty(
    writers: Mapping[str, TokenWriter], settings: Settings, num_documents: int
) -> None:
    """Raise InvalidData for a split without a document."""
    for split, writer in writers.items():
        if writer.num_tokens == 0 and num_documents == 0:
            rule = "must hold text, but every document is empty"
            raise invalid("inputs", "empty", ..., rule, "check the paths", kind=InvalidData)
        if writer.num_tokens == 0:
            name = "validation_fraction" if settings.validation_fraction else "validation_every"
            rule = f"would leave split {split} empty with {num_documents} documents"
            fix = "use another, or document line or blank_line for more documents"
            raise invalid(name, "empty_split", getattr(settings, name), rule, fix, kind=InvalidData)
