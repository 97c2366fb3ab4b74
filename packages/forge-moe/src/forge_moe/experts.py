"""Experts: a stack of feed-forwards, each applied to the tokens that are routed to it.

Shapes: R routed tokens (one per token and slot) sorted by expert, E experts of this process, D width, F width inside an
expert.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from forge_moe._shared.module_arguments import FromConfig, config_arguments
from forge_moe._shared.parameter_kinds import ParameterKind
from forge_moe._shared.problems import invalid
from forge_moe._shared.shards import local_tensor
from forge_moe._torch_compat import autocast_dtype, is_clamped, is_compiling_or_fake
from forge_moe.config import MoEConfig
from forge_moe.grouped_mm import (
    Casts,
    GemmBackend,
    Groups,
    choose_backend,
    find_backend,
    multiply,
    pad_rows,
    unpad_rows,
)
from forge_moe.protocols import OverlappingDispatcher

__all__ = ["Experts", "SortedExperts", "sorted_experts_by_name"]

Optional = Tensor | None


class Experts(FromConfig, nn.Module):
    """Experts of one activation as 3-D parameters.

        experts = Experts(dim=512, hidden_dim=1024, num_experts=8)
        experts(x, counts)   # x (R, D) sorted by expert, counts (E,) ints on the device -> (R, D)

    Keywords are the fields of `MoEConfig`, `device` and `dtype`; `Experts(config)` takes a config.
    `gate_proj` (E, D, F; SwiGLU only), `up_proj` (E, D, F), `down_proj` (E, F, D), with biases `*_bias` (E, F), (E, F),
    (E, D). Of activation "clamped_swiglu" `gate_up_proj` (E, D, 2 F) has alternating columns of gate and up, and
    `gate_up_proj_bias` (E, 2 F). A matrix is stored as the right factor: x @ up_proj[e]; `forge_moe.layouts` converts
    to the layouts of transformers and torchtitan, (E, out, in). Parameters may be DTensors
    sharded on dim 0: this process then holds and computes its own E experts.

    Rows of x beyond counts.sum() are a tail: not computed, zero in the output, without gradient, even if they hold NaN.
    An expert without tokens gets an exact zero gradient, so every parameter always has one. Under autocast x and the
    matrices are cast to its dtype. No host sync with `grouped_mm`, one otherwise.

    With `float8` the casts of matrices, two bytes per value, are kept and used again until a parameter changes: in place
    (an optimizer's step, `load_state_dict`), or by another tensor in its place (FSDP frees them with the gathered
    parameter). As for autograd's check of saved tensors, a write through `.data` is not a change: call `drop_casts()`.
    """

    @config_arguments(MoEConfig)
    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        find_backend(config.backend)  # an unknown name fails here and not in the first forward
        self._casts: dict[str, tuple[Any, Casts]] = {}  # by parameter, with its state
        num, dim, hidden = config.num_experts, config.dim, config.hidden_dim
        gated, fused = config.activation == "swiglu", config.activation == "clamped_swiglu"
        bias = config.bias

        def stack(exists: bool, *shape: int) -> nn.Parameter | None:
            return nn.Parameter(torch.empty(num, *shape)) if exists else None

        self.gate_proj = stack(gated, dim, hidden)
        self.gate_up_proj = stack(fused, dim, 2 * hidden)
        self.up_proj = stack(not fused, dim, hidden)
        self.down_proj = nn.Parameter(torch.empty(num, hidden, dim))
        self.gate_proj_bias = stack(bias and gated, hidden)
        self.gate_up_proj_bias = stack(bias and fused, 2 * hidden)
        self.up_proj_bias = stack(bias and not fused, hidden)
        self.down_proj_bias = stack(bias, dim)

        clamped = ClampedSwiGLU(config.swiglu_alpha, config.swiglu_limit)
        self.activation: Activation = clamped if fused else Gelu()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw initial values, also after `to_empty`: matrices normal with std 0.02, biases 0."""
        for name, parameter in self.named_parameters():
            if name.endswith("_bias"):
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x: Tensor, counts: Tensor, *, full: bool = False) -> Tensor:
        """Apply the experts to x (R, D). `full` promises that counts.sum() is R, which saves two passes."""
        dtype = autocast_dtype(x) or x.dtype

        def compute_tensor(name: str) -> Optional:
            parameter = getattr(self, name)
            return None if parameter is None else local_tensor(parameter).to(dtype)

        x = x.to(dtype)
        up_name = "up_proj" if self.gate_up_proj is None else "gate_up_proj"
        names = ("gate_proj", up_name, "down_proj")
        weights = [compute_tensor(name) for name in names]
        biases = [compute_tensor(f"{name}_bias") for name in names]
        up = weights[1]
        assert up is not None
        if counts.numel() != up.size(0):
            rule = f"must be ({up.size(0)},): one number of rows per expert here"
            raise invalid("counts", "shape", tuple(counts.shape), rule)

        widths = (self.config.dim, self.config.hidden_dim)
        backend = choose_backend(self.config.backend, x, widths, counts)
        groups = Groups.of(counts, host_sizes=backend.needs_host_sizes, full=full)
        keeps = backend.cast_matrices is not None and not is_compiling_or_fake(x)
        casts = [self._casts_of(name, dtype) if keeps else None for name in names]
        options = groups, backend, self.activation, casts
        return GroupedFeedForward.apply(x, *weights, *biases, *options)

    def _casts_of(self, name: str, dtype: torch.dtype) -> Casts | None:
        """The casts of a parameter in `dtype`; None if it has no version, or is a tensor of this forward only."""
        parameter = getattr(self, name)
        if not isinstance(parameter, nn.Parameter) or parameter.is_inference():
            return None
        local = local_tensor(parameter)
        state = id(parameter), local.data_ptr(), local._version, dtype
        kept, casts = self._casts.get(name, (None, None))
        if casts is None or kept != state:
            # A new object: the backward of an earlier forward reads the casts of its own weights.
            casts = Casts()
            self._casts[name] = state, casts
        return casts

    def drop_casts(self) -> None:
        """Free the casts that `float8` keeps; the next forward casts again."""
        while self._casts:
            self._casts.popitem()[1][1].clear()

    def __setattr__(self, name: str, value: Any) -> None:
        # FSDP2 puts gathered and sharded parameters here in turn. The former is one tensor, whose version does not
        # change with its values; its casts would keep the memory that a reshard frees.
        kept = self.__dict__.get("_casts", {}).pop(name, None)
        if kept is not None:
            kept[1].clear()
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_casts": {}}

    def parameter_kinds(self) -> dict[str, ParameterKind]:
        """Kind of each parameter, for weight decay and Muon: biases (E, F) are a vector for each expert."""
        return {
            name: "stacked_bias" if name.endswith("_bias") else "stacked_matrix"
            for name, _ in self.named_parameters()
        }

    def init_table(self, std: float, residual_std: float) -> dict[str, tuple[str, float]]:
        """Initial distribution of each parameter: (kind, value) by name. down_proj writes to the residual stream."""
        values = dict.fromkeys(("gate_proj", "gate_up_proj", "up_proj"), std)
        values["down_proj"] = residual_std
        return {
            name: ("normal", values[name]) if name in values else ("constant", 0.0)
            for name, _ in self.named_parameters()
        }

    def extra_repr(self) -> str:
        """Number and shape, for print(model)."""
        c = self.config
        return f"{c.num_experts} x ({c.dim} -> {c.hidden_dim} -> {c.dim}), {c.activation}"


