"""Compute and evaluate on batches of our own, against the sums by hand."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from forge_parallel import Meshes, ParallelConfig, make_meshes, parallelize
from forge_parallel.compute import Compute, evaluate, evaluate_sequences, reader_batches
from forge_testing import device, run_on_ranks

pytestmark = pytest.mark.lane("test")

VOCAB, ROWS, LENGTH = 7, 4, 3


@dataclass(frozen=True)
class Rows:
    """The least that a batch must offer."""

    tokens: Tensor
    labels: Tensor
    weights: Tensor | None
    positions: Tensor | None = None
    document_ids: Tensor | None = None
    extras: Mapping[str, Any] = field(default_factory=dict)

    def split(self, micro_batch: int) -> list[Rows]:
        cuts = (self.tokens, self.labels, self.weights)
        parts = zip(*(x.split(micro_batch) for x in cuts if x is not None), strict=True)
        return [Rows(*part) for part in parts]

    def to(self, device: torch.device, stay: Sequence[str] = ()) -> Rows:
        cuts = {"tokens": self.tokens, "labels": self.labels, "weights": self.weights}
        return replace(self, **{n: x if x is None else x.to(device) for n, x in cuts.items()})


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.drop = nn.Embedding(VOCAB, 8), nn.Dropout(0.5)
        self.head = nn.Linear(8, VOCAB)

    def forward(self, tokens: Tensor, **_: Any) -> Tensor:
        return self.head(self.drop(self.embedding(tokens)))


def token_loss(logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return (losses * weights.flatten()).sum() if weights is not None else losses.sum()


def make(meshes: Meshes, config: ParallelConfig) -> Compute:
    torch.manual_seed(0)
    model = parallelize(Net(), config, meshes)
    return Compute(
        model, config, meshes, micro_batch=2, num_micro_batches=2, seq_len=LENGTH, loss=token_loss
    )


def rows(seed: int) -> Rows:
    g = torch.Generator().manual_seed(seed)
    tokens, labels = (torch.randint(VOCAB, (ROWS, LENGTH), generator=g) for _ in range(2))
    return Rows(tokens, labels, torch.rand(ROWS, LENGTH, generator=g))


@torch.no_grad()
def by_hand(batches: Sequence[Rows]) -> float:
    torch.manual_seed(0)
    model = Net().eval()
    losses = [token_loss(model(b.tokens), b.labels, b.weights) for b in batches]
    weights = [b.weights.double().sum() for b in batches if b.weights is not None]
    return float(sum(losses) / sum(weights))


def weight(batch: Any) -> float:
    return float(batch.weights.double().sum())


def test_an_evaluation_is_the_weighted_mean_and_restores_the_mode() -> None:
    config = ParallelConfig(device=device().type, precision="fp32")
    compute = make(make_meshes(config), config)
    batch = rows(1)
    for training in (True, False):
        compute.model.train(training)
        found = evaluate(compute, batch.split(2), weight, lambda value: [value])
        assert found == pytest.approx(by_hand([batch]), rel=1e-6)
        assert compute.model.training is training


def test_F160_an_evaluation_keeps_the_mode_of_each_module() -> None:
    config = ParallelConfig(device=device().type, precision="fp32")
    compute = make(make_meshes(config), config)
    compute.model.train()
    next(compute.model.children()).eval()
    before = [module.training for module in compute.model.modules()]
    evaluate(compute, rows(1).split(2), weight, lambda value: [value])
    assert [module.training for module in compute.model.modules()] == before


def test_weights_cast_for_a_micro_batch_end_before_the_next_one() -> None:
    config = ParallelConfig(device=device().type, precision="bf16")
    compute = make(make_meshes(config), config)
    casts: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def count(head: nn.Module, *_: Any) -> None:
        alive.append(sum(cast() is not None for cast in casts))
        casts.append(weakref.ref(head.weight))  # type: ignore[arg-type]

    compute.model.head.register_forward_pre_hook(count)  # type: ignore[operator, union-attr]
    compute.gradients(rows(1), lambda: 1.0)
    assert alive == [0, 0]
    assert [cast() for cast in casts] == [None, None]


@pytest.mark.parametrize("readers", [1, 2, 3])
def test_batches_are_the_same_for_any_number_of_readers(readers: int) -> None:
    each: list[list[range]] = []
    for rank in range(readers):
        meshes: Any = SimpleNamespace(batch_size=readers, batch_rank=rank)
        each.append(reader_batches(10, 4, meshes))
    assert len({len(batches) for batches in each}) == 1  # filler where there are no more rows
    found = [batch for batches in each for batch in batches]
    assert found[:3] == [range(0, 4), range(4, 8), range(8, 12)]


def test_each_row_has_the_sum_of_its_losses_over_the_ranks_that_share_it() -> None:
    config = ParallelConfig(device=device().type, precision="fp32")
    compute = make(make_meshes(config), config)
    compute.model.train()
    batch = rows(1)

    def gather(own: list[Any]) -> list[list[Any]]:  # another rank has a part of rows 1 and 2
        return [own, [1, [1.0, 2.0]]]

    parts = batch.split(2)
    found = evaluate_sequences(compute, ROWS, lambda part: parts[part.start // 2], gather)
    weights = batch.weights.double().sum(1).tolist() if batch.weights is not None else []
    wanted = [by_hand([row]) * w for row, w in zip(batch.split(1), weights, strict=True)]
    assert found == pytest.approx(
        [wanted[0], wanted[1] + 1.0, wanted[2] + 2.0, wanted[3]], rel=1e-5
    )
    assert compute.model.training


def test_F205_no_labels_are_no_loss() -> None:
    config = ParallelConfig(device=device().type, precision="fp32")
    compute = make(make_meshes(config), config)
    batch = replace(rows(1), weights=torch.zeros(ROWS, LENGTH))
    assert math.isnan(evaluate(compute, batch.split(2), weight, lambda value: [value]))


def test_gradients_of_a_batch_are_those_of_its_mean() -> None:
    config = ParallelConfig(device=device().type, precision="fp32")
    compute = make(make_meshes(config), config)
    compute.model.eval()  # without dropout
    batch = rows(2)
    calls: list[int] = []

    def normaliser() -> float:
        calls.append(1)
        return weight(batch)

    share = compute.gradients(batch, normaliser)
    assert share.shape == (1,)
    assert float(share) == pytest.approx(by_hand([batch]), rel=1e-6)
    torch.manual_seed(0)
    alone = Net().eval()
    (token_loss(alone(batch.tokens), batch.labels, batch.weights) / weight(batch)).backward()
    for own, wanted in zip(compute.parameters, alone.parameters(), strict=True):
        torch.testing.assert_close(own.grad, wanted.grad)


def evaluate_on_a_rank() -> float:
    config = ParallelConfig(device=device().type, precision="fp32")
    compute = make(make_meshes(config), config)

    def gather(value: list[float]) -> list[list[float]]:
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values

    return evaluate(compute, rows(dist.get_rank()).split(2), weight, gather)


@pytest.mark.distributed
def test_all_ranks_have_the_mean_over_all_of_them() -> None:
    first, second = run_on_ranks(2, evaluate_on_a_rank)
    assert first == second == pytest.approx(by_hand([rows(0), rows(1)]), rel=1e-6)
