"""Load balancing of experts: router losses, the scopes of their counts, the loss-free bias, counters.

Shapes: T tokens of this rank, K slots per token, E experts, G segments (sequences or documents); B sequences of S tokens
on each of W ranks that hold parts of the same sequences. An id of E marks a dropped slot. f_e is the fraction of the
choices that went to expert e, a constant; P_te the probability of expert e for token t, with a gradient.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from forge_moe._shared.problems import invalid
from forge_moe._torch_compat import all_gather, inside_backward
from forge_moe.protocols import TokenContext
from forge_moe.replay import replaying

V = TypeVar("V")


# ---- losses


class AuxLosses(NamedTuple):
    """0-dim fp32 tensors, multiplied by their weights; total is the sum of the other three."""

    total: Tensor
    balance: Tensor
    z: Tensor
    sequence: Tensor

    @staticmethod
    def of(balance: Tensor, z: Tensor, sequence: Tensor) -> "AuxLosses":
        """Losses with their total."""
        return AuxLosses(balance + z + sequence, balance, z, sequence)


def balance_loss(
    fractions: Tensor, probabilities: Tensor, valid: Tensor | None, total: Tensor | int
) -> Tensor:
    """E / T sum_t sum_e f_e P_te: 1 for an even load, up to E when one expert takes all (Switch, eq. 4).

    fractions f: (E,), or (T, E) with those of each token's own sequence. probabilities P (T, E). Tokens with valid (T,)
    False do not count. `total` is the number of tokens, an integer or 0-dim. Where it includes other ranks that split the
    same sequences, the result is this rank's part of the mean: the ranks' results add up. The loss is linear in P: with
    equal f, the mean over ranks or micro-batches, weighted by tokens, is the loss of all their tokens.

    With the fractions of each sequence it is DeepSeek-V3's loss per sequence (eq. 17-20), averaged over sequences by
    length. `transformers` sums over slots where this averages: its value is K times this one.
    """
    per_token = torch.linalg.vecdot(probabilities, fractions.expand_as(probabilities))  # (T,)
    return probabilities.size(1) * _mean(per_token, valid, total)


def z_loss(logits: Tensor, valid: Tensor | None, total: Tensor | int) -> Tensor:
    """Mean over tokens of logsumexp(logits (T, E)) squared (ST-MoE, eq. 5); `total` as in `balance_loss`."""
    return _mean(logits.logsumexp(dim=-1).square(), valid, total)


def _mean(values: Tensor, valid: Tensor | None, total: Tensor | int) -> Tensor:
    if valid is not None:
        values = values.masked_fill(~valid, 0.0)
    return values.sum() / (max(total, 1) if isinstance(total, int) else total.clamp_min(1))


class AttachLoss(Function):
    """The identity of y; backward also propagates `scale` times the gradient of `loss`.

    loss and scale are 0-dim tensors. The loss reaches the router under pipeline stages and recomputation too, where no
    caller sees its value.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        ctx.options = {"dtype": loss.dtype, "device": loss.device}
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (scale,) = ctx.saved_tensors
        return grad, torch.ones((), **ctx.options) * scale.to(**ctx.options), None


# ---- counts


def count_ids(ids: Tensor, num_experts: int) -> Tensor:
    """Number of choices of each expert: ids (T, K) in 0..E -> (E,) int64; dropped slots are not counted."""
    return _scatter_ones(ids.reshape(-1), num_experts + 1)[:num_experts]


def count_ids_per_segment(
    ids: Tensor, segments: Tensor, num_segments: int, num_experts: int
) -> Tensor:
    """The same for each segment: ids (T, K), segments (T,) in 0..G-1 -> (G, E) int64."""
    columns = num_experts + 1  # the last one counts dropped slots
    flat = (segments.unsqueeze(1) * columns + ids).reshape(-1)
    table = _scatter_ones(flat, num_segments * columns).view(num_segments, columns)
    return table[:, :num_experts]


def _scatter_ones(index: Tensor, size: int) -> Tensor:
    # Integer sums do not depend on their order; bincount would sync with the host.
    return index.new_zeros(size).scatter_add_(0, index, torch.ones_like(index))


def to_fractions(counts: Tensor) -> Tensor:
    """Fraction of each expert in counts (..., E) as fp32; 0 where nothing was counted."""
    return counts.float() / counts.sum(dim=-1, keepdim=True).clamp_min(1)


def reduction_groups(groups: Any) -> tuple[Any, ...]:
    """Process groups to reduce over one after the other, from a group, a sequence of groups, or None.

    None is legal on one process only and raises ValueError on more: local counts would give each rank another bias. `()`
    reduces over no group.
    """
    if groups is None:
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            rule = f"must be given in a job of {dist.get_world_size()} ranks, to sum the counts"
            fix = "give the data-parallel groups, or () to sum nothing"
            raise invalid("groups", "missing", groups, rule, fix)
        return ()
    return tuple(groups) if isinstance(groups, tuple | list) else (groups,)


