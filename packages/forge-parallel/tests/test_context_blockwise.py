"""Attention put together from pieces against a dense mask, in one process.

Shapes: B rows, S tokens, H query heads, K key/value heads, D width of a head.
"""

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from forge_parallel.axes import blockwise
from forge_parallel.axes.blockwise import Tile, Tiling, blockwise_attention
from forge_parallel.axes.context import SequenceShard, documents, packed_tiling
from forge_parallel.recompute import recompute
from forge_testing.kernels import flash_gradients
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

B, S, H, K, D = 2, 16, 4, 2, 8


def dense(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Softmax over the keys that `seen` (B, S, S') names; zeros for a query that sees none."""
    k, v = (t.repeat_interleave(q.size(2) // t.size(2), 2) for t in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.size(-1) ** -0.5
    scores = scores.masked_fill(~seen.unsqueeze(1), -torch.inf)
    weights = torch.nan_to_num(scores.softmax(-1))
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted.double()).abs().max() / wanted.double().abs().max())


def random_plan(seed: int, everywhere: bool) -> list[Tile]:
    """Runs of queries, each with a causal piece, a full piece, both or none, on keys of their own."""
    draw, tiles = random.Random(seed), []
    for row in [None] if everywhere else range(B):
        begin = 0
        while begin < S:
            size = draw.randint(1, S - begin)
            if draw.random() < 0.8:
                start = draw.randint(0, S - size)
                tiles.append(Tile(row, begin, size, S + start, size, True))
            if draw.random() < 0.8:
                start = draw.randint(0, S - size)
                tiles.append(Tile(row, begin, size, 2 * S + start, size, True, backwards=True))
            if draw.random() < 0.8:
                start = draw.randint(0, S - 1)
                tiles.append(Tile(row, begin, size, start, draw.randint(1, S - start), False))
            begin += size
    return tiles


def seen_by(tiles: list[Tile], keys: int) -> Tensor:
    seen = torch.zeros(B, S, keys, dtype=torch.bool)
    for p in tiles:
        rows = slice(None) if p.sequence is None else p.sequence
        block = torch.ones(p.queries, p.keys, dtype=torch.bool)
        part = (rows, slice(p.query, p.query + p.queries), slice(p.key, p.key + p.keys))
        if p.causal:
            block = block.triu() if p.backwards else block.tril()
        seen[part] |= block
    return seen


def with_gradients(function, how: Tiling | Tensor, *inputs: Tensor, weight: Tensor) -> list[Tensor]:
    inputs = [t.detach().clone().requires_grad_() for t in inputs]
    out = function(*inputs, how)
    (out * weight).sum().backward()
    return [out.detach(), *(t.grad for t in inputs)]


# fp64 runs as plain products, fp32 and bf16 in the flash kernel of the CPU. bf16: outputs of pieces and
# gradients are rounded to 2^-8, a few times.
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)]
)
@pytest.mark.parametrize("everywhere", [True, False])
def test_random_chunks_equal_a_dense_mask(
    dtype: torch.dtype, bound: float, everywhere: bool
) -> None:
    for seed in range(12):
        torch.manual_seed(seed)
        tiles = random_plan(seed, everywhere)
        if not tiles:
            continue
        q, weight = torch.randn(2, B, S, H, D).to(dtype)
        k, v = torch.randn(2, B, 3 * S, K, D).to(dtype)
        tiling = Tiling([tiles])
        got = with_gradients(blockwise_attention, tiling, q, k, v, weight=weight)
        seen = seen_by(tiles, 3 * S)
        wide = (t.double() for t in (q, k, v))
        wanted = with_gradients(dense, seen, *wide, weight=weight.double())
        for name, a, b in zip(("out", "q", "k", "v"), got, wanted):
            assert a.dtype == dtype
            assert error(a, b) < bound, (seed, name)


