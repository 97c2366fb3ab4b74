"""The mixture-of-experts layer.

Shapes: B rows of a batch, S tokens of a row, T = B S tokens, K slots per token, E experts, D width.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_moe._torch_compat import inside_backward, is_fake
from forge_moe.balance.attach import AttachLoss
from forge_moe.balance.losses import balance_loss, count_ids, fractions, z_loss
from forge_moe.balance.scopes import (
    global_batch_counts,
    lagged_shares,
    micro_batch_shares,
    sequence_shares,
)
from forge_moe.balance.spread import Spread
from forge_moe.balance.tally import Tally
from forge_moe.balance.terms import AuxLosses
from forge_moe.capacity import drop_over_capacity, row_limit
from forge_moe.config import MoEConfig
from forge_moe.dispatch import LocalDispatch
from forge_moe.experts import Experts
from forge_moe.replay import recall, replaying
from forge_moe.routers import Routed, Router
from forge_moe.routers.router import check_tokens


class SharedExperts(nn.Module):
    """Experts that see every token, as one feed-forward of their widths together.

    Side by side or stacked is the same function: outputs of experts add up. With `gate`, a sigmoid of
    the token scales the sum (Qwen2-MoE).
    """

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        dim, hidden = config.dim, config.resolved_shared_hidden_dim
        gated = config.activation == "swiglu"
        self.gate_proj = nn.Linear(dim, hidden, bias=config.bias) if gated else None
        self.up_proj = nn.Linear(dim, hidden, bias=config.bias)
        self.down_proj = nn.Linear(hidden, dim, bias=config.bias)
        self.gate = nn.Linear(dim, 1, bias=False) if config.shared_gate else None

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., D)."""
        if self.gate_proj is None:
            hidden = F.gelu(self.up_proj(x))
        else:
            hidden = F.silu(self.gate_proj(x)) * self.up_proj(x)
        out: Tensor = self.down_proj(hidden)
        return out if self.gate is None else out * torch.sigmoid(self.gate(x))

    def init_table(self, std: float, residual_std: float) -> dict[str, tuple[str, float]]:
        """How each parameter begins: (kind, value) by name."""
        table = {}
        for name, parameter in self.named_parameters():
            value = residual_std if name == "down_proj.weight" else std
            table[name] = ("constant", 0.0) if parameter.dim() == 1 else ("normal", value)
        return table