class SortedExperts(Experts):
    """`Experts` for a router of your own: x sorted by expert, also where `expert_parallelize` shards the experts.

        experts = SortedExperts(dim=64, hidden_dim=128, num_experts=4)
        experts(x, counts)   # x (R, D) sorted by expert, counts (E,) ints on the device, of sum R -> (R, D)

    A module that routes tokens in another way than `MoE` (by modality, say) calls them with the counts of all E experts.
    Over ranks each routed token is sent to the rank of its expert and back, once for each of its experts; R may differ
    among ranks and be 0, and all ranks call it equally often. It then costs as much as an `AllToAllDispatch` with one
    slot per token: one host sync.
    """

    dispatcher: OverlappingDispatcher | None = None

    def forward(self, x: Tensor, counts: Tensor, *, full: bool = True) -> Tensor:
        """Apply the experts to x (R, D); the result has the dtype of the experts' matmuls."""
        if self.dispatcher is None:
            return super().forward(x, counts, full=full)
        ids = torch.arange(self.config.num_experts, device=counts.device)
        ids = ids.repeat_interleave(counts, output_size=len(x))[:, None]  # (R, 1)
        weights = torch.ones(ids.shape, device=x.device)
        out, _ = self.dispatcher.run(x, weights, ids, super().forward)
        return out.to(x.dtype)


