# Copied from scripts/shared/cross_entropy.py; edit that file, then run scripts/copy_shared.py.
"""Cross-entropy over a full or a sharded vocabulary, from logits or from hidden states and the weight of the head.

Shapes: N tokens (all leading dims flattened), R tokens of one block, D width, V ids of the vocabulary, W ids whose logits
this rank has (V on one rank). The terms of a token with logits l and label y, where Z = sum_j exp l_j,
log p_j = l_j - log Z, e is the smoothing and c the coefficient of the z-loss:

    cross-entropy    -log p_y
    label smoothing  -(1 - e) log p_y - e / V sum_j log p_j                  (Szegedy et al. 2016, section 7)
    z-loss           c (log Z)^2                                             (Chowdhery et al. 2022, section 5)
    gradient         (1 + 2 c log Z) p_j - (1 - e) [j = y] - e / V

Both losses walk over blocks of tokens, so that no second (N, W) tensor in fp32 exists. From logits, only these are saved,
and the backward computes the softmax again: on two CPU cores with N 2048 and V 32000 it took 141 ms for 296 (fp32) and
106 ms for 375 (bf16), forward and backward together. From hidden states, a block of logits is overwritten by its gradient,
and both gradients are computed in the forward: three matmuls, as many as with all logits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .problems import invalid

# Elements of one fp32 block: about 4 MB, which stays in the cache of a CPU over all passes; on other devices large
# enough that launching kernels costs nothing next to running them.
_BLOCK_CPU = 2**20
_BLOCK_DEVICE = 2**27
# Of logits made from hidden states (32 MB in fp32), and the fewest tokens: each block reads the weight twice and adds to
# its gradient. 512 tokens, 128,000 ids, width 512, bf16, one thread: 0.64, 0.55, 0.52 s in blocks of 128, 256, 512. On a
# CPU a block is also as large as the gradient in fp32: 4,096 tokens, 32,000 ids: 0.70 s for 0.60 (1,024 tokens).
_BLOCK_FUSED = 2**23
_TOKENS_FUSED = 256
# On other devices a block is 0.5 GB in bf16: each reads the weight twice, and reads and writes its gradient once. 16,384
# tokens, 128,256 ids, width 4,096: 24 matmuls in blocks of 2,048 tokens.
_BLOCK_LARGE = 2**28
_TOKENS_LARGE = 2048, 8192


@dataclass(frozen=True)
class TokenLoss:
    """The sum of token losses and its normalizer. Divide by a count of your own for many ranks.

    sum: 0-dim fp32 with a graph. count: 0-dim on the same device, the number of valid labels in int64, or with weights
    their sum in float64. Without a graph, for logs: cross_entropy, the sum without smoothing and z-loss; z_loss, the
    term in the sum with its coefficient; token_losses, the part of each label in cross_entropy, in the labels' shape.
    """

    sum: Tensor
    count: Tensor
    cross_entropy: Tensor
    z_loss: Tensor
    token_losses: Tensor

    @property
    def mean(self) -> Tensor:
        """`sum / count`: the mean over valid labels, and zero (with a graph) if the count is zero."""
        # clamp(min=1) would rescale small sums of weights
        count = self.count.masked_fill(self.count == 0, 1)
        return (self.sum / count).to(self.sum.dtype)


class Vocab(NamedTuple):
    """The coefficients of the terms, and the ids of this rank: rank * width to (rank + 1) * width, below `size` only.

    group: None, or an object with `rank`, `size` and `all_gather(x)`, which returns the tensors of all ranks, (size, ...).
    """

    size: int
    width: int
    z_loss: float
    label_smoothing: float
    group: Any = None

    @classmethod
    def of(
        cls, width: int, z_loss: float, label_smoothing: float, size: int = 0, group: Any = None
    ) -> Vocab:
        """ValueError for a coefficient out of range, and for a `size` that shards of `width` ids do not cover."""
        if not 0.0 <= z_loss < math.inf:
            rule = "must be a finite number of at least 0"
            raise invalid("z_loss", "range", z_loss, rule, "use 1e-4, or 0 for none")
        if not 0.0 <= label_smoothing < 1.0:
            rule = "must be at least 0 and below 1"
            raise invalid(
                "label_smoothing", "range", label_smoothing, rule, "use 0.1, or 0 for none"
            )

        group = None if group is None or group.size == 1 else group
        ranks = 1 if group is None else group.size
        size = size or width * ranks
        if -(-size // ranks) != width:
            rule = f"must give each of {ranks} ranks {width} ids, the width of its logits"
            raise invalid(
                "vocab_size", "shards", size, rule, "give the size of the full vocabulary"
            )
        return cls(size, width, z_loss, label_smoothing, group)

    @property
    def rank(self) -> int:
        """The number of this rank's shard."""
        rank: int = 0 if self.group is None else self.group.rank
        return rank

    @property
    def num_local(self) -> int:
        """Ids of this rank that are not padding."""
        return min(max(self.size - self.rank * self.width, 0), self.width)

    def locate(self, ids: Tensor, valid: Tensor) -> tuple[Tensor, Tensor | None]:
        """Column (N, 1) of each label, 0 if it is not valid or not here; and whether it is here (N,), None on one rank."""
        if self.group is None:
            return ids.where(valid, 0)[:, None], None
        column = ids - self.rank * self.width
        here = valid.clone()
        if self.rank:
            here &= column >= 0
        # no upper bound on the last rank: there an id beyond the vocabulary fails in the gather instead of counting 0
        if self.rank < self.group.size - 1:
            here &= column < self.width
        return column.where(here, 0)[:, None], here

    def empty(self, like: Tensor) -> Tensor:
        """The statistics of each of the tokens of like (N, ...), which `measure` fills: (1 to 3, N)."""
        rows = 3 if self.label_smoothing else 2 if self.z_loss or self.group is not None else 1
        return torch.zeros(rows, len(like), dtype=wide_dtype(like), device=like.device)

    def measure(self, logits: Tensor, target: Tensor, out: Tensor, p: Tensor | None = None) -> None:
        """Write log p_y, log Z and sum_j log p_j, as many as there are rows, into out (1 to 3, R).

        logits (R, W), their softmax p if it is there, target (R, 1). Of a shard: l_y, log Z and sum_j l_j over its ids, for
        `combine`.
        """
        if self.group is not None:
            wide = logits.to(out.dtype)
            out[0], out[1] = wide.gather(1, target)[:, 0], wide.logsumexp(dim=-1)
            if self.label_smoothing:
                out[2] = wide[:, : self.num_local].sum(-1)
            return

        if p is None:
            log_p = F.log_softmax(logits, dim=-1, dtype=out.dtype)
            out[0] = log_p.gather(1, target)[:, 0]
            if self.z_loss:
                # from the largest logit: well-conditioned, and two passes fewer than logsumexp
                largest = logits.argmax(-1, keepdim=True)
                of_logits = logits.gather(1, largest).to(log_p.dtype)
                out[1] = (of_logits - log_p.gather(1, largest))[:, 0]
            if self.label_smoothing:
                out[2] = log_p.sum(-1)
            return

        # From the largest logit, whose p is at least 1 / W: log p_y = -inf for a small p_y otherwise. On a CPU softmax
        # and two maxima take half the time of log_softmax and exp, and p is needed for the gradient.
        top = logits.amax(-1).to(out.dtype)
        log_top = p.amax(-1).log_()
        of_label = logits.gather(1, target)[:, 0].to(out.dtype)
        torch.add(of_label - top, log_top, out=out[0])
        if self.z_loss:
            out[1] = top - log_top
        if self.label_smoothing:
            # the mean first: V log Z would lose the digits of the difference
            out[2] = (logits.mean(-1, dtype=out.dtype) - top + log_top) * self.size

    def combine(self, found: Tensor, here: Tensor | None) -> Tensor:
        """The statistics over all ids from those of the shards: one all-gather of (2 or 3, N)."""
        if self.group is None or here is None:
            return found
        found[0] = found[0].where(here, 0.0)
        shards = self.group.all_gather(found)  # (ranks, 2 or 3, N)
        log_z = shards[:, 1].logsumexp(dim=0)
        sums = [shards[:, 0].sum(dim=0) - log_z, log_z]
        if self.label_smoothing:
            # the mean first: V log Z would lose the digits of the difference
            sums.append((shards[:, 2].sum(dim=0) / self.size - log_z) * self.size)
        return torch.stack(sums)

    def sums(
        self, found: Tensor, valid: Tensor, weights: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The sum of all terms, 0-dim; (cross-entropy, z-loss), (2,); the cross-entropy of each token, (N,)."""

        def weighted(values: Tensor) -> Tensor:
            # `where`, not a product: an ignored token may have any logits, also NaN
            values = values.where(valid, 0.0)
            return values if weights is None else values * weights

        log_p = weighted(found[0])
        plain = total = log_p.sum().neg()
        z_loss = torch.zeros_like(plain)
        if self.label_smoothing:
            fraction = self.label_smoothing / self.size
            total = (1 - self.label_smoothing) * plain - fraction * weighted(found[2]).sum()
        if self.z_loss:
            z_loss = self.z_loss * weighted(found[1].square()).sum()
            total = total + z_loss
        return total, torch.stack((plain, z_loss)), log_p.neg()

    def probabilities(self, logits: Tensor, found: Tensor) -> Tensor:
        """softmax(logits) (R, W) as a new tensor in the dtype of the statistics."""
        if self.group is None:
            return torch.softmax(logits, dim=-1, dtype=found.dtype)
        return logits.to(found.dtype, copy=True).sub_(found[1][:, None]).exp_()

    def gradient_(
        self,
        p: Tensor,
        target: Tensor,
        here: Tensor | None,
        scale: Tensor,
        found: Tensor,
        of_label: Tensor | None = None,
    ) -> Tensor:
        """Overwrite probabilities (R, W) by the gradient of the sum; scale (R, 1) is 0 for ignored tokens.

        of_label (R, 1) is `scale * (label_smoothing - 1)`, where the caller has it.
        """
        factor = scale
        if self.z_loss:
            # an ignored token may have any log Z, and its factor stays zero
            factor = scale * (1 + 2 * self.z_loss * found[1][:, None]).where(scale != 0, 1.0)
        p.mul_(factor)
        if self.label_smoothing:
            p[:, : self.num_local].sub_(scale * (self.label_smoothing / self.size))
        if of_label is None:
            of_label = scale * (self.label_smoothing - 1)
        return p.scatter_add_(1, target, of_label if here is None else of_label * here[:, None])


class Labels(NamedTuple):
    """Flat labels: ids (N,) int64, valid (N,) bool, weights (N,) or None, and the normalizer, 0-dim."""

    ids: Tensor
    valid: Tensor
    weights: Tensor | None
    normalizer: Tensor

    @classmethod
    def of(
        cls,
        labels: Tensor,
        weights: Tensor | None,
        ignore_index: int,
        vocab_size: int,
        dtype: torch.dtype,
    ) -> Labels:
        """Weights in `dtype`. ValueError for wrong dtypes and shapes, and on a CPU for a label that is not an id."""
        if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
            rule = "must be token ids"
            raise invalid("labels", "dtype", labels.dtype, rule, "use torch.int64")
        ids = labels.reshape(-1).to(torch.int64)
        valid = ids != ignore_index
        # on other devices a check would cost a sync, and an index out of range trips an assertion there
        readable = type(ids) is Tensor and ids.device.type == "cpu"
        if readable and not torch.compiler.is_compiling():
            wrong = ids[valid & ((ids < 0) | (ids >= vocab_size))]
            if wrong.numel():
                rule = f"must be in [0, {vocab_size}), the vocabulary, or ignore_index"
                fix = "enlarge the vocabulary or check the tokenizer"
                raise invalid("labels", "range", int(wrong[0]), rule, fix)

        if weights is None:
            return cls(ids, valid, None, valid.sum())
        if not weights.is_floating_point():
            rule = "must be floating-point numbers"
            raise invalid("weights", "dtype", weights.dtype, rule, "cast them")
        if weights.shape != labels.shape:
            rule = f"must have the shape of labels {tuple(labels.shape)}"
            raise invalid("weights", "shape", tuple(weights.shape), rule, "give one for each label")
        flat = weights.reshape(-1).to(dtype).where(valid, 0.0)
        return cls(ids, valid, flat, flat.double().sum())


def loss_of_logits(logits: Tensor, labels: Labels, shape: torch.Size, vocab: Vocab) -> TokenLoss:
    """The loss of logits (N, W) of floating point; `shape` is the shape of `token_losses`."""
    if torch.compiler.is_compiling() and vocab.group is None:
        # operators that the compiler fuses and differentiates itself
        found = vocab.empty(logits)
        vocab.measure(logits, vocab.locate(labels.ids, labels.valid)[0], found)
        total, parts, each = vocab.sums(found, labels.valid, labels.weights)
        parts, each = parts.detach(), each.detach()
    else:
        total, parts, each = _OfLogits.apply(logits, *labels[:3], vocab)
    return TokenLoss(total, labels.normalizer, parts[0], parts[1], each.view(shape))


class _OfLogits(torch.autograd.Function):
    """(N, W) logits, and ids, valid and weights of `Labels` -> the results of `Vocab.sums`."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        ids: Tensor,
        valid: Tensor,
        weights: Tensor | None,
        vocab: Vocab,
    ) -> tuple[Tensor, Tensor, Tensor]:
        target, here = vocab.locate(ids, valid)
        found = vocab.empty(logits)
        for rows in _row_blocks(logits):
            vocab.measure(logits[rows], target[rows], found[:, rows])
        found = vocab.combine(found, here)

        ctx.vocab = vocab
        ctx.save_for_backward(logits, found, target, here, valid, weights)
        total, parts, each = vocab.sums(found, valid, weights)
        ctx.mark_non_differentiable(parts, each)
        return total, parts, each

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, found, target, here, valid, weights = ctx.saved_tensors
        scale = grads[0] * (valid if weights is None else weights)[:, None]  # (N, 1)
        grad = torch.empty_like(logits)  # (N, W)
        for rows in _row_blocks(logits):
            p = ctx.vocab.probabilities(logits[rows], found[:, rows])
            local = None if here is None else here[rows]
            grad[rows] = ctx.vocab.gradient_(p, target[rows], local, scale[rows], found[:, rows])
            del p  # or it would be alive together with the next block
        return grad, None, None, None, None


