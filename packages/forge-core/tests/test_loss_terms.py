"""z-loss, label smoothing, scale and cap of logits: every loss against float64 by hand, token by token.

Bounds, of max|a - b| / max|b|: fp32 1e-5, sums 1e-6.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from forge_core._shared import cross_entropy as shared
from forge_core.loss import LossBreakdown, TokenLoss, cross_entropy, fused_cross_entropy
from forge_testing.live_bytes import LiveBytes
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

V, D = 23, 8
TERMS = {
    "plain": {},
    "z": {"z_loss": 1e-2},
    "smoothed": {"label_smoothing": 0.1},
    "both": {"z_loss": 1e-2, "label_smoothing": 0.2},
}
HEADS: dict[str, dict[str, Any]] = {
    "": {},
    "scale": {"scale": 0.5},
    "cap": {"softcap": 2.0, "scale": 3.0},
}


def example(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x (3, 7, D), weight (V, D), labels with ignored ones, weights."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*s, generator=generator).to(dtype) for s in ((3, 7, D), (V, D)))
    labels = torch.randint(0, V, (3, 7), generator=generator)
    labels[0, 1] = labels[2, 3:] = -100
    weights = torch.rand(3, 7, generator=generator)
    weights[0, 1] = torch.nan  # of an ignored label: not read
    return x, weight, labels, weights


def logits_of(
    x: Tensor, weight: Tensor, scale: float = 1.0, softcap: float | None = None
) -> Tensor:
    logits = scale * F.linear(x, weight)
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def by_hand(
    logits: Tensor,
    labels: Tensor,
    weights: Tensor | None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Trained sum, cross-entropy and z-loss of float64 logits, one token at a time."""
    trained, plain, z = logits.sum() * 0, torch.zeros(()).double(), torch.zeros(()).double()
    for i in range(labels.numel()):
        label = int(labels.flatten()[i])
        if label == -100:
            continue
        row = logits.flatten(0, -2)[i]
        weight = 1.0 if weights is None else float(weights.flatten()[i])
        log_z = row.exp().sum().log()
        target = torch.full_like(row, label_smoothing / V)
        target[label] += 1 - label_smoothing
        trained = trained + weight * (-(target * (row - log_z)).sum() + z_loss * log_z**2)
        plain += weight * (log_z - row[label]).detach()
        z += weight * z_loss * log_z.detach() ** 2
    return trained, plain, z


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted.double()).abs().max() / wanted.double().abs().max())