@pytest.fixture
def varlen_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """The varlen path, with plain matmuls as torch's flash operators on CPUs; `is_causal` of each forward.

    Lengths and log-sum-exp must be laid out as the CUDA kernels want them.
    """
    calls = []

    def scores(q, k, starts, begins, most, longest, causal):
        assert (starts.diff().max(), begins.diff().max()) == (most, longest)
        seen = torch.zeros(q.size(0), k.size(0), dtype=torch.bool)
        for a, b, c, d in zip(starts, starts[1:], begins, begins[1:]):
            block = torch.ones(b - a, d - c, dtype=torch.bool)
            seen[a:b, c:d] = block.tril() if causal else block
        k = k.repeat_interleave(q.size(1) // k.size(1), 1)
        product = torch.einsum("qhd,khd->hqk", q, k) * q.size(-1) ** -0.5
        return product.masked_fill(~seen, -torch.inf)

    def forward(q, k, v, starts, begins, most, longest, dropout, causal, debug):
        assert (dropout, debug) == (0.0, False)
        calls.append(causal)
        found = scores(q, k, starts, begins, most, longest, causal)
        v = v.repeat_interleave(q.size(1) // v.size(1), 1)
        out = torch.einsum("hqk,khd->qhd", found.softmax(-1), v)
        return out, found.logsumexp(-1), *(q.new_empty(0) for _ in range(3))

    def backward(
        grad, q, k, v, out, lse, starts, begins, most, longest, dropout, causal, state, unused
    ):
        assert dropout == 0.0
        assert lse.is_contiguous()
        found = scores(q, k, starts, begins, most, longest, causal)
        weights = (found - lse.unsqueeze(-1)).exp()
        return flash_gradients(weights, grad, q, k, v, out, q.size(-1) ** -0.5)

    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    monkeypatch.setattr(blockwise, "_kernel_for", lambda q: blockwise._FLASH_VARLEN)
    yield calls
    library._destroy()


def test_selective_recomputation_computes_no_tile_again(varlen_calls: list[bool]) -> None:
    tiling = Tiling([random_plan(1, False)])
    k, v = torch.randn(2, B, 3 * S, K, D)

    class Block(nn.Module):
        def forward(self, q):
            return blockwise_attention(q.sin(), k, v, tiling).cos()

    calls, gradients = {}, {}
    for mode in ("none", "selective", "full"):
        block = Block()
        recompute([block], mode)
        torch.manual_seed(0)
        q = torch.randn(B, S, H, D, requires_grad=True)
        varlen_calls.clear()
        block(q).sum().backward()
        calls[mode], gradients[mode] = len(varlen_calls), q.grad
        assert torch.equal(gradients[mode], gradients["none"])
    assert calls["selective"] == calls["none"]
    assert calls["full"] == 2 * calls["none"]


def test_all_kernels_take_all_groups_of_a_plan(varlen_calls: list[bool]) -> None:
    """One call for each kind of tile, whatever the lengths."""
    ids = torch.tensor([[0] * 3 + [1] * 6 + [2] * 7, [0] * 5 + [1] * 5 + [-1] * 6])
    own = packed_tiling(
        documents(ids), SequenceShard(S, 0, 1, "ring")
    )  # one rank: no key of another
    for tiles in (own.parts[0], random_plan(1, False), random_plan(3, True)):
        torch.manual_seed(0)
        q, weight = torch.randn(2, B, S, H, D)
        k, v = torch.randn(2, B, 3 * S, K, D)
        varlen_calls.clear()
        tiling = Tiling([tiles])
        got = with_gradients(blockwise_attention, tiling, q, k, v, weight=weight)
        seen = seen_by(list(tiles), 3 * S)
        wanted = with_gradients(dense, seen, q, k, v, weight=weight)
        for a, b in zip(got, wanted):
            assert error(a, b) < 1e-5
        everywhere = tiles[0].sequence is None
        assert len(varlen_calls) == (
            len(tiles) if everywhere else len({(p.causal, p.backwards) for p in tiles})
        )


def test_shapes_that_do_not_fit_are_rejected() -> None:
    tiling, x = Tiling([[Tile(None, 0, 4, 0, 4, True)]]), torch.zeros(1, 4, 6, 8)
    with rejects("k", (1, 4, 4, 8), "shape"):
        blockwise_attention(x, x[:, :, :4], x[:, :, :4], tiling)
    with rejects("k", (1, 4, 6, 8), "shape"):
        blockwise_attention(x, x, x[..., :4], tiling)
