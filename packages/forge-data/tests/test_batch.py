"""Batches that carry weights, positions of three axes and extras keep them with their rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from forge_data import Batch, Loader, Ragged, filler_batch
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

S = 6


def ragged(rows: int) -> Ragged:
    """Row i has i % 3 entries, each of which says its row."""
    lengths = [i % 3 for i in range(rows)]
    values = torch.repeat_interleave(torch.arange(rows), torch.tensor(lengths))
    offsets = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int64)
    return Ragged(values[:, None].float() * torch.ones(1, 4), offsets)


def batch(rows: int = 8, **fields: Any) -> Batch:
    tokens = torch.arange(rows * S).view(rows, S)
    given: dict[str, Any] = {
        "tokens": tokens,
        "labels": tokens.where(tokens % 4 > 0, -100),
        "positions": torch.arange(S).expand(rows, 3, S),
        "document_ids": torch.zeros_like(tokens),
        "instance_ids": torch.arange(rows),
        "digest": "0" * 16,
        "weights": (tokens % 7) / 10,
        "source": torch.arange(rows) % 2,
        "extras": {"patches": ragged(rows), "scale": torch.arange(rows).float()},
    }
    return Batch(**{**given, **fields})


def test_parts_have_what_belongs_to_their_rows() -> None:
    whole = batch()
    parts = whole.split(2)
    assert sum(part.label_weight for part in parts) == pytest.approx(whole.label_weight)
    for i, part in enumerate(parts):
        rows = range(2 * i, 2 * i + 2)
        assert part.positions.shape == (2, 3, S)
        assert part.extras["scale"].tolist() == list(rows)
        patches = part.extras["patches"]
        assert patches.values[:, 0].tolist() == [r for r in rows for _ in range(r % 3)]
        assert patches.row_offsets.tolist() == [0, rows[0] % 3, rows[0] % 3 + rows[1] % 3]
        wanted = (part.weights.double() * (part.labels != -100)).sum()
        assert part.label_weight == pytest.approx(float(wanted))


def test_weights_are_summed_in_float64() -> None:
    """Where fp32 would lose the small ones."""
    weights = torch.full((8, S), 1e-9)
    weights[0, 1] = 1.0
    exact = batch(weights=weights).label_weight
    valid = int((batch().labels != -100).sum())
    assert exact == pytest.approx(1.0 + (valid - 1) * float(torch.tensor(1e-9)), rel=1e-15)
    assert batch(weights=None).label_weight == valid


def test_padding_sequences_have_every_extra_and_weight_zero() -> None:
    whole = batch()
    filled = whole.with_filler(3)
    assert filled.label_weight == whole.label_weight
    assert len(filled) == len(filled.extras["patches"]) == 11
    (one, *_), filler = filled.split(1), filled[8:11]
    assert filler.label_weight == 0
    assert filler.instance_ids.tolist() == filler.source.tolist() == [-1] * 3
    assert filler.extras["patches"].values.shape == (0, 4)
    assert not filler.extras["scale"].any()
    assert filler.positions.shape == (3, 3, S)
    for name in ("tokens", "labels", "document_ids"):
        assert torch.equal(getattr(filler, name), getattr(filler_batch(3, S), name))
    assert one.extras["scale"].tolist() == [0]


def test_moving_leaves_what_is_named() -> None:
    moved = batch().to("meta", stay=("document_ids", "scale"))
    assert moved.tokens.is_meta
    assert moved.weights.is_meta
    assert moved.extras["patches"].values.is_meta
    assert not moved.extras["patches"].row_offsets.is_meta, "the host cuts by them"
    assert not moved.document_ids.is_meta
    assert not moved.extras["scale"].is_meta
    assert moved.label_weight == batch().label_weight


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"positions": torch.zeros(3, 8, S)}, ("positions", (3, 8, 6), "shape")),
        ({"labels": torch.zeros(8, S + 1)}, ("labels", (8, 7), "shape")),
        ({"weights": -torch.ones(8, S)}, ("weights", (-1.0, -1.0), "range")),
        (
            {"weights": torch.full((8, S), float("nan"))},
            ("weights", (float("nan"), float("nan")), "range"),
        ),
        ({"weights": torch.ones(8, S, dtype=torch.int64)}, ("weights", torch.int64, "dtype")),
        ({"extras": {"patches": ragged(7)}}, ("extras.patches", 7, "length")),
    ],
)
def test_extras_that_do_not_fit_the_rows_are_rejected(
    fields: dict[str, Any], problem: tuple[str, Any, str]
) -> None:
    with rejects(*problem):
        batch(**fields)


@pytest.mark.parametrize("offsets", [[0, 2], [1, 3], [0, 4, 3], [], [[0, 3]]])
def test_invalid_offsets_are_rejected(offsets: Any) -> None:
    with rejects("row_offsets", offsets, "order"):
        Ragged(torch.zeros(3), torch.tensor(offsets, dtype=torch.int64))


def test_rows_in_another_order_are_rejected() -> None:
    with rejects("rows", slice(None, None, -1), "order"):
        ragged(4)[::-1]


class Pictures:
    """A stream with all that a batch can carry."""

    def arrays(self, ids: np.ndarray) -> dict[str, Any]:
        rows = len(ids)
        tokens = np.repeat(ids[:, None], S, 1)
        counts = ids % 3
        return {
            "tokens": tokens,
            "labels": tokens,
            "positions": np.zeros((rows, 3, S), np.int64),
            "document_ids": np.zeros((rows, S), np.int64),
            "weights": np.full((rows, S), 0.5, np.float32),
            "source": ids % 2,
            "scale": ids.astype(np.float32),
            "patches": Ragged(
                torch.from_numpy(np.repeat(ids, counts)).float(),
                torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)),
            ),
        }

    def fingerprint(self) -> dict[str, str | int]:
        return {"pictures": 1}

    def __len__(self) -> int:
        return 100


def test_a_stream_without_sequences_and_without_extras_is_an_error() -> None:
    class Stacked(Pictures):
        def arrays(self, ids: np.ndarray) -> dict[str, Any]:
            return {"tokens": np.stack([np.zeros(S, np.int64) for _ in ids])}

    with rejects("stream", ..., "no_rows"):
        Loader(Stacked(), 4).filler(1)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_gives_extras_through_workers_and_padding_sequences(num_workers: int) -> None:
    loader = Loader(Pictures(), 5, rank=1, world_size=2, num_workers=num_workers)
    for step in range(2):
        got, first = next(loader), 5 * step + 3
        ids = [first, first + 1, -1]
        assert got.instance_ids.tolist() == ids
        assert got.extras["patches"].values.tolist() == [i for i in ids[:2] for _ in range(i % 3)]
        assert got.extras["scale"].tolist() == [*ids[:2], 0]
        assert got.label_weight == S
        assert got.source.tolist() == [first % 2, (first + 1) % 2, -1]
    loader.close()
    assert list(loader.filler(2).extras) == ["scale", "patches"]
