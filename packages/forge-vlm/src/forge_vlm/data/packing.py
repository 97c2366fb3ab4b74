"""Pack samples into sequences by their lengths, and read the packed sequences with their images. No sample is truncated.

N   sequences of a call        S   tokens of a sequence        M   entries of a medium, of all sequences        R   sequences
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forge_vlm._renamed import renamed
from forge_vlm._shared.problems import Problem
from forge_vlm._shared.record_keys import unread_keys
from forge_vlm.data.files import InvalidSample, invalid
from forge_vlm.data.index import SampleIndex, sample_fingerprint
from forge_vlm.data.options import fit_problems
from forge_vlm.data.sample import MediaDecoder, Sample
from forge_vlm.sequence.plan import IGNORE, PAD, SPAN_INPUTS, SequencePlan

__all__ = [
    "PACKING_VERSION",
    "IndexedSource",
    "PackedRows",
    "RaggedMedia",
    "arrays_of",
    "grouped_order",
    "order_of",
    "plan_rows",
    "too_long",
]

PACKING_VERSION = 1  # part of every fingerprint: raise it whenever a plan or an order would change
_WINDOW = 4096  # samples that are looked at together


def plan_rows(lengths: np.ndarray, seq_len: int, pack: bool) -> list[np.ndarray]:
    """Rows as numbers of samples, of lengths (N,) up to `seq_len`: best-fit of decreasing lengths in windows of the
    order of the files, or each sample by itself."""
    if not pack:
        return [np.array([i]) for i in range(len(lengths))]
    rows = []
    for first in range(0, len(lengths), _WINDOW):
        rows += _window(lengths[first : first + _WINDOW], first, seq_len)
    return rows


def _window(lengths: np.ndarray, first: int, seq_len: int) -> list[np.ndarray]:
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # of each sequence that is not full, sorted
    for sample in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[sample])
        at = bisect_left(room, (length, -1))
        if at == len(room):
            rows.append([])
            left, row = seq_len, len(rows) - 1
        else:
            left, row = room.pop(at)
        rows[row].append(sample)
        if left > length:
            insort(room, (left - length, row))
    return [np.sort(np.array(row)) + first for row in rows]


def order_of(count: int, seed: int, epoch: int) -> np.ndarray:
    """The order of an epoch, a permutation (count,) that is the same on every machine and version: by a hash of each
    number (splitmix64, Steele et al. 2014)."""
    key = hashlib.sha256(f"forge-vlm order 1:{seed}:{epoch}".encode()).digest()[:8]
    x = np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x ^= np.uint64(int.from_bytes(key, "little"))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return np.argsort(x ^ (x >> np.uint64(31)), kind="stable")


def grouped_order(
    lengths: np.ndarray, pictured: np.ndarray, size: int, seed: int, epoch: int
) -> np.ndarray:
    """The order of an epoch whose batches of `size` rows have images in all of them, or in none, the longest row first
    (LLaVA, Liu et al. 2023): a permutation (R,) of rows of lengths (R,), `pictured` (R,) bool.

    Rows are drawn and batches shuffled by (seed, epoch). What is left of both kinds stands together at the end.
    """
    drawn = order_of(len(lengths), seed, epoch)
    batches, rest = [], []
    for kind in (drawn[pictured[drawn]], drawn[~pictured[drawn]]):
        whole = len(kind) // size * size
        batches += list(kind[:whole].reshape(-1, size))
        rest.append(kind[whole:])
    shuffled = [batches[i] for i in order_of(len(batches), seed, ~epoch)]  # not the order of rows
    every = [*shuffled, np.concatenate(rest)]
    return np.concatenate([batch[np.argsort(-lengths[batch], kind="stable")] for batch in every])


ARRAYS = ("tokens", "labels", "document_ids")
_OF_TILES = ("grids", "clips")
PLANNED = ("tokens", "document_ids", "labels")


@dataclass(frozen=True)
class RaggedMedia:
    """Tiles or patches (M, ...) of all sequences; row i has those from `row_offsets[i]` to `row_offsets[i + 1]`."""

    values: Tensor
    row_offsets: Tensor  # (N + 1,) int64


class PackedRows:
    """Rows of `seq_len` tokens, each of full samples with their images, each once an epoch.

    The order of an epoch is a permutation by (seed, epoch), so that sample index n is found without those before it; 8 bytes for
    each sequence are held. Positions are those of `SequencePlan.positions(positions)`. Rows have `weights` if `weighted`. Cost of
    a row: reading and decoding its records and images.
    """

    def __init__(
        self,
        samples: IndexedSource,
        rows: Sequence[np.ndarray],
        seq_len: int,
        seed: int,
        positions: str = "sequential",
        weighted: bool = True,
    ) -> None:
        self.seq_len, self.seed = seq_len, seed
        self.warnings: list[str] = []  # for a user
        self.source_lines: list[str] = []  # and what the source is
        self._samples, self._position_name, self._weighted = samples, positions, weighted
        self._starts = np.cumsum([0, *map(len, rows)])  # (rows + 1,)
        self._numbers = np.concatenate([*rows, np.zeros(0, np.int64)]).astype(np.int64)
        self._epoch: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        """Rows of an epoch."""
        return len(self._starts) - 1

    @property
    def utilization(self) -> float:
        """Tokens over places in the rows; the rest is padding."""
        return int(self._samples.lengths[self._numbers].sum()) / (len(self) * self.seq_len)

    def samples_of(self, instance: int) -> np.ndarray:
        """Numbers of the samples in a sequence."""
        epoch, place = divmod(int(instance), len(self))
        known = self._epoch  # another thread may set it to another epoch's
        if known is None or known[0] != epoch:
            known = self._epoch = (epoch, self._order(epoch))
        row = known[1][place]
        return self._numbers[self._starts[row] : self._starts[row + 1]]

    @property
    def group(self) -> int | None:
        """Rows of a batch that all have images or none; None where rows are in any order."""
        found: int | None = self._samples.options.get("group")
        return found

    def _order(self, epoch: int) -> np.ndarray:
        if self.group is None:
            return order_of(len(self), self.seed, epoch)
        own = self._numbers  # a sample a row
        lengths, pictured = self._samples.lengths[own], self._samples.pictured[own]
        return grouped_order(lengths, pictured, self.group, self.seed, epoch)

    def arrays(self, instance_ids: np.ndarray) -> Mapping[str, Any]:
        """As `arrays_of`."""
        rows = [[self._sample(int(n)) for n in self.samples_of(i)] for i in instance_ids.tolist()]
        decoder = self._samples.decoder
        return arrays_of(rows, self.seq_len, decoder, self._position_name, self._weighted)

    def model_problems(self, model: Any, where: str) -> list[Problem]:
        """As `fit_problems`, of the rows' options."""
        return fit_problems(self._samples.options, self._samples.image_id, model, where)

    def fingerprint(self) -> dict[str, str | int]:
        """Everything that determines the rows; a resume compares it."""
        plan = hashlib.sha256(self._starts.astype("<i8").tobytes())
        plan.update(self._numbers.astype("<i8").tobytes())
        return {
            **{f"source.{key}": value for key, value in self._samples.fingerprint().items()},
            "packing.version": PACKING_VERSION,
            "packing.seq_len": self.seq_len,
            "packing.plan": plan.hexdigest()[:16],
            "order.seed": self.seed,
        }

    def _sample(self, number: int) -> Sample:
        sample = self._samples.sample(number)
        length = int(self._samples.lengths[number])
        if len(sample.tokens) != length:
            self._samples.forget()
            rule = f"has {len(sample.tokens)} tokens and had {length} when it was opened, as a picture or a text was changed"
            raise invalid("sample", "changed", number, rule, "start again")
        return sample


