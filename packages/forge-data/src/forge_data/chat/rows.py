"""Rendered conversations in a folder, and rows of them: each conversation once an epoch, packed by a plan of their lengths.

A folder of token files with the weight of each token, written once:

    weights.bin     little-endian fp32: weight of the loss of each token
    chat.json       digest of weights.bin, and what was counted

N   sample indices of a call     S   tokens in a sequence     T   tokens of a conversation
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from forge_data._shared.atomic import new_folder, write_file
from forge_data._shared.hashed_files import HashedFile
from forge_data._shared.record_keys import RecordKeys
from forge_data.batch import IGNORE, PAD_DOCUMENT
from forge_data.order import ORDER_VERSION, EpochOrder
from forge_data.packing import ARRAYS, check_tokens_at_once
from forge_data.packing_plan import PLAN_VERSION, plan_rows
from forge_data.tokens.cache import Entry
from forge_data.tokens.files import TokenFiles
from forge_data.tokens.format import check_digest, check_size, read_sidecar
from forge_data.tokens.writer import TokenWriter

__all__ = ["ChatStream", "Rendered", "Rendering", "cached", "cut_to_nothing", "offsets_digest"]

WEIGHTS, COUNTS = "weights.bin", "chat.json"
UNTRAINED, TRAINED_TOKENS = "unlearnt", "learnt_tokens"  # language: keys of chat.json


class Rendering(NamedTuple):
    """Token ids and loss weights of one conversation.

    `holds_specials`: the text of a message became special tokens. `ends` has the special token that ends each trained
    answer, None for an answer without.
    """

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
        check_digest(folder / WEIGHTS, counts["sha256"])
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
    """Read rendered conversations from a cache entry, and render them first if it is missing or damaged.

    `keys` are counted by `render`.

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
    names = (UNTRAINED, TRAINED_TOKENS, "weighted", "with_specials", "answers", "without_end")
    counts = dict.fromkeys(names, 0)

    try:
        with closing(HashedFile(folder / WEIGHTS)) as file:
            for ids, weights, holds_specials, ends in rendered:
                writer.add([ids])
                file.write(weights.astype("<f4").tobytes())

                # the first token of a conversation is no label, as no token predicts it
                counts[UNTRAINED] += not weights[1:].any()
                counts[TRAINED_TOKENS] += int((weights[1:] > 0).sum())
                counts["with_specials"] += holds_specials
                counts["answers"] += len(ends)
                counts["without_end"] += ends.count(None)
                counts["weighted"] += not np.isin(weights, (0.0, 1.0)).all()

            digest = file.finish()

        content_of = {**counts, "not_read": keys.counts, "sha256": digest}
        write_file(folder / COUNTS, json.dumps(content_of))
        writer.finish()
    finally:
        writer.close()


def offsets_digest(rendered: Rendered) -> str:
    """Return the sha256 of the offsets of conversations."""
    return str(read_sidecar(rendered.folder).sha256["documents.bin"])


def cut_to_nothing(rendered: Rendered, seq_len: int) -> np.ndarray:
    """Conversations (N,) of more than `seq_len` tokens whose first `seq_len` have no label."""
    long = np.flatnonzero(rendered.lengths > seq_len)
    # the first token is no label: nothing predicts it
    starts = np.asarray(rendered.tokens.documents)[long] + 1
    found = [not rendered.weights[start : start + seq_len - 1].any() for start in starts]
    cut: np.ndarray = long[np.asarray(found, bool)]
    return cut