def sum_over(counts: Tensor, groups: Sequence[Any]) -> Tensor:
    """Sum integers over the ranks of `groups`, into a new tensor: one all-reduce per group."""
    if groups:
        counts = counts.clone(memory_format=torch.contiguous_format)
    for group in groups:
        dist.all_reduce(counts, group=group)
    return counts


class RoutingCounters:
    """Sums of a layer on the device, created in the first forward; not part of the module's state.

    `step_counts` (E,) int64: choices since the last end of step, in training forwards; `global_step_counts`: those of
    all data ranks. `sums` since the last `reset`, over all forwards: `counts` (E,), `tokens`, `dropped` int64, `entropy`
    fp64.
    """

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts
        self.step_counts: Tensor | None = None
        self.global_step_counts: Tensor | None = None
        self.sums: dict[str, Tensor] = {}
        self.device: torch.device | None = None  # of the last forward

    def reset(self) -> None:
        """Reset the statistics; the counts of the step stay."""
        self.sums = {}

    def add(self, counts: Tensor, others: dict[str, Tensor | int], *, training: bool) -> None:
        """Add one forward. Sums are new tensors: those made under inference_mode cannot be changed later."""
        self.device = device = counts.device
        if training:
            self.step_counts = _add(self.step_counts, counts, device)
        values: dict[str, Tensor | int] = {"counts": counts, **others}
        self.sums = {n: _add(self.sums.get(n), value, device) for n, value in values.items()}

    def add_global(self, counts: Tensor) -> Tensor:
        """Add one micro-batch's counts over all data ranks; the sum of the step so far, (E,) int64."""
        total = counts if self.global_step_counts is None else self.global_step_counts + counts
        self.global_step_counts = total
        return total

    def read(self) -> dict[str, Tensor]:
        """The sums, and the entropy as a mean over tokens; zeros before the first forward."""
        if not self.sums:
            zero = torch.zeros((), dtype=torch.int64, device=self.device)
            counts = zero.repeat(self.num_experts)
            return {"counts": counts, "tokens": zero, "dropped": zero, "entropy": zero.float()}
        entropy = (self.sums["entropy"] / self.sums["tokens"].clamp_min(1)).float()
        return {**{name: value.clone() for name, value in self.sums.items()}, "entropy": entropy}

    def take_step(self, device: torch.device) -> Tensor:
        """Choices of the step (E,) int64; the counts of the next step start at 0."""
        counts = self.step_counts
        self.step_counts = self.global_step_counts = None
        if counts is None:
            return torch.zeros(self.num_experts, dtype=torch.int64, device=device)
        return counts.to(device)


def _add(total: Tensor | None, value: Tensor | int, device: torch.device) -> Tensor:
    if total is not None:
        total = total.to(device)
        return total if isinstance(value, int) and value == 0 else total + value
    if isinstance(value, Tensor):
        return value.clone()
    return torch.full((), value, dtype=torch.int64, device=device)


# ---- sequences split over ranks


class DocumentSegments(NamedTuple):
    """Segment ids below `num_segments` of the tokens of all ranks (W T,) and of this rank (T,).

    Tokens of documents that have no token on this rank get segment num_segments - 1.
    """

    all_ranks: Tensor
    this_rank: Tensor
    num_segments: int


class SequenceGroup:
    """The process groups of a layer's `sequence_group`, in a forward with context `ctx`.

    Several groups are crossed axes (context and tensor parallel): reduced or gathered over one after the other. Values
    that are the same in all layers of a forward are computed once if ctx is a `CachingContext`.
    """

    def __init__(self, groups: Any, ctx: TokenContext | None) -> None:
        self.groups = () if groups is None else reduction_groups(groups)
        self.ctx = ctx

    def sum(self, counts: Tensor) -> Tensor:
        """Sum integers over the ranks: one all-reduce per group."""
        return sum_over(counts, self.groups)

    def gather(self, x: Tensor) -> Tensor:
        """x (n, ...) of all ranks, (W n, ...), in the same order on each; one all-gather per group."""
        for group in self.groups:
            x = all_gather(x, group)
        return x

    def num_tokens(self, ids: Tensor, valid: Tensor | None) -> Tensor:
        """Number of tokens of all ranks without pads, 0-dim int64; this rank has those of ids (T, K)."""

        def make() -> Tensor:
            # Without pads here, too: other ranks may have some.
            return self.sum(ids.new_full((), len(ids)) if valid is None else valid.sum())

        return self._once("num_tokens", make)

    def documents(self, ids: Tensor) -> DocumentSegments:
        """Segments of the documents that have tokens on this rank, from its document ids (B, S).

        An id names one document of its sequence, in whatever order ranks hold its tokens. No host sync.
        """

        def make() -> DocumentSegments:
            num, size = ids.shape
            # A segment is the position of the first token with its id in the sorted ids of its sequence: ids are
            # not dense, and their number on the host would cost a sync.
            known = ids.sort(dim=1).values  # (B, S)
            offset = torch.arange(0, num * size, size, device=ids.device).unsqueeze(1)  # (B, 1)
            gathered = self.gather(ids).view(-1, num, size).transpose(0, 1).flatten(1)  # (B, W S)
            position = torch.searchsorted(known, gathered).clamp_max(max(size - 1, 0))
            found = known.gather(1, position) == gathered

            segments = torch.where(found, position + offset, num * size)
            all_ranks = segments.view(num, -1, size).transpose(0, 1).flatten()  # (W T,)
            this_rank = (torch.searchsorted(known, ids) + offset).flatten()  # (T,)
            return DocumentSegments(all_ranks, this_rank, num * size + 1)

        return self._once("documents", make)

    def _once(self, name: str, make: Callable[[], V]) -> V:
        once = getattr(self.ctx, "once", None)
        key = ("forge_moe.sequence_group", name, *map(id, self.groups))
        found: V = make() if once is None else once(key, make)
        return found


