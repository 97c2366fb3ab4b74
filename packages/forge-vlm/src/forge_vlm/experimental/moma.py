"""Feed-forwards of experts in groups, one group for each modality (MoMa, Lin et al. 2024, arXiv 2407.21770).

Shapes: B sequences, S tokens, N = B S, n tokens of a group, E experts of it, K experts of a token, C tokens of an expert,
D width, R routed tokens sorted by expert.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from forge_core import TokenContext
from forge_core.model import FeedForward
from forge_vlm._shared.problems import invalid
from forge_vlm.experimental.routing import (
    expert_choice,
    gumbel_difference,
    quotas_of,
    routes_of,
    token_choice,
)
from forge_vlm.flops import expert_flops
from forge_vlm.modalities import modality_ids

if TYPE_CHECKING:
    from forge_vlm.config import VLMConfig

__all__ = [
    "GroupExperts",
    "MoMa",
    "MoMaSteps",
    "attach",
    "expert_sources",
    "set_routing_step",
    "set_row_group",
]


def attach(y: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
    """y itself; backward also propagates `scale` times the gradient of `loss`, both 0-dim.

    It reaches routers under recomputation and stages of a pipeline too, where no caller sees the loss.
    """
    out: Tensor = _Attach.apply(y, loss, scale)
    return out


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        ctx.options = {"dtype": loss.dtype, "device": loss.device}
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (scale,) = ctx.saved_tensors
        return grad, scale.to(**ctx.options, copy=True), None


class GroupExperts(nn.Module):
    """E feed-forwards, each applied to its own rows.

        GroupExperts(4, dim=64, hidden_dim=128, kind="swiglu", bias=False)(rows, counts)   # (R, D) -> (R, D)

    rows are sorted by expert, counts (E,) ints. Each expert runs once, also on no rows. One host sync for counts on an
    accelerator: give experts with grouped products to MoMa where that counts.
    """

    def __init__(self, num: int, dim: int, hidden_dim: int, *, kind: str, bias: bool) -> None:
        super().__init__()
        made = {str(e): FeedForward(dim, hidden_dim, kind=kind, bias=bias) for e in range(num)}
        self.each = nn.ModuleDict(made)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        parts = rows.split(counts.tolist())
        return torch.cat([expert(part) for expert, part in zip(self.each.values(), parts)])


def expert_sources(experts: nn.Module) -> dict[str, str]:
    """{parameter of experts: the one of a dense feed-forward that it begins as a copy of}.

    Known are feed-forwards below a number (`each.0.up_proj.weight`), and stacks (E, in, out) named as the linear layers
    of the dense one (`up_proj`), whose biases end in `_bias`.
    """
    found = {}
    for name, parameter in experts.named_parameters():
        parts = name.split(".")
        if len(parts) == 1:
            stem = name.removesuffix("_bias")
            found[name] = f"{stem}.{'bias' if stem != name else 'weight'}"
        elif parameter.ndim <= 2:
            found[name] = ".".join(parts[-2:])
    return found


class MoMa(nn.Module):
    """A feed-forward whose tokens are parted by modality, and then routed among the experts of its group.

        model = VLM(VLMConfig(fusion=FusionConfig("moma"), ...), experts=lambda group, num: Experts(...))

    `experts(group, num)` makes the experts of a group: a module called with rows (R, D), sorted by expert, and their
    counts (num,) on the device; without it they are `GroupExperts`. Padding is never routed, and gets 0.

    By token choice nothing is synchronized but the experts' own way with counts. Where experts choose, their quotas
    are found on the host once per forward, and an auxiliary router's choice in evaluation costs one sync per group
    and layer. Choices are kept in the context of the forward, so that a recomputation takes the same.
    Losses of routers (`balance_loss`, auxiliary routers) are added to gradients by the backward pass: means over the tokens
    of a group in the micro-batch, or with the weights of `set_routing_step` in the step.
    Where ranks hold parts of the same rows (context parallelism), `set_row_group` makes the balance loss one of full
    rows, for an all-reduce of E numbers per group and layer.

    Raises ValueError in evaluation where experts choose without an auxiliary router, as the output of a token would
    depend on later ones, and RuntimeError where noise is wanted and `set_routing_step` was not called.
    """

    def __init__(
        self,
        config: VLMConfig,
        layer: int,
        names: tuple[str, ...],
        groups: tuple[int, ...],
        experts: Callable[[str, int], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.options, self.layer, self.table = config.fusion.moma, layer, groups
        self.modalities = config.modalities
        self.groups = nn.ModuleDict({name: Group(config, name, experts) for name in names})

    def forward(self, x: Tensor, ctx: TokenContext | None = None) -> Tensor:
        """x (B, S, D) -> the same shape and dtype."""
        ctx = TokenContext() if ctx is None else ctx
        if not self.training and self.needs_whole_rows:
            rule = f"of layer {self.layer} is for training: in evaluation a token's output would depend on later tokens"
            fix = "train with 'auxiliary_router', or use 'token_choice'"
            raise invalid("fusion.moma.router", "evaluation", self.options.router, rule, fix)
        routes = routes_of(ctx, self.table)
        rows = routes.split(x.reshape(-1, x.size(-1)))  # (n, D) each
        places = routes.split(torch.arange(x.shape[:-1].numel(), device=x.device)[:, None])
        out = [
            group(part, _Call(ctx, x.shape[:-1], where[:, 0], self.layer))
            for group, part, where in zip(self.groups.values(), rows, places)
        ]
        return routes.join(out).view(x.shape)

    def prepare(self, ctx: TokenContext, x: Tensor, cache: Any = None) -> None:
        """Find the routes, which all layers share."""
        routes_of(ctx, self.table)

    def count_tokens(self, tokens: Tensor, document_ids: Tensor | None = None) -> dict[str, int]:
        """Tokens of each group by its name, padding left out, of ids (B, S). On an accelerator it costs host syncs."""
        ids = modality_ids(tokens, document_ids, self.modalities).cpu()
        group = torch.tensor(self.table)[ids + 1]
        return {name: int((group == number).sum()) for number, name in enumerate(self.groups)}

    @property
    def needs_whole_rows(self) -> bool:
        """Whether a token's output depends on others of its row, so that none can be decoded by itself."""
        return self.options.router == "expert_choice"

    def warm_sources(self) -> dict[str, tuple[str, ...]]:
        """{parameter of an expert: those that it may begin as: of its group's first expert, of a dense feed-forward}."""
        return {
            f"groups.{name}.experts.{own}": (f"groups.{name}.experts.each.0.{source}", source)
            for name, group in self.groups.items()
            for own, source in expert_sources(cast(Any, group).experts).items()
        }

    def parallel_roles(self) -> dict[str, Any]:
        """A copy on each rank of tensor parallelism, which sees full tokens; experts that ranks of `ep` share are known."""
        if not any(hasattr(p, "device_mesh") for p in self.parameters()):
            return {"*": "opaque"}
        others = ("router", "auxiliary")
        return {"groups.*.experts.*": "expert"} | {f"groups.*.{o}.*": "opaque" for o in others}

    def flops_per_token(self, seq_len: int) -> float:
        """Forward FLOPs for one token: of the group where they are most, capacities filled."""
        return max(cast(Any, group).flops_per_token() for group in self.groups.values())

    def spared_flops_per_token(self, seq_len: int) -> float:
        """FLOPs of the backward that frozen matrices spare one token: those of the group where they are fewest."""
        groups = [cast(Any, group) for group in self.groups.values()]
        return min(group.flops_per_token(frozen=True) for group in groups)


