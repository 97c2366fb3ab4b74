"""cross_entropy against float64, its edges, and what it costs."""

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from forge_core.loss import TokenLoss, cross_entropy
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")


def _example(dtype=torch.float32, shape=(3, 5), vocab=11, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(*shape, vocab, generator=generator)).to(dtype).requires_grad_()
    labels = torch.randint(0, vocab, shape, generator=generator)
    labels[0, 1] = -100
    return logits, labels


def _reference(logits, labels):
    """Sum and gradient in float64, one token at a time."""
    exact = logits.detach().double().requires_grad_()
    rows, targets = exact.reshape(-1, exact.shape[-1]), labels.reshape(-1).tolist()
    total = exact.new_zeros(())
    for row, target in zip(rows, targets):
        if target != -100:
            total = total + torch.logsumexp(row, 0) - row[target]
    total.backward()
    return total.detach(), exact.grad


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-8), (torch.float16, 2**-11)]
)
def test_sum_and_gradient_equal_float64(dtype, bound):
    logits, labels = _example(dtype)
    loss = cross_entropy(logits, labels)
    loss.sum.backward()
    total, grad = _reference(logits, labels)
    # The sum is fp32 for every dtype; the gradient is rounded once, to the dtype of the logits.
    assert loss.sum.dtype == torch.float32
    assert loss.sum.shape == loss.count.shape == ()
    assert abs(loss.sum.item() - total.item()) <= 1e-6 * total.item()
    assert logits.grad.dtype == dtype
    assert (logits.grad.double() - grad).abs().max() <= bound * grad.abs().max()


def test_blocks_do_not_show(monkeypatch):
    logits, labels = _example(shape=(4, 7))
    whole = cross_entropy(logits, labels)
    (whole.sum * 0.5).backward()
    expected, logits.grad = logits.grad, None
    monkeypatch.setattr(
        "forge_core._shared.cross_entropy._BLOCK_CPU", 3 * 11
    )  # blocks of 3 rows, then 1
    parts = cross_entropy(logits, labels)
    (parts.sum * 0.5).backward()
    assert torch.equal(parts.sum, whole.sum)
    assert torch.equal(logits.grad, expected)


def test_count_and_mean():
    logits, labels = _example()
    loss = cross_entropy(logits, labels)
    assert isinstance(loss, TokenLoss)
    assert loss.count.dtype == torch.int64
    assert loss.count.item() == 14
    torch.testing.assert_close(
        loss.mean, F.cross_entropy(logits.flatten(0, 1), labels.flatten()), rtol=1e-6, atol=0
    )


def test_F12_zero_valid_labels_give_zero_with_a_graph():
    logits, labels = _example()
    loss = cross_entropy(logits, torch.full_like(labels, -100))
    loss.mean.backward()
    assert loss.sum.item() == 0.0
    assert loss.count.item() == 0
    assert loss.mean.item() == 0.0
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_F13_sums_of_parts_give_the_mean_over_tokens():
    logits, labels = _example(shape=(4, 5))
    labels[1:, 1:] = -100
    parts = [cross_entropy(logits[:1], labels[:1]), cross_entropy(logits[1:], labels[1:])]
    mean = sum(p.sum for p in parts) / sum(p.count for p in parts)
    torch.testing.assert_close(mean, cross_entropy(logits, labels).mean, rtol=1e-6, atol=0)


def test_no_tokens_at_all():
    logits = torch.zeros(0, 4, requires_grad=True)
    loss = cross_entropy(logits, torch.zeros(0, dtype=torch.int64))
    loss.mean.backward()
    assert loss.mean.item() == 0.0


@pytest.mark.parametrize("value", [1e30, -1e30])
def test_an_ignored_row_has_no_gradient(value):
    logits, labels = _example()
    with torch.no_grad():
        logits[0, 1, 3] = value
    cross_entropy(logits, labels).sum.backward()
    assert torch.equal(logits.grad[0, 1], torch.zeros(11))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_an_ignored_row_does_not_enter_the_sum_whatever_it_holds(value):
    logits, labels = _example()
    expected = cross_entropy(logits, labels).sum
    with torch.no_grad():
        logits[0, 1] = value
    assert torch.equal(cross_entropy(logits, labels).sum, expected)


def test_a_bad_valid_row_shows():
    logits, labels = _example()
    with torch.no_grad():
        logits[0, 0] = float("nan")
    assert cross_entropy(logits, labels).sum.isnan()


def test_large_logits_do_not_overflow():
    logits = torch.tensor([[1e4, -1e4, 0.0]], requires_grad=True)
    loss = cross_entropy(logits, torch.tensor([1]))
    loss.sum.backward()
    assert loss.sum.item() == 2e4
    assert torch.equal(logits.grad, torch.tensor([[1.0, -1.0, 0.0]]))


