"""Forwards of modules under tensor parallelism: mixins for `add_mixin`, each around the module's own forward.

Shapes: B sequences, S tokens of a sequence, T tokens in a flat list, D width of the residual stream, n ranks of tp.
`tokens_sharded`: a rank has S/n tokens of the residual stream (sequence parallelism).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from forge_parallel._shared.problems import invalid
from forge_parallel.axes.collectives import (
    NamedGroup,
    copy,
    gather,
    gather_replicated,
    reduce,
    scatter,
    split,
    token_dim,
)
from forge_parallel.axes.local import local_value


class SharedInputs:
    """A cache of one gathered tensor for sibling layers (q, k, v): one all-gather for all of them.

    `open`: the parent of the siblings runs; otherwise layers gather for themselves.
    """

    def __init__(self) -> None:
        self.open = False
        self.clear()

    def clear(self) -> None:
        """Forget the tensor."""
        self._input: Tensor | None = None
        self._gathered: Tensor | None = None
        self._state: tuple[int, bool] | None = None

    def get(self, x: Tensor, gather: Callable[[Tensor], Tensor]) -> Tensor:
        """`gather(x)`, computed anew if x is another tensor, was changed in place, or the grad mode is another."""
        # inference tensors have no version, and compiled code cannot read it
        no_version = torch.compiler.is_compiling() or x.is_inference()
        state = (0 if no_version else x._version, torch.is_grad_enabled())
        if self._gathered is None or self._input is not x or self._state != state:
            self._input, self._gathered, self._state = x, gather(x), state
        return self._gathered


@dataclasses.dataclass(frozen=True)
class TPRegion:
    """Collectives at the entry to and the exit from a sharded layer. inputs: the cache of its siblings, if any."""

    group: NamedGroup
    tokens_sharded: bool
    inputs: SharedInputs | None = None

    def enter(self, x: Tensor) -> Tensor:
        """All tokens, for a layer sharded by outputs."""
        shared = self.inputs
        return shared.get(x, self._enter) if shared is not None and shared.open else self._enter(x)

    def _enter(self, x: Tensor) -> Tensor:
        """`enter` without its cache."""
        return gather(x, self.group, token_dim(x)) if self.tokens_sharded else copy(x, self.group)

    def exit(self, x: Tensor) -> Tensor:
        """The sum over ranks, with `tokens_sharded` for this rank's tokens only."""
        return (
            scatter(x, self.group, token_dim(x)) if self.tokens_sharded else reduce(x, self.group)
        )


class Colwise(nn.Module):
    """Takes all tokens, returns this rank's outputs. Of a sharded weight among its arguments (a tied head) it uses the
    local shard."""

    tp: TPRegion

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        args, kwargs = _on_first(self.tp.enter, args, kwargs)
        args = tuple(a.to_local() if isinstance(a, DTensor) else a for a in args)
        out: Tensor = super().forward(*args, **kwargs)
        return out


class SharedHeadRows(nn.Module):
    """Parameters with fewer heads than ranks: replicated, and in forward each rank sees the rows of one head.

    Several ranks see the same head. Gradients of the parameters are partial sums.
    """

    tp_rows: slice
    in_forward: bool

    @property
    def weight(self) -> Any:
        return self._rows("weight")

    @property
    def bias(self) -> Any:
        return self._rows("bias")

    @property
    def lora_b(self) -> Any:
        return self._rows("lora_b")

    def _rows(self, name: str) -> Any:
        """A parameter in full outside of forward, in it the rows of this rank's head."""
        full = local_value(self, name, (Partial(),))
        return full if full is None or not self.in_forward else full[self.tp_rows]


class SharedHeads(SharedHeadRows, Colwise):
    """A column-wise layer that computes one head, as other ranks do."""


@dataclasses.dataclass(frozen=True)
class MeanOverRanks:
    """The mean of squares of `width` numbers that are sharded over ranks; `replicas` ranks have the same ones.

    One all-reduce of (..., 1) forward, and one backward: the loss of each rank depends on the sums of all.
    """

    group: NamedGroup
    width: int
    replicas: int = 1

    def __call__(self, sums: Tensor) -> Tensor:
        total = copy(reduce(sums, self.group), self.group)
        return total / (self.width * self.replicas)


class ShardedLogits(Colwise):
    """A rank's logits; those of an uneven vocabulary are padded with -inf to the same width on all ranks.

    A head that is called with `loss`, a function, returns the function's result, which stays as it is.
    """

    tp_width: int  # logits of a rank, padded

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        logits = super().forward(*args, **kwargs)
        if kwargs.get("loss") is not None:
            return logits
        missing = self.tp_width - logits.size(-1)
        if missing < 0:
            rule = f"of a rank must have at most {self.tp_width} ids"
            fix = "give the tied weight's embedding the role 'vocab'"
            raise invalid("logits", "width", tuple(logits.shape), rule, fix)
        return F.pad(logits, (0, missing), value=-torch.inf) if missing else logits


class GatheredLogits(ShardedLogits):
    """A rank's logits in training, for `vocab_cross_entropy`; otherwise those of all ids, by one all-gather."""

    tp_ids: int  # ids of the full vocabulary
    tp_gathers = False  # set while the model computes a loss of its own, which needs all logits

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        logits = super().forward(*args, **kwargs)
        if kwargs.get("loss") is not None:
            return logits
        if self.training and torch.is_grad_enabled() and not self.tp_gathers:
            return logits
        return gather_replicated(logits, self.tp.group, logits.dim() - 1)[..., : self.tp_ids]