class Head(NamedTuple):
    """Logits of matmuls z: scale * z, or softcap * tanh(scale * z / softcap)."""

    scale: float
    softcap: float | None

    @classmethod
    def of(cls, scale: float, softcap: float | None) -> Head:
        """ValueError for a soft-cap that is not above 0."""
        if softcap is not None and not softcap > 0:
            rule = "must be above 0, or None for no cap"
            raise invalid("softcap", "range", softcap, rule, "use 30, or None for no cap")
        return cls(scale, softcap)

    def logits(self, product: Tensor, dtype: torch.dtype) -> Tensor:
        """Logits (R, W) in `dtype`: `product` itself if it has that dtype and nothing is to be done."""
        if self.scale == 1.0 and self.softcap is None:
            return product.to(dtype)
        logits = product.to(dtype, copy=True).mul_(self.scale)
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits

    def backward_(self, grad: Tensor, logits: Tensor) -> Tensor:
        """The gradient of the product from the gradient of the logits, in place."""
        if self.softcap is not None:
            grad.mul_(1 - (logits / self.softcap).square_())
        return grad if self.scale == 1.0 else grad.mul_(self.scale)


def cast_like_autocast(x: Tensor) -> Tensor:
    """x in the dtype in which a matmul under the current autocast has it; float64 stays."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(kind))


def loss_of_hidden(
    x: Tensor, weight: Tensor, labels: Labels, shape: torch.Size, vocab: Vocab, head: Head
) -> TokenLoss:
    """The loss of hidden states (N, D) and the head's weight (W, D), both as `cast_like_autocast` returns them."""
    needs = (x.requires_grad, weight.requires_grad) if torch.is_grad_enabled() else (False, False)
    if any(needs) and x.dtype == torch.float16:
        reason = "they are rounded to it before the factor of a loss scaler is known"
        rule = f"must be bf16 or wider where gradients are needed: {reason}"
        raise invalid("x", "dtype", x.dtype, rule, "use bf16, or the loss of logits")
    scales = labels.valid.to(wide_dtype(x)) if labels.weights is None else labels.weights
    with torch.autocast(x.device.type, enabled=False):
        total, parts, each = _OfHidden.apply(x, weight, *labels[:2], scales, vocab, head, needs)
    return TokenLoss(total, labels.normalizer, parts[0], parts[1], each.view(shape))