@pytest.fixture(params=[1, 5 * V, None], ids=["1 row", "5 rows", "all"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param:
        monkeypatch.setattr(shared, "_BLOCK_FUSED", 2 * request.param)
        monkeypatch.setattr(shared, "_TOKENS_FUSED", 1)
        monkeypatch.setattr(shared, "_BLOCK_CPU", request.param)


@pytest.mark.lane("quick")
@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("terms", TERMS)
def test_sums_and_gradients_equal_float64(terms: str, head: str, weighted: bool) -> None:
    x, weight, labels, weights = example()
    given = {**TERMS[terms], "weights": weights if weighted else None}
    exact = [t.double().requires_grad_() for t in (x, weight)]
    trained, plain, z = by_hand(
        logits_of(*exact, **HEADS[head]), labels, given["weights"], **TERMS[terms]
    )
    (trained / 7).backward()
    losses: list[Callable[..., TokenLoss]] = [
        lambda x, w: cross_entropy(logits_of(x, w, **HEADS[head]), labels, **given),
        lambda x, w: fused_cross_entropy(x, w, labels, **given, **HEADS[head]),
    ]
    for loss in losses:
        leaves = [t.clone().requires_grad_() for t in (x, weight)]
        found = loss(*leaves)
        (found.sum / 7).backward()
        assert error(found.sum.detach(), trained.detach()) < 1e-6
        assert error(found.cross_entropy, plain) < 1e-6
        assert abs(float(found.z_loss) - float(z)) <= 1e-6 * float(z)
        assert not found.cross_entropy.requires_grad
        assert not found.z_loss.requires_grad
        for leaf, want in zip(leaves, exact, strict=True):
            assert error(leaf.grad, want.grad) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("terms", TERMS)
def test_gradcheck(terms: str) -> None:
    x, weight, labels, weights = example(torch.float64)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    given = {**TERMS[terms], "weights": weights.double()}
    assert torch.autograd.gradcheck(
        lambda a: cross_entropy(a, labels, **given).sum, (x @ weight.T,)
    )
    assert torch.autograd.gradcheck(
        lambda *a: fused_cross_entropy(*a, labels, **given, **HEADS["cap"]).sum, (x, weight)
    )


def test_smoothing_is_that_of_torch() -> None:
    x, weight, labels, _ = example()
    logits = F.linear(x, weight)
    wanted = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.3)
    for found in (cross_entropy(logits, labels, label_smoothing=0.3),
                  fused_cross_entropy(x, weight, labels, label_smoothing=0.3)):  # fmt: skip
        torch.testing.assert_close(found.mean, wanted, rtol=1e-6, atol=0)


@pytest.mark.slow
@pytest.mark.lane("ci")
def test_the_same_when_compiled() -> None:
    x, weight, labels, weights = example()
    given = {**TERMS["both"], "weights": weights}
    logits = F.linear(x, weight).requires_grad_()
    sums, grads = [], []
    for function in (cross_entropy, torch.compile(cross_entropy, backend="eager", fullgraph=True)):
        found = function(logits, labels, **given)
        sums.append(torch.stack([found.sum.detach(), found.cross_entropy, found.z_loss]))
        grads.append(*torch.autograd.grad(found.sum, logits))
    assert error(sums[1], sums[0]) < 1e-6
    assert error(grads[1], grads[0]) < 1e-5


def test_no_label_gives_a_zero_with_a_graph_and_ignored_rows_may_hold_anything() -> None:
    x, weight, labels, _ = example()
    x, weight = x.requires_grad_(), weight.requires_grad_()
    none = torch.full_like(labels, -100)
    logits = F.linear(x, weight)
    for found in (cross_entropy(logits, none, **TERMS["both"]),
                  fused_cross_entropy(x, weight, none, **TERMS["both"], softcap=3.0)):  # fmt: skip
        assert (
            float(found.mean.detach()) == float(found.cross_entropy) == float(found.z_loss) == 0.0
        )
        x.grad = weight.grad = None
        found.sum.backward()
        assert float(x.grad.abs().max()) == float(weight.grad.abs().max()) == 0.0
    bad = logits.detach().clone()
    bad[0, 1, 0] = 1e30
    bad.requires_grad_()
    wanted = cross_entropy(logits.detach(), labels, **TERMS["both"])
    found = cross_entropy(bad, labels, **TERMS["both"])
    assert torch.equal(found.sum, wanted.sum)
    found.sum.backward()
    assert torch.equal(bad.grad[0, 1], torch.zeros(V))


def test_gradients_may_be_asked_for_twice_and_scale_with_their_factor() -> None:
    x, weight, labels, _ = example()
    x, weight = x.requires_grad_(), weight.requires_grad_()
    total = fused_cross_entropy(x, weight, labels).sum
    first = torch.autograd.grad(total, (x, weight), retain_graph=True)
    second = torch.autograd.grad(total, (x, weight), torch.tensor(4.0))
    assert all(torch.equal(4 * a, b) for a, b in zip(first, second, strict=True))


def test_autocast_is_that_of_a_matmul() -> None:
    grads = []
    for fuses in (False, True):
        x, weight, labels, _ = example()
        x, weight = x.requires_grad_(), weight.requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            plain = None if fuses else cross_entropy(F.linear(x, weight), labels)
            total = (plain or fused_cross_entropy(x, weight, labels)).sum
        total.backward()
        assert x.grad.dtype == weight.grad.dtype == torch.float32
        grads.append((total.detach(), x.grad, weight.grad))
    for got, wanted in zip(*grads, strict=True):
        assert error(got, wanted) < 2**-7


def test_autocast_leaves_float64_like_that_of_a_matmul() -> None:
    x, weight, labels, _ = example()
    x, weight = x.double(), weight.double()
    with torch.autocast("cpu", torch.bfloat16):
        plain = cross_entropy(F.linear(x, weight), labels).sum
        fused = fused_cross_entropy(x, weight, labels).sum
    assert fused.dtype == plain.dtype == torch.float64
    assert error(fused, plain) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64])
