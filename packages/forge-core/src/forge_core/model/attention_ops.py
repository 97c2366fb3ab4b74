"""What an attention computes (`AttentionSpec`), and the operations that compute it.

    operation             each token sees                         backends, see `choose_backend`
    attend_sequences      its sequence, up to itself              sdpa, varlen, windowed, flex, reference
    attend_documents      its document, up to itself              varlen, flex, by_length
    attend_segments       its segment, in full (image patches)    varlen, by_length
    attend_masked         what a mask of the caller allows        sdpa, reference

No operation but `reference_attention` and `attend_masked` holds an (S, T) tensor. All backends equal
`reference_attention`, the definition.

Shapes: B sequences, S tokens, T keys, H query heads, K key/value heads, D width of a head, W window, N segments of one
length L or chunks of one window. Layers use (B, S, H, D), kernels (B, H, S, D).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from dataclasses import field as plain_field
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from forge_core._config import is_size, number_problems, switch_problems
from forge_core._renamed import renamed
from forge_core._shared.fields import field
from forge_core._shared.problems import Problem, invalid, raise_problems
from forge_core._torch_compat import (
    constant_when_compiled,
    not_compiled,
    takes_narrow_values,
    varlen,
    varlen_computes,
)
from forge_core.model.attention_flex import attend_flex, causal_blocks, flex_computes
from forge_core.model.attention_sinks import sdpa_with_sinks, varlen_with_sinks
from forge_core.registry import Registry


@dataclass(frozen=True)
class AttentionSpec:
    """Softmax attention of each token to tokens of its document, as plain data.

        AttentionSpec(window=4096)                    # Mistral
        AttentionSpec(scale=1 / 64, softcap=50.0)     # Gemma 2

    An implementation computes a field or rejects it by its name; fields at their defaults need no support.
    """

    scale: float | None = field(None, "factor of the scores; empty: head_dim ** -0.5")
    window: int | None = field(
        None, "how many tokens one sees, itself and those before it; empty: all of its document"
    )
    softcap: float | None = field(
        None,
        "scores x become softcap * tanh(x / softcap); holds a sequence's scores on CPUs; empty: no cap",
    )
    sinks: bool = field(
        False,
        "a learned logit per head that takes part of the softmax, and has no value",
    )
    mask: str = field(
        "causal",
        "who sees whom: causal, or the import path of mask(ctx, queries, keys); holds a sequence's scores on CPUs",
    )

    def __post_init__(self) -> None:
        raise_problems("attention", _spec_problems(self))

    @property
    def needs_scores(self) -> bool:
        """Whether `F.scaled_dot_product_attention` does not compute it: a soft-cap, sinks, or a mask of its own."""
        return self.softcap is not None or self.sinks or self.mask != "causal"

    def beyond(self, computed: tuple[str, ...]) -> dict[str, Any]:
        """Return {name: value} of fields with other values than their defaults, without the fields `computed`."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in computed}
        return {name: value for name, value in values.items() if value != getattr(PLAIN, name)}


def _spec_problems(c: AttentionSpec) -> Iterator[Problem]:
    examples = {"scale": "0.125 for a head width of 64", "softcap": "50"}
    fixes = {name: f"use {example}, or leave it out" for name, example in examples.items()}
    yield from number_problems(c, 0, fixes)
    if c.window is not None and not is_size(c.window, 2**31):
        rule = "must be a whole number, at least 1"
        yield Problem("window", "range", c.window, rule, "use 4096, or leave it out")
    yield from switch_problems(c, "sinks")
    if not isinstance(c.mask, str) or (c.mask != "causal" and ":" not in c.mask):
        yield Problem("mask", "unknown", c.mask, "must be 'causal' or module:attr", "use 'causal'")


def visible(queries: Tensor, keys: Tensor, window: int | None = None) -> Tensor:
    """The causal mask (queries, keys) bool: True where the token at one index sees the token at another."""
    distance = queries[:, None] - keys[None, :]
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def causal_mask(ctx: Any, queries: Tensor, keys: Tensor) -> Tensor:
    """Each token sees itself and those before it: (1, queries, keys) bool."""
    return visible(queries, keys)[None]


MASKS = Registry(
    "model.attention.mask", "forge.masks", ("ctx", "queries", "keys"), {"causal": causal_mask}
)
PLAIN = AttentionSpec()


# ---- documents


