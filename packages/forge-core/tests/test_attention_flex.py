"""Rules and block masks that FlexAttention gets, evaluated pair by pair; its forward on the CPU against held scores."""

import itertools

import pytest
import torch
from torch import Tensor

from forge_core.model import attention_flex
from forge_core.model import attention_ops as ops
from forge_core.model.attention import LocalAttention
from forge_core.model.attention_flex import BLOCK, attend_flex, dense_blocks
from forge_core.model.context import TokenContext

pytestmark = pytest.mark.lane("test")

S, H, K, D = 400, 4, 2, 16
ROWS = {
    "whole": [[S], [S]],
    "few": [[250, 150], [1, 399]],
    "many": [[10] * 40, [128, 128, 128, 16]],
}
WINDOWS = [None, 1, 60, 128, 129, 300]


def seen_by(rows: list[list[int]], window: int | None) -> Tensor:
    """(B, S, S) bool, from the definition."""
    ids = torch.stack([torch.arange(len(r)).repeat_interleave(torch.tensor(r)) for r in rows])
    index = torch.arange(S)
    return ops.visible(index, index, window) & (ids[:, :, None] == ids[:, None])


def by_blocks(mask: Tensor, reduce: str, beyond: bool = False) -> Tensor:
    """(B, N, N) bool; `beyond`: what queries after the last one see."""
    spare = -S % BLOCK
    padded = torch.nn.functional.pad(mask, (0, spare))
    padded = torch.nn.functional.pad(padded, (0, 0, 0, spare), value=beyond)
    cut = padded.unflatten(1, (-1, BLOCK)).unflatten(3, (-1, BLOCK))
    return getattr(getattr(cut, reduce)(4), reduce)(2)


def listed(count: Tensor, indices: Tensor) -> Tensor:
    """(B, N, N) bool from the numbers and indices of blocks."""
    found = torch.zeros(indices.shape, dtype=torch.bool)
    for place in itertools.product(*map(range, count.shape)):
        found[place][indices[place][: count[place]].long()] = True
    return found[:, 0]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("rows", ROWS)
def test_the_rule_and_its_blocks_are_those_of_the_definition(rows: str, window: int | None) -> None:
    """Blocks are exactly those with a pair that sees each other, none too many."""
    wanted = seen_by(ROWS[rows], window)
    mask = ops.SegmentPlan.of_lengths(ROWS[rows]).blocks(window, torch.device("cpu"))
    index = torch.arange(S)
    row = torch.arange(len(wanted))[:, None, None]
    rule = mask.mask_mod(row, torch.tensor(0), index[:, None], index)
    assert torch.equal(rule.expand_as(wanted), wanted)

    part = listed(mask.kv_num_blocks, mask.kv_indices)
    full = listed(mask.full_kv_num_blocks, mask.full_kv_indices)
    assert not (part & full).any()
    assert torch.equal((part | full).expand(len(wanted), -1, -1), by_blocks(wanted, "any"))
    assert torch.equal(full.expand(len(wanted), -1, -1), by_blocks(wanted, "all", True))


def test_blocks_of_a_mask_are_those_of_its_pairs() -> None:
    for batch in (1, 2):
        mask = torch.rand(batch, 1, S, S, generator=torch.Generator().manual_seed(0)) < 1e-4
        mask[:, :, :200, :200] = True
        blocks = dense_blocks(mask)
        part = listed(blocks.kv_num_blocks, blocks.kv_indices)
        full = listed(blocks.full_kv_num_blocks, blocks.full_kv_indices)
        assert torch.equal(part | full, by_blocks(mask[:, 0], "any"))
        assert torch.equal(full, by_blocks(mask[:, 0], "all"))
        row, index = torch.arange(batch)[:, None, None], torch.arange(S)
        rule = blocks.mask_mod(row, torch.tensor(0), index[:, None], index)
        assert torch.equal(rule.expand(batch, S, S), mask[:, 0])


