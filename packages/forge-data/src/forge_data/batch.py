"""The input of a training step: rows first and tokens last in every tensor.

B   rows        S   tokens in a row        N   entries of all rows of a ragged extra
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch

from forge_data._shared.problems import invalid

__all__ = ["FILLER_INSTANCE", "IGNORE", "PAD_DOCUMENT", "Batch", "Ragged", "filler_batch"]

IGNORE = -100  # label without loss: torch's cross_entropy ignores this one by default
PAD_DOCUMENT = -1
FILLER_INSTANCE = -1  # ids and sources of streams begin at 0, so that this is no id
#: Values of filler where 0 would be a real label, document, instance or source.
_FILLER = {
    "labels": IGNORE,
    "document_ids": PAD_DOCUMENT,
    **dict.fromkeys(("instance_ids", "source"), FILLER_INSTANCE),
}


@dataclass(frozen=True, eq=False)
class Ragged:
    """Any number of entries for each row: row i has `values[row_offsets[i] : row_offsets[i + 1]]`.

    Usage: `patches = Ragged(torch.randn(7, 588), torch.tensor([0, 3, 3, 7])); patches[0:2]`. Raises
    ValueError unless the offsets rise from 0 to the number of values.
    """

    values: torch.Tensor  # (N, ...)
    row_offsets: torch.Tensor  # (B + 1,) int64, on the host, which slices by them

    def __post_init__(self) -> None:
        offsets = self.row_offsets
        good = offsets.dim() == 1 and len(offsets) > 0 and offsets.dtype == torch.int64
        if not good or offsets[0] != 0 or offsets[-1] != len(self.values) or bool(
            (offsets.diff() < 0).any()
        ):  # fmt: skip
            rule = f"must be int64 (B + 1,) and rise from 0 to the {len(self.values)} values"
            fix = "give where the entries of each row begin, and their end"
            raise invalid("row_offsets", "order", offsets.tolist(), rule, fix)

    def __len__(self) -> int:
        """Rows."""
        return len(self.row_offsets) - 1

    def __getitem__(self, rows: slice) -> Ragged:
        """Some rows in order, as views."""
        first, last, step = rows.indices(len(self))
        if step != 1:
            raise invalid("rows", "order", rows, "must be in order", "use a step of 1")
        offsets = self.row_offsets[first : max(first, last) + 1]
        begin, end = int(offsets[0]), int(offsets[-1])
        return Ragged(self.values[begin:end], offsets - offsets[0])

    def to(self, device: torch.device | str) -> Ragged:
        """Values on `device`; the offsets stay on the host, which slices by them."""
        return Ragged(_move(self.values, torch.device(device)), self.row_offsets)

    def pin_memory(self) -> Ragged:
        """Return a copy with the values in pinned memory."""
        return Ragged(self.values.pin_memory(), self.row_offsets)

    def followed_by(self, other: Ragged) -> Ragged:
        """The rows of this one, then those of `other`."""
        after = other.row_offsets[1:] + self.row_offsets[-1]
        values = torch.cat([self.values, other.values])
        return Ragged(values, torch.cat([self.row_offsets, after]))


Extra = torch.Tensor | Ragged


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of packed documents. Labels are already shifted: `labels[t]` follows `tokens[t]`.

    The loss of each label is multiplied by its weight (1 without `weights`), and the mean loss divides
    by the sum of the weights over all ranks; `label_weight` is the sum of this rank.
    `extras` are further inputs by name, tensors (B, ...) or Ragged, for models
    that declare them.

    Usage: `for part in batch.split(4): loss = model(part.to(device).tokens, ...)`. Raises ValueError
    where a tensor does not have the rows and the length of `tokens`.
    """

    tokens: torch.Tensor  # (B, S) int64; 0 on padding, as an embedding takes no id below 0
    labels: torch.Tensor  # (B, S) int64; -100 on padding and where no token follows in a document
    positions: torch.Tensor  # (B, S) int64 from 0 in each document's part of the row, or (B, 3, S)
    document_ids: torch.Tensor  # (B, S) int64; from 0 in each row, so that padding has -1
    instance_ids: torch.Tensor  # (B,) int64; -1 on filler, as 0 is an instance
    # 16 hex digits of the *global* batch's instance ids, so that all ranks have the same; whatever seed and data
    digest: str
    # (B, S) fp32; at least 0, as the mean loss divides by their sum
    weights: torch.Tensor | None = None
    # (B,) int64, number of each row's source from 0, so that filler has -1
    source: torch.Tensor | None = None
    extras: Mapping[str, Extra] = field(default_factory=dict)
    #: Sum of the weights of the labels that are not -100, or their number; computed unless given: a sync on a device
    label_weight: float = -1.0
    #: A copy on a device that `staged` began: `to` takes it, so that nothing is copied twice
    staging: Staging | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self._check()
        if self.label_weight < 0:
            object.__setattr__(self, "label_weight", self._sum_of_weights())

    def __len__(self) -> int:
        """Rows."""
        return len(self.tokens)

    def __getitem__(self, rows: slice) -> Batch:
        """Some rows in order: views, under the same digest."""
        part = self._map(lambda value: value[rows])
        if self.staging is None:
            return part
        # with the weight of the host's labels: to sum those of the device would wait for it
        copy = self.staging.batch._map(lambda value: value[rows], part.label_weight)
        return replace(part, staging=replace(self.staging, batch=copy))

    def split(self, micro_batch: int) -> list[Batch]:
        """Parts of `micro_batch` rows, in order; views, no copy.

        Each part sums the weights of its own labels, which on a device costs a sync: split before `to`.
        Raises ValueError unless `micro_batch` divides the rows.
        """
        rows = len(self)
        if micro_batch < 1 or rows % micro_batch:
            divisors = (d for d in range(1, min(micro_batch, rows) + 1) if rows % d == 0)
            rule, fix = (
                f"must divide the {rows} rows of the batch",
                f"use {max(divisors, default=1)}",
            )
            raise invalid("micro_batch", "divides", micro_batch, rule, fix)
        return [self[i : i + micro_batch] for i in range(0, rows, micro_batch)]

    def to(self, device: torch.device | str, stay: Sequence[str] = ()) -> Batch:
        """The batch on `device`, except the fields and extras named in `stay`. Copies to CUDA are
        asynchronous, through pinned memory; one that `staged` began is taken, and what is queued behind waits for it."""
        device = torch.device(device)
        here = self
        if self.staging is not None and device.type == "cuda":
            here = self.staging.take(device)
        given = {**{n: getattr(here, n) for n in _ROWS}, **here.extras}
        given |= {n: getattr(self, n, None) for n in stay if n in _ROWS}
        given |= {n: self.extras[n] for n in stay if n in self.extras}
        moved = {n: v if v is None or n in stay else _move(v, device) for n, v in given.items()}
        rows: dict[str, Any] = {n: moved.pop(n) for n in _ROWS}
        return replace(self, **rows, extras=moved, staging=None)

    def pin_memory(self) -> Batch:
        """Return a copy in pinned memory, which `DataLoader(pin_memory=True)` asks for; needs an accelerator."""
        return self._map(lambda value: value.pin_memory(), self.label_weight)

    def staged(self, stream: torch.cuda.Stream, stay: Sequence[str] = ()) -> Batch:
        """This batch on the host, and a copy that begins now on `stream`, of all but the names in `stay`.

        `to` of the batch, or of its parts, then finds it on the stream's device: it moves while kernels of the step before
        run. No host sync; the memory of the copy lives as long as the batch, and until the kernels that read it are done.
        Usage: `batch = batch.staged(side_stream); part = batch.split(4)[0].to("cuda")`.
        """
        with torch.cuda.stream(stream):
            copy = self.to(stream.device, stay)
            event = stream.record_event()
        return replace(self, staging=Staging(copy, event))

    def with_filler(self, rows: int) -> Batch:
        """A copy with `rows` rows of filler at the end, which have the same extras.

        Extras that are tensors are zero in filler; ragged ones have no entries.
        """
        given = {name: getattr(self, name) for name in _ROWS}
        joined: dict[str, Any] = {
            n: None if v is None else _extended(v, rows, _FILLER.get(n, 0))
            for n, v in given.items()
        }
        extras = {name: _extended(value, rows) for name, value in self.extras.items()}
        return replace(self, **joined, extras=extras, label_weight=self.label_weight, staging=None)

    def _map(self, change: Callable[[Any], Any], label_weight: float = -1.0) -> Batch:
        """A batch with `change` applied to every field and extra that has rows."""
        values = {name: getattr(self, name) for name in _ROWS}
        changed: dict[str, Any] = {
            name: None if value is None else change(value) for name, value in values.items()
        }
        extras = {name: change(value) for name, value in self.extras.items()}
        return replace(self, **changed, extras=extras, label_weight=label_weight, staging=None)

    def _sum_of_weights(self) -> float:
        if self.weights is None:
            if self.labels.device.type == "cpu":  # numpy counts in half the time
                return float(np.count_nonzero(self.labels.numpy(force=True) != IGNORE))
            return float((self.labels != IGNORE).sum())
        valid = self.labels != IGNORE
        weights = self.weights.double()
        if bool((weights < 0).any()) or not bool(weights.isfinite().all()):
            found = (float(weights.min()), float(weights.max()))
            fix = "give 0 to a label that is not trained"
            raise invalid("weights", "range", found, "must be finite and at least 0", fix)
        return float(weights.where(valid, 0.0).sum())

    def _check(self) -> None:
        rows, length = self.tokens.shape
        shapes: dict[str, tuple[int, ...]] = {
            name: (rows, length) for name in ("labels", "document_ids", "weights")
        }
        shapes |= {name: (rows,) for name in ("instance_ids", "source")}
        for name, shape in shapes.items():
            value = getattr(self, name)
            if value is not None and value.shape != shape:
                rule = f"must be {shape} with tokens {(rows, length)}"
                fix = "give one value for each of them"
                raise invalid(name, "shape", tuple(value.shape), rule, fix)
        if self.weights is not None and not self.weights.is_floating_point():
            rule = "must be floating point"
            raise invalid("weights", "dtype", self.weights.dtype, rule, "give torch.float32")

        if self.positions.shape not in ((rows, length), (rows, 3, length)):
            rule = f"must be {(rows, length)} or {(rows, 3, length)}"
            fix = "put rows first and tokens last"
            raise invalid("positions", "shape", tuple(self.positions.shape), rule, fix)
        for name, value in self.extras.items():
            if len(value) != rows:
                rule = f"must be the {rows} of the batch"
                fix = (
                    "give a tensor with a first dim of rows, or Ragged with an offset for each row"
                )
                raise invalid(f"extras.{name}", "length", len(value), rule, fix)