def document_starts(document_ids: Tensor) -> Tensor:
    """(B, S) bool: True at the first token of each document of document_ids (B, S), where the id changes."""
    # not only where the id rises: ids of a row may repeat or fall, and negative ones are padding
    changed = document_ids[:, 1:] != document_ids[:, :-1]
    return F.pad(changed, (1, 0), value=True)


def document_lengths(document_ids: Tensor) -> list[list[int]]:
    """Lengths of the documents of each sequence of document_ids (B, S). One host copy if they are on a device."""
    size = document_ids.size(1)
    starts: list[list[int]] = [[] for _ in range(document_ids.size(0))]
    for sequence, start in document_starts(document_ids.cpu()).nonzero().tolist():
        starts[sequence].append(start)
    return [[end - start for start, end in zip(s, [*s[1:], size])] for s in starts]


@dataclass(frozen=True)
class SegmentPlan:
    """Segments of a batch as host integers.

    lengths: of every segment, one sequence after another; groups: (length, count) in rising length;
    order: the flat token order that puts segments of equal length side by side, None if they are.
    """

    rows: int
    lengths: tuple[int, ...]
    groups: tuple[tuple[int, int], ...]
    order: Tensor | None
    _on_device: dict[Any, Any] = plain_field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, document_ids: Tensor) -> SegmentPlan:
        """Plan of document_ids (B, S). One host copy if they are on a device."""
        return cls.of_lengths(document_lengths(document_ids))

    @classmethod
    def of_lengths(cls, rows: Sequence[Sequence[int]]) -> SegmentPlan:
        """Plan of sequences given as the lengths of their segments."""
        lengths = [length for row in rows for length in row]
        starts = [0, *accumulate(lengths)][:-1]
        by_length = sorted(range(len(lengths)), key=lambda n: lengths[n])
        order = None
        if by_length != list(range(len(lengths))):
            order = torch.cat([torch.arange(starts[n], starts[n] + lengths[n]) for n in by_length])
        groups = tuple(Counter(sorted(lengths)).items())
        return cls(len(rows), tuple(lengths), groups, order)

    @property
    def whole_rows(self) -> bool:
        """Whether every sequence is a single segment."""
        return len(self.lengths) == self.rows

    def permutation(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """`order` and its inverse on a device, copied there once."""
        key = ("permutation", device)
        if key not in self._on_device:
            assert self.order is not None
            order = self.order.to(device, non_blocking=True)
            inverse = torch.empty_like(order)
            inverse[order] = torch.arange(order.numel(), device=device)
            self._on_device[key] = (order, inverse)
        return self._on_device[key]

    def cu_seqlens(self, device: torch.device) -> Tensor:
        """Cumulative lengths (segments + 1,) int32 for varlen attention, copied to a device once."""
        key = ("cu_seqlens", device)
        if key not in self._on_device:
            host = torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32)
            self._on_device[key] = host.to(device, non_blocking=True)
        return self._on_device[key]

    borders = cu_seqlens  # its name in 0.1; goes in 0.3.0

    def blocks(self, window: int | None, device: torch.device) -> Any:
        """The block mask of FlexAttention, made once on a device."""
        key = ("blocks", window, device)
        if key not in self._on_device:
            numbers, size = None, sum(self.lengths) // self.rows
            if not self.whole_rows:
                lengths = torch.tensor(self.lengths)
                numbers = torch.arange(len(lengths)).repeat_interleave(lengths)
                numbers = numbers.view(self.rows, size).to(device, non_blocking=True)
            self._on_device[key] = causal_blocks(numbers, size, window, device)
        return self._on_device[key]


@lru_cache(maxsize=8)
def _sequence_plan(size: int) -> SegmentPlan:
    """The plan of one sequence of one segment; the next layers find its block masks."""
    return SegmentPlan.of_lengths([[size]])


# ---- operations