class _Call(NamedTuple):
    """What a group knows of the batch: its context and shape (B, S), places of its tokens in it (n,), the layer."""

    ctx: TokenContext
    shape: torch.Size
    places: Tensor
    layer: int


class Group(nn.Module):
    """A router and the experts of one modality: (n, D) -> (n, D)."""

    def __init__(
        self, config: VLMConfig, name: str, experts: Callable[[str, int], nn.Module] | None
    ) -> None:
        super().__init__()
        c = config.fusion.moma
        self.options, self.name = c, name
        self.num = c.experts.get(name, c.num_experts)
        self.router = nn.Linear(config.dim, self.num, bias=False)
        hidden = config.resolved_hidden_dim if c.hidden_dim is None else c.hidden_dim
        if experts is None:
            kind, bias = config.feed_forward, config.feed_forward_bias
            self.experts: Any = GroupExperts(self.num, config.dim, hidden, kind=kind, bias=bias)
        else:
            self.experts = experts(name, self.num)

        self.auxiliary: nn.Module | None = None
        if c.router == "auxiliary_router":
            self.auxiliary = nn.Sequential(
                nn.Linear(config.dim, c.auxiliary_dim),
                nn.SiLU(),
                nn.Linear(c.auxiliary_dim, self.num),
            )

        self.noise_stream: tuple[int, ...] | None = None
        self.token_weight: Tensor | None = None
        self.row_group: Any = None

    def forward(self, tokens: Tensor, call: _Call) -> Tensor:
        """The group's output (n, D) for its tokens (n, D), in their dtype."""
        logits = self._logits(tokens)  # (n, E)
        if self.options.router == "token_choice":
            return self._by_tokens(tokens, logits, call)
        if self.training:
            return self._by_experts(tokens, logits, call)
        return self._by_auxiliary(tokens, logits)

    def _logits(self, tokens: Tensor) -> Tensor:
        wide = torch.promote_types(tokens.dtype, torch.float32)
        with torch.autocast(tokens.device.type, enabled=False):
            return F.linear(tokens.to(wide), self.router.weight.to(wide))

    def _by_tokens(self, tokens: Tensor, logits: Tensor, call: _Call) -> Tensor:
        probabilities, top_k = logits.softmax(-1), min(self.options.top_k, self.num)
        ids = call.ctx.once((id(self), "ids"), lambda: token_choice(probabilities, top_k))
        weights = probabilities.gather(1, ids)  # (n, K)
        if self.options.normalize:
            weights = weights / weights.sum(-1, keepdim=True)

        slots = ids.flatten().argsort(stable=True)  # (n K,), sorted by expert
        numbers = torch.arange(self.num, device=ids.device)
        counts = (ids.flatten()[:, None] == numbers).sum(0)  # (E,)
        seen = self.experts(tokens.index_select(0, slots // top_k), counts)
        back = torch.empty_like(slots).scatter_(
            0, slots, torch.arange(len(slots), device=ids.device)
        )
        each = seen.index_select(0, back).unflatten(0, (len(tokens), top_k))  # (n, K, D)
        out = (each * weights[..., None]).sum(1).to(tokens.dtype)

        if self.training and self.options.balance_loss and self.num > 1:
            out = self._with_loss(out, *self._balance(probabilities, counts, call))
        return out

    def _with_loss(self, out: Tensor, loss: Tensor, tokens: Tensor | int) -> Tensor:
        """`out` with a loss (0-dim) attached that is summed over so many tokens."""
        if self.token_weight is None:
            return attach(out, loss / tokens, loss.new_ones(()))
        return attach(out, loss, self.token_weight)

    def _balance(self, probabilities: Tensor, counts: Tensor, call: _Call) -> tuple[Tensor, Tensor]:
        """The balance loss of probabilities (n, E) and counts (E,), summed over tokens, and the number of tokens. Where ranks
        hold parts of rows the loss is this rank's summand, and the number is that of all."""
        group = self.row_group
        if group is not None:
            counts = call.ctx.once((id(self), "counts"), lambda: _sum_over(group, counts))
        slots = counts.sum().clamp_min(1)
        loss = self.options.balance_loss * self.num * (counts / slots * probabilities.sum(0)).sum()
        return loss, slots / min(self.options.top_k, self.num)

    def _by_experts(self, tokens: Tensor, logits: Tensor, call: _Call) -> Tensor:
        if self.options.gumbel_noise:
            logits = logits + self.options.gumbel_noise * self._noise(call)
        gates = logits.sigmoid()
        chosen = call.ctx.once((id(self), "chosen"), lambda: self._choose(gates, call))  # (E, C)
        counts = torch.full((self.num,), chosen.size(1), device=chosen.device)
        weights = gates.mT.gather(1, chosen).flatten()  # (E C,)
        out = self._combined(tokens, chosen.flatten(), counts, weights)
        if self.auxiliary is None:
            return out
        picked = torch.zeros_like(gates).scatter_(0, chosen.mT, 1.0)  # (n, E)
        guess = self.auxiliary(tokens.detach()).to(picked.dtype)
        missed = F.binary_cross_entropy_with_logits(guess, picked, reduction="sum")
        return self._with_loss(out, missed / self.num, max(len(tokens), 1))

    def _choose(self, gates: Tensor, call: _Call) -> Tensor:
        c = self.options
        quotas = call.ctx.once(
            ("quotas", self.name, c.scope, c.capacity_factor, self.num),
            lambda: quotas_of(
                call.ctx, call.shape, call.places, c.scope, c.capacity_factor, self.num
            ).to(gates.device),
        )
        return expert_choice(gates, quotas)

    def _by_auxiliary(self, tokens: Tensor, logits: Tensor) -> Tensor:
        assert self.auxiliary is not None
        picked = self.auxiliary(tokens) > 0  # (n, E)
        experts, rows = picked.mT.nonzero(as_tuple=True)  # sorted by expert
        weights = logits.sigmoid()[rows, experts]
        return self._combined(tokens, rows, picked.sum(0), weights)

    def _combined(self, tokens: Tensor, rows: Tensor, counts: Tensor, weights: Tensor) -> Tensor:
        """The sum over experts of each token's outputs times its weights: rows (R,) of tokens, sorted by expert."""
        if self.options.normalize:
            total = weights.new_zeros(len(tokens)).index_add(0, rows, weights)
            tiny = torch.finfo(weights.dtype).tiny  # of gates that are 0 in fp32
            weights = weights / total.clamp_min(tiny).index_select(0, rows)
        seen = self.experts(tokens.index_select(0, rows), counts) * weights[:, None]
        out = seen.new_zeros(len(tokens), seen.size(1)).index_add(0, rows, seen)
        return out.to(tokens.dtype)

    def _noise(self, call: _Call) -> Tensor:
        # kept, as a pipeline begins other micro-batches before it recomputes this one
        stream = call.ctx.once((id(self), "noise"), lambda: self._stream(call.layer))
        return gumbel_difference(call.places, self.num, stream)

    def _stream(self, layer: int) -> tuple[int, ...]:
        """What noise on the gates is a function of, next to a token's place."""
        if self.noise_stream is None:
            raise RuntimeError(
                f"fusion.moma.gumbel_noise {self.options.gumbel_noise} needs the step that it is drawn for; call "
                "forge_vlm.fusion.set_routing_step before each forward"
            )
        name = int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:4], "big")
        return (*self.noise_stream, layer, name)

    def flops_per_token(self, *, frozen: bool = False) -> float:
        """Forward FLOPs for one token: router, and experts as often as a token meets one; or those of frozen matrices."""
        c = self.options
        most = c.top_k if c.router == "token_choice" else c.capacity_factor
        met = min(most, self.num)
        routers = (self.router, *(() if self.auxiliary is None else (self.auxiliary,)))
        router = sum(expert_flops(part, 1, frozen=frozen) for part in routers)
        return router + met * expert_flops(self.experts, self.num, frozen=frozen)