_ROWS = tuple(
    f.name for f in fields(Batch) if f.name not in ("digest", "extras", "label_weight", "staging")
)  # fields with a first dim of rows: slices and filler change no others


@dataclass(frozen=True, eq=False)
class Staging:
    """A copy of a batch that is on its way to a device, and the event behind it on the stream that makes it."""

    batch: Batch
    event: Any

    def take(self, device: torch.device) -> Batch:
        """The copy, for what the current stream of `device` does from now on."""
        stream = torch.cuda.current_stream(device)
        stream.wait_event(self.event)
        for value in (*(getattr(self.batch, name) for name in _ROWS), *self.batch.extras.values()):
            tensor = value.values if isinstance(value, Ragged) else value
            if tensor is not None and tensor.is_cuda:
                # else its memory could be given to the next copy while a kernel of this stream reads it
                tensor.record_stream(stream)
        return self.batch


def filler_batch(rows: int, seq_len: int) -> Batch:
    """Rows (B, S) of padding without labels: a rank without data runs the same collectives with them.

    They have no loss, routers skip them, and no count includes them. They fill the last micro-batches
    of a rank with fewer rows than another, the batches of a rank that cannot read its data, and
    evaluations whose rows do not divide. The digest is zero.
    """
    zeros = torch.zeros(rows, seq_len, dtype=torch.int64)
    return Batch(
        tokens=zeros,
        labels=torch.full_like(zeros, IGNORE),
        positions=zeros,
        document_ids=torch.full_like(zeros, PAD_DOCUMENT),
        instance_ids=torch.full((rows,), FILLER_INSTANCE),
        digest="0" * 16,
        label_weight=0.0,
    )


def _extended(value: Any, rows: int, fill: int = 0) -> Any:
    """A tensor with `rows` rows of `fill` at the end; Ragged with `rows` rows without entries."""
    if isinstance(value, Ragged):
        empty = Ragged(value.values[:0], torch.zeros(rows + 1, dtype=torch.int64))
        return value.followed_by(empty)
    return torch.cat([value, value.new_full((rows, *value.shape[1:]), fill)])


def _move(value: Any, device: torch.device) -> Any:
    if isinstance(value, Ragged):
        return value.to(device)
    if device.type == "cuda" and value.device.type == "cpu":
        return value.pin_memory().to(device, non_blocking=True)
    return value.to(device)
