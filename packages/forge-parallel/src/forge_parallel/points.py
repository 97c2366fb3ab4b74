"""Unsharded activations of a parallelized model, for `ActivationStore` and `intervene` of forge_core.

Shapes: B sequences, S tokens of a sequence, M width of the stream, H query and K key/value heads, D width of a head, F
width of a feed-forward, E experts, V vocabulary, n ranks of tp.

    hook point                         value            tp: a rank has            cp: its chunks of
    resid_*, attn_out, mlp_out,        (B, S, M)        S/n tokens with           dim 1
    final_norm                                          sequence_parallel
    q, head_out                        (B, S, H, D)     H/n heads                 dim 1
    k, v                               (B, S, K, D)     K/n heads, at least one   dim 1
    mlp_hidden                         (B, S, F)        F/n numbers               dim 1
    attn_scores, attn_weights          (B, H, S, S)     H/n heads                 dim 2, the queries
    router_logits                      (B, S, E)        S/n tokens                dim 1
    logits                             (B, S, V)        V/n ids                   dim 1

Under pp a rank has the hook points of its stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from forge_parallel._renamed import renamed
from forge_parallel._shared.problems import invalid
from forge_parallel.axes.collectives import NamedGroup, gather_replicated
from forge_parallel.axes.context import gather_sequence, shard_sequence
from forge_parallel.axes.layers import Opaque, Rowwise, SharedHeads
from forge_parallel.axes.tensor import gather_vocab, sharded_logits_vocab_size, sharded_logits_width
from forge_parallel.config import ParallelConfig
from forge_parallel.meshes import Meshes
from forge_parallel.structure import stages_of

__all__ = ["POINTS", "TensorRole", "UnshardedPoints"]

#: How a value is sharded over ranks: as the stream, by heads, by the features of a token, as scores, by a router's tokens,
#: by ids of the vocabulary.
TensorRole = Literal["stream", "heads", "width", "scores", "routed", "vocab"]

#: Roles of the hook points of models of forge_core.
POINTS: dict[str, TensorRole] = {
    **dict.fromkeys(("resid_pre", "resid_mid", "resid_post"), "stream"),
    **dict.fromkeys(("attn_out", "mlp_out", "final_norm"), "stream"),
    **dict.fromkeys(("q", "k", "v", "head_out"), "heads"),
    **dict.fromkeys(("attn_scores", "attn_weights"), "scores"),
    "mlp_hidden": "width",
    "router_logits": "routed",
    "logits": "vocab",
}
_DIM_OF_ROLE: dict[TensorRole, int] = {
    "heads": 2,
    "width": -1,
    "scores": 1,
    "routed": 1,
    "stream": 1,
}


class UnshardedPoints:
    """Gather the values of hook points from the ranks of a parallelized model, and shard values for them.

        whole = UnshardedPoints(model, config, meshes)
        store = ActivationStore("layers.*.head_out", whole=whole)
        with store.watch(model):
            compute.forward(batch)                      # all ranks; see Compute
        with intervene(model, {"layers.2.head_out": lambda x, name: x * keep}, whole=whole):
            compute.forward(batch)

    `model` is that of `parallelize(model, config, meshes)`. Sequences and tokens of a value are those of the batch that
    the ranks of a pp, cp and tp group read, on each of these ranks; ranks of the data axes have sequences of their own.
    `kinds` are the roles of your own hook points. All ranks of a group watch the same points, call the model equally
    often, and change values alike.

    Cost of a value: one all-gather over tp, if it is sharded there, and one over cp; at the end of `watch` one
    broadcast over pp of each value, and two exchanges of their names and sizes. Scores and weights of attention under
    cp: all-gathers of keys, and of values if they are changed.

    Raises ValueError for a rank with several stages; later for a hook point without a role, one inside of an opaque
    module under sequence parallelism, and one of heads or hidden features whose module has no row-wise layer.
    """

    def __init__(
        self,
        model: nn.Module,
        config: ParallelConfig,
        meshes: Meshes,
        kinds: Mapping[str, TensorRole] | None = None,
    ) -> None:
        if len(stages_of(model)) > 1:
            rule = f"must have one stage a rank for points, and has {len(stages_of(model))}"
            fix = "use pp_schedule = '1f1b'"
            raise invalid("pp_schedule", "stages", config.pp_schedule, rule, fix)
        self.meshes, self.tp = meshes, NamedGroup.of(meshes.tp)
        self.kinds = POINTS | dict(kinds or {})
        self._shards_stream = config.sequence_parallel and self.tp.size > 1
        self._ids = sharded_logits_vocab_size(model)
        self._width = sharded_logits_width(model)
        self._opaque = [name for name, m in model.named_modules() if isinstance(m, Opaque)]

    def names(self, here: list[str]) -> list[str]:
        """The hook points of all stages, in order of depth, given those of this rank: one exchange over pp."""
        return [name for names in self._of_stages(here) for name in names]

    def check(self, name: str, place: Any) -> None:
        """ValueError for a hook point that cannot be gathered in this layout; `place` is one of `points_of(model)`."""
        if self.tp.size == self.meshes.cp.size == 1:
            return
        kind = self.kinds.get(place.point)
        if kind is None:
            rule = "has no role, so how tp and cp shard it is unknown"
            fix = f"give UnshardedPoints kinds={{{place.point!r}: ...}}, or use tp = 1 and cp = 1"
            raise invalid("point", "kind", name, rule, fix)
        if self.tp.size == 1:
            return

        inside = [p for p in self._opaque if f"{place.path}.".startswith(f"{p}.")]
        if inside and not (place.path in inside and place.kind in ("input", "output")):
            rule = f"is inside of {inside[0]}, which sees all tokens where tp splits the stream"
            raise invalid("point", "opaque", name, rule, "use sequence_parallel = false")

        children = place.module.children()
        if kind in ("heads", "width", "scores") and not any(
            isinstance(m, Rowwise) for m in children
        ):
            rule = "is of a module without a row-wise layer, so how tp shards it is unknown"
            raise invalid("point", "rowwise", name, rule, "use tp = 1")
        if kind == "vocab" and self._ids is None:
            rule = "must be of a head with the role sharded_logits under tp, and it has another"
            raise invalid("point", "head", name, rule, "use tp = 1")

    def join(self, place: Any, part: Tensor) -> Tensor:
        """Gather the full value, without graph, from this rank's shard, whose dim 0 is that of sequences."""
        role, value = self.kinds.get(place.point), part.detach().contiguous()
        if role == "routed" and value.dim() == 2:  # one token a sequence
            value = value.unsqueeze(1)
        if self.tp.size > 1:
            value = self._gather_tp(role, place, value)
        if self.meshes.cp.size > 1:
            dim = 2 if role == "scores" else 1
            value = gather_sequence(value.contiguous(), self.meshes.cp, dim)
        return value

    def cut(self, place: Any, value: Tensor) -> Tensor:
        """This rank's shard of a full value; no communication."""
        role = self.kinds.get(place.point)
        if self.meshes.cp.size > 1:
            value = shard_sequence(value, self.meshes.cp, 2 if role == "scores" else 1)
        return self._shard_tp(role, place, value) if self.tp.size > 1 else value

    def exchange(
        self, found: dict[str, list[Tensor]], max_bytes: int | None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the values of other stages, one after another, given those of this rank: one broadcast each."""
        if self.meshes.pp.size == 1:
            return
        described = [
            (name, v.shape, v.dtype, v.nbytes) for name, values in found.items() for v in values
        ]
        stages = self._of_stages(described)
        total = sum(size for stage in stages for *_, size in stage)
        if max_bytes is not None and total > max_bytes:
            rule = f"bytes are left, and the points of all stages make {total}"
            raise invalid("max_bytes", "range", max_bytes, rule, "raise it, or keep fewer points")

        own = iter([v for values in found.values() for v in values])
        for rank, stage in enumerate(stages):
            for name, shape, dtype, _ in stage:
                mine = rank == self.meshes.pp.rank
                value = next(own).to(self.meshes.device).contiguous() if mine else None
                if value is None:
                    value = torch.empty(shape, dtype=dtype, device=self.meshes.device)
                dist.broadcast(value, group=self.meshes.pp.group, group_src=rank)
                if not mine:
                    yield name, value

    def _of_stages(self, value: Any) -> list[Any]:
        """An object of each pp rank."""
        pp = self.meshes.pp
        if pp.size == 1:
            return [value]
        found: list[Any] = [None] * pp.size
        dist.all_gather_object(found, value, group=pp.group)
        return found

    def _gather_tp(self, role: TensorRole | None, place: Any, shard: Tensor) -> Tensor:
        """The value of all tp ranks, from this rank's shard."""
        if role == "vocab":
            is_shard = shard.size(-1) == self._width
            return gather_vocab(shard, self.meshes.tp, self._ids) if is_shard else shard
        if role is None or (role == "stream" and not self._shards_stream):
            return shard
        dim = _DIM_OF_ROLE[role] % shard.dim()
        value = gather_replicated(shard, self.tp, dim)
        owners = self._owners(place)
        if owners is None:
            return value
        # several ranks have the same head: take it once
        heads = value.chunk(self.tp.size, dim)
        return torch.cat([heads[owners.index(head)] for head in range(owners[-1] + 1)], dim)

    def _shard_tp(self, role: TensorRole | None, place: Any, value: Tensor) -> Tensor:
        """This tp rank's shard of a value."""
        if role == "vocab":
            assert self._width is not None
            missing = self.tp.size * self._width - value.size(-1)
            value = F.pad(value, (0, missing), value=-torch.inf)
            return value.chunk(self.tp.size, -1)[self.tp.rank]
        if role is None or (role == "stream" and not self._shards_stream):
            return value
        dim = _DIM_OF_ROLE[role] % value.dim()
        owners = self._owners(place)
        if owners is not None:
            return value.narrow(dim, owners[self.tp.rank], 1)
        return value.chunk(self.tp.size, dim)[self.tp.rank]

    def _owners(self, place: Any) -> list[int] | None:
        """The head of each tp rank, of keys or values with fewer heads than ranks; else None."""
        layer = getattr(place.module, f"{place.point}_proj", None)
        if place.point not in ("k", "v") or not isinstance(layer, SharedHeads):
            return None
        width = layer.tp_rows.stop - layer.tp_rows.start
        parameter: Any = layer._parameters["weight"]
        heads = parameter.size(0) // width
        return [rank * heads // self.tp.size for rank in range(self.tp.size)]


__getattr__ = partial(renamed, __name__)
