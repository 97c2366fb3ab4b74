"""Cross-entropy over cut logits equals torch's over whole ones."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from forge_parallel._shared import cross_entropy as shared
from forge_parallel.axes.vocab import vocab_cross_entropy
from forge_testing import device, run_on_ranks
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

ALONE = SimpleNamespace(group=None, size=1, rank=0)


def _data(ids, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(3, 5, ids, generator=generator) * 6).to(dtype)
    labels = torch.randint(0, ids, (3, 5), generator=generator)
    labels[0, :2], labels[2] = -100, -100
    return logits.to(device()), labels.to(device())


def _whole(logits, labels):
    logits = logits.clone().requires_grad_()
    flat = logits.float().flatten(0, 1)
    total = F.cross_entropy(flat, labels.flatten(), reduction="sum")
    (total * 0.5).backward()
    return total.detach(), logits.grad


def _cut(ids, dtype):
    size, rank = dist.get_world_size(), dist.get_rank()
    axis = SimpleNamespace(group=dist.group.WORLD, size=size, rank=rank)
    logits, labels = _data(ids, dtype)
    want, grad = _whole(logits, labels)
    width = -(-ids // size)
    padded = F.pad(logits, (0, width * size - ids), value=-torch.inf)
    mine = padded[..., rank * width : (rank + 1) * width].clone().requires_grad_()
    shared._BLOCK_CPU = 2 * width  # several blocks of two rows
    found = vocab_cross_entropy(mine, labels, axis)
    total, count = found.sum, found.count
    (total * 0.5).backward()
    theirs = F.pad(grad, (0, width * size - ids))[..., rank * width : (rank + 1) * width]
    worst = (mine.grad.float() - theirs.float()).abs().max() / grad.abs().max()
    found = vocab_cross_entropy(mine, torch.full_like(labels, -100), axis)
    nothing, none = found.sum, found.count
    mine.grad = None
    nothing.backward()
    return (
        float((total - want).abs() / want),
        float(worst),
        int(count),
        (float(nothing), int(none), float(mine.grad.abs().max())),
        total.dtype is torch.float32 and mine.grad.dtype is dtype,
    )


@pytest.mark.parametrize(("ranks", "ids"), [(2, 16), (2, 37), (4, 37)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sum_and_gradient_equal_those_of_full_logits(ranks, ids, dtype):
    for loss, grad, count, nothing, kept in run_on_ranks(ranks, _cut, ids, dtype):
        assert loss < 1e-6
        assert grad < (1e-5 if dtype is torch.float32 else 1e-2)  # one rounding to bf16
        assert count == 8
        assert nothing == (0.0, 0, 0.0)
        assert kept


def _weighted(ids):
    size, rank = dist.get_world_size(), dist.get_rank()
    axis = SimpleNamespace(group=dist.group.WORLD, size=size, rank=rank)
    logits, labels = _data(ids)
    weights = (
        torch.rand(labels.shape, generator=torch.Generator().manual_seed(5)).to(device()) / 100
    )
    whole = logits.clone().requires_grad_()
    losses = F.cross_entropy(whole.flatten(0, 1), labels.flatten(), reduction="none")
    want = (losses.view_as(labels) * weights).sum()
    want.backward()
    width = ids // size
    mine = logits[..., rank * width : (rank + 1) * width].clone().requires_grad_()
    found = vocab_cross_entropy(mine, labels, axis, weights=weights)
    total, count = found.sum, found.count
    total.backward()
    theirs = whole.grad[..., rank * width : (rank + 1) * width]
    worst = (mine.grad - theirs).abs().max() / whole.grad.abs().max()
    wrong = count - weights.double().where(labels != -100, 0.0).sum()
    return float((total - want).abs() / want), float(worst), float(wrong.abs())


def test_weights_multiply_the_loss_of_each_label():
    for loss, grad, count in run_on_ranks(2, _weighted, 16):
        assert loss < 1e-6
        assert grad < 1e-5
        assert count < 1e-12


def test_one_rank_needs_no_group():
    logits, labels = _data(16)
    want, _ = _whole(logits, labels)
    assert float(vocab_cross_entropy(logits, labels, ALONE).sum) == pytest.approx(float(want))


@pytest.mark.parametrize(
    ("labels", "value", "code"),
    [
        (torch.zeros(3, 4, dtype=torch.int64), (3, 4), "shape"),
        (torch.full((3, 5), 16), 16, "range"),
    ],
)
def test_labels_that_do_not_fit_are_rejected(labels, value, code):
    with rejects("labels", value, code):
        vocab_cross_entropy(_data(16)[0], labels, ALONE)
