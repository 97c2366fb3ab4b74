"""Rows of packed samples with their pictures, by instance.

N   rows of a call        S   tokens of a row        M   entries of a medium, of all rows
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from forge_vlm._shared.problems import Problem
from forge_vlm.data.errors import InvalidSample, invalid
from forge_vlm.data.fit import fit_problems
from forge_vlm.data.packing import PACKING_VERSION, grouped_order, order_of, plan_rows
from forge_vlm.data.sample import Sample
from forge_vlm.plan import IGNORE, PAD, SPAN_INPUTS, SequencePlan

__all__ = ["PictureRows", "RowsOfPictures", "Samples", "arrays_of", "stream_of", "too_long"]

ARRAYS = ("tokens", "labels", "document_ids")
_OF_TILES = ("grids", "clips")
PLANNED = ("tokens", "document_ids", "labels")


@dataclass(frozen=True)
class PictureRows:
    """Tiles or patches (M, ...) of all rows; row i has those from `row_offsets[i]` to `row_offsets[i + 1]`."""

    values: Tensor
    row_offsets: Tensor  # (N + 1,) int64


class Media(Protocol):
    """What decodes the pictures of samples."""

    image_id: int
    bidirectional: str  # which tokens see ahead: "none", or a scope of `SequencePlan.spans`
    branched: bool  # whether a sample has branches

    def media(self, sample: Sample) -> tuple[list[dict[str, Tensor]], bool]:
        """Media of each of its pictures, and whether these are what they should be, so that it is learnt."""
        ...

    def nothing(self) -> dict[str, Tensor]:
        """Media of no picture."""
        ...


class Samples(Media, Protocol):
    """What rows are made of. `weighted`: a label may have another weight than 1."""

    lengths: np.ndarray  # (samples,) tokens of each
    pictured: np.ndarray  # (samples,) bool: whether it has a picture
    options: dict[str, Any]
    weighted: bool

    def sample(self, number: int) -> Sample:
        """A sample."""
        ...

    def fingerprint(self) -> dict[str, str | int]:
        """What determines them."""
        ...

    def forget(self) -> None:
        """Called when a sample is not what it was: nothing that was kept of it between runs is true."""
        ...


class RowsOfPictures:
    """Rows of `seq_len` tokens, each of whole samples with their pictures, each once an epoch.

    The order of an epoch is a permutation by (seed, epoch), so that instance n is found without those before it; 8 bytes for
    each row are held. Positions are those of `SequencePlan.positions(positions)`. Rows have `weights` if `weighted`. Cost of
    a row: reading and decoding its records and pictures.
    """

    def __init__(
        self,
        samples: Samples,
        rows: Sequence[np.ndarray],
        seq_len: int,
        seed: int,
        positions: str = "sequential",
        weighted: bool = True,
    ) -> None:
        self.seq_len, self.seed = seq_len, seed
        self.remarks: list[str] = []  # what whoever opened it should tell a user
        self.source_lines: list[str] = []  # and what the source is
        self._samples, self._position_name, self._weighted = samples, positions, weighted
        self._starts = np.cumsum([0, *map(len, rows)])  # (rows + 1,)
        self._numbers = np.concatenate([*rows, np.zeros(0, np.int64)]).astype(np.int64)
        self._epoch: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        """Rows of an epoch."""
        return len(self._starts) - 1

    @property
    def utilisation(self) -> float:
        """Tokens over places in the rows; the rest is padding."""
        return int(self._samples.lengths[self._numbers].sum()) / (len(self) * self.seq_len)

    def samples_of(self, instance: int) -> np.ndarray:
        """Numbers of the samples in a row."""
        epoch, place = divmod(int(instance), len(self))
        known = self._epoch  # another thread may set it to another epoch's
        if known is None or known[0] != epoch:
            known = self._epoch = (epoch, self._order(epoch))
        row = known[1][place]
        return self._numbers[self._starts[row] : self._starts[row + 1]]

    @property
    def group(self) -> int | None:
        """Rows of a batch that all have pictures or none; None where rows are in any order."""
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
        return arrays_of(rows, self.seq_len, self._samples, self._position_name, self._weighted)

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


def stream_of(
    samples: Samples, path: str, seq_len: int, seed: int, name_of: Callable[[int], str]
) -> RowsOfPictures:
    """Rows of all samples; InvalidSample for one that is longer than a row, unless `too_long` leaves it out."""
    options, lengths = samples.options, samples.lengths
    long = np.flatnonzero(lengths > seq_len)
    if len(long) and options["too_long"] == "raise":
        raise too_long(name_of(int(long[0])), int(lengths[long[0]]), seq_len, len(long) - 1)
    fits = np.flatnonzero(lengths <= seq_len)
    if not len(fits):
        rule = "must hold a sample, and all are longer"
        raise invalid("seq_len", "too_short", seq_len, rule, "raise seq_len", where=path)
    rows = [fits[row] for row in plan_rows(lengths[fits], seq_len, options["pack"])]
    stream = RowsOfPictures(samples, rows, seq_len, seed, options["positions"], samples.weighted)
    if len(long):
        stream.remarks.append(
            f"{len(long)} of {len(lengths)} samples are left out, as they have more than seq_len {seq_len} tokens"
        )
    return stream


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
    decoder: Media,
    positions: str,
    weighted: bool,
) -> dict[str, Any]:
    """Rows of samples: tokens, labels, document_ids (N, S) and positions (N, S) or (N, 3, S) int64, weights (N, S) fp32 if
    `weighted`, branch_ids and ids of what sees ahead (N, S) int64 where samples have them, and the media of their
    pictures, read and decoded here."""
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
            found, learnt = decoder.media(sample)
            out["tokens"][i, here], out["document_ids"][i, here] = sample.tokens, document
            weights[i, here] = sample.weights
            if sample.branches is not None:
                branches[i, here] = sample.branches
            if learnt:
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
        out[name] = PictureRows(values, torch.tensor([0, *counts]).cumsum(0))
    return out
