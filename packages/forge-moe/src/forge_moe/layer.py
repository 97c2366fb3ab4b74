"""The mixture-of-experts layer: route tokens, dispatch them to experts, combine the outputs.

Shapes: B sequences of S tokens, T = B S tokens, K slots per token, E experts, D width.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_moe import load_balancing, router
from forge_moe._shared.module_arguments import FromConfig, config_arguments
from forge_moe._shared.problems import invalid
from forge_moe._torch_compat import inside_backward, is_fake
from forge_moe.config import MoEConfig
from forge_moe.dispatch.local import LocalDispatch
from forge_moe.experts import Experts
from forge_moe.load_balancing import AuxLosses, RoutingCounters, SequenceGroup
from forge_moe.protocols import Dispatcher, OverlappingDispatcher, TokenContext
from forge_moe.replay import record_or_replay, replaying
from forge_moe.router import Router, RoutingResult, check_tokens


class SharedExperts(FromConfig, nn.Module):
    """Experts that see every token, as one feed-forward: its width is the sum of their widths.

    That is the same function, as outputs of experts add up. With `gate`, a sigmoid of the token scales the sum
    (Qwen2-MoE).
    """

    @config_arguments(MoEConfig)
    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        dim, hidden = config.dim, config.resolved_shared_hidden_dim
        gated = config.activation == "swiglu"
        self.gate_proj = nn.Linear(dim, hidden, bias=config.bias) if gated else None
        self.up_proj = nn.Linear(dim, hidden, bias=config.bias)
        self.down_proj = nn.Linear(hidden, dim, bias=config.bias)
        self.gate = nn.Linear(dim, 1, bias=False) if config.shared_gate else None

    def reset_parameters(self) -> None:
        """Draw initial values of the linear layers, for `MoE.reset_parameters`; `initialize` reads `init_table`."""
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
        """Forward FLOPs for one token, including those of adapters, which count their own."""
        total = 0.0
        for layer in cast(Any, self.children()):
            if hasattr(layer, "flops_per_token"):
                total += layer.flops_per_token(seq_len)
            else:
                total += 2.0 * layer.in_features * layer.out_features
        return total

    def init_table(self, std: float, residual_std: float) -> dict[str, tuple[str, float]]:
        """Initial distribution of each parameter: (kind, value) by name."""
        stds = {"down_proj.weight": residual_std}
        return {
            name: ("constant", 0.0) if parameter.dim() == 1 else ("normal", stds.get(name, std))
            for name, parameter in self.named_parameters()
        }


class MoE(FromConfig, nn.Module):
    """A feed-forward of experts, of which each token uses `top_k`.

        moe = MoE(dim=512, hidden_dim=1024, num_experts=8, top_k=2, aux_loss_weight=0.01)
        y, aux = moe(x, return_aux=True)                          # (B, S, D) or (T, D), same shape out
        total = task_loss(y) + aux.total

    Keywords are the fields of `MoEConfig`, `device` and `dtype`; `MoE(config)` takes a config.
    `moe.router`, `moe.experts`, `moe.shared` (or None) and `moe.dispatcher` may be replaced. With several processes set
    `moe.data_group`, the ranks with other sequences, for `aux_scope = "global_batch"`; it may include the ranks of
    `sequence_group`, as fractions stay the same if all tokens are counted equally often.

    Where ranks hold parts of the same sequences (context parallelism, tokens split over tensor-parallel ranks), set
    `moe.sequence_group` to their group, or to a tuple of crossed groups: losses are then each rank's part of the mean
    over all tokens of the micro-batch, so that values and gradients of these ranks add up to those of one process. It
    costs the all-reduces of the scope (see `load_balancing`) and one of the number of tokens, once per forward if ctx is
    a `CachingContext`, else per layer; only in training forwards with a loss. Every rank holds equally many tokens of
    each sequence; documents are then ids within a sequence.
    """

    lagged_counts: Tensor | None

    @config_arguments(MoEConfig)
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

    def forward(
        self, x: Tensor, ctx: TokenContext | None = None, *, return_aux: bool = False
    ) -> Any:
        """Compute y of the shape and dtype of x (B, S, D) or (T, D); with `return_aux` (y, `AuxLosses` of this call).

        Returned losses have gradients, are zeros in eval, and are not handed to `aux_losses` too. ValueError for
        `return_aux` with `aux = "attach"`, whose losses would count twice, or "none".

        `ctx`, if given, may have `valid` (B, S) bool, False on pads, which are neither routed nor counted and get 0 from
        routed experts, and `document_ids` (B, S), which split a packed sequence into documents.
        """
        check_tokens(x, self.config.dim)
        if return_aux and self.config.aux != "return":
            rule, fix = (
                "must go with aux 'return'",
                "build the layer with it, or leave return_aux out",
            )
            raise invalid("return_aux", "aux", self.config.aux, rule, fix)
        tokens = x.reshape(-1, x.size(-1))  # (T, D)
        valid = _valid_tokens(ctx, x)
        if valid is not None:
            tokens = tokens.masked_fill(~valid.unsqueeze(1), 0.0)  # pads may hold NaN

        # Route. The choices are counted once: for the local dispatch, the statistics and the balance loss.
        rows = self._num_rows(x)
        routed = self.router.route(tokens, valid, rows)
        counts = load_balancing.count_ids(routed.ids, self.config.num_experts)  # (E,)
        weights, ids, kept = self._apply_capacity(routed, counts, valid)

        # Dispatch, experts, combine: (T, D) fp32.
        out, shared = self._run_experts(tokens, weights, ids, kept, valid, rows)
        if shared is not None:
            out = out + shared

        # A recomputation has gradients: a compiled forward without them need not break its graph to check.
        first = not (replaying() or (torch.is_grad_enabled() and inside_backward()))
        if first:
            self._add_statistics(routed, counts, kept, valid)
        if not self.training:
            self.pending_losses = None  # of a training forward whose losses the caller did not take
            if return_aux:
                zero = routed.logits.new_zeros(())
                losses = AuxLosses.of(zero, zero, zero)
        elif self.config.aux != "none":
            losses, num_tokens = self._router_losses(routed, counts, valid, x, ctx)
            if self.config.aux == "attach":
                out = self._attach(out, losses, num_tokens)
            elif first and torch.is_grad_enabled() and not return_aux:
                # Losses without a graph are of no use to the caller.
                before = self.pending_losses
                if before is None:
                    self.pending_losses = losses
                elif self._has_losses:
                    self.pending_losses = AuxLosses(*map(torch.add, before, losses))
        y = out.to(x.dtype).view(x.shape)
        return (y, losses) if return_aux else y

    def extra_repr(self) -> str:
        """Sizes, for print(model)."""
        c = self.config
        sizes = (
            f"dim={c.dim}, hidden_dim={c.hidden_dim}, num_experts={c.num_experts}, top_k={c.top_k}"
        )
        return sizes + (f", shared={c.num_shared_experts}" if c.num_shared_experts else "")

    @property
    def needs_whole_rows(self) -> bool:
        """Whether the tokens of a sequence must come in one call, and not one by one with a KV cache."""
        return not self.router.rule.causal

    @property
    def _drops(self) -> bool:
        # In evaluation the output of a token must not depend on the other tokens of the call.
        return self.training and self.config.capacity_factor is not None

    @property
    def _has_losses(self) -> bool:
        c = self.config
        return bool(c.aux_loss_weight or c.sequence_loss_weight or c.z_loss_weight)

    def _num_rows(self, x: Tensor) -> int | None:
        """B of x (B, S, D), None of (T, D); ValueError if the router chooses within sequences that are split."""
        if self.needs_whole_rows and not self.training and self.sequence_group is not None:
            rule = "chooses within each row in eval, and cannot where rows are split over ranks"
            fix = "evaluate without sequence_group, or train another router"
            raise invalid("router", "split_rows", self.config.router, rule, fix)
        return None if x.dim() == 2 else max(x.shape[:-2].numel(), 1)

    def _apply_capacity(
        self, routed: RoutingResult, counts: Tensor, valid: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Weights and ids (T, K), with 0 and E for dropped slots, and the slots kept of `counts` (E,).

        Evaluation drops nothing.
        """
        c = self.config
        if not self._drops:
            return routed.weights, routed.ids, counts
        assert c.capacity_factor is not None
        tokens = routed.ids.size(0) if valid is None else valid.sum()
        limit = router.expert_capacity(tokens, c.top_k, c.num_experts, c.capacity_factor)

        def drop() -> Tensor:
            given = routed.ids, routed.weights
            return router.drop_over_capacity(*given, c.num_experts, limit, c.drop_policy)

        ids = record_or_replay(self, "ids_within_capacity", drop)
        kept = torch.clamp(counts, max=limit)
        return routed.weights.masked_fill(ids == c.num_experts, 0.0), ids, kept

    def _run_experts(
        self,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        counts: Tensor,
        valid: Tensor | None,
        rows: int | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Sum of the routed experts (T, D) fp32, and the shared experts' output or None."""
        shared = None if self.shared is None else lambda: cast(nn.Module, self.shared)(x)
        if hasattr(self.dispatcher, "run"):
            dispatcher = cast(OverlappingDispatcher, self.dispatcher)
            return dispatcher.run(x, weights, ids, self.experts, shared)

        if type(self.dispatcher) is not LocalDispatch:
            sent = self.dispatcher.dispatch(x, weights, ids)
            out = self.experts(sent.rows, sent.counts)
        else:  # its routed tokens are the slots, so their number is known
            rule, num_rows = self.router.rule, None
            if (
                rule.max_slots is not None
            ):  # the rule is called once in training, for each sequence in eval
                calls = 1 if self.training or rows is None else rows
                num_rows = calls * rule.max_slots(len(x) // calls, self.router.config)
            sent = self.dispatcher.dispatch(x, weights, ids, counts=counts, num_rows=num_rows)
            full = valid is None and not self._drops and rule.routes_all_slots
            out = self.experts(sent.rows, sent.counts, full=full)
        return self.dispatcher.combine(out, sent.meta), None if shared is None else shared()

    @torch.no_grad()
    def _add_statistics(
        self, routed: RoutingResult, counts: Tensor, kept: Tensor, valid: Tensor | None
    ) -> None:
        """Add one forward to the counters; `kept` (E,) are the counts within capacity."""
        if counts.is_meta or is_fake(counts):
            return
        entropy = torch.special.entr(routed.probabilities).sum(dim=-1)  # (T,)
        tokens: Tensor | int = entropy.numel()
        dropped: Tensor | int = 0
        if valid is not None:
            tokens, entropy = valid.sum(), entropy.masked_fill(~valid, 0.0)
        if self._drops:
            dropped = (counts - kept).sum()
        # fp32 would lose small terms in a sum over many forwards.
        sums: dict[str, Tensor | int] = {
            "tokens": tokens,
            "dropped": dropped,
            "entropy": entropy.sum().double(),
        }
        self.counters.add(counts, sums, training=self.training)

    def _router_losses(
        self,
        routed: RoutingResult,
        counts: Tensor,
        valid: Tensor | None,
        x: Tensor,
        ctx: TokenContext | None,
    ) -> tuple[AuxLosses, Tensor | int]:
        """Weighted router losses, and the number of tokens that they are means over."""
        c, group = self.config, SequenceGroup(self.sequence_group, ctx)
        ids = routed.ids
        total: Tensor | int = len(ids)
        # Losses without a weight are constants: no graph, no communication.
        balance = z = sequence = routed.logits.new_zeros(())
        if not self._has_losses:
            return AuxLosses(balance, balance, z, sequence), total
        if group.groups:
            total = record_or_replay(self, "num_tokens", lambda: group.num_tokens(ids, valid))
        elif valid is not None:
            total = valid.sum()

        def fractions_in(scope: str) -> Tensor:
            """Fraction of the choices of each expert, (E,) or per token (T, E)."""
            if scope == "micro_batch":
                return load_balancing.to_fractions(group.sum(counts))
            if scope == "global_batch":
                reduced = load_balancing.global_batch_counts(counts, self.data_group, group)
                return load_balancing.to_fractions(self.counters.add_global(reduced))
            if scope == "global_batch_lagged":
                assert self.lagged_counts is not None
                return load_balancing.lagged_fractions(self.lagged_counts)

            documents: Tensor | None = getattr(ctx, "document_ids", None)
            if x.dim() == 2 and documents is None:
                rule = "must be (B, S, D), as a loss per sequence needs the sequences"
                fix = "pass (B, S, D), or ctx.document_ids"
                raise invalid("x", "dims", tuple(x.shape), rule, fix)
            shape = x.shape[:-1] if documents is None else documents.shape
            rows = shape[0] if len(shape) == 2 else 1
            return load_balancing.sequence_fractions(ids, rows, documents, c.num_experts, group)

        def balance_in(scope: str, name: str) -> Tensor:
            # Recorded: a recomputation must not reduce again, and the sums of the step have changed by then.
            fractions = record_or_replay(self, name, lambda: fractions_in(scope))
            return load_balancing.balance_loss(fractions, routed.probabilities, valid, total)

        if c.aux_loss_weight:
            balance = c.aux_loss_weight * balance_in(c.aux_scope, "fractions")
        if c.sequence_loss_weight:
            sequence = c.sequence_loss_weight * balance_in("sequence", "sequence_fractions")
        if c.z_loss_weight:
            z = c.z_loss_weight * load_balancing.z_loss(routed.logits, valid, total)
        return AuxLosses.of(balance, z, sequence), total

    def _attach(self, out: Tensor, losses: AuxLosses, num_tokens: Tensor | int) -> Tensor:
        # The scale may have changed by the time of a recomputation (pipeline schedules).
        scale = record_or_replay(self, "scale", lambda: self.aux_scale)
        scale = torch.ones_like(losses.z) if scale is None else scale
        # With aux_per_token the scale is a factor on sums; the losses are means over the tokens of the micro-batch.
        loss = losses.total * num_tokens if self.aux_per_token else losses.total
        return load_balancing.AttachLoss.apply(out, loss, scale) if loss.requires_grad else out

    def statistics(self, *, reset: bool = False) -> dict[str, Tensor]:
        """Statistics of routing since the last reset, in training and eval, as tensors on the device.

        `counts` (E,) int64 choices per expert before drops, `tokens` int64 without pads, `dropped` int64 slots over
        capacity, `entropy` fp32, mean over tokens in nats, and `bias` (E,) if there is one. No host sync until the caller
        reads a value. Recomputation does not count.
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
        zeros = {"router.bias": self.router.bias, "router.expert_bias": self.router.expert_bias}
        zeros["lagged_counts"] = self.lagged_counts
        return table | {k: ("constant", 0.0) for k, tensor in zeros.items() if tensor is not None}

    def parallel_roles(self) -> dict[str, str]:
        """Role of each parameter under tensor and expert parallelism, by pattern.

        Ranks of both have disjoint tokens here, so gradients of replicated parameters are summed.
        """
        roles = {"router.*": "replicate_sum_grad", "experts.*": "expert"}
        if self.shared is not None:
            if self.shared.gate_proj is not None:
                roles["shared.gate_proj.*"] = "colwise"
            roles |= {"shared.up_proj.*": "colwise", "shared.down_proj.*": "rowwise"}
            if self.shared.gate is not None:
                roles["shared.gate.*"] = "replicate_sum_grad"
        return roles

    def flops_per_token(self, seq_len: int) -> float:
        """Forward FLOPs of the matmuls for one token: router, top_k experts, shared experts."""
        c = self.config
        matrices = 2 if c.activation == "gelu" else 3
        routed = 2.0 * c.dim * (c.num_experts + matrices * c.top_k * c.hidden_dim)
        if hasattr(self.shared, "flops_per_token"):
            return routed + float(cast(Any, self.shared).flops_per_token(seq_len))
        inside = matrices * c.resolved_shared_hidden_dim + int(c.shared_gate)
        return routed + 2.0 * c.dim * inside


def _valid_tokens(ctx: TokenContext | None, x: Tensor) -> Tensor | None:
    """ctx.valid as (T,) on the device of x, or None; ValueError if it is not one value per token."""
    found: Tensor | None = getattr(ctx, "valid", None)
    if found is None:
        return None
    if found.numel() != x.numel() // x.size(-1):
        rule = f"must have one value for each token of x {tuple(x.shape)}"
        raise invalid("valid", "length", tuple(found.shape), rule)
    return found.to(x.device, non_blocking=True).reshape(-1)