def set_routing_step(
    model: nn.Module,
    *,
    seed: int,
    step: int,
    micro_batch: int = 0,
    token_weights: Mapping[str, Tensor] | None = None,
) -> None:
    """Tell all MoMa layers of a model which micro-batch comes next; nothing happens without any.

        weights = {group: torch.tensor(1 / tokens) for group, tokens in tokens_of_step.items()}
        set_routing_step(model, seed=0, step=7, micro_batch=3, token_weights=weights)     # the fourth

    Noise on gates is a function of (seed, step, micro_batch), the layer and a token's place. `micro_batch` counts those
    of the global batch, over all ranks. `token_weights`, 0-dim, are factors on the routers' losses of each token of a group, 1 over
    their number in the step (`MoMa.count_tokens`, summed over ranks); backward reads them. Without them a loss is the mean
    over the tokens of the micro-batch.
    """
    for module in model.modules():
        if isinstance(module, Group):
            module.noise_stream = (seed, step, micro_batch)
            module.token_weight = None if token_weights is None else token_weights[module.name]


def set_row_group(model: nn.Module, group: Any) -> None:
    """Tell all MoMa layers of a model that the ranks of `group`, a process group, hold parts of the same rows.

    set_row_group(model, meshes.cp.group)
    """
    for module in model.modules():
        if isinstance(module, Group):
            module.row_group = group