class IndexedSource:
    """Base of sources whose samples have numbers; one that has it defines `sample` and `name_of`."""

    path: str
    image_id: int
    vocab_size: int | None
    tokenizer: dict[str, Any] | None

    def __init__(
        self, decoder: MediaDecoder, options: dict[str, Any], counted: SampleIndex, content: str
    ) -> None:
        self.decoder, self.options, self.counted, self.content = decoder, options, counted, content
        self.lengths, self.kept, self.pictured = counted.lengths, counted.kept, counted.pictures > 0
        self.weighted = counted.weighted or options["weigh"] != "token"
        decoder.branched = counted.branched
        decoder.bidirectional = options.get("bidirectional", "none")

    @property
    def max_token_id(self) -> int:
        """The largest id that a row may hold."""
        assert self.vocab_size is not None
        return self.vocab_size - 1

    @property
    def masked(self) -> int:
        """Images that this process could not decode."""
        return self.decoder.masked

    def sample(self, number: int) -> Sample:
        """A sample that rows name."""
        raise NotImplementedError

    def name_of(self, number: int) -> str:
        """What an error calls a sample."""
        raise NotImplementedError

    def media(self, sample: Sample) -> tuple[list[dict[str, Tensor]], bool]:
        """As `MediaDecoder.media`."""
        return self.decoder.media(sample)

    def forget(self) -> None:
        """Drop what a cache holds of the samples, because one of them has changed."""

    def trained(self, left_out: np.ndarray) -> int | None:
        """Labels of all samples but those with numbers `left_out`; None where they are not known."""
        labels = self.counted.trained
        return None if labels is None else int(np.delete(labels, left_out).sum())

    def summary(self, seq_len: int | None = None) -> str:
        """A line of what rows of `seq_len` tokens train; of all samples without it."""
        long = np.flatnonzero(self.lengths > (seq_len or np.inf))
        pictures, trained = np.delete(self.counted.pictures, long), self.trained(long)
        counts = [f"{len(pictures):,} samples", f"{(pictures > 0).mean():.1%} with images"]
        counts.append(f"{pictures.sum():,} images")
        counts.append(f"{np.delete(self.lengths, long).sum():,} tokens")
        counts += [] if trained is None else [f"{trained:,} trained"]
        line = ", ".join(counts) + unread_keys(self.counted.unread)
        if seq_len is None and self.options["too_long"] == "skip":
            line += (
                "; samples of more than seq_len tokens are counted, and left out when a run starts"
            )
        return line

    def stream(self, seq_len: int, seed: int = 0) -> PackedRows:
        """Packed sequences of `seq_len` tokens; InvalidSample for a longer sample, unless `too_long` leaves it out."""
        options, lengths = self.options, self.lengths
        long = np.flatnonzero(lengths > seq_len)
        if len(long) and options["too_long"] == "raise":
            first = int(long[0])
            raise too_long(self.name_of(first), int(lengths[first]), seq_len, len(long) - 1)
        fits = np.flatnonzero(lengths <= seq_len)
        if not len(fits):
            rule = "must hold a sample, and all are longer"
            raise invalid("seq_len", "too_short", seq_len, rule, "raise seq_len", where=self.path)

        rows = [fits[row] for row in plan_rows(lengths[fits], seq_len, options["pack"])]
        stream = PackedRows(self, rows, seq_len, seed, options["positions"], self.weighted)
        warnings = self.counted.warnings()
        if len(long):
            rule = f"as they have more than seq_len {seq_len} tokens"
            warnings.append(f"{len(long)} of {len(lengths)} samples are left out, {rule}")
        stream.warnings = warnings
        stream.source_lines = [self.summary(seq_len)]
        return stream

    def fingerprint(self) -> dict[str, str | int]:
        """Digests of the files, the options and the lengths; images in files of their own are named, not read."""
        return sample_fingerprint(self.options, self.counted, self.content)


