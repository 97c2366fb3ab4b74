"""The mixture-of-experts layer.

Shapes: B rows of a batch, S tokens of a row, T = B S tokens, K slots per token, E experts, D width.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_moe._shared.problems import invalid
from forge_moe._torch_compat import inside_backward, is_fake
from forge_moe.balance.attach import AttachLoss
from forge_moe.balance.counters import RoutingCounters
from forge_moe.balance.losses import AuxLosses, balance_loss, count_ids, fractions, z_loss
from forge_moe.balance.scopes import (
    global_batch_counts,
    lagged_shares,
    micro_batch_shares,
    sequence_shares,
)
from forge_moe.balance.sequence_group import SequenceGroup
from forge_moe.capacity import drop_over_capacity, row_limit
from forge_moe.config import MoEConfig
from forge_moe.dispatch import LocalDispatch
from forge_moe.experts import Experts
from forge_moe.protocols import Dispatcher, OverlappingDispatcher, TokenContext
from forge_moe.replay import record_or_replay, replaying
from forge_moe.routers import Routed, Router
from forge_moe.routers.router import check_tokens


class SharedExperts(nn.Module):
    """Experts that see every token, as one feed-forward whose width is the sum of theirs.

    That is the same function, as outputs of experts add up. With `gate`, a sigmoid of the token scales
    the sum (Qwen2-MoE).
    """

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        dim, hidden = config.dim, config.resolved_shared_hidden_dim
        gated = config.activation == "swiglu"
        self.gate_proj = nn.Linear(dim, hidden, bias=config.bias) if gated else None
        self.up_proj = nn.Linear(dim, hidden, bias=config.bias)
        self.down_proj = nn.Linear(hidden, dim, bias=config.bias)
        self.gate = nn.Linear(dim, 1, bias=False) if config.shared_gate else None

    def reset_parameters(self) -> None:
        """Draw initial values of its linear layers."""
        for linear in self.children():
            cast(Any, linear).reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., D)."""
        if self.gate_proj is None:
            hidden = F.gelu(self.up_proj(x))
        else:
            hidden = F.silu(self.gate_proj(x)) * self.up_proj(x)
        out: Tensor = self.down_proj(hidden)
        return out if self.gate is None else out * torch.sigmoid(self.gate(x))

    def flops_per_token(self, seq_len: int) -> float:
        """Forward FLOPs for one token; a layer that counts its own, as one with an adapter, is asked."""
        total = 0.0
        for layer in cast(Any, self.children()):
            if hasattr(layer, "flops_per_token"):
                total += layer.flops_per_token(seq_len)
            else:
                total += 2.0 * layer.in_features * layer.out_features
        return total

    def init_table(self, std: float, residual_std: float) -> dict[str, tuple[str, float]]:
        """Initial distribution of each parameter: (kind, value) by name."""
        table = {}
        for name, parameter in self.named_parameters():
            value = residual_std if name == "down_proj.weight" else std
            table[name] = ("constant", 0.0) if parameter.dim() == 1 else ("normal", value)
        return table


