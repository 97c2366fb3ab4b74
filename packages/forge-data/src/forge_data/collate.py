"""Arrays of a stream become a `Batch`, in the same memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from forge_data.batch import Batch, Ragged
from forge_data.protocols import Stream

#: Fields of a Batch that a stream may give, as ids and digest come from the call; arrays of other names are extras.
_FIELDS = ("tokens", "labels", "positions", "document_ids", "weights", "source")


def digest_of_ids(instance_ids: np.ndarray) -> str:
    """64 bits of sha256 over the ids as little-endian int64, as 16 hex digits."""
    return hashlib.sha256(np.asarray(instance_ids).astype("<i8").tobytes()).hexdigest()[:16]


def batch_of(stream: Stream, instance_ids: Iterable[int]) -> Batch:
    """A batch of the given instances of a stream, on the host, with the digest of these ids."""
    ids = np.fromiter(instance_ids, dtype=np.int64)
    return make_batch(stream.arrays(ids), ids, digest_of_ids(ids))


def make_batch(arrays: Mapping[str, Any], ids: np.ndarray, digest: str) -> Batch:
    """A Batch on the host that shares the memory of a stream's arrays; unknown names become extras."""
    tensors = as_tensors(arrays)
    known = {name: tensors.pop(name) for name in _FIELDS if name in tensors}
    return Batch(**known, extras=tensors, instance_ids=torch.from_numpy(ids), digest=digest)


def as_tensors(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays as tensors of the same memory, objects with `values` and `row_offsets` as Ragged; tensors unchanged."""
    return {
        name: torch.from_numpy(value) if isinstance(value, np.ndarray) else as_ragged(value)
        for name, value in arrays.items()
    }


def as_ragged(value: Any) -> Any:
    """Ragged of an object with tensors `values` and `row_offsets`, whose package need not import this one."""
    if isinstance(value, (Ragged, torch.Tensor)) or not hasattr(value, "row_offsets"):
        return value
    return Ragged(value.values, value.row_offsets)


def joined_rows(rows: Sequence[torch.Tensor], empty: torch.Tensor) -> Ragged:
    """Ragged of the entries of each row, (n, ...) each; `empty` has the shape of no entry."""
    offsets = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    return Ragged(torch.cat([empty, *rows]), torch.from_numpy(offsets))


def scatter(
    count: int, found: Iterable[tuple[np.ndarray, Mapping[str, Any]]], like: Mapping[str, Any]
) -> dict[str, Any]:
    """Rows that several readers found, put to their places (n,) among `count`, with the names, shapes and dtypes of `like`.

    Ragged rows that no reader found are empty; other values are undefined there.
    """
    out = {n: _rows_like(v, count) for n, v in like.items() if not isinstance(v, Ragged)}
    empty = {n: v.values[:0] for n, v in like.items() if isinstance(v, Ragged)}
    entries = {name: [none] * count for name, none in empty.items()}
    for where, arrays in found:
        for name, value in arrays.items():
            if name not in entries:
                out[name][where] = value
                continue
            ragged = as_ragged(value)
            for i, row in enumerate(where.tolist()):
                entries[name][row] = ragged[i : i + 1].values
    return out | {name: joined_rows(rows, empty[name]) for name, rows in entries.items()}


def _rows_like(value: Any, rows: int) -> Any:
    """Rows of an array's, or a tensor's, shape and dtype, without values."""
    shape = (rows, *value.shape[1:])
    if isinstance(value, torch.Tensor):
        return torch.empty(shape, dtype=value.dtype)
    return np.empty(shape, value.dtype)