# ---- fractions f in the scopes of the balance loss


def sequence_fractions(
    ids: Tensor, rows: int, documents: Tensor | None, num_experts: int, group: SequenceGroup
) -> Tensor:
    """Fractions in each token's own sequence: ids (T, K) of `rows` sequences one after another -> (T, E).

    With `documents` (rows, T / rows) a run of equal ids is a sequence of its own. If sequences are split over ranks:
    without documents one all-reduce of (rows, E) integers; with them an all-gather of ids (T, K) in int32 and, once per
    forward, of documents; a document is then an id within its sequence.
    """
    length = ids.size(0) // max(rows, 1)
    if documents is not None:
        documents = documents.to(ids.device, non_blocking=True).view(rows, length)
        if group.groups:
            # A document may begin on one rank and end on another: counts per document need all ranks' ids.
            found = group.documents(documents)
            all_ids, num = group.gather(ids.int()).long(), found.num_segments
            counts = count_ids_per_segment(all_ids, found.all_ranks, num, num_experts)
            return to_fractions(counts).index_select(0, found.this_rank)

        # T bounds the number of segments, as the exact number would cost a host sync; most are empty.
        begins = torch.ones_like(documents, dtype=torch.bool)
        begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
        segments, num_segments = begins.view(-1).cumsum(0) - 1, rows * length
    else:
        segments = torch.arange(rows, device=ids.device).repeat_interleave(length)
        num_segments = rows
    counts = count_ids_per_segment(ids, segments, num_segments, num_experts)  # (G, E)
    return to_fractions(group.sum(counts)).index_select(0, segments)


def global_batch_counts(counts: Tensor, data_groups: Any, group: SequenceGroup) -> Tensor:
    """Counts (E,) of this micro-batch over all data ranks, and ranks that hold parts of its sequences.

    One all-reduce of E integers per group. Raises RuntimeError in a recomputation without recorded fractions: later
    micro-batches have changed the sums by then.
    """
    if inside_backward() and not replaying():
        raise RuntimeError(
            "aux_scope 'global_batch' must be recomputed with the fractions of its forward; "
            "give checkpoint(..., context_fn=forge_moe.recompute_contexts)"
        )
    return sum_over(group.sum(counts), reduction_groups(data_groups))


def lagged_fractions(counts: Tensor) -> Tensor:
    """Fractions in the last step's counts (E,); even ones before the first step has ended."""
    even = torch.full_like(counts, 1.0 / counts.numel(), dtype=torch.float32)
    return torch.where(counts.sum() > 0, to_fractions(counts), even)


# ---- the loss-free bias (Wang et al. 2024): it makes full experts less likely to be chosen


def rate_at(rate: float, schedule: str, step: int, total_steps: int) -> float:
    """The rate at optimizer step `step` of 0..total_steps-1.

    "constant"; "cosine" falls to 0 at the end; "linear_warmup" rises over the first tenth of the run.
    """
    if schedule == "cosine":
        return rate * 0.5 * (1.0 + math.cos(math.pi * min(step / max(total_steps, 1), 1.0)))
    if schedule == "linear_warmup":
        return rate * min((step + 1) / max(math.ceil(0.1 * total_steps), 1), 1.0)
    return rate


def moved_bias(bias: Tensor, counts: Tensor, rate: float, center: bool) -> Tensor:
    """bias (E,) fp32 + rate * sign(mean load - load), with its mean subtracted if `center`."""
    num = counts.numel()
    # mean - load, times E: integers, so an expert exactly at the mean gets sign 0.
    moved = bias + rate * torch.sign(counts.sum() - counts * num)
    return moved - moved.mean() if center else moved
