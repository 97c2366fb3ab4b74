"""Sums of routed rows on CUDA: the Triton kernels in Triton's interpreter, and the bytes that they move."""

import sys
from collections.abc import Iterator

import pytest
import torch

from forge_moe.dispatch import row_sums
from forge_moe.dispatch.local import Permutation
from forge_testing.traffic import Traffic

pytestmark = pytest.mark.lane("test")

KERNELS = "forge_moe.dispatch._triton_rows"


@pytest.fixture
def one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every device counts as one that has the kernels."""
    monkeypatch.setattr(row_sums, "in_one_pass", lambda device: True)


@pytest.fixture
def interpreted(one_pass: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels run on CPU tensors, in Triton's interpreter."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # read where a kernel is defined
    sys.modules.pop(KERNELS, None)
    yield
    sys.modules.pop(KERNELS, None)


def values(order: Permutation, x, routed, weights, seeds):
    """Permuted x, summed rows, and the gradients of x, rows and weights."""
    x, routed, weights = (t.clone().requires_grad_() for t in (x, routed, weights))
    permuted, sums = order.permute(x), order.unpermute(routed, weights)
    (permuted.float() * seeds[0]).sum().backward()
    (sums * seeds[1]).sum().backward()
    return permuted.detach(), sums.detach(), x.grad, routed.grad, weights.grad


def check(found, wanted) -> None:
    for name, ours, theirs in zip(("permuted", "sums", "x", "rows", "weights"), found, wanted):
        assert ours.dtype == theirs.dtype
        # Triton's interpreter rounds to bf16 toward zero: one unit in the last place.
        rounding = 2**-7 if ours.dtype == torch.bfloat16 else 1e-6
        scale = theirs.abs().max().item() if theirs.numel() else 0.0
        torch.testing.assert_close(ours, theirs, rtol=rounding, atol=1e-6 * scale, msg=name)


#: T, K, E, D.
CASES = {
    "one token": (1, 2, 4, 8),
    "empty experts, odd width": (5, 2, 64, 33),
    "two blocks": (3, 8, 8, 1030),
    "one slot": (7, 1, 3, 16),
    "no token": (0, 2, 4, 8),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", ["full", "tail", "short"])
@pytest.mark.parametrize("case", CASES)
def test_the_kernels_sum_what_the_loop_sums(interpreted, monkeypatch, case, rows, dtype) -> None:
    tokens, slots, experts, dim = CASES[case]
    torch.manual_seed(0)
    ids = torch.rand(tokens, experts).topk(slots, dim=1).indices
    if rows != "full":
        ids[::2, 0] = experts  # dropped slots, whose rows are the tail
    num_rows = int((ids < experts).sum()) if rows == "short" else None
    weights = torch.rand(ids.shape).masked_fill(ids == experts, 0.0)
    order = Permutation.local(ids, num_rows)
    num_rows = len(order.slot_of_row)
    x, routed = (torch.randn(n, dim).to(dtype) for n in (tokens, num_rows))
    seeds = torch.randn(num_rows, dim), torch.randn(tokens, dim)

    found = values(order, x, routed, weights, seeds)
    monkeypatch.setattr(row_sums, "in_one_pass", lambda device: False)
    check(found, values(order, x, routed, weights, seeds))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_of_other_ranks_keep_their_order(interpreted, monkeypatch, dtype) -> None:
    """Received tokens have one to K slots here; rows that lie apart in memory, as on the wire, are read in place."""
    torch.manual_seed(0)
    ids = torch.tensor([[4, 1, 4], [0, 2, 3], [4, 4, 1], [1, 0, 4]])  # 4: on another rank
    counts = [4, 2, 1]  # tokens with more than 0, 1, 2 slots
    weights = torch.rand(ids.shape).masked_fill(ids == 4, 0.0)
    x, routed = torch.randn(4, 9).to(dtype), torch.randn(7, 20).to(dtype)[:, :9]
    seeds = torch.randn(7, 9), torch.randn(4, 9)

    found = values(Permutation.received(ids, 4, counts), x, routed, weights, seeds)
    monkeypatch.setattr(row_sums, "in_one_pass", lambda device: False)
    check(found, values(Permutation.received(ids, 4, counts), x, routed, weights, seeds))


def test_bytes_of_permute_and_combine(one_pass) -> None:
    """K = 8, rows in bf16: bytes per element of (T, D), with the indices and the weights, which are few at this width."""
    tokens, slots, dim = 256, 8, 2048
    ids = torch.zeros(tokens, slots, dtype=torch.int64, device="meta")
    rows = torch.empty(tokens * slots, dim, dtype=torch.bfloat16, device="meta", requires_grad=True)
    weights = torch.empty(tokens, slots, device="meta", requires_grad=True)
    x = torch.empty(tokens, dim, dtype=torch.bfloat16, device="meta", requires_grad=True)
    order = Permutation.local(ids)

    def moved(call) -> float:
        with Traffic() as traffic:
            found = call()
        return found, traffic.bytes / x.numel()

    permuted, forward = moved(lambda: order.permute(x))
    _, backward = moved(lambda: permuted.backward(torch.empty_like(permuted)))
    assert max(forward, backward) <= 20
    sums, forward = moved(lambda: order.unpermute(rows, weights))
    _, backward = moved(lambda: sums.backward(torch.empty_like(sums)))
    assert forward <= 24
    assert backward <= 48
