"""Attention with sinks from flash kernels, against scores that are held; no tensor of scores in forward or backward.

The CUDA kernels are stood in for by plain matmuls with their signatures and layouts.
"""

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from forge_core.model import attention_ops as ops
from forge_core.model.attention_sinks import varlen_with_sinks
from forge_testing.kernels import flash_gradients

pytestmark = pytest.mark.lane("test")

B, S, H, K, D = 2, 23, 4, 2, 8
ROWS = {"whole": [[S]] * B, "packed": [[9, 3, 10, 1], [1, 22]]}


def parts(dtype: torch.dtype, size: int = S) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(B, size, heads, D, generator=generator) for heads in (H, K, K)]
    made = [t.to(dtype).requires_grad_() for t in made]
    sinks = torch.randn(H, generator=generator).to(torch.promote_types(dtype, torch.float32))
    return [*made, sinks.requires_grad_()]


def reference(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, spec: ops.AttentionSpec, rows: list[list[int]]) -> Tensor:  # fmt: skip
    ids = torch.stack([torch.arange(len(r)).repeat_interleave(torch.tensor(r)) for r in rows])
    index = torch.arange(q.size(1))
    mask = ops.visible(index, index, spec.window) & (ids[:, :, None] == ids[:, None])
    heads = (t.transpose(1, 2) for t in (q, k, v))
    return ops.reference_attention(*heads, mask[:, None], spec, sinks).transpose(1, 2)


def outputs(out: Tensor, given: list[Tensor]) -> list[Tensor]:
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, given, upstream)]


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted.double()).abs().max() / wanted.double().abs().max())


# bf16: the kernel rounds its output, and the weight of the sink is applied to that
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)]
)
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("rows", ROWS)
def test_values_and_gradients_are_those_of_held_scores(
    rows: str, window: int | None, dtype: torch.dtype, bound: float
) -> None:
    spec, plan = (
        ops.AttentionSpec(sinks=True, window=window, scale=0.3),
        ops.SegmentPlan.of_lengths(ROWS[rows]),
    )
    given = parts(dtype)
    got = outputs(ops.attend_documents(*given[:3], plan, spec, given[3]), given)
    wide = [t.detach().double().requires_grad_() for t in given]
    wanted = outputs(reference(*wide, spec, ROWS[rows]), wide)
    for name, a, b in zip(("out", "q", "k", "v", "sinks"), got, wanted):
        assert error(a, b) < bound, name


class Largest(TorchDispatchMode):
    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [t.numel() for t in tree_leaves(out) if isinstance(t, Tensor)]
        self.numbers = max([self.numbers, *sizes])
        return out


@pytest.mark.parametrize("window", [None, 16])
def test_no_scores_of_a_square_are_made(window: int | None) -> None:
    given = parts(torch.float32, size=200)
    with Largest() as largest:
        out = ops.attend_sequences(
            *given[:3], ops.AttentionSpec(sinks=True, window=window), given[3]
        )
        out.sum().backward()  # an expanded gradient, too
    assert largest.numbers <= 2 * B * H * 200 * D


def test_compiled_it_is_one_graph_with_the_same_gradients() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return ops.attend_sequences(q, k, v, ops.AttentionSpec(sinks=True, window=6), sinks)

    given = parts(torch.float32)
    wanted = outputs(attend(*given), given)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for a, b in zip(outputs(compiled(*given), given), wanted):
        assert error(a, b) < 1e-6


# ---- the varlen kernels of CUDA


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """Windows (left, right) of each forward."""
    windows = []

    def scores(q, k, starts, longest, causal, scale, left, right):
        assert starts.diff().max() == longest
        distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
        ids = torch.bucketize(torch.arange(len(q)), starts[1:], right=True)
        seen = ids[:, None] == ids
        if causal or right == 0:
            seen = seen & (distance >= 0)
        if left is not None and left >= 0:
            seen = seen & (distance <= left)
        k = k.repeat_interleave(q.size(1) // k.size(1), 1)
        return (torch.einsum("qhd,khd->hqk", q, k) * scale).masked_fill(~seen, -torch.inf)

    def forward(q, k, v, starts, begins, most, longest, dropout, causal, debug, *,
                scale=None, window_size_left=None, window_size_right=None):  # fmt: skip
        assert (dropout, debug, starts is begins, most) == (0.0, False, True, longest)
        windows.append((window_size_left, window_size_right))
        found = scores(q, k, starts, longest, causal, scale, window_size_left, window_size_right)
        v = v.repeat_interleave(q.size(1) // v.size(1), 1)
        out = torch.einsum("hqk,khd->qhd", found.softmax(-1), v)
        return out, found.logsumexp(-1), *(q.new_empty(0) for _ in range(3))

    def backward(grad, q, k, v, out, lse, starts, begins, most, longest, dropout, causal, state, unused, *,
                 scale=None, window_size_left=None, window_size_right=None):  # fmt: skip
        assert lse.is_contiguous()
        found = scores(q, k, starts, longest, causal, scale, window_size_left, window_size_right)
        weights = (found - lse.unsqueeze(-1)).exp()
        return flash_gradients(weights, grad, q, k, v, out, scale)

    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    yield windows
    library._destroy()


@pytest.mark.parametrize(("window", "given_to_it"), [(None, (None, None)), (4, (3, 0))])
@pytest.mark.parametrize("rows", ROWS)
def test_the_kernels_of_cuda_get_the_output_with_sinks(
    flash: list[tuple[int, int]], rows: str, window: int | None, given_to_it: tuple[int, int]
) -> None:
    spec, plan = (
        ops.AttentionSpec(sinks=True, window=window, scale=0.3),
        ops.SegmentPlan.of_lengths(ROWS[rows]),
    )
    given = parts(torch.float64)
    tokens = [t.flatten(0, 1) for t in given[:3]]
    cu_seqlens = plan.cu_seqlens(torch.device("cpu"))
    out = varlen_with_sinks(*tokens, given[3], cu_seqlens, max(plan.lengths), 0.3, window)
    got = outputs(out.unflatten(0, (B, S)), given)
    wanted = outputs(reference(*given, spec, ROWS[rows]), given)
    assert [error(a, b) < 1e-12 for a, b in zip(got, wanted)] == [True] * 5
    assert flash == [given_to_it]


@pytest.mark.parametrize("rows", ROWS)
def test_on_cuda_sinks_in_16_bits_are_one_varlen_call(
    flash: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, rows: str
) -> None:
    spec, plan = (
        ops.AttentionSpec(sinks=True, window=4, scale=0.3),
        ops.SegmentPlan.of_lengths(ROWS[rows]),
    )
    given = parts(torch.bfloat16)
    wanted = outputs(reference(*given, spec, ROWS[rows]), given)
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    assert ops.choose_backend(given[0], spec, plan) == "varlen"
    assert ops.choose_backend(given[0].float(), spec) == "reference"  # without Triton
    got = outputs(ops.attend_documents(*given[:3], plan, spec, given[3]), given)
    if rows == "whole":
        got = outputs(ops.attend_sequences(*given[:3], spec, given[3]), given)
    assert [error(a, b) < 2e-2 for a, b in itertools.zip_longest(got, wanted)] == [True] * 5
    assert set(flash) == {(3, 0)}
    assert len(flash) == (2 if rows == "whole" else 1)