class MoE(nn.Module):
    """A feed-forward made of experts, of which each token visits `top_k`.

        moe = MoE(MoEConfig(dim=512, hidden_dim=1024, num_experts=8, top_k=2))
        y = moe(x)                                                # (B, S, D) or (T, D), same shape out
        total = task_loss(y) + aux_losses(moe).total

    `moe.router`, `moe.experts`, `moe.shared` (or None) and `moe.dispatcher` may be replaced. With several
    processes set `moe.data_group`, the ranks with other rows, for `aux_scope = "global_batch"`; it may hold
    those of `sequence_group` too, as shares stay the same if all are counted equally often.

    Where ranks hold parts of the same rows (context parallelism, tokens cut over tensor-parallel ranks), set
    `moe.sequence_group` to their group, or to a tuple of crossed groups: losses are then each rank's part of
    the mean over all tokens of the micro-batch, so that values and gradients of these ranks add up to those
    of one process. It costs the all-reduces of the scope (see `balance.scopes`) and one of the number of
    tokens, once per forward where ctx has `once`, else per layer; in training forwards with a loss alone.
    Every rank holds equally many tokens of each row; documents are then ids within a row.
    """

    lagged_counts: Tensor | None

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.router = Router(config.router_config)
        self.experts = Experts(config)
        self.shared = SharedExperts(config) if config.num_shared_experts else None
        self.dispatcher: Any = LocalDispatch(config.num_experts)
        lagged = config.aux_scope == "global_batch_lagged"
        counts = torch.zeros(config.num_experts, dtype=torch.int64) if lagged else None
        self.register_buffer("lagged_counts", counts)
        self.data_group: Any = None
        self.sequence_group: Any = None
        self.aux_scale: Tensor | None = None
        self.pending: AuxLosses | None = None
        self.tally = Tally(config.num_experts)

    def forward(self, x: Tensor, ctx: Any = None) -> Tensor:
        """x (B, S, D) or (T, D) -> the same shape and dtype.

        `ctx`, if given, may have `valid` (B, S) bool, False on pads, which are neither routed nor counted
        and get 0 from routed experts, and `document_ids` (B, S), which part a row into sequences.
        """
        check_tokens(x, self.config.dim)
        tokens = x.reshape(-1, x.size(-1))  # (T, D)
        valid = _flat(ctx, "valid", x)
        if valid is not None:
            tokens = tokens.masked_fill(~valid.unsqueeze(1), 0.0)  # whatever lies there
        rows = self._rows(x)
        routed = self.router.route(tokens, valid, rows)
        weights, ids = self._within_capacity(routed, valid)
        bound = self._most_rows(len(tokens), rows)
        placed = valid is None and not self._drops and self.router.rule.places_all
        out, shared = self._through_experts(tokens, weights, ids, bound, placed=placed)
        # A recomputation has gradients: without them a compiled forward need not break its graph to ask.
        first = not (replaying() or (torch.is_grad_enabled() and inside_backward()))
        if first:
            self._count(routed, ids, valid)
        if not self.training:
            self.pending = None  # the losses of a training forward that nobody took
        if shared is not None:
            out = out + shared
        if self.training and self.config.aux != "none":
            out = self._with_losses(out, routed, valid, x, ctx, first)
        return out.to(x.dtype).view(x.shape)

    @property
    def needs_whole_rows(self) -> bool:
        """Whether a row cannot be given one token after another, as a KV cache does."""
        return not self.router.rule.causal

    @property
    def _drops(self) -> bool:
        # A token that is evaluated must not depend on others that happen to share the call.
        return self.training and self.config.capacity_factor is not None

    def _rows(self, x: Tensor) -> int | None:
        """B of x (B, S, D), None of (T, D); ValueError where a choice within rows does not see them whole."""
        if self.needs_whole_rows and not self.training and self.sequence_group is not None:
            raise ValueError(
                f"router {self.config.router!r} chooses within each row in eval and cannot evaluate rows "
                "that are cut over ranks; evaluate without sequence_group, or train another router"
            )
        return None if x.dim() == 2 else max(x.shape[:-2].numel(), 1)

    def _most_rows(self, tokens: int, rows: int | None) -> int | None:
        """How many slots go somewhere at most, where the rule knows better than T times K."""
        if self.router.rule.most_rows is None:
            return None
        parts = 1 if self.training or rows is None else rows
        return parts * self.router.rule.most_rows(tokens // parts, self.router.config)

    def _within_capacity(self, routed: Routed, valid: Tensor | None) -> tuple[Tensor, Tensor]:
        """Weights and ids (T, K), those of dropped slots 0 and E; nothing is dropped in eval."""
        c = self.config
        if not self._drops:
            return routed.weights, routed.ids
        assert c.capacity_factor is not None
        tokens = routed.ids.size(0) if valid is None else valid.sum()
        limit = row_limit(tokens, c.top_k, c.num_experts, c.capacity_factor)
        kept = recall(
            self,
            "kept",
            lambda: drop_over_capacity(
                routed.ids, routed.weights, c.num_experts, limit, c.drop_policy
            ),
        )
        return routed.weights.masked_fill(kept == c.num_experts, 0.0), kept

    def _through_experts(
        self, x: Tensor, weights: Tensor, ids: Tensor, bound: int | None, *, placed: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Sum of the routed experts (T, D) fp32, and the shared experts' output or None."""
        meanwhile = None if self.shared is None else lambda: cast(nn.Module, self.shared)(x)
        run: Any = getattr(self.dispatcher, "run", None)
        if run is not None:
            return run(x, weights, ids, self.experts, meanwhile)
        local = type(self.dispatcher) is LocalDispatch
        known = {"num_rows": bound} if local and bound is not None else {}
        sent = self.dispatcher.dispatch(x, weights, ids, **known)
        full = placed and local
        rows = self.experts(sent.rows, sent.counts, full=full)
        shared = None if meanwhile is None else meanwhile()
        return self.dispatcher.combine(rows, sent.meta), shared

    @torch.no_grad()
    def _count(self, routed: Routed, kept: Tensor, valid: Tensor | None) -> None:
        """Tally one forward."""
        if routed.ids.is_meta or is_fake(routed.ids):
            return
        num = self.config.num_experts
        entropy = torch.special.entr(routed.probabilities).sum(dim=-1)  # (T,)
        if valid is None:
            tokens = torch.full((), entropy.numel(), dtype=torch.int64, device=entropy.device)
        else:
            tokens, entropy = valid.sum(), entropy.masked_fill(~valid, 0.0)
        counts = count_ids(routed.ids, num)
        dropped = counts.sum() - (kept != num).sum()
        self.tally.add(counts, tokens, dropped, entropy.sum(), training=self.training)

    def _with_losses(
        self, out: Tensor, routed: Routed, valid: Tensor | None, x: Tensor, ctx: Any, first: bool
    ) -> Tensor:
        """Keep the router losses for the caller, or attach them to `out`."""
        c = self.config
        zero = routed.logits.new_zeros(())
        balance = z = sequence = zero
        spread, total = Spread(self.sequence_group, ctx), None
        if spread.groups and (c.aux_loss_weight or c.sequence_loss_weight or c.z_loss_weight):
            here = routed.ids
            total = recall(self, "tokens", lambda: spread.tokens(valid, len(here), here.device))

        def loss(name: str, scope: str) -> Tensor:
            shares = recall(self, name, lambda: self._shares(scope, routed.ids, x, ctx, spread))
            return balance_loss(shares, routed.probabilities, valid, total)

        if c.aux_loss_weight:
            balance = c.aux_loss_weight * loss("shares", c.aux_scope)
        if c.sequence_loss_weight:
            sequence = c.sequence_loss_weight * loss("sequence", "sequence")
        if c.z_loss_weight:
            z = c.z_loss_weight * z_loss(routed.logits, valid, total)
        terms = AuxLosses.of(balance, z, sequence)
        if c.aux == "attach":
            scale = recall(self, "scale", lambda: self.aux_scale)
            scale = torch.ones_like(zero) if scale is None else scale
            return AttachLoss.apply(out, terms.total, scale) if terms.total.requires_grad else out
        if first and torch.is_grad_enabled():  # without grad there is nothing that could be added
            waiting = self.pending
            self.pending = terms if waiting is None else AuxLosses(*map(torch.add, waiting, terms))
        return out

    @torch.no_grad()
    def _shares(self, scope: str, ids: Tensor, x: Tensor, ctx: Any, spread: Spread) -> Tensor:
        """Share of each expert, (E,) or per token (T, E), in the scope of the balance loss."""
        num = self.config.num_experts
        if scope == "micro_batch":
            return micro_batch_shares(ids, num, spread)
        if scope == "global_batch":
            counts = global_batch_counts(ids, num, self.data_group, spread)
            return fractions(self.tally.add_global(counts))
        if scope == "global_batch_lagged":
            assert self.lagged_counts is not None
            return lagged_shares(self.lagged_counts)
        documents = getattr(ctx, "document_ids", None)
        if x.dim() == 2 and documents is None:
            raise ValueError(
                f"a loss per sequence needs to know sequences, and x {tuple(x.shape)} is (T, D); pass "
                "(B, S, D), or ctx.document_ids"
            )
        shape = x.shape[:-1] if documents is None else documents.shape
        rows = shape[0] if len(shape) == 2 else 1
        return sequence_shares(ids, rows, documents, num, spread)

    def statistics(self, *, reset: bool = False) -> dict[str, Tensor]:
        """What the router did since the last reset, in training and eval, as tensors on the device:

        `counts` (E,) int64 choices per expert before drops, `tokens` int64 without pads, `dropped` int64
        slots over capacity, `entropy` fp32, mean over tokens in nats, and `bias` (E,) if there is one.
        No host sync until the caller reads a value. Recomputation does not count.
        """
        found = self.tally.read()
        if self.router.expert_bias is not None:
            found["bias"] = self.router.expert_bias.clone()
        if reset:
            self.tally.reset()
        return found

    def __getstate__(self) -> dict[str, Any]:
        # Losses that wait hold a graph, and groups are of this process: neither can be copied.
        return {**self.__dict__, "pending": None, "data_group": None, "sequence_group": None}

    def init_table(self, std: float, residual_std: float) -> dict[str, tuple[str, float]]:
        """How each parameter and buffer begins: (kind, value) by name."""
        table: dict[str, tuple[str, float]] = {"router.weight": ("normal", std)}
        for name in ("experts", "shared"):
            module: Any = getattr(self, name)
            rows = {} if module is None else module.init_table(std, residual_std)
            table |= {f"{name}.{key}": row for key, row in rows.items()}
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
        matrices = 3 if c.activation == "swiglu" else 2
        inside = c.top_k * c.hidden_dim + c.resolved_shared_hidden_dim
        return 2.0 * c.dim * (c.num_experts + matrices * inside + int(c.shared_gate))


def _flat(ctx: Any, name: str, x: Tensor) -> Tensor | None:
    """ctx.<name> as (T,) on the device of x, or None; ValueError if it is not one value per token."""
    found: Tensor | None = getattr(ctx, name, None)
    if found is None:
        return None
    if found.numel() != x.numel() // x.size(-1):
        raise ValueError(
            f"{name} {tuple(found.shape)} must have one value for each token of x {tuple(x.shape)}"
        )
    return found.to(x.device, non_blocking=True).reshape(-1)
