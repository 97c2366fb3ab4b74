"""Values inside a parallelized model, whole: for `ActivationStore` and `intervene` of forge_core.

Shapes: B rows, S tokens of a row, M width of the stream, H query and K key/value heads, D width of a head, F width of
a feed-forward, E experts, V vocabulary, n ranks of tp.

    point                              value            tp: a rank has            cp: its chunks of
    resid_*, attn_out, mlp_out,        (B, S, M)        S/n tokens with           dim 1
    final_norm                                          sequence_parallel
    q, head_out                        (B, S, H, D)     H/n heads                 dim 1
    k, v                               (B, S, K, D)     K/n heads, at least one   dim 1
    mlp_hidden                         (B, S, F)        F/n numbers               dim 1
    attn_scores, attn_weights          (B, H, S, S)     H/n heads                 dim 2, the queries
    router_logits                      (B, S, E)        S/n tokens                dim 1
    logits                             (B, S, V)        V/n ids                   dim 1

Under pp a rank has the points of its stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from forge_parallel._shared.problems import invalid
from forge_parallel.axes.collectives import NamedGroup, join
from forge_parallel.axes.context import cut_sequence, join_sequence
from forge_parallel.axes.layers import Opaque, Rowwise, SharedHeads
from forge_parallel.axes.tensor import gather_vocab, ids_of_cut_logits, width_of_cut_logits
from forge_parallel.config import ParallelConfig
from forge_parallel.meshes import Meshes
from forge_parallel.structure import stages_of

__all__ = ["POINTS", "Kind", "WholePoints"]

#: How ranks share a value: as the stream, as heads, as the numbers of a token, as scores, as tokens of a router, as ids.
Kind = Literal["stream", "heads", "width", "scores", "routed", "vocab"]

#: The kinds of the points that models of forge have.
POINTS: dict[str, Kind] = {
    **dict.fromkeys(("resid_pre", "resid_mid", "resid_post"), "stream"),
    **dict.fromkeys(("attn_out", "mlp_out", "final_norm"), "stream"),
    **dict.fromkeys(("q", "k", "v", "head_out"), "heads"),
    **dict.fromkeys(("attn_scores", "attn_weights"), "scores"),
    "mlp_hidden": "width",
    "router_logits": "routed",
    "logits": "vocab",
}
_DIM: dict[Kind, int] = {"heads": 2, "width": -1, "scores": 1, "routed": 1, "stream": 1}


class WholePoints:
    """Whole values from the parts of the ranks of a parallelized model, and the parts of whole values.

        whole = WholePoints(model, config, meshes)
        store = ActivationStore("layers.*.head_out", whole=whole)
        with store.watch(model):
            compute.forward(batch)                      # all ranks; see Compute
        with intervene(model, {"layers.2.head_out": lambda x, name: x * keep}, whole=whole):
            compute.forward(batch)

    `model` is that of `parallelize(model, config, meshes)`. Rows and tokens of a value are those of the batch that the
    ranks of a pp, cp and tp group read, on each of these ranks; ranks of the data axes have rows of their own. `kinds`
    are those of your own points. All ranks of a group watch the same points, call the model equally often, and
    change values alike.

    Cost of a value: one all-gather over tp, if it is shared there, and one over cp; at the end of `watch` one
    broadcast over pp of each value, and two exchanges of their names and sizes. Scores and weights of attention under
    cp: all-gathers of keys, and of values if they are changed.

    Raises ValueError for a rank with several stages; later for a point without a kind, one inside of an opaque module
    under sequence parallelism, and one of heads or hidden numbers whose module has no row-wise layer behind it.
    """

    def __init__(
        self,
        model: nn.Module,
        config: ParallelConfig,
        meshes: Meshes,
        kinds: Mapping[str, Kind] | None = None,
    ) -> None:
        if len(stages_of(model)) > 1:
            rule = f"must have one stage a rank for points, and has {len(stages_of(model))}"
            fix = "use pp_schedule = '1f1b'"
            raise invalid("pp_schedule", "stages", config.pp_schedule, rule, fix)
        self.meshes, self.tp = meshes, NamedGroup.of(meshes.tp)
        self.kinds = POINTS | dict(kinds or {})
        self._cuts_stream = config.sequence_parallel and self.tp.size > 1
        self._ids = ids_of_cut_logits(model)
        self._width = width_of_cut_logits(model)
        self._opaque = [name for name, m in model.named_modules() if isinstance(m, Opaque)]

    def names(self, here: list[str]) -> list[str]:
        """The points of all stages, in order of depth, given those of this rank's: one exchange over pp."""
        return [name for names in self._of_stages(here) for name in names]

    def check(self, name: str, place: Any) -> None:
        """ValueError for a point that this does not know in the layout; `place` is one of `points_of(model)`."""
        if self.tp.size == self.meshes.cp.size == 1:
            return
        kind = self.kinds.get(place.point)
        if kind is None:
            rule = "has no kind, so how ranks of tp and cp share it is unknown"
            fix = f"give WholePoints kinds={{{place.point!r}: ...}}, or use tp = 1 and cp = 1"
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
            rule = "is of a module without a row-wise layer, so how ranks of tp share it is unknown"
            raise invalid("point", "rowwise", name, rule, "use tp = 1")
        if kind == "vocab" and self._ids is None:
            rule = "must be of a head with the role sharded_logits under tp, and it has another"
            raise invalid("point", "head", name, rule, "use tp = 1")

    def join(self, place: Any, part: Tensor) -> Tensor:
        """The whole value, without graph, of this rank's part, whose first dim are rows."""
        kind, part = self.kinds.get(place.point), part.detach().contiguous()
        if kind == "routed" and part.dim() == 2:  # one token a row
            part = part.unsqueeze(1)
        if self.tp.size > 1:
            part = self._join_tp(kind, place, part)
        if self.meshes.cp.size > 1:
            part = join_sequence(part.contiguous(), self.meshes.cp, 2 if kind == "scores" else 1)
        return part

    def cut(self, place: Any, value: Tensor) -> Tensor:
        """This rank's part of a whole value; no communication."""
        kind = self.kinds.get(place.point)
        if self.meshes.cp.size > 1:
            value = cut_sequence(value, self.meshes.cp, 2 if kind == "scores" else 1)
        return self._cut_tp(kind, place, value) if self.tp.size > 1 else value

    def exchange(
        self, found: dict[str, list[Tensor]], max_bytes: int | None
    ) -> Iterator[tuple[str, Tensor]]:
        """The values of the other stages' points, one after another, given those of this rank's: one broadcast each."""
        if self.meshes.pp.size == 1:
            return
        kinds = [
            (name, v.shape, v.dtype, v.nbytes) for name, values in found.items() for v in values
        ]
        stages = self._of_stages(kinds)
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

    def _join_tp(self, kind: Kind | None, place: Any, part: Tensor) -> Tensor:
        if kind == "vocab":
            cut = part.size(-1) == self._width
            return gather_vocab(part, self.meshes.tp, self._ids) if cut else part
        if kind is None or (kind == "stream" and not self._cuts_stream):
            return part
        dim = _DIM[kind] % part.dim()
        value = join(part, self.tp, dim)
        owners = self._owners(place)
        if owners is None:
            return value
        heads = value.chunk(self.tp.size, dim)
        return torch.cat([heads[owners.index(head)] for head in range(owners[-1] + 1)], dim)

    def _cut_tp(self, kind: Kind | None, place: Any, value: Tensor) -> Tensor:
        if kind == "vocab":
            assert self._width is not None
            missing = self.tp.size * self._width - value.size(-1)
            value = F.pad(value, (0, missing), value=-torch.inf)
            return value.chunk(self.tp.size, -1)[self.tp.rank]
        if kind is None or (kind == "stream" and not self._cuts_stream):
            return value
        dim = _DIM[kind] % value.dim()
        owners = self._owners(place)
        if owners is not None:
            return value.narrow(dim, owners[self.tp.rank], 1)
        return value.chunk(self.tp.size, dim)[self.tp.rank]

    def _owners(self, place: Any) -> list[int] | None:
        """The head that each rank of tp has, of keys or values with fewer heads than ranks."""
        layer = getattr(place.module, f"{place.point}_proj", None)
        if place.point not in ("k", "v") or not isinstance(layer, SharedHeads):
            return None
        width = layer.tp_rows.stop - layer.tp_rows.start
        parameter: Any = layer._parameters["weight"]
        heads = parameter.size(0) // width
        return [rank * heads // self.tp.size for rank in range(self.tp.size)]