def block_size(num_ids: int, dim: int, wide: torch.dtype, dtype: torch.dtype, device: str) -> int:
    """Tokens of a block of logits of `num_ids` ids, which are made from hidden states (..., dim) in `dtype`."""
    if device != "cpu":
        low, high = _TOKENS_LARGE
        # a multiple of 128, the tile of a matmul
        return min(max(_BLOCK_LARGE // num_ids // 128 * 128, low), high)
    # at least as much memory as the gradient of the weight takes
    return max(_TOKENS_FUSED, _BLOCK_FUSED // num_ids, dim * wide.itemsize // dtype.itemsize)


class _OfHidden(torch.autograd.Function):
    """(N, D), (W, D), ids, valid and weights of `Labels` -> the results of `Vocab.sums`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        ids: Tensor,
        valid: Tensor,
        scales: Tensor,
        vocab: Vocab,
        head: Head,
        needs: tuple[bool, bool],
    ) -> tuple[Tensor, Tensor, Tensor]:
        target, here = vocab.locate(ids, valid)
        found = vocab.empty(x)
        grad_x = torch.empty_like(x) if needs[0] else None

        # equal on all ranks, also on one with fewer ids, as each block has its collective
        size = block_size(vocab.width, x.size(1), found.dtype, x.dtype, x.device.type)
        of_labels = scales * (vocab.label_smoothing - 1)
        # the product of one block needs no sum
        dtype = weight.dtype if len(x) <= size else found.dtype
        grad_weight = weight.new_zeros(weight.shape, dtype=dtype) if needs[1] else None

        # written again by each block: of a new tensor, a CPU maps the pages anew (128,000 ids: 0.21 s for 0.15)
        buffer = x.new_empty(min(size, len(x)), len(weight))
        for rows in _slices(len(x), size):
            block = torch.mm(x[rows], weight.mT, out=buffer[: len(target[rows])])  # (R, W)
            local = None if here is None else here[rows]
            of_block = target[rows], local, scales[rows, None], of_labels[rows, None]
            found[:, rows] = _overwrite_by_gradient(block, *of_block, vocab, head, any(needs))
            if grad_x is not None:
                torch.mm(block, weight, out=grad_x[rows])
            if grad_weight is not None and len(x) <= size:
                torch.mm(block.mT, x, out=grad_weight)
            elif grad_weight is not None:
                _add_matmul(grad_weight, block.mT, x[rows])

        ctx.save_for_backward(grad_x, grad_weight)
        ctx.dtype = weight.dtype
        total, parts, each = vocab.sums(found, valid, scales)
        ctx.mark_non_differentiable(parts, each)
        return total, parts, each

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        kept = _graph_is_kept()  # a pipeline that splits the backward comes twice

        def scaled(grad: Tensor | None) -> Tensor | None:
            if grad is None:
                return None
            if grad.dtype == ctx.dtype:
                return grad * grads[0] if kept else grad.mul_(grads[0])
            # some rows at a time, also as `out` in another dtype makes a full product in fp32 first
            rounded = torch.empty_like(grad, dtype=ctx.dtype)
            for rows in _pieces(grad):
                rounded[rows] = grad[rows] * grads[0]
            return rounded

        grad_x, grad_weight = ctx.saved_tensors
        return scaled(grad_x), scaled(grad_weight), None, None, None, None, None, None


def _overwrite_by_gradient(
    block: Tensor,
    target: Tensor,
    here: Tensor | None,
    scales: Tensor,
    of_labels: Tensor,
    vocab: Vocab,
    head: Head,
    needed: bool,
) -> Tensor:
    """The statistics of a block of matmuls (R, W); if `needed`, their gradient is written into the block.

    On a CPU a few tokens at a time, whose softmax stays in cache.
    """
    found = vocab.empty(block)
    if vocab.group is None:
        softmax = None
        for rows in _row_blocks(block):
            logits = head.logits(block[rows], found.dtype)
            if softmax is None:  # reused by all rows, whose first are the most
                softmax = torch.empty_like(logits)
            p = torch.softmax(logits, dim=-1, out=softmax[: len(logits)])
            vocab.measure(logits, target[rows], found[:, rows], p)
            if needed:
                of_label = scales[rows], found[:, rows], of_labels[rows]
                grad = vocab.gradient_(p, target[rows], None, *of_label)
                block[rows] = head.backward_(grad, logits)
            del logits  # or the next block's are made next to them
        return found

    for rows in _row_blocks(block):
        vocab.measure(head.logits(block[rows], found.dtype), target[rows], found[:, rows])
    found = vocab.combine(found, here)
    assert here is not None
    for rows in _row_blocks(block) if needed else ():
        logits = head.logits(block[rows], found.dtype)
        p = vocab.probabilities(logits, found[:, rows])
        of_label = scales[rows], found[:, rows], of_labels[rows]
        grad = vocab.gradient_(p, target[rows], here[rows], *of_label)
        block[rows] = head.backward_(grad, logits)
    return found


def _add_matmul(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b in the dtype of total.

    Of 16-bit tensors on CUDA cuBLAS adds to fp32; elsewhere a product is made some rows at a time, in one buffer.
    """
    if a.dtype == total.dtype:
        total.addmm_(a, b)
        return
    if a.is_cuda and total.dtype == torch.float32 and _adds_to_fp32():
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
        return
    product = None
    for rows in _pieces(total):
        part = a[rows]
        if product is None:
            product = b.new_empty(len(part), b.size(1))
        total[rows].add_(torch.mm(part, b, out=product[: len(part)]))


@cache
def _adds_to_fp32() -> bool:
    """Whether `torch.addmm` of 16-bit matrices adds to a matrix in fp32: cuBLAS, by the `out_dtype` of newer torch."""
    return torch.version.hip is None and "dtype_out" in torch.ops.aten.addmm.overloads()


def _graph_is_kept() -> bool:
    """Whether the current backward may run again (`retain_graph`); True if that is not known."""
    if torch.compiler.is_compiling():
        return True
    reads = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)  # 2.11 to 2.15
    return reads is None or bool(reads())


def wide_dtype(x: Tensor) -> torch.dtype:
    """The dtype of softmax and sums: fp32, or fp64 for fp64."""
    return torch.promote_types(x.dtype, torch.float32)


def _row_blocks(logits: Tensor) -> Iterator[slice]:
    """Slices of tokens whose fp32 logits are one block."""
    limit = _BLOCK_CPU if logits.device.type == "cpu" else _BLOCK_DEVICE
    return _slices(len(logits), max(1, limit // max(1, logits.size(1))))


def _pieces(grad: Tensor) -> Iterator[slice]:
    """Slices of rows of a gradient (W, D), small next to it."""
    limit = _BLOCK_CPU if grad.device.type == "cpu" else _BLOCK_DEVICE // 2
    return _slices(len(grad), max(1, limit // max(1, grad.size(1))))


def _slices(length: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, length, size))