def _sum_over(group: Any, counts: Tensor) -> Tensor:
    total = counts.clone()
    dist.all_reduce(total, group=group)
    return total


class MoMaSteps:
    """Weights the losses of the routers of MoMa by tokens, and numbers the micro-batches for their noise.

        steps = MoMaSteps([model], seed=0)
        steps.begin(step=7, first=0)                              # before the forwards of a step
        counts = steps.count_tokens(tokens, document_ids)         # to be added up over micro-batches and ranks
        steps.set_tokens(counts)                                  # before the first backward

    Each token of the step has the same weight then, whatever its micro-batch. Each of `stages` (of a pipeline, or the
    model) runs all micro-batches of its data rank in their order. Forwards in eval mode, which draw nothing, do not
    count. Without such layers nothing happens.
    """

    def __init__(self, stages: Sequence[nn.Module], seed: int, device: Any = None) -> None:
        self._seed, self._step, self._first = seed, 0, 0
        self._begun = dict.fromkeys(stages, 0)
        layers = [m for stage in stages for m in stage.modules() if isinstance(m, MoMa)]
        self._layer = layers[0] if layers else None
        names = () if self._layer is None else self._layer.groups
        self._weights = {name: torch.full((), math.nan, device=device) for name in names}
        for stage in stages if layers else ():
            stage.register_forward_pre_hook(self._enter)

    def begin(self, step: int, first: int) -> None:
        """Step `step` begins; `first` is the number of this data rank's first micro-batch in the global batch."""
        self._step, self._first = step, first
        self._begun = dict.fromkeys(self._begun, 0)

    def count_tokens(self, tokens: Tensor, document_ids: Tensor) -> tuple[int, ...]:
        """Tokens of each group in (B, S)."""
        if self._layer is None:
            return ()
        return tuple(self._layer.count_tokens(tokens, document_ids).values())

    def set_tokens(self, sums: Sequence[int]) -> None:
        """Set the tokens of the step, in the order of `count_tokens`. No host sync."""
        for weight, number in zip(self._weights.values(), sums):
            weight.data.fill_(1.0 / max(number, 1))  # .data: the forward before keeps the tensor

    def _enter(self, stage: nn.Module, args: Any) -> None:
        if not stage.training:
            return
        set_routing_step(
            stage,
            seed=self._seed,
            step=self._step,
            micro_batch=self._first + self._begun[stage],
            token_weights=self._weights,
        )
        self._begun[stage] += 1