def sorted_experts_by_name(model: nn.Module) -> dict[str, Any]:
    """The `SortedExperts` in a model by their names."""
    return {n: m for n, m in model.named_modules() if isinstance(m, SortedExperts)}


class Gelu(NamedTuple):
    """The exact GELU: (R, F) -> (R, F)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x)

    def backward(self, grad: Tensor, x: Tensor) -> Tensor:
        """The gradient of x (R, F) from that of the output."""
        return torch.ops.aten.gelu_backward(grad, x)


class ClampedSwiGLU(NamedTuple):
    """(up + 1) * gate * sigmoid(alpha * gate) with gate at most `limit` and up within it (gpt-oss, 2025).

    (R, 2 F) -> (R, F): columns of gate and up alternate, as one matmul with `gate_up_proj` gives them. A clamped value
    has no gradient, as in autograd of the installed torch.
    """

    alpha: float
    limit: float

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self._clamped(x)
        return (up + 1) * gate * torch.sigmoid(self.alpha * gate)

    def backward(self, grad: Tensor, x: Tensor) -> Tensor:
        """The gradient of x (R, 2 F) from that of the output (R, F); holds about six buffers of (R, F)."""
        gate, up = self._clamped(x)
        sigmoid = torch.sigmoid(self.alpha * gate)
        of_swish = sigmoid * (1 + self.alpha * gate * (1 - sigmoid))  # d (gate sigmoid(alpha gate))
        grad_gate = grad * (up + 1) * of_swish
        grad_up = grad * gate * sigmoid

        raw_gate, raw_up = x[..., ::2], x[..., 1::2]
        grad_gate = grad_gate.masked_fill(is_clamped(raw_gate, self.limit), 0.0)
        grad_up = grad_up.masked_fill(is_clamped(raw_up.abs(), self.limit), 0.0)
        return torch.stack((grad_gate, grad_up), dim=-1).flatten(-2)  # (R, F, 2) -> (R, 2 F)

    def _clamped(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Clamped gate and up, (R, F) each, of x (R, 2 F) in which their columns alternate."""
        return x[..., ::2].clamp(max=self.limit), x[..., 1::2].clamp(-self.limit, self.limit)


Activation = Gelu | ClampedSwiGLU