@pytest.mark.parametrize("label", [11, -1, -101, 2**40])
def test_F49_label_out_of_range_is_named(label):
    logits, labels = _example()
    labels[2, 2] = label
    with rejects("labels", label, "range"):
        cross_entropy(logits, labels)


def test_other_ignore_index():
    logits, labels = _example()
    labels[labels == -100] = 0
    loss = cross_entropy(logits, labels, ignore_index=0)
    assert loss.count.item() == int((labels != 0).sum())


@pytest.mark.parametrize(
    ("logits", "labels", "key", "value", "code"),
    [
        (torch.zeros(2, 3, 5), torch.zeros(2, 2, dtype=torch.int64), "labels", (2, 2), "shape"),
        (torch.zeros(2, 5), torch.zeros(2), "labels", torch.float32, "dtype"),
        (
            *(torch.zeros(2, 5, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)),
            *("logits", torch.int64, "dtype"),
        ),
    ],
)
def test_invalid_arguments_are_rejected(logits, labels, key, value, code):
    with rejects(key, value, code):
        cross_entropy(logits, labels)


class _HostReads(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_no_host_sync():
    logits, labels = _example()
    with _HostReads() as reads:
        cross_entropy(logits, labels).mean.backward()
    assert reads.count == 0


def test_keeps_no_second_copy_of_the_logits():
    logits, labels = _example(torch.bfloat16, shape=(8, 16), vocab=512)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        cross_entropy(logits, labels)
    large = [t for t in saved if t.numel() >= logits.numel()]
    assert [t.data_ptr() for t in large] == [logits.data_ptr()]
    assert large[0].dtype == torch.bfloat16


class _LiveBlocks(TorchDispatchMode):
    """The most fp32 tensors of at least `size` elements that are alive at once."""

    def __init__(self, size):
        super().__init__()
        self.size, self.alive, self.most = size, [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        large = isinstance(out, torch.Tensor) and out.numel() >= self.size
        new = not func.is_view and not func._schema.is_mutable
        if large and new and out.dtype == torch.float32:
            self.alive.append(weakref.ref(out))
        self.alive = [ref for ref in self.alive if ref() is not None]
        self.most = max(self.most, len(self.alive))
        return out


@pytest.mark.parametrize(("dtype", "blocks"), [(torch.float32, 1), (torch.bfloat16, 2)])
def test_F118_two_fp32_blocks_at_once(dtype, blocks, monkeypatch):
    """The result of a block and, of 16-bit logits, its cast: never the block before."""
    monkeypatch.setattr("forge_core._shared.cross_entropy._BLOCK_CPU", 3 * 512)
    logits, labels = _example(dtype, shape=(4, 3), vocab=512)
    loss = cross_entropy(logits, labels)
    for run in (lambda: cross_entropy(logits, labels), loss.sum.backward):
        with _LiveBlocks(3 * 512) as live:
            run()
        # the gradient of fp32 logits is itself an fp32 tensor as large
        assert live.most == blocks + (dtype == torch.float32 and logits.grad is not None)


def test_same_under_compile():
    logits, labels = _example()
    eager = cross_entropy(logits, labels)
    compiled = torch.compile(
        lambda a, b: cross_entropy(a, b).mean, backend="eager", fullgraph=True
    )(logits, labels)
    torch.testing.assert_close(compiled, eager.mean, rtol=1e-6, atol=0)


@pytest.mark.parametrize("compiled", [False, True])
def test_weights_multiply_the_loss_of_each_label(compiled):
    """Small ones too: the mean divides by their sum, whatever it is, unless that is zero."""
    logits, labels = _example(torch.float64)
    weights = torch.rand(labels.shape, generator=torch.Generator().manual_seed(1)) / 100
    valid = labels != -100
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    wanted = (losses.view_as(labels) * weights).sum()
    (gradient,) = torch.autograd.grad(wanted, logits)
    rounded = logits.detach().float().requires_grad_()
    loss_of = torch.compile(cross_entropy, backend="eager") if compiled else cross_entropy
    loss = loss_of(rounded, labels, weights=weights)
    loss.sum.backward()
    total = weights.double().where(valid, 0.0).sum()
    assert 0 < total < 1
    torch.testing.assert_close(loss.sum.double(), wanted, rtol=1e-6, atol=0)
    torch.testing.assert_close(rounded.grad.double(), gradient, rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(loss.count, total, rtol=1e-12, atol=0)
    torch.testing.assert_close(loss.mean.double(), wanted / total, rtol=1e-6, atol=0)
    assert loss.mean.dtype == torch.float32
    assert cross_entropy(rounded, labels, weights=torch.zeros_like(weights)).mean == 0


def test_weights_of_another_shape_are_rejected():
    logits, labels = _example()
    with rejects("weights", (*labels.shape[:1],), "shape"):
        cross_entropy(logits, labels, weights=torch.ones(labels.shape[:1]))
