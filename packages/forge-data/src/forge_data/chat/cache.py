"""Conversations are rendered once: a folder of token files with the weight of each token beside.

weights.bin     little-endian fp32: weight of the loss of each token
chat.json       digest of weights.bin, and what was counted
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from forge_data._shared.atomic import new_folder, write_file
from forge_data._shared.record_keys import RecordKeys
from forge_data.prepare.token_writer import TokenWriter
from forge_data.sources.integrity import check_whole
from forge_data.sources.sidecar import check_size, read_sidecar
from forge_data.sources.token_cache import Entry
from forge_data.sources.token_files import TokenFiles

__all__ = ["Rendered", "Rendering", "cached", "offsets_digest"]

WEIGHTS, COUNTS = "weights.bin", "chat.json"


class Rendering(NamedTuple):
    """Of one conversation; `holds_specials`: the text of a message became special tokens. `ends` has the special token that
    ends each trained answer, None for one without."""

    ids: np.ndarray  # (T,)
    weights: np.ndarray  # (T,)
    holds_specials: bool
    ends: list[int | None]


class Rendered:
    """Conversations of a folder, memory-mapped: `tokens`, `weights` (num_tokens,) fp32, and `counts`."""

    def __init__(self, folder: Path) -> None:
        counts = json.loads((folder / COUNTS).read_bytes())
        self.tokens = TokenFiles(folder, verify="full")
        check_size(folder / WEIGHTS, self.tokens.num_tokens, 4)
        check_whole(folder / WEIGHTS, counts["sha256"])
        self.folder = folder
        self.counts: dict[str, Any] = counts
        self.weights = np.memmap(folder / WEIGHTS, "<f4", mode="r")

    def __reduce__(self) -> tuple[Any, ...]:
        return Rendered, (self.folder,)  # a worker maps the files, and gets no copy of them

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each conversation, int64."""
        return np.diff(self.tokens.documents, append=self.tokens.num_tokens)


def cached(
    entry: Entry,
    vocab_size: int,
    tokenizer: dict[str, Any],
    render: Callable[[], Iterator[Rendering]],
    keys: RecordKeys,
) -> Rendered:
    """What `render` gives, from an entry of the token cache, which is written if it is not there, or is damaged; `keys` are
    counted by it.

    One process writes while the others wait. Raises as `Entry.once`, and what `render` raises.
    """

    def write(folder: Path, progress: Callable[[int, int], None]) -> None:
        with new_folder(folder) as temporary:
            keys.counts.clear()
            _write(temporary, vocab_size, tokenizer, render(), keys)

    return entry.once(lambda: Rendered(entry.folder), write)


def _write(
    folder: Path,
    vocab_size: int,
    tokenizer: dict[str, Any],
    rendered: Iterator[Rendering],
    keys: RecordKeys,
) -> None:
    writer = TokenWriter(folder, vocab_size, tokenizer)
    digest = hashlib.sha256()
    counts = {"unlearnt": 0, "learnt_tokens": 0, "weighted": 0, "with_specials": 0, "answers": 0, "without_end": 0}  # fmt: skip
    try:
        with (folder / WEIGHTS).open("xb") as file:
            for ids, weights, holds_specials, ends in rendered:
                writer.add(ids, last=True)  # type: ignore[arg-type]
                content = weights.astype("<f4").tobytes()
                file.write(content)
                digest.update(content)
                counts["unlearnt"] += not weights[1:].any()
                counts["learnt_tokens"] += int((weights[1:] > 0).sum())
                counts["with_specials"] += holds_specials
                counts["answers"] += len(ends)
                counts["without_end"] += ends.count(None)
                counts["weighted"] += not np.isin(weights, (0.0, 1.0)).all()
            file.flush()
            os.fsync(file.fileno())
        content_of = {**counts, "not_read": keys.counts, "sha256": digest.hexdigest()}
        write_file(folder / COUNTS, json.dumps(content_of))
        writer.finish()
    finally:
        writer.close()


def offsets_digest(rendered: Rendered) -> str:
    """sha256 of where conversations begin."""
    return str(read_sidecar(rendered.folder).sha256["documents.bin"])