class ChatStream:
    """The endless stream of rows of rendered conversations: `len(stream)` rows an epoch, each exactly once.

    A conversation is never cut over two rows: one of more than `seq_len` tokens ends after them, unless it is one of those
    that are `left_out` (N,). Labels are shifted; they are -100 where nothing is trained and on a conversation's last token. Rows have
    `weights` where some conversation has one other than 0 and 1. Cost of a row: one read a conversation. The plan
    is made here from the lengths alone, about a microsecond each, 40 bytes of memory.
    """

    def __init__(
        self,
        rendered: Rendered,
        fingerprint: Mapping[str, Any],
        seq_len: int,
        seed: int,
        left_out: np.ndarray,
    ) -> None:
        self.seq_len, self.seed = seq_len, seed
        self._rendered, self._source = rendered, dict(fingerprint)
        kept = np.setdiff1d(np.arange(len(rendered.lengths)), left_out)
        self._lengths = np.minimum(rendered.lengths, seq_len)  # (conversations,)
        # conversations, tokens and labels of an epoch: fewer than the cache has, where some are too long
        self.counts = self._counts(kept)
        plan = plan_rows(self._lengths[kept], seq_len, "best_fit")
        self._rows, self._conversations = plan.rows, kept[plan.documents]
        self.utilization = plan.utilization
        self.warnings: list[str] = []
        self.source_lines: list[str] = []
        self._weighted = rendered.counts["weighted"] > 0
        self._order = EpochOrder(len(self), seed)

    def __len__(self) -> int:
        """Instances per epoch."""
        return len(self._rows) - 1

    def conversations(self, row: int) -> np.ndarray:
        """The conversations of a row of the plan, as counted in the files."""
        return self._conversations[self._rows[row] : self._rows[row + 1]]

    def rows(self, instance_ids: np.ndarray) -> np.ndarray:
        """The rows (N,) of the plan for instances (N,)."""
        return self._order.rows(instance_ids)

    def arrays(self, instance_ids: np.ndarray) -> dict[str, np.ndarray]:
        """Instances as int64 arrays (N, S), `source` (N,), 0, and `weights` (N, S) fp32 if any differ from 1."""
        shape = (len(instance_ids), self.seq_len)
        check_tokens_at_once(*shape)
        out: dict[str, np.ndarray] = {name: np.zeros(shape, np.int64) for name in ARRAYS}
        weights = np.zeros(shape, np.float32)
        out["labels"][:], out["document_ids"][:] = IGNORE, PAD_DOCUMENT
        for i, row in enumerate(self.rows(instance_ids)):
            self._fill(int(row), {**{name: a[i] for name, a in out.items()}, "weights": weights[i]})
        if self._weighted:
            out["weights"] = weights
        return {**out, "source": np.zeros(shape[0], np.int64)}

    def fingerprint(self) -> dict[str, str | int]:
        """Everything that determines the rows, as flat JSON; a resume compares it."""
        plan = hashlib.sha256(self._rows.astype("<i8").tobytes())
        plan.update(self._conversations.astype("<i8").tobytes())
        return {
            **{f"source.{key}": value for key, value in self._source.items()},
            "packing.policy": f"best_fit-{PLAN_VERSION}",
            "packing.seq_len": self.seq_len,
            "packing.plan": plan.hexdigest()[:16],
            "order.version": ORDER_VERSION,
            "order.seed": self.seed,
            "order.shuffle": 1,
        }

    def _counts(self, kept: np.ndarray) -> tuple[int, int, int]:
        weights, lengths = self._rendered.weights, self._rendered.lengths
        taken = np.zeros_like(lengths)
        taken[kept] = self._lengths[kept]
        starts = np.asarray(self._rendered.tokens.documents)
        # the first token is no label: nothing predicts it
        firsts, stops = starts + np.maximum(taken, 1), starts + lengths
        cut = np.flatnonzero(taken < lengths)
        lost = sum(int((weights[firsts[i] : stops[i]] > 0).sum()) for i in cut)
        return len(kept), int(taken.sum()), int(self._rendered.counts[TRAINED_TOKENS]) - lost

    def _fill(self, row: int, out: Mapping[str, np.ndarray]) -> None:
        """Write row `row` into arrays (S,) of padding."""
        place = 0
        for document, conversation in enumerate(self.conversations(row)):
            start = int(self._rendered.tokens.documents[conversation])
            length = int(self._lengths[conversation])
            here, labels = slice(place, place + length), slice(place, place + length - 1)
            ids = self._rendered.tokens.read(start, start + length)
            # one later than the ids, as labels are shifted
            weights = self._rendered.weights[start + 1 : start + length]
            out["tokens"][here] = ids
            out["labels"][labels] = np.where(weights > 0, ids[1:].astype(np.int64), IGNORE)
            out["weights"][labels] = weights
            out["positions"][here] = np.arange(length)
            out["document_ids"][here] = document
            place += length