SPECS = {
    "softcap": ops.AttentionSpec(softcap=0.5),
    "softcap window": ops.AttentionSpec(softcap=0.8, window=60, scale=0.4),
    "sinks": ops.AttentionSpec(sinks=True, scale=0.4),
    "softcap sinks window": ops.AttentionSpec(softcap=0.8, sinks=True, window=129),
}


@pytest.mark.parametrize("name", SPECS)
def test_forward_equals_held_scores(name: str) -> None:
    spec, rows = SPECS[name], ROWS["few"]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, S, heads, D, generator=generator) for heads in (H, K, K))
    sinks = torch.randn(H, generator=generator) if spec.sinks else None
    heads = (t.transpose(1, 2) for t in (q, k, v))
    wanted = ops.reference_attention(*heads, seen_by(rows, spec.window)[:, None], spec, sinks)
    blocks = ops.SegmentPlan.of_lengths(rows).blocks(spec.window, q.device)
    got = attend_flex(q, k, v, blocks, spec, sinks)
    assert (got - wanted.transpose(1, 2)).abs().max() < 1e-5


def test_on_cuda_with_triton_it_computes_what_has_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    plan, x = ops.SegmentPlan.of_lengths([[3, 5]]), torch.zeros(1, 8, 2, 16, dtype=torch.bfloat16)
    for triton in (True, False):
        monkeypatch.setattr(attention_flex, "has_triton", lambda found=triton: found)
        flex = "flex" if triton else "reference"
        packed = "flex" if triton else "by_length"
        assert ops.choose_backend(x, ops.AttentionSpec(softcap=1.0)) == flex
        assert ops.choose_backend(x, ops.AttentionSpec(softcap=1.0, sinks=True), plan) == packed
        assert ops.choose_backend(x.float(), ops.AttentionSpec(sinks=True)) == flex
        assert ops.choose_backend(x, ops.AttentionSpec(sinks=True)) == "varlen"
        assert ops.choose_backend(x, ops.AttentionSpec()) == "sdpa"
        assert ops.choose_backend(x[..., :8], ops.AttentionSpec(softcap=1.0)) == "reference"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SPECS)
def test_values_and_gradients_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    spec, rows = SPECS[name], ROWS["few"]
    given = [torch.randn(2, S, heads, 64, device="cuda", dtype=dtype) for heads in (H, K, K)]
    given = [t.requires_grad_() for t in given]
    sinks = torch.randn(H, device="cuda", requires_grad=True)
    given += [sinks] if spec.sinks else []
    upstream = torch.randn_like(given[0])
    plan = ops.SegmentPlan.of_lengths(rows)
    heads = (t.transpose(1, 2).double() for t in given[:3])
    mask = seen_by(rows, spec.window)[:, None].cuda()
    out = ops.reference_attention(*heads, mask, spec, sinks.double() if spec.sinks else None)
    wanted = [
        out.transpose(1, 2),
        *torch.autograd.grad(out.transpose(1, 2), given, upstream.double()),
    ]

    out = ops.attend_documents(*given[:3], plan, spec, *given[3:])
    got = [out, *torch.autograd.grad(out, given, upstream)]
    bound = 1e-3 if dtype == torch.float32 else 3e-2
    for a, b in zip(got, wanted):
        assert (a.double() - b.double()).abs().max() / b.double().abs().max() < bound
    whole = ops.attend_sequences(*given[:3], spec, *given[3:])
    assert whole.shape == out.shape


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_mask_of_ones_own_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = LocalAttention(ops.AttentionSpec(window=60))
    given = [torch.randn(2, S, heads, 64, device="cuda").requires_grad_() for heads in (H, K, K)]
    shown = torch.rand(2, S, S, device="cuda") < 0.3
    attend._mask = lambda ctx, queries, keys: shown
    found = []
    for flex in (True, False):
        monkeypatch.setattr(attention_flex, "has_triton", lambda flex=flex: flex)
        out = attend(*given, TokenContext())
        found.append([out, *torch.autograd.grad(out.sin().sum(), given)])
    for a, b in zip(*found):
        assert (a - b).abs().max() / b.abs().max() < 1e-3
