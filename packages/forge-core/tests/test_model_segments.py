"""Full attention inside segments against a loop over them in float64, and the varlen call that CUDA makes."""

import inspect
import itertools
from typing import Any

import pytest
import torch
import torch.nn.attention.varlen as torch_varlen
from torch import Tensor

from forge_core import _torch_compat
from forge_core.model import SegmentPlan, attend_segments, attention_ops
from forge_core.model import attention_ops as ops
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

PLANS = {
    "mixed": [[5, 2, 4, 1], [2, 2, 8]],
    "one_length": [[4, 4, 4], [4, 4, 4]],
    "whole_rows": [[12], [12]],
    "single_tokens": [[1] * 12, [11, 1]],
}


def loop(q: Tensor, k: Tensor, v: Tensor, rows: list[list[int]]) -> Tensor:
    """Softmax of each segment's scores, one segment after the other: (B, S, H, D)."""
    k, v = (t.repeat_interleave(q.size(2) // t.size(2), 2) for t in (k, v))
    out = []
    for row, lengths in enumerate(rows):
        parts = zip(*(t[row].split(lengths) for t in (q, k, v)))
        seen = []
        for own in parts:
            queries, keys, values = (t.transpose(0, 1) for t in own)  # (H, L, D)
            weights = (queries @ keys.mT / q.size(-1) ** 0.5).softmax(-1)
            seen.append((weights @ values).transpose(0, 1))
        out.append(torch.cat(seen))
    return torch.stack(out)


@pytest.mark.parametrize("name", PLANS)
def test_values_and_gradients_are_those_of_a_loop(name: str) -> None:
    torch.manual_seed(0)
    rows = PLANS[name]
    parts = [torch.randn(2, 12, heads, 8).double().requires_grad_() for heads in (4, 2, 2)]
    found = attend_segments(*parts, plan=SegmentPlan.of_lengths(rows))
    wanted = loop(*parts, rows)
    upstream = torch.randn_like(wanted)
    assert (found - wanted).abs().max() < 1e-12
    for got, reference in zip(*(torch.autograd.grad(o, parts, upstream) for o in (found, wanted))):
        assert (got - reference).abs().max() < 1e-12


def test_a_segment_does_not_see_another() -> None:
    x = torch.randn(1, 9, 2, 8)
    plan, other = SegmentPlan.of_lengths([[3, 4, 2]]), x.clone()
    other[:, 3:7] += 1.0
    before, after = attend_segments(x, x, x, plan), attend_segments(other, other, other, plan)
    assert torch.equal(before[:, :3], after[:, :3])
    assert torch.equal(before[:, 7:], after[:, 7:])
    assert not torch.equal(before[:, 3:7], after[:, 3:7])


def test_a_plan_of_other_rows_is_rejected() -> None:
    x = torch.zeros(1, 9, 2, 8)
    with rejects("plan", (1, 8), "mismatch"):
        attend_segments(x, x, x, SegmentPlan.of_lengths([[3, 5]]))


def of_2_11(q, k, v, cu_q, cu_k, max_q, max_k, is_causal=False, scale=None):  # type: ignore[no-untyped-def]
    return {"is_causal": is_causal}


def of_2_13(q, k, v, cu_q, cu_k, max_q, max_k, *, window_size=(-1, -1), scale=None, enable_gqa=False):  # type: ignore[no-untyped-def]  # fmt: skip
    return {"window_size": window_size}


@pytest.mark.parametrize(
    ("installed", "full", "causal"),
    [
        (of_2_11, {"is_causal": False}, {"is_causal": True}),
        (of_2_13, {"window_size": (-1, -1)}, {"window_size": (-1, 0)}),
    ],
    ids=["2.11", "2.13"],
)
def test_varlen_gets_the_boundaries_of_documents(
    monkeypatch: pytest.MonkeyPatch, installed: Any, full: Any, causal: Any
) -> None:
    monkeypatch.setattr(torch_varlen, "varlen_attn", installed)
    monkeypatch.setattr(
        _torch_compat, "_varlen_parameters", lambda: frozenset(inspect.signature(installed).parameters)
    )  # fmt: skip
    x, borders = torch.zeros(4, 2, 8), torch.tensor([0, 1, 4], dtype=torch.int32)
    assert _torch_compat.varlen(x, x, x, borders, 3, causal=False) == full
    assert _torch_compat.varlen(x, x, x, borders, 3) == causal


@pytest.mark.parametrize(
    ("width", "by_varlen"), [(8, True), (256, True), (20, False), (264, False)]
)
def test_varlen_gets_the_widths_that_flash_attention_has(
    monkeypatch: pytest.MonkeyPatch, width: int, by_varlen: bool
) -> None:
    """Rows of one document go to another function: with other widths a run died at its first packed row."""
    calls = []
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(attention_ops, "varlen", lambda q, *_, **__: calls.append(q.shape) or q)
    q = torch.randn(1, 5, 2, width).to(torch.bfloat16)
    plan = SegmentPlan.of_lengths([[2, 3]])
    for attend in (attend_segments, ops.attend_documents):
        assert attend(q, q, q, plan).shape == q.shape
    assert calls == [(5, 2, width)] * (2 * by_varlen)


@pytest.mark.parametrize(("window", "backend"), [(3, "varlen"), (11, "sdpa")])
def test_windowed_sequences_go_to_varlen_on_cuda(
    monkeypatch: pytest.MonkeyPatch, window: int, backend: str
) -> None:
    """Forward and backward equal the reference; the stand-in attends inside each of the segments it is given."""
    torch.manual_seed(0)
    spec, calls = ops.AttentionSpec(window=window, scale=0.3), []

    def varlen(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int,
        scale: float | None, width: int | None, causal: bool,
    ) -> Tensor:  # fmt: skip
        calls.append((cu_seqlens.tolist(), longest, causal))
        found = []
        for start, end in itertools.pairwise(cu_seqlens.tolist()):
            index = torch.arange(end - start)
            parts = (t[start:end].transpose(0, 1)[None] for t in (q, k, v))
            given = ops.AttentionSpec(window=width, scale=scale)
            out = ops.reference_attention(*parts, ops.visible(index, index, width), given, None)
            found.append(out[0].transpose(0, 1))
        return torch.cat(found)

    q, k, v = (torch.randn(2, 11, h, 8).bfloat16().requires_grad_() for h in (4, 2, 2))
    index = torch.arange(11)
    parts = (t.transpose(1, 2) for t in (q, k, v))
    wanted = ops.reference_attention(
        *parts, ops.visible(index, index, window), spec, None
    ).transpose(1, 2)
    upstream = torch.randn_like(wanted)
    gradients = torch.autograd.grad(wanted, (q, k, v), upstream)

    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(attention_ops, "varlen", varlen)
    assert ops.choose_backend(q, spec) == backend
    assert ops.choose_backend(q.float(), spec) == backend.replace("varlen", "windowed")
    if backend == "varlen":
        out = ops.attend_sequences(q, k, v, spec)
        torch.testing.assert_close(out, wanted)
        torch.testing.assert_close(torch.autograd.grad(out, (q, k, v), upstream), gradients)
        assert calls == [([0, 11, 22], 11, True)]
