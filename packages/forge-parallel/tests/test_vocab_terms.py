"""z-loss, smoothing, scale and cap over a cut vocabulary, of logits and inside the head, against whole float64 logits.

Bounds, of max|a - b| / max|b|: sums 1e-6, gradients in fp32 1e-5.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from forge_parallel._shared import cross_entropy as shared
from forge_parallel.axes import VocabLoss, vocab_cross_entropy, vocab_fused_cross_entropy
from forge_testing import device, run_on_ranks
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

D, ROWS = 8, (3, 7)
ALONE = SimpleNamespace(group=None, size=1, rank=0)
TERMS: dict[str, dict[str, float]] = {
    "plain": {},
    "z": {"z_loss": 1e-2},
    "smoothed": {"label_smoothing": 0.1},
    "both": {"z_loss": 1e-2, "label_smoothing": 0.2},
}
CAP = {"softcap": 2.0, "scale": 3.0}


def data(ids: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*s, generator=generator) for s in ((*ROWS, D), (ids, D)))
    labels = torch.randint(0, ids, ROWS, generator=generator)
    labels[0, 1] = labels[2, 3:] = -100
    drawn = (x, weight, labels, torch.rand(ROWS, generator=generator))
    return tuple(tensor.to(device()) for tensor in drawn)  # type: ignore[return-value]


def logits_of(
    x: Tensor, weight: Tensor, scale: float = 1.0, softcap: float | None = None
) -> Tensor:
    logits = scale * F.linear(x, weight)
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def whole(ids: int, terms: dict[str, float], weighted: bool, head: dict[str, Any]) -> list[Tensor]:
    """Trained sum, cross-entropy, z-loss, and the gradients of x and weight in float64."""
    x, weight, labels, weights = data(ids)
    x, weight = (t.double().requires_grad_() for t in (x, weight))
    rows, target = logits_of(x, weight, **head).flatten(0, 1), labels.flatten()
    scale = (weights.flatten().double() if weighted else 1.0) * (target != -100)
    trained = F.cross_entropy(
        rows, target, reduction="none", label_smoothing=terms.get("label_smoothing", 0.0)
    )
    z = (terms.get("z_loss", 0.0) * rows.logsumexp(-1).square() * scale).sum()
    plain = (F.cross_entropy(rows, target, reduction="none") * scale).sum()
    total = (trained * scale).sum() + z
    (total / 7).backward()
    assert x.grad is not None
    assert weight.grad is not None
    return [total.detach(), plain.detach(), z.detach(), x.grad, weight.grad]


def on_rank(ids: int, terms: dict[str, float], weighted: bool, fused: bool) -> list[Tensor]:
    """The same of this rank: the gradient of x summed over ranks, that of its own rows of the weight."""
    size, rank = dist.get_world_size(), dist.get_rank()
    axis = SimpleNamespace(group=dist.group.WORLD, size=size, rank=rank)
    x, weight, labels, weights = data(ids)
    width = -(-ids // size)
    shared._BLOCK_CPU, shared._BLOCK_FUSED, shared._TOKENS_FUSED = 2 * width, 5 * width, 1
    mine = weight[rank * width : (rank + 1) * width].clone().requires_grad_()
    x = x.requires_grad_()
    given: dict[str, Any] = {**terms, "weights": weights if weighted else None, "vocab_size": ids}
    if fused:
        found = vocab_fused_cross_entropy(x, mine, labels, axis, **given, **CAP)
    else:
        logits = F.pad(F.linear(x, mine), (0, width - len(mine)), value=-torch.inf)
        found = vocab_cross_entropy(logits, labels, axis, **given)
    (found.sum / 7).backward()
    assert x.grad is not None
    assert mine.grad is not None
    dist.all_reduce(x.grad)
    shown = [found.sum.detach(), found.cross_entropy, found.z_loss]
    assert not any(t.requires_grad for t in shown)
    return [*shown, x.grad, mine.grad]


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted).abs().max() / wanted.abs().max().clamp(min=1e-9))


FIRST = ("both", 37, False)  # the case of the lane test


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("terms", "ids", "fused"),
    [
        pytest.param(*case, marks=pytest.mark.lane("test" if case == FIRST else "quick"))
        for case in itertools.product(TERMS, [16, 37], [False, True])
    ],
)
def test_sums_and_gradients_equal_those_of_full_logits(terms: str, ids: int, fused: bool) -> None:
    for weighted in (False, True):
        wanted = whole(ids, TERMS[terms], weighted, CAP if fused else {})
        ranks = run_on_ranks(2, on_rank, ids, TERMS[terms], weighted, fused)
        weight = torch.cat([rank[-1] for rank in ranks])
        for *sums, x, _ in ranks:
            assert max(error(a, b) for a, b in zip(sums, wanted)) < 1e-6
            assert error(x, wanted[3]) < 1e-5
        assert error(weight, wanted[4]) < 1e-5


def under_autocast(ids: int, fused: bool, dtype: torch.dtype) -> list[Tensor]:
    """Sum and gradients with products in bf16, of masters in `dtype`."""
    size, rank = dist.get_world_size(), dist.get_rank()
    axis = SimpleNamespace(group=dist.group.WORLD, size=size, rank=rank)
    x, weight, labels, weights = data(ids)
    width = -(-ids // size)
    mine = weight[rank * width : (rank + 1) * width].to(dtype, copy=True).requires_grad_()
    x = x.to(dtype).requires_grad_()
    given: dict[str, Any] = {**TERMS["both"], "weights": weights, "vocab_size": ids}
    with torch.autocast(device().type, torch.bfloat16):
        if fused:
            found = vocab_fused_cross_entropy(x, mine, labels, axis, **given)
        else:
            logits = F.pad(F.linear(x, mine), (0, width - len(mine)), value=-torch.inf)
            found = vocab_cross_entropy(logits, labels, axis, **given)
    found.sum.backward()
    assert x.grad is not None
    assert mine.grad is not None
    return [found.sum.detach(), x.grad, mine.grad]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 2**-7), (torch.float64, 1e-12)], ids=str
)
def test_autocast_is_that_of_a_matmul(dtype: torch.dtype, bound: float) -> None:
    """bf16 gradients differ by a rounding; float64 is none of autocast's dtypes."""
    fused, plain = (run_on_ranks(2, under_autocast, 37, f, dtype) for f in (True, False))
    for got, wanted in zip(fused, plain, strict=True):
        assert error(got[0], wanted[0].double()) < 1e-6
        for a, b in zip(got[1:], wanted[1:], strict=True):
            assert a.dtype == dtype
            assert error(a, b.double()) < bound