def test_labels_are_ids_in_both(dtype: torch.dtype) -> None:
    x, weight, labels, _ = example()
    texts = set()
    for loss in (
        lambda: cross_entropy(F.linear(x, weight), labels.to(dtype)),
        lambda: fused_cross_entropy(x, weight, labels.to(dtype)),
    ):
        with rejects("labels", dtype, "dtype") as found:
            loss()
        texts.add(str(found.value))
    assert len(texts) == 1


def test_a_label_out_of_range_is_named_in_both() -> None:
    x, weight, labels, _ = example()
    labels[labels >= 0] = len(weight)
    for loss in (
        lambda: cross_entropy(F.linear(x, weight), labels),
        lambda: fused_cross_entropy(x, weight, labels),
    ):
        with rejects("labels", len(weight), "range"):
            loss()


@pytest.mark.parametrize("fuses", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_of_16_bits_are_exact(dtype: torch.dtype, fuses: bool) -> None:
    x, weight, labels, weights = example()
    found = []
    for given in (weights.to(dtype), weights.to(dtype).float()):
        x = x.detach().requires_grad_()
        if fuses:
            loss = fused_cross_entropy(x, weight, labels, weights=given)
        else:
            loss = cross_entropy(F.linear(x, weight), labels, weights=given)
        loss.sum.backward()
        found.append((loss.sum, loss.count, x.grad))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_fp16_matmuls_are_rejected_only_with_grad() -> None:
    """Weights of 1e-6 and a loss scaler's 1e6: the plain loss has them in its slopes, the forward has the first alone."""
    x, weight, labels, weights = example()
    x, weight, tiny = x.half(), weight.half(), weights * 1e-6
    wanted = cross_entropy(F.linear(x, weight), labels, weights=tiny).sum
    assert torch.equal(fused_cross_entropy(x, weight, labels, weights=tiny).sum, wanted)
    with rejects("x", torch.float16, "dtype"):
        fused_cross_entropy(x.requires_grad_(), weight, labels, weights=tiny)
    x, weight, _, _ = example()
    with (
        torch.autocast("cpu", torch.float16),
        rejects("x", torch.float16, "dtype"),
    ):
        fused_cross_entropy(x.requires_grad_(), weight, labels)


@pytest.mark.parametrize(
    ("key", "value"),
    [("z_loss", -1e-4), ("z_loss", math.nan), ("label_smoothing", 1.0), ("softcap", 0.0)],
)
def test_invalid_arguments_are_rejected(key: str, value: float) -> None:
    x, weight, labels, _ = example()
    with rejects(key, value, "range"):
        fused_cross_entropy(x, weight, labels, **{key: value})
    if key != "softcap":
        with rejects(key, value, "range"):
            cross_entropy(F.linear(x, weight), labels, **{key: value})


class _Products(TorchDispatchMode):
    """Shapes of the results of matrix products, and elements of the largest tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_):
                self.shapes.append(tuple(out.shape))
            self.largest = max(self.largest, out.numel())
        return out


@pytest.mark.parametrize(
    ("needs", "products"),
    [((True, True), 3), ((True, False), 2), ((False, True), 2), ((False, False), 1)],
    ids=str,
)
def test_three_matmuls_a_block_and_one_without_grad(
    needs: tuple[bool, bool], products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "_TOKENS_FUSED", 4)
    monkeypatch.setattr(shared, "_BLOCK_FUSED", 4 * V)
    x, weight, labels, _ = example()
    x, weight = x.requires_grad_(needs[0]), weight.requires_grad_(needs[1])
    with _Products() as seen:
        total = fused_cross_entropy(x, weight, labels).sum
        if any(needs):
            total.backward()
    assert len(seen.shapes) == products * 3  # 21 rows in blocks of D = 8
    assert seen.largest <= V * D
    weight.requires_grad_()
    with _Products() as seen, torch.no_grad():
        fused_cross_entropy(x, weight, labels)
    assert len(seen.shapes) == 3


def test_what_is_kept_for_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "_TOKENS_FUSED", 1)
    monkeypatch.setattr(shared, "_BLOCK_FUSED", 1)  # two blocks of 2 D = 16 tokens
    x, weight, labels, _ = example(torch.bfloat16)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        fused_cross_entropy(x.requires_grad_(), weight.requires_grad_(), labels, **TERMS["both"])
    assert {(tuple(t.shape), t.dtype) for t in kept} == {
        ((21, D), torch.bfloat16),
        ((V, D), torch.float32),
    }


@pytest.mark.parametrize("keeps", [False, True])
def test_the_weights_gradient_is_there_once_unless_the_graph_is_kept(keeps: bool) -> None:
    x, weight = torch.randn(8, 64, requires_grad=True), torch.randn(4096, 64, requires_grad=True)
    total = fused_cross_entropy(x, weight, torch.arange(8)).sum
    with LiveBytes() as seen:
        total.backward(retain_graph=keeps)
    size = 4 * weight.numel()
    # the engine takes over what a function returns, and copies nothing
    assert (seen.peak >= size) if keeps else (seen.peak < 0.1 * size)


def test_matmuls_in_bf16_are_added_to_the_weights_gradient_by_chunks_of_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared, "_TOKENS_FUSED", 1)
    monkeypatch.setattr(shared, "_BLOCK_FUSED", 1)
    # 129 tokens: two blocks, as the product of one is not added to anything
    x, weight = (torch.randn(n, 64).bfloat16().requires_grad_() for n in (129, 2048))
    found = []
    for block in (2**20, 2**12):
        monkeypatch.setattr(shared, "_BLOCK_CPU", block)
        with LiveBytes() as seen:
            total = fused_cross_entropy(x, weight, torch.arange(129)).sum
        found.append((seen.peak, *torch.autograd.grad(total, weight)))
    assert torch.equal(found[0][1], found[1][1])
    assert found[0][0] - found[1][0] > 1.5 * weight.numel()  # of 2 bytes each


def test_a_breakdown_has_the_gradient_of_the_loss_and_the_loss_of_each_group() -> None:
    x, weight, labels, weights = example()
    sources = torch.tensor([0, 1, 1])[:, None].expand_as(labels)
    terms = {"z_loss": 1e-2, "label_smoothing": 0.1}
    breakdown = LossBreakdown(terms, ("web", "code"), {"image": (5, 10)})
    logits, same = (F.linear(x, weight).requires_grad_() for _ in range(2))

    first, *others = breakdown(cross_entropy, logits, labels, weights, sources=sources)
    whole = cross_entropy(same, labels, weights=weights, **terms)
    first.backward()
    whole.sum.backward()

    assert torch.equal(logits.grad, same.grad)  # type: ignore[arg-type]
    values = [value.item() for value in others]
    assert 1 + len(values) == breakdown.num_sums
    means, weighing = breakdown.means(values), breakdown.weights(values)
    assert list(means) == [*terms, *weighing]
    for groups in (("source.web", "source.code"), ("modality.text", "modality.image")):
        total = sum(means[name] * weighing[name] for name in groups)
        assert total == pytest.approx(float(whole.cross_entropy), rel=1e-5)
        assert sum(weighing[name] for name in groups) == pytest.approx(float(whole.count), rel=1e-5)
    columns = breakdown.columns([*values, 7.0], mtp=True, fractions=True)
    assert columns.keys() == {
        *(f"loss.{name}" for name in (*means, "mtp")),
        *(f"share.{name}" for name in ("source.web", "source.code")),
    }
    assert columns["loss.mtp"] == 7.0