def choose_backend(
    q: Tensor, spec: AttentionSpec, plan: SegmentPlan | None = None
) -> Literal["varlen", "by_length", "reference", "flex", "windowed", "sdpa"]:
    """Choose the backend that computes a spec for q (B, S, H, D), within the segments of a plan if there is one.

    varlen       one kernel call for all segments, or sequences with sinks or a window shorter than S: CUDA in bf16 or
                 fp16, D a multiple of 8 up to 256, no soft-cap; narrower values are padded
    flex         soft-cap, other sinks: on CUDA with Triton, D at least 16
    by_length    the other segments: one call of a backend below for each length that occurs
    reference    other soft-caps, and sinks on CUDA: the scores (B, H, S, S) are held
    windowed     another window shorter than S: the mask is (W, 2 W) whatever S is
    sdpa         all else: torch's fused kernels

    ValueError for a mask of its own, which `LocalAttention` computes.
    """
    if spec.mask != "causal":
        fix = "call LocalAttention(spec)"
        raise invalid("attention.mask", "unsupported", spec.mask, "must be 'causal' here", fix)
    # flash attention: outside `scaled_dot_product_attention` no caller pads other widths to a multiple of 8
    by_varlen = q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)
    by_varlen = by_varlen and q.size(-1) % 8 == 0 and q.size(-1) <= 256
    by_varlen = by_varlen and spec.softcap is None
    by_varlen = by_varlen and (spec.sinks or varlen_computes(spec.window))
    if spec.needs_scores and not by_varlen and flex_computes(q):
        return "flex"
    if plan is not None and not plan.whole_rows:
        return "varlen" if by_varlen else "by_length"
    if spec.sinks and by_varlen:
        return "varlen"
    if spec.softcap is not None or (spec.sinks and q.is_cuda):
        return "reference"
    if spec.window is None or spec.window >= q.size(1):
        return "sdpa"
    # flash takes no mask and torch's efficient kernel no shared heads: `windowed` would end in the math kernel
    return "varlen" if by_varlen else "windowed"


def attend_sequences(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec = PLAIN,
    sinks: Tensor | None = None,
    *,
    causal: bool = True,
) -> Tensor:
    """Attention inside each sequence: q (B, S, H, D), k and v (B, S, K, D), sinks (H,) -> like q.

    Values may be narrower, v (B, S, K, V) -> (B, S, H, V); see `sdpa` and `choose_backend` for where they are padded.

    With causal=False each token sees the full sequence. ValueError for that with a soft-cap, sinks or a window, and for
    a spec with a mask of its own.
    """
    if not causal and (spec.needs_scores or spec.window is not None):
        rule = "computes a soft-cap, sinks or a window only causally"
        raise invalid("causal", "unsupported", causal, rule, "leave them out of the spec")
    backend = choose_backend(q, spec)
    if backend == "varlen":
        batch, size = q.shape[:2]
        cu_seqlens = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * size
        return _varlen(q, k, v, cu_seqlens, size, spec, sinks, causal)
    if backend == "flex":
        return _by_flex(q, k, v, None, spec, sinks)

    attend = partial(sdpa, scale=spec.scale)
    if spec.sinks and sinks is not None:
        attend = partial(sdpa_with_sinks, sinks=sinks, scale=spec.scale)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, H or K, S, D), views
    if backend == "reference":
        index = torch.arange(q.size(2), device=q.device)
        out = reference_attention(q, k, v, visible(index, index, spec.window), spec, sinks)
    elif backend == "windowed":
        assert spec.window is not None
        out = _windowed(q, k, v, spec.window, attend)
    else:
        out = attend(q, k, v, is_causal=causal)
    return out.transpose(1, 2)


@not_compiled  # host lengths change with every batch: compiled, each would be a new graph
def attend_documents(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: SegmentPlan,
    spec: AttentionSpec = PLAIN,
    sinks: Tensor | None = None,
    *,
    causal: bool = True,
) -> Tensor:
    """Attention inside the segments of a plan: q (B, S, H, D), k and v (B, S, K, D or V) -> (B, S, H, D or V).

    No work is spent across boundaries. Where equal lengths are not neighbors, `by_length` gathers q, k, v and the
    output once more.
    """
    backend = choose_backend(q, spec, plan)
    if backend == "flex":
        return _by_flex(q, k, v, plan, spec, sinks)
    if backend not in ("varlen", "by_length"):
        return attend_sequences(q, k, v, spec, sinks, causal=causal)

    if backend == "varlen":
        cu_seqlens = plan.cu_seqlens(q.device)
        return _varlen(q, k, v, cu_seqlens, max(plan.lengths), spec, sinks, causal)
    attend = partial(attend_sequences, spec=spec, sinks=sinks, causal=causal)
    batch = q.shape[:2]
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))  # (B S, H or K, D)
    return _by_length(q, k, v, plan, attend).unflatten(0, batch)