def too_long(name: str, tokens: int, seq_len: int, others: int) -> InvalidSample:
    """The error of a sample that is longer than a row."""
    rest = f", and so are {others} others" if others else ""
    rule = f"must be at most seq_len {seq_len}{rest}"
    fix = "raise seq_len, or set too_long = 'skip'"
    error: InvalidSample = invalid("tokens", "too_long", tokens, rule, fix, where=name)
    return error


def arrays_of(
    rows: Sequence[Sequence[Sample]],
    seq_len: int,
    decoder: MediaDecoder,
    positions: str,
    weighted: bool,
) -> dict[str, Any]:
    """Rows of samples: tokens, labels, document_ids (N, S) and positions (N, S) or (N, 3, S) int64, weights (N, S) fp32 if
    `weighted`, branch_ids and ids of what attends to later ones (N, S) int64 where samples have them, and the media of their
    images, read and decoded here."""
    shape = (len(rows), seq_len)
    out: dict[str, Any] = {name: np.zeros(shape, np.int64) for name in ARRAYS}
    out["labels"][:], out["document_ids"][:] = IGNORE, PAD
    weights, branches = np.ones(shape, np.float32), np.zeros(shape, np.int64)
    media: list[list[dict[str, Tensor]]] = []

    for i, samples in enumerate(rows):
        media.append([])
        place = 0
        for document, sample in enumerate(samples):
            here = slice(place, place + len(sample.tokens))
            found, decoded = decoder.media(sample)
            out["tokens"][i, here], out["document_ids"][i, here] = sample.tokens, document
            weights[i, here] = sample.weights
            if sample.branches is not None:
                branches[i, here] = sample.branches
            if decoded:
                out["labels"][i, here] = sample.labels
            media[-1] += found
            place = here.stop

    grids, clips = ([[g for s in row for g in getattr(s, n)] for row in rows] for n in _OF_TILES)
    tokens, documents, labels = (torch.from_numpy(out[n]) for n in PLANNED)
    ids = torch.from_numpy(branches)
    plan = SequencePlan.of(tokens, documents, {decoder.image_id: 1}, grids, ids, clips)
    if decoder.branched:
        out["branch_ids"] = branches

    if decoder.bidirectional != "none":
        spans = plan.spans(decoder.bidirectional, labels)
        out[SPAN_INPUTS[decoder.bidirectional]] = spans.numpy()
    out["positions"] = plan.positions(positions).numpy()
    if weighted:
        out["weights"] = weights

    for name, empty in decoder.nothing().items():
        parts = [[picture[name] for picture in row] for row in media]
        counts = [sum(map(len, row)) for row in parts]
        values = torch.cat([empty, *(part for row in parts for part in row)])
        out[name] = RaggedMedia(values, torch.tensor([0, *counts]).cumsum(0))

    return out


__getattr__ = renamed(__name__)