class Rowwise(nn.Module):
    """Takes this rank's inputs, returns the sum over ranks; the bias is added once, to the sum."""

    tp: TPRegion
    tp_summing = False

    # The layer's own forward must not see the bias: each rank would add it, and the sum would contain it n times.
    @property
    def bias(self) -> Tensor | None:
        if self.tp_summing:
            return None
        return local_value(self, "bias", (Partial(),) if self.tp.tokens_sharded else None)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        if self._parameters.get("bias") is None:
            return self.tp.exit(super().forward(*args, **kwargs))
        self.tp_summing = True
        try:
            out = self.tp.exit(super().forward(*args, **kwargs))
        finally:
            self.tp_summing = False
        return out + self.bias  # type: ignore[operator]


class VocabEmbedding(nn.Module):
    """Looks up this rank's ids; the sum over ranks adds the vectors of the others."""

    tp: TPRegion
    tp_rows: tuple[int, int]

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        (ids,) = (*args, *kwargs.values())
        begin, end = self.tp_rows
        last = self.tp.group.rank == self.tp.group.size - 1
        # An id beyond the vocabulary is looked up on the last rank, a negative one on the first, so that both raise.
        foreign = torch.zeros_like(ids, dtype=torch.bool) if last else ids >= end
        foreign = foreign | (ids < begin) if begin else foreign
        out = super().forward((ids - begin).masked_fill(foreign, 0))
        return self.tp.exit(out.masked_fill(foreign.unsqueeze(-1), 0.0))


class Siblings(nn.Module):
    """The parent of layers with the same input: the first layer gathers it for all of them."""

    tp_inputs: SharedInputs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        inputs = self.tp_inputs
        inputs.open = True
        inputs.clear()
        try:
            return super().forward(*args, **kwargs)
        finally:
            inputs.open = False
            inputs.clear()


class Opaque(nn.Module):
    """Gathers all tokens, computes the same on every rank, and returns this rank's tokens."""

    tp: TPRegion

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's own forward on the tokens of all tp ranks, and return the stream of this rank's tokens."""
        full = _gather_streams((*args, *kwargs.values()), self.tp.group, type(self).__name__)
        args = tuple(full.get(id(a), a) for a in args)
        kwargs = {key: full.get(id(a), a) for key, a in kwargs.items()}
        out = super().forward(*args, **kwargs)
        outs = [out] if isinstance(out, Tensor) else list(out)
        stream = next((i for i, value in enumerate(outs) if _is_stream(value)), None)
        if stream is None:
            raise invalid(
                "opaque", "output", ..., "module must return the stream as a float tensor"
            )
        outs[stream] = split(outs[stream], self.tp.group, token_dim(outs[stream]))
        return outs[0] if isinstance(out, Tensor) else tuple(outs)


class DisjointTokens(nn.Module):
    """The parent of experts: gives each rank disjoint tokens, and the shard of the contexts for them."""

    tp: TPRegion

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        region, dim = self.tp, token_dim(x)
        # of all ranks: contexts have them all, in both cases
        tokens = x.size(dim) * (region.group.size if region.tokens_sharded else 1)
        args = tuple(_shard_context(a, region.group, tokens) for a in args)
        kwargs = {k: _shard_context(a, region.group, tokens) for k, a in kwargs.items()}
        if region.tokens_sharded:
            return super().forward(x, *args, **kwargs)
        out = super().forward(split(x, region.group, dim), *args, **kwargs)
        return gather_replicated(out, region.group, dim)


class Root(nn.Module):
    """The model itself: gathers logits for the model's own loss, and explains torch's error about mixed tensors."""

    tp_heads: tuple[Any, ...] = ()  # a tuple: nn.Module would register its modules a second time

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for head in self.tp_heads:
            head.tp_gathers = kwargs.get("labels") is not None
        try:
            return super().forward(*args, **kwargs)
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
            rule = (
                "that tp shards must be used by its own module's forward, and other code uses it (the line is above), where "
                "nothing would be exchanged between ranks"
            )
            fix = f"call the module there, or give it the role opaque: {error}"
            raise invalid("weight", "foreign", ..., rule, fix) from error


def _on_first(
    change: Callable[[Tensor], Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, of which the first, positional or keyword, is changed."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    name = next(iter(kwargs))
    return args, {**kwargs, name: change(kwargs[name])}


def _is_stream(value: Any) -> bool:
    """Whether a value may be the residual stream: a float tensor."""
    return isinstance(value, Tensor) and value.is_floating_point()


def _gather_streams(values: tuple[Any, ...], group: NamedGroup, name: str) -> dict[int, Tensor]:
    """{id: all tokens} of the first float tensor and of those of its shape (queries, keys, values)."""
    floats = [value for value in values if _is_stream(value)]
    if not floats:
        raise invalid("opaque", "input", name, "must take the stream as a float tensor")
    first, dim = floats[0], token_dim(floats[0])
    streams = {id(x): x for x in floats if x.shape == first.shape}
    return {key: gather_replicated(x, group, dim) for key, x in streams.items()}


def _shard_context(value: Any, group: NamedGroup, tokens: int) -> Any:
    """A copy of a dataclass with its (B or 1, S) tensors sharded along S; any other value unchanged.

    A context with `once` caches the copy for all layers of a forward.
    """
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value

    def make() -> Any:
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        per_token = {
            name: tensor.chunk(group.size, 1)[group.rank].contiguous()
            for name, tensor in fields.items()
            if isinstance(tensor, Tensor) and tensor.dim() > 1 and tensor.size(1) == tokens
        }
        return dataclasses.replace(value, **per_token)

    once = getattr(value, "once", None)
    return make() if once is None else once(("tensor_parallel", group, tokens), make)