@pytest.mark.parametrize("fused", [False, True])
def test_labels_are_ids_and_weights_numbers(fused: bool) -> None:
    x, weight, labels, weights = data(9)

    def loss(labels: Tensor, weights: Tensor) -> VocabLoss:
        if fused:
            return vocab_fused_cross_entropy(x, weight, labels, ALONE, weights=weights)
        return vocab_cross_entropy(F.linear(x, weight), labels, ALONE, weights=weights)

    for dtype in (torch.float32, torch.bool, torch.complex64):
        with rejects("labels", dtype, "dtype"):
            loss(labels.to(dtype), weights)
    with rejects("weights", torch.int64, "dtype"):
        loss(labels, labels)
    with rejects("weights", (1, *weights.shape), "shape"):
        loss(labels, weights[None])
    short = weights.half()
    assert torch.equal(loss(labels, short).sum, loss(labels, short.float()).sum)
    assert torch.equal(loss(labels, short).count, loss(labels, short.float()).count)


def test_fp16_matmuls_are_rejected_only_with_grad() -> None:
    x, weight, labels, _ = data(9)
    x, weight = x.half(), weight.half()
    wanted = vocab_cross_entropy(F.linear(x, weight), labels, ALONE).sum
    assert error(vocab_fused_cross_entropy(x, weight, labels, ALONE).sum, wanted.double()) < 1e-6
    with rejects("x", torch.float16, "dtype"):
        vocab_fused_cross_entropy(x.requires_grad_(), weight, labels, ALONE)


@pytest.mark.slow
@pytest.mark.parametrize("terms", TERMS)
def test_gradcheck(terms: str) -> None:
    x, weight, labels, weights = data(9)
    leaves = [t.double().requires_grad_() for t in (x, weight)]
    given: dict[str, Any] = {**TERMS[terms], "weights": weights.double()}

    def fused(x: Tensor, weight: Tensor) -> Tensor:
        return vocab_fused_cross_entropy(x, weight, labels, ALONE, **given, **CAP).sum

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return vocab_cross_entropy(F.linear(x, weight), labels, ALONE, **given).sum

    assert torch.autograd.gradcheck(fused, leaves)
    assert torch.autograd.gradcheck(plain, leaves)


def test_no_label_gives_a_zero_with_a_graph() -> None:
    x, weight, labels, _ = data(9)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    found = vocab_fused_cross_entropy(x, weight, labels.fill_(-100), ALONE, **TERMS["both"])
    found.sum.backward()
    assert float(found.sum.detach()) == float(found.cross_entropy) == float(found.z_loss) == 0.0
    assert int(found.count) == 0
    assert x.grad is not None
    assert weight.grad is not None
    assert float(x.grad.abs().max()) == float(weight.grad.abs().max()) == 0.0


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that an operator gives, and products among them."""

    numel = products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.numel = max(self.numel, out.numel())
        self.products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_)
        return out


def test_no_tensor_has_the_size_of_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, rows = 64, D  # on a CPU a block of fp32 has at least D tokens
    monkeypatch.setattr(shared, "_BLOCK_FUSED", rows * ids)
    monkeypatch.setattr(shared, "_TOKENS_FUSED", 1)
    x, weight, labels, _ = data(ids)
    blocks = -(-labels.numel() // rows)
    for grad, products in ((True, 3), (False, 1)):
        leaves = [t.clone().requires_grad_(grad) for t in (x, weight)]
        with Largest() as seen:
            total = vocab_fused_cross_entropy(*leaves, labels, ALONE, **TERMS["both"]).sum
            if grad:
                total.backward()
        assert seen.numel <= max(ids * D, rows * ids) < ids * labels.numel()
        assert seen.products == products * blocks


@pytest.mark.parametrize(
    ("keys", "key", "value", "code"),
    [
        ({"z_loss": -1.0}, "z_loss", -1.0, "range"),
        ({"label_smoothing": 1.0}, "label_smoothing", 1.0, "range"),
        ({"vocab_size": 12}, "weight", (9, 8), "shape"),
        ({"softcap": -1.0}, "softcap", -1.0, "range"),
    ],
    ids=str,
)
def test_invalid_arguments_are_rejected(
    keys: dict[str, Any], key: str, value: object, code: str
) -> None:
    x, weight, labels, _ = data(9)
    with rejects(key, value, code):
        vocab_fused_cross_entropy(x, weight, labels, ALONE, **keys)
    with rejects("vocab_size", 12, "shards"):
        vocab_cross_entropy(F.linear(x, weight), labels, ALONE, vocab_size=12)
    with rejects("x", tuple(x[..., 1:].shape), "shape"):
        vocab_fused_cross_entropy(x[..., 1:], weight, labels, ALONE)
    assert isinstance(vocab_cross_entropy(F.linear(x, weight), labels, ALONE), VocabLoss)