@not_compiled  # as above
def attend_segments(q: Tensor, k: Tensor, v: Tensor, plan: SegmentPlan) -> Tensor:
    """Full attention inside the segments of a plan: q (B, S, H, D), k, v (B, S, K, D) -> like q.

        plan = SegmentPlan.of_lengths([[4, 9]])         # two images of 4 and 9 patches in one sequence
        seen = attend_segments(q, k, v, plan)           # q, k, v (1, 13, H, D)

    Calls are those of `attend_documents`; lengths are the host's, so there is no sync. ValueError for a plan of
    another number of tokens.
    """
    batch, size = q.shape[:2]
    if (plan.rows, sum(plan.lengths)) != (batch, batch * size):
        rule = f"(rows, tokens of segments) must be {(batch, batch * size)}, as q has"
        given = plan.rows, sum(plan.lengths)
        raise invalid("plan", "mismatch", given, rule, "make it of their lengths")
    return attend_documents(q, k, v, plan, causal=False)


def attend_masked(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, spec: AttentionSpec, sinks: Tensor | None
) -> Tensor:
    """Attention to the tokens that a mask (..., S, T) allows: q (B, H, S, D), k, v (B, K, T, D) -> like q."""
    if spec.needs_scores:
        return reference_attention(q, k, v, mask, spec, sinks)
    return sdpa(q, k, v, attn_mask=mask, scale=spec.scale)


# ---- the reference, in three steps


def reference_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, spec: AttentionSpec, sinks: Tensor | None
) -> Tensor:
    """Attention from its definition, in fp32 at least; holds (B, H, S, T) scores, also for the backward.

    q (B, H, S, D), k and v (B, K, T, D), mask (..., S, T) bool or None, sinks (H,) -> like q.
    """
    weights = attention_weights(attention_scores(q, k, spec), mask, spec, sinks)
    return mix_values(weights, v).to(q.dtype)


def attention_scores(q: Tensor, k: Tensor, spec: AttentionSpec) -> Tensor:
    """Scores before soft-cap and mask: q (B, H, S, D), k (B, K, T, D) -> (B, H, S, T), fp32 at least."""
    wide = torch.promote_types(q.dtype, torch.float32)
    keys = k.to(wide).repeat_interleave(q.size(1) // k.size(1), dim=1)  # (B, H, T, D)
    scale = q.size(-1) ** -0.5 if spec.scale is None else spec.scale
    return q.to(wide) @ keys.mT * scale  # (B, H, S, T)


def attention_weights(
    scores: Tensor, mask: Tensor | None, spec: AttentionSpec, sinks: Tensor | None
) -> Tensor:
    """Attention probabilities of scores (B, H, S, T): soft-cap, mask, sinks, softmax."""
    # before the mask, or -inf would become -softcap
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    # a sink takes probability and has no value (gpt-oss): one more column in the softmax, dropped afterwards
    if sinks is not None:
        column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), dim=-1)  # (B, H, S, T + 1)
    weights = scores.softmax(-1)
    return weights if sinks is None else weights[..., :-1]