class GroupedFeedForward(Function):
    """down(silu(gate(x)) * up(x)), or down(activation(up(x))) without a gate, by each row's own expert.

    One function, not a chain of ops, so that (1) the hidden values (R, F) are not saved but recomputed from gate and up,
    (2) the tail beyond the groups is zeroed exactly twice, in the output and in the gradient of x, (3) gradients reach
    the kernels contiguous. Saves x, gate and up, R (D + 2 F) values; backward allocates 2 R F more. No second
    derivatives.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate_w: Optional,
        up_w: Tensor,
        down_w: Tensor,
        gate_b: Optional,
        up_b: Optional,
        down_b: Optional,
        groups: Groups,
        backend: GemmBackend,
        activation: Activation,
        casts: list[Casts | None],
    ) -> Tensor:
        num_rows, position = x.size(0), None
        if backend.padded:  # once, for all matmuls
            groups, position = groups.padded(num_rows)
            x = pad_rows(x, position, groups)
        rows = x if backend.cast_rows is None else backend.cast_rows(x)  # once, for gate and up
        gate = None
        if gate_w is not None:
            gate = _affine(rows, gate_w, gate_b, groups, backend, casts[0])  # (R, F)
        up = _affine(rows, up_w, up_b, groups, backend, casts[1])  # (R, F); clamped SwiGLU (R, 2 F)
        hidden = activation.forward(up) if gate is None else F.silu(gate).mul_(up)  # (R, F)
        out = _affine(hidden, down_w, down_b, groups, backend, casts[2])  # (R, D)
        out = unpad_rows(out, position, num_rows)
        if not groups.full:
            # Not in place: selective recomputation keeps the kernel's output and rejects a change of it.
            out = out.masked_fill(groups.tail(x.size(0)), 0.0)

        saved = (x, gate, up, gate_w, up_w, down_w, groups.counts, groups.ends, position)
        ctx.save_for_backward(*saved)
        ctx.host_sizes, ctx.full, ctx.backend = groups.host_sizes, groups.full, backend
        ctx.activation, ctx.casts = activation, casts
        ctx.has_bias = (gate_b is not None, up_b is not None, down_b is not None)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Optional, ...]:
        x, gate, up, gate_w, up_w, down_w, counts, ends, position = ctx.saved_tensors
        groups, backend = Groups(counts, ends, ctx.host_sizes, ctx.full), ctx.backend
        needs_x, needs_gate, needs_up, needs_down = ctx.needs_input_grad[:4]
        gate_bias, up_bias, down_bias = ctx.has_bias
        gate_casts, up_casts, down_casts = ctx.casts

        # The down projection.
        num_rows = grad.size(0)
        grad = pad_rows(grad.contiguous(), position, groups)
        act = None if gate is None else F.silu(gate)  # (R, F)
        hidden = ctx.activation.forward(up) if act is None else act * up  # (R, F)
        grad_down_w = backend.outer(hidden, grad, groups) if needs_down else None
        grad_down_b = _sum_rows(grad, groups, backend) if down_bias else None
        del hidden  # at most two buffers of (R, F) at a time
        grad_hidden = multiply(grad, down_w, groups, backend, down_casts, transposed=True)  # (R, F)

        # The up projection, or the fused one.
        backward = ctx.activation.backward
        grad_up = backward(grad_hidden, up) if act is None else act.mul_(grad_hidden)
        grad_up_w = backend.outer(x, grad_up, groups) if needs_up else None
        grad_up_b = _sum_rows(grad_up, groups, backend) if up_bias else None
        grad_x = None
        if needs_x:
            grad_x = multiply(grad_up, up_w, groups, backend, up_casts, transposed=True)

        grad_gate_w = grad_gate_b = None
        if gate is not None:
            # In place: silu'(gate) times the gradient of silu(gate), in the buffer of grad_hidden.
            grad_hidden.mul_(up)
            silu_backward = torch.ops.aten.silu_backward.grad_input
            grad_gate = silu_backward(grad_hidden, gate, grad_input=grad_hidden)
            grad_gate_w = backend.outer(x, grad_gate, groups) if needs_gate else None
            grad_gate_b = _sum_rows(grad_gate, groups, backend) if gate_bias else None
            if grad_x is not None:
                grad_x += multiply(grad_gate, gate_w, groups, backend, gate_casts, transposed=True)

        if grad_x is not None:
            grad_x = unpad_rows(grad_x, position, num_rows)
            if not groups.full:
                grad_x.masked_fill_(groups.tail(num_rows), 0.0)
        weights = (grad_gate_w, grad_up_w, grad_down_w)
        return (grad_x, *weights, grad_gate_b, grad_up_b, grad_down_b, None, None, None, None)


def _affine(
    x: Any, w: Tensor, b: Optional, groups: Groups, backend: GemmBackend, casts: Casts | None
) -> Tensor:
    out = multiply(x, w, groups, backend, casts)
    if b is None:
        return out
    # In place on the gathered biases, not on the output, which selective recomputation may have kept.
    return b.index_select(0, groups.experts_of_rows(out.size(0))).add_(out)


def _sum_rows(rows: Tensor, groups: Groups, backend: GemmBackend) -> Tensor:
    """Sum of each expert's rows (E, N), by the same kernel: no atomics, so the same bits every time."""
    ones = rows.new_ones(rows.size(0), 8)  # 8 columns: kernels need rows of 16 bytes
    return backend.outer(ones, rows, groups)[:, 0]
