"""Attention inside documents of packed rows, without a dense mask.

A row is cut where the document id changes. All segments of one length go through one call of
attention, so no (S, S) mask exists and no work is spent across borders. Documents attend causally;
other segments (patches of images) may attend in full.

Shapes: B rows, S tokens of a row, T cached and new tokens, H query heads, K key/value
heads, D width of a head, N segments of one length L.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from forge_core._shared.problems import invalid
from forge_core._torch_compat import not_compiled, varlen, varlen_computes
from forge_core.model.rows import PLAIN, attend_rows, sdpa
from forge_core.model.spec import AttentionSpec


@dataclass(frozen=True)
class SegmentPlan:
    """Segments of a batch as host integers.

    lengths: of every segment, rows one after another; groups: (length, count) in rising length;
    order: the flat token order that puts segments of equal length side by side, None if they are.
    """

    rows: int
    lengths: tuple[int, ...]
    groups: tuple[tuple[int, int], ...]
    order: Tensor | None
    _on_device: dict[Any, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, document_ids: Tensor) -> "SegmentPlan":
        """Plan of document_ids (B, S). One host copy if they are on a device."""
        return cls.of_lengths(cut(document_ids))

    @classmethod
    def of_lengths(cls, rows: Sequence[Sequence[int]]) -> "SegmentPlan":
        """Plan of rows given as the lengths of their segments."""
        lengths = [length for row in rows for length in row]
        starts = [0, *accumulate(lengths)][:-1]
        by_length = sorted(range(len(lengths)), key=lambda n: lengths[n])
        counts = {length: 0 for length in sorted(lengths)}
        for length in lengths:
            counts[length] += 1
        order = None
        if by_length != list(range(len(lengths))):
            spans = [torch.arange(starts[n], starts[n] + lengths[n]) for n in by_length]
            order = torch.cat(spans)
        return cls(len(rows), tuple(lengths), tuple(counts.items()), order)

    @property
    def whole_rows(self) -> bool:
        """Whether every row is a single segment."""
        return len(self.lengths) == self.rows

    def permutation(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """`order` and its inverse on a device, copied there once."""
        assert self.order is not None
        key = ("permutation", device)
        if key not in self._on_device:
            order = self.order.to(device, non_blocking=True)
            inverse = torch.empty_like(order)
            inverse[order] = torch.arange(order.numel(), device=device)
            self._on_device[key] = (order, inverse)
        found: tuple[Tensor, Tensor] = self._on_device[key]
        return found

    def borders(self, device: torch.device) -> Tensor:
        """Cumulative lengths (segments + 1,) int32 for varlen attention, copied to a device once."""
        key = ("borders", device)
        if key not in self._on_device:
            host = torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32)
            self._on_device[key] = host.to(device, non_blocking=True)
        found: Tensor = self._on_device[key]
        return found


def cut(document_ids: Tensor) -> list[list[int]]:
    """Lengths of the segments of each row of document_ids (B, S): a change of id is a border."""
    size = document_ids.size(1)
    host = document_ids.cpu()
    changed = (host[:, 1:] != host[:, :-1]).nonzero().tolist()
    borders: list[list[int]] = [[0] for _ in range(host.size(0))]
    for row, before in changed:
        borders[row].append(before + 1)
    return [[end - start for start, end in zip(b, [*b[1:], size])] for b in borders]


class _Reorder(torch.autograd.Function):
    """Rows of x in a given order; the backward gathers by the inverse order, so it needs no scatter."""

    @staticmethod
    def forward(ctx, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(inverse)
        return x.index_select(0, order)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


@not_compiled  # host lengths change with every batch: compiled, each would be a new graph
def within_segments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: SegmentPlan,
    spec: AttentionSpec = PLAIN,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention inside the segments of a plan: q (B, S, H, D), k, v (B, S, K, D) -> like q.

    On CUDA in bf16 or fp16 one `varlen_attn` call, if that computes the spec and the width of a head (a multiple of
    8, up to 256); elsewhere one call of `attend_rows` for each length that occurs, plus one gather of q, k, v and
    the output where equal lengths are not neighbors.
    """
    if plan.whole_rows:
        return attend_rows(q, k, v, spec, sinks)
    if _fits_varlen(q) and not spec.needs_scores and varlen_computes(spec.window):
        return _by_varlen(q, k, v, plan, scale=spec.scale, window=spec.window)
    return _by_length(q, k, v, plan, partial(attend_rows, spec=spec, sinks=sinks))


@not_compiled  # as above
def attend_segments(q: Tensor, k: Tensor, v: Tensor, plan: SegmentPlan) -> Tensor:
    """Full attention inside the segments of a plan: q (B, S, H, D), k, v (B, S, K, D) -> like q.

        plan = SegmentPlan.of_lengths([[4, 9]])         # two images of 4 and 9 patches in one row
        seen = attend_segments(q, k, v, plan)           # q, k, v (1, 13, H, D)

    Calls are those of `within_segments`; lengths are the host's, so there is no sync. ValueError for a plan of
    another number of tokens.
    """
    batch, size = q.shape[:2]
    if (plan.rows, sum(plan.lengths)) != (batch, batch * size):
        rule = f"(rows, tokens of segments) must be {(batch, batch * size)}, as q has"
        given = plan.rows, sum(plan.lengths)
        raise invalid("plan", "mismatch", given, rule, "make it of their lengths")
    if plan.whole_rows:
        return _attend_in_full(q, k, v)
    if _fits_varlen(q):
        return _by_varlen(q, k, v, plan, causal=False)
    return _by_length(q, k, v, plan, _attend_in_full)


def _attend_in_full(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each token of a row sees all of it: shapes as `attend_rows`."""
    return sdpa(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)


def _fits_varlen(q: Tensor) -> bool:
    """Whether flash attention takes q (..., D): it has widths up to 256, and outside `scaled_dot_product_attention`
    nobody pads others to a multiple of 8."""
    half = q.dtype in (torch.bfloat16, torch.float16)
    return q.is_cuda and half and q.size(-1) % 8 == 0 and q.size(-1) <= 256


def _by_varlen(q: Tensor, k: Tensor, v: Tensor, plan: SegmentPlan, **options: Any) -> Tensor:
    rows = q.shape[:2]
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))  # (B S, H or K, D)
    out = varlen(q, k, v, plan.borders(q.device), max(plan.lengths), **options)
    return out.unflatten(0, rows)


def _by_length(
    q: Tensor, k: Tensor, v: Tensor, plan: SegmentPlan, attend: Callable[..., Tensor]
) -> Tensor:
    """One call of `attend` for all segments of a length, (N, L, H or K, D) each."""
    rows = q.shape[:2]
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))  # (B S, H or K, D)
    if plan.order is not None:
        order, inverse = plan.permutation(q.device)
        q, k, v = (_Reorder.apply(t, order, inverse) for t in (q, k, v))
    sizes = [length * count for length, count in plan.groups]
    pieces = []
    for (length, count), *parts in zip(plan.groups, *(t.split(sizes) for t in (q, k, v))):
        pieces.append(attend(*(t.unflatten(0, (count, length)) for t in parts)).flatten(0, 1))
    out = torch.cat(pieces)  # (B S, H, D)
    if plan.order is not None:
        out = _Reorder.apply(out, inverse, order)
    return out.unflatten(0, rows)