class MoE(nn.Module):
    """A feed-forward of experts, of which each token uses `top_k`.

        moe = MoE(MoEConfig(dim=512, hidden_dim=1024, num_experts=8, top_k=2))
        y = moe(x)                                                # (B, S, D) or (T, D), same shape out
        total = task_loss(y) + aux_losses(moe).total

    `moe.router`, `moe.experts`, `moe.shared` (or None) and `moe.dispatcher` may be replaced. With several
    processes set `moe.data_group`, the ranks with other rows, for `aux_scope = "global_batch"`; it may hold
    those of `sequence_group` too, as shares stay the same if all tokens are counted equally often.

    Where ranks hold parts of the same rows (context parallelism, tokens split over tensor-parallel ranks), set
    `moe.sequence_group` to their group, or to a tuple of crossed groups: losses are then each rank's part of
    the mean over all tokens of the micro-batch, so that values and gradients of these ranks add up to those
    of one process. It costs the all-reduces of the scope (see `balance.scopes`) and one of the number of
    tokens, once per forward if ctx is a `CachingContext`, else per layer; only in training forwards with a
    loss.
    Every rank holds equally many tokens of each row; documents are then ids within a row.
    """

    lagged_counts: Tensor | None

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.router = Router(config.router_config)
        self.experts = Experts(config)
        self.shared = SharedExperts(config) if config.num_shared_experts else None
        self.dispatcher: Dispatcher = LocalDispatch(config.num_experts)
        lagged = config.aux_scope == "global_batch_lagged"
        counts = torch.zeros(config.num_experts, dtype=torch.int64) if lagged else None
        self.register_buffer("lagged_counts", counts)
        self.data_group: Any = None
        self.sequence_group: Any = None
        self.aux_scale: Tensor | None = None
        self.aux_per_token = False
        self.pending_losses: AuxLosses | None = None
        self.counters = RoutingCounters(config.num_experts)

    def reset_parameters(self) -> None:
        """Draw initial values of router, experts and shared experts, also after `to_empty`; counts begin at 0."""
        for module in (self.router, self.experts, self.shared):
            if module is not None:
                module.reset_parameters()
        if self.lagged_counts is not None:
            nn.init.zeros_(self.lagged_counts)

    def forward(self, x: Tensor, ctx: TokenContext | None = None) -> Tensor:
        """x (B, S, D) or (T, D) -> the same shape and dtype.

        `ctx`, if given, may have `valid` (B, S) bool, False on pads, which are neither routed nor counted
        and get 0 from routed experts, and `document_ids` (B, S), which part a row into sequences.
        """
        check_tokens(x, self.config.dim)
        tokens = x.reshape(-1, x.size(-1))  # (T, D)
        valid = _flat(ctx, "valid", x)
        if valid is not None:
            tokens = tokens.masked_fill(~valid.unsqueeze(1), 0.0)  # pads may hold NaN
        rows = self._num_rows(x)
        routed = self.router.route(tokens, valid, rows)
        weights, ids = self._apply_capacity(routed, valid)
        max_slots = self._max_slots(len(tokens), rows)
        all_routed = valid is None and not self._drops and self.router.rule.routes_all_slots
        out, shared = self._run_experts(tokens, weights, ids, max_slots, all_routed=all_routed)
        # A recomputation has gradients: a compiled forward without them need not break its graph to check.
        first = not (replaying() or (torch.is_grad_enabled() and inside_backward()))
        if first:
            self._count(routed, ids, valid)
        if not self.training:
            self.pending_losses = None  # of a training forward whose losses the caller did not take
        if shared is not None:
            out = out + shared
        if self.training and self.config.aux != "none":
            out = self._with_losses(out, routed, valid, x, ctx, first)
        return out.to(x.dtype).view(x.shape)

    @property
    def needs_whole_rows(self) -> bool:
        """Whether the tokens of a row must come in one call, and not one by one with a KV cache."""
        return not self.router.rule.causal

    @property
    def _drops(self) -> bool:
        # In evaluation the output of a token must not depend on the other tokens of the call.
        return self.training and self.config.capacity_factor is not None

    def _num_rows(self, x: Tensor) -> int | None:
        """B of x (B, S, D), None of (T, D); ValueError if the router chooses within rows and they are split."""
        if self.needs_whole_rows and not self.training and self.sequence_group is not None:
            rule = "chooses within each row in eval, and cannot where rows are split over ranks"
            fix = "evaluate without sequence_group, or train another router"
            raise invalid("router", "split_rows", self.config.router, rule, fix)
        return None if x.dim() == 2 else max(x.shape[:-2].numel(), 1)

    def _max_slots(self, tokens: int, rows: int | None) -> int | None:
        """Upper bound on the slots that go somewhere, if the rule has one below T times K."""
        if self.router.rule.max_slots is None:
            return None
        parts = 1 if self.training or rows is None else rows
        return parts * self.router.rule.max_slots(tokens // parts, self.router.config)

    def _apply_capacity(self, routed: Routed, valid: Tensor | None) -> tuple[Tensor, Tensor]:
        """Weights and ids (T, K), with 0 and E for dropped slots; evaluation drops nothing."""
        c = self.config
        if not self._drops:
            return routed.weights, routed.ids
        assert c.capacity_factor is not None
        tokens = routed.ids.size(0) if valid is None else valid.sum()
        limit = row_limit(tokens, c.top_k, c.num_experts, c.capacity_factor)
        ids = record_or_replay(
            self,
            "ids_within_capacity",
            lambda: drop_over_capacity(
                routed.ids, routed.weights, c.num_experts, limit, c.drop_policy
            ),
        )
        return routed.weights.masked_fill(ids == c.num_experts, 0.0), ids

    def _run_experts(
        self, x: Tensor, weights: Tensor, ids: Tensor, max_slots: int | None, *, all_routed: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Sum of the routed experts (T, D) fp32, and the shared experts' output or None."""
        shared = None if self.shared is None else lambda: cast(nn.Module, self.shared)(x)
        if hasattr(self.dispatcher, "run"):
            dispatcher = cast(OverlappingDispatcher, self.dispatcher)
            return dispatcher.run(x, weights, ids, self.experts, shared)
        if (
            type(self.dispatcher) is LocalDispatch
        ):  # its rows are the slots, so their number is known
            sent = self.dispatcher.dispatch(x, weights, ids, num_rows=max_slots)
            out = self.experts(sent.rows, sent.counts, full=all_routed)
        else:
            sent = self.dispatcher.dispatch(x, weights, ids)
            out = self.experts(sent.rows, sent.counts)
        return self.dispatcher.combine(out, sent.meta), None if shared is None else shared()

    @torch.no_grad()
    def _count(self, routed: Routed, ids: Tensor, valid: Tensor | None) -> None:
        """Count one forward; `ids` are those within capacity."""
        if routed.ids.is_meta or is_fake(routed.ids):
            return
        num = self.config.num_experts
        entropy = torch.special.entr(routed.probabilities).sum(dim=-1)  # (T,)
        if valid is None:
            tokens = torch.full((), entropy.numel(), dtype=torch.int64, device=entropy.device)
        else:
            tokens, entropy = valid.sum(), entropy.masked_fill(~valid, 0.0)
        counts = count_ids(routed.ids, num)
        dropped = counts.sum() - (ids != num).sum()
        self.counters.add(counts, tokens, dropped, entropy.sum(), training=self.training)

    def _with_losses(
        self,
        out: Tensor,
        routed: Routed,
        valid: Tensor | None,
        x: Tensor,
        ctx: TokenContext | None,
        first: bool,
    ) -> Tensor:
        """Store the router losses for the caller, or attach them to `out`."""
        c = self.config
        zero = routed.logits.new_zeros(())
        balance = z = sequence = zero
        group, total = SequenceGroup(self.sequence_group, ctx), None
        if group.groups and (c.aux_loss_weight or c.sequence_loss_weight or c.z_loss_weight):
            local = routed.ids
            total = record_or_replay(
                self, "num_tokens", lambda: group.num_tokens(valid, len(local), local.device)
            )

        def loss(name: str, scope: str) -> Tensor:
            shares = record_or_replay(
                self, name, lambda: self._shares(scope, routed.ids, x, ctx, group)
            )
            return balance_loss(shares, routed.probabilities, valid, total)

        if c.aux_loss_weight:
            balance = c.aux_loss_weight * loss("shares", c.aux_scope)
        if c.sequence_loss_weight:
            sequence = c.sequence_loss_weight * loss("sequence_shares", "sequence")
        if c.z_loss_weight:
            z = c.z_loss_weight * z_loss(routed.logits, valid, total)
        losses = AuxLosses.of(balance, z, sequence)
        if c.aux == "attach":
            # The scale may have changed by the time of a recomputation (pipeline schedules).
            scale = record_or_replay(self, "scale", lambda: self.aux_scale)
            scale = torch.ones_like(zero) if scale is None else scale
            attached = losses.total
            if self.aux_per_token:  # the losses are means over the tokens of the micro-batch
                tokens: Tensor | int = len(routed.ids) if valid is None else valid.sum()
                attached = attached * (tokens if total is None else total)
            return AttachLoss.apply(out, attached, scale) if attached.requires_grad else out
        if first and torch.is_grad_enabled():  # losses without a graph are of no use to the caller
            before = self.pending_losses
            self.pending_losses = (
                losses if before is None else AuxLosses(*map(torch.add, before, losses))
            )
        return out

    @torch.no_grad()
    def _shares(
        self, scope: str, ids: Tensor, x: Tensor, ctx: TokenContext | None, group: SequenceGroup
    ) -> Tensor:
        """Share of each expert, (E,) or per token (T, E), in the scope of the balance loss."""
        num = self.config.num_experts
        if scope == "micro_batch":
            return micro_batch_shares(ids, num, group)
        if scope == "global_batch":
            counts = global_batch_counts(ids, num, self.data_group, group)
            return fractions(self.counters.add_global(counts))
        if scope == "global_batch_lagged":
            assert self.lagged_counts is not None
            return lagged_shares(self.lagged_counts)
        documents: Tensor | None = getattr(ctx, "document_ids", None)
        if x.dim() == 2 and documents is None:
            rule = "must be (B, S, D), as a loss per sequence needs the sequences"
            raise invalid("x", "dims", tuple(x.shape), rule, "pass (B, S, D), or ctx.document_ids")
        shape = x.shape[:-1] if documents is None else documents.shape
        rows = shape[0] if len(shape) == 2 else 1
        return sequence_shares(ids, rows, documents, num, group)

    def statistics(self, *, reset: bool = False) -> dict[str, Tensor]:
        """Statistics of routing since the last reset, in training and eval, as tensors on the device:

        `counts` (E,) int64 choices per expert before drops, `tokens` int64 without pads, `dropped` int64
        slots over capacity, `entropy` fp32, mean over tokens in nats, and `bias` (E,) if there is one.
        No host sync until the caller reads a value. Recomputation does not count.
        """
        found = self.counters.read()
        if self.router.expert_bias is not None:
            found["bias"] = self.router.expert_bias.clone()
        if reset:
            self.counters.reset()
        return found

    def __getstate__(self) -> dict[str, Any]:
        # Pending losses hold a graph, and groups belong to this process: neither can be copied.
        return {**self.__dict__, "pending_losses": None, "data_group": None, "sequence_group": None}

    def init_table(self, std: float, residual_std: float) -> dict[str, tuple[str, float]]:
        """Initial distribution of each parameter and buffer: (kind, value) by name."""
        table: dict[str, tuple[str, float]] = {"router.weight": ("normal", std)}
        for name in ("experts", "shared"):
            module: Any = getattr(self, name)
            rows = {} if module is None else module.init_table(std, residual_std)
            table |= {f"{name}.{key}": row for key, row in rows.items()}
        if self.router.bias is not None:
            table["router.bias"] = ("constant", 0.0)
        if self.router.expert_bias is not None:
            table["router.expert_bias"] = ("constant", 0.0)
        if self.lagged_counts is not None:
            table["lagged_counts"] = ("constant", 0.0)
        return table

    def parallel_roles(self) -> dict[str, str]:
        """Role of each parameter under tensor and expert parallelism, by pattern; ranks of both have
        disjoint tokens here."""
        roles = {"router.*": "replicate_sum_grad", "experts.*": "expert"}
        if self.shared is not None:
            if self.shared.gate_proj is not None:
                roles["shared.gate_proj.*"] = "colwise"
            roles |= {"shared.up_proj.*": "colwise", "shared.down_proj.*": "rowwise"}
            if self.shared.gate is not None:
                roles["shared.gate.*"] = "replicate_sum_grad"
        return roles

    def flops_per_token(self, seq_len: int) -> float:
        """Forward FLOPs of the matrix products for one token: router, top_k experts, shared experts."""
        c = self.config
        matrices = 2 if c.activation == "gelu" else 3
        routed = 2.0 * c.dim * (c.num_experts + matrices * c.top_k * c.hidden_dim)
        if hasattr(self.shared, "flops_per_token"):
            return routed + float(cast(Any, self.shared).flops_per_token(seq_len))
        inside = matrices * c.resolved_shared_hidden_dim + int(c.shared_gate)
        return routed + 2.0 * c.dim * inside


def _flat(ctx: TokenContext | None, name: str, x: Tensor) -> Tensor | None:
    """ctx.<name> as (T,) on the device of x, or None; ValueError if it is not one value per token."""
    found: Tensor | None = getattr(ctx, name, None)
    if found is None:
        return None
    if found.numel() != x.numel() // x.size(-1):
        rule = f"must have one value for each token of x {tuple(x.shape)}"
        raise invalid(name, "length", tuple(found.shape), rule)
    return found.to(x.device, non_blocking=True).reshape(-1)