def mix_values(weights: Tensor, v: Tensor) -> Tensor:
    """Weighted sums (B, H, S, D) of values v (B, K, T, D) by weights (B, H, S, T), in the dtype of the weights."""
    values = v.to(weights.dtype).repeat_interleave(weights.size(1) // v.size(1), dim=1)
    return weights @ values


# ---- backends


def sdpa(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Attention with shared key/value heads: q (B, H, S, D), k (B, K, T, D), v (B, K, T, V) -> (B, H, S, V), V <= D.

    Narrower values are padded to D, unless a kernel takes them that is as fast (`takes_narrow_values`).
    `options` are those of `F.scaled_dot_product_attention`. On CUDA keys and values are repeated to H heads in fp32
    (only torch's math kernel shares heads there), and where only the memory-efficient kernel is allowed, which has no
    shared heads.
    """
    width, values = q.size(-1), v.size(-1)
    if values < width:
        causal, masked = options.get("is_causal", False), options.get("attn_mask") is not None
        grad = torch.is_grad_enabled() and (q.requires_grad or v.requires_grad)
        if not takes_narrow_values(q.device, q.dtype, width, values, causal, masked, grad):
            return sdpa(q, k, _padded(v, width), **options)[..., :values]
        # torch takes its math kernel, which holds all scores, where values do not begin at 16 bytes
        v = v.contiguous() if v.storage_offset() * v.element_size() % 16 else v

    groups = q.size(1) // k.size(1)
    # repeated heads cost (B, H, T, D); the math kernel would cost (B, H, S, T)
    if groups > 1 and q.is_cuda and (q.dtype == torch.float32 or not _a_kernel_shares_heads()):
        k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))  # (B, H, T, D)
        groups = 1
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=groups > 1, **options)


def _padded(v: Tensor, width: int) -> Tensor:
    """v (..., V) with zeros up to a width."""
    return v if v.size(-1) == width else F.pad(v, (0, width - v.size(-1)))


# Dynamo cannot read the switches, which last as long as a model
@constant_when_compiled
def _a_kernel_shares_heads() -> bool:
    """Whether torch may take a kernel that shares key/value heads: flash and cuDNN, which have 16 bits, and math."""
    cuda = torch.backends.cuda
    return cuda.flash_sdp_enabled() or cuda.math_sdp_enabled() or cuda.cudnn_sdp_enabled()


def _varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    spec: AttentionSpec,
    sinks: Tensor | None,
    causal: bool,
) -> Tensor:
    """Attention inside segments of cumulative lengths cu_seqlens: shapes as `attend_sequences`."""
    batch = q.shape[:2]
    width = v.size(-1)
    q, k, v = (t.flatten(0, 1) for t in (q, k, _padded(v, q.size(-1))))  # (B S, H or K, D)
    if spec.sinks and sinks is not None:
        out = varlen_with_sinks(q, k, v, sinks, cu_seqlens, longest, spec.scale, spec.window)
    else:
        out = varlen(q, k, v, cu_seqlens, longest, spec.scale, spec.window, causal)
    return out[..., :width].unflatten(0, batch)


@not_compiled  # within a compiled block it is compiled by itself, and its block mask is of host integers
def _by_flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: SegmentPlan | None,
    spec: AttentionSpec,
    sinks: Tensor | None,
) -> Tensor:
    """Attention inside segments of a plan, or sequences, by FlexAttention: shapes as `attend_sequences`."""
    plan = _sequence_plan(q.size(1)) if plan is None else plan
    return attend_flex(q, k, v, plan.blocks(spec.window, q.device), spec, sinks)


def _windowed(
    q: Tensor, k: Tensor, v: Tensor, window: int, attend: Callable[..., Tensor]
) -> Tensor:
    """Windowed attention in chunks of W queries, each with its own W keys and those before, by calls of `attend`: shapes
    as `sdpa`.

    Keys and values are copied once more.
    """
    size = q.size(2)
    chunks = size // window  # full ones, at least 1
    # a query of a chunk reaches back into the chunk before and no further: one mask serves all chunks
    query = torch.arange(window, 2 * window, device=q.device)
    mask = visible(query, torch.arange(2 * window, device=q.device), window)  # (W, 2 W)

    # the first chunk has none before it
    out = [attend(*(t[:, :, :window] for t in (q, k, v)), is_causal=True)]
    if chunks > 1:
        full = [t[:, :, : chunks * window].unflatten(2, (chunks, window)) for t in (q, k, v)]
        pairs = [torch.cat((t[:, :, :-1], t[:, :, 1:]), dim=3) for t in full[1:]]
        # (B, H or K, N, W or 2 W, D) -> (B N, H or K, W or 2 W, D)
        merged = [t.transpose(1, 2).flatten(0, 1) for t in (full[0][:, :, 1:], *pairs)]
        later = attend(*merged, attn_mask=mask)
        out.append(later.unflatten(0, (q.size(0), -1)).transpose(1, 2).flatten(2, 3))

    rest = size - chunks * window
    if rest:
        keys, values = (t[:, :, (chunks - 1) * window :] for t in (k, v))
        last = mask[:rest, : window + rest]
        out.append(attend(q[:, :, chunks * window :], keys, values, attn_mask=last))
    return torch.cat(out, dim=2)


def _by_length(
    q: Tensor, k: Tensor, v: Tensor, plan: SegmentPlan, attend: Callable[..., Tensor]
) -> Tensor:
    """Attend with one call for all segments of each length, (N, L, H or K, D): q (B S, H, D) -> like q."""
    # segments of one length become neighbors: one call per length, not one per segment
    if plan.order is not None:
        order, inverse = plan.permutation(q.device)
        q, k, v = (_Reorder.apply(t, order, inverse) for t in (q, k, v))
    sizes = [length * count for length, count in plan.groups]
    found = []
    for (length, count), *group in zip(plan.groups, *(t.split(sizes) for t in (q, k, v))):
        found.append(attend(*(t.unflatten(0, (count, length)) for t in group)).flatten(0, 1))
    out = torch.cat(found)  # (B S, H, D)
    return out if plan.order is None else _Reorder.apply(out, inverse, order)


class _Reorder(torch.autograd.Function):
    """Reorder the first dim of x; the backward gathers by the inverse order, so it needs no scatter."""

    @staticmethod
    def forward(ctx, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(inverse)
        return x.index_select(0, order)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


__getattr__ = renamed(__name__)
