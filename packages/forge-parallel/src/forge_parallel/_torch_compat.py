"""Private torch names in use; seen in torch 2.11 to 2.13 where nothing else is said."""

from __future__ import annotations

import datetime
import functools
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils import _python_dispatch

F = TypeVar("F", bound=Callable[..., Any])
Borders = tuple[Tensor, Tensor, int, int]
"""Cumulative lengths of queries and of keys, int32 on the device, and the longest of each."""


def foreach_norm(tensors: Sequence[Tensor], norm_type: float = 2.0) -> list[Tensor]:
    """Norm of each tensor in fp32, one fused launch per device and dtype."""
    return list(torch._foreach_norm(list(tensors), norm_type, dtype=torch.float32))


def foreach_mul_(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply each tensor in place by a 0-dim tensor."""
    torch._foreach_mul_(list(tensors), factor)


def set_timeout(group: Any, seconds: float) -> None:
    """Bound each later collective of a process group that torch made with its default."""
    from torch.distributed.distributed_c10d import _set_pg_timeout

    _set_pg_timeout(datetime.timedelta(seconds=seconds), group)


def reduce_what_waits(module: Any) -> None:
    """Let an FSDP2 module's gradients of earlier micro-batches be reduced if the last one does not use it.

    HSDP's sum over copies waits for the last micro-batch, and torch forgets what waits in a module that
    gets no gradient there, until a later step finds it. Such a module then reduces zeros, and with them the rest.
    """
    state = module._get_fsdp_state()
    finish = state._root_post_backward_final_callback

    def first_reduce() -> None:
        for group in (g for other in state._state_ctx.all_states for g in _groups(other)):
            waits = group._partial_reduce_output is not None and group.all_reduce_grads
            if waits and not any(_has_gradient(p) for p in group.fsdp_params):
                _reduce_zeros(group)
        finish()

    state._root_post_backward_final_callback = first_reduce


def _reduce_zeros(group: Any) -> None:
    trained = [p for p in group.fsdp_params if p.sharded_param.requires_grad]
    if (
        sum(p.padded_sharded_param_size.numel() for p in trained)
        != group._partial_reduce_output.numel()
    ):
        raise RuntimeError(
            f"{group._module_fqn}: has gradients of some of its parameters from earlier micro-batches and none "
            "from the last, which HSDP cannot sum; use all of them in each micro-batch, or dp_replicate = 1"
        )
    for parameter in trained:
        dtype = group._reduce_dtype or parameter.unsharded_param.dtype
        zeros = torch.zeros_like(parameter.unsharded_param, dtype=dtype)
        parameter.unsharded_accumulated_grad = zeros
    group.post_backward()


def _has_gradient(parameter: Any) -> bool:
    """Whether a gradient is there that FSDP2 will still reduce in this backward."""
    own = getattr(parameter, "_unsharded_param", None)
    waiting = parameter.unsharded_accumulated_grad
    return waiting is not None or (own is not None and own.grad is not None)


def _groups(state: Any) -> list[Any]:
    """What an FSDP2 module gathers together; 2.13 may have several such groups."""
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def all_reduce(x: Tensor, group_name: str) -> Tensor:
    """A new tensor with the sum over ranks, by the ops that compile and fake groups know."""
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(x.contiguous(), "sum", group_name))


def start_all_gather(x: Tensor, size: int, group_name: str) -> Callable[[], Tensor]:
    """Parts of all ranks one after another on dim 0, once the returned function is called."""
    ops = torch.ops._c10d_functional
    pending = ops.all_gather_into_tensor(x.contiguous(), size, group_name)
    return lambda: ops.wait_tensor(pending)


def all_gather(x: Tensor, size: int, group_name: str) -> Tensor:
    """`start_all_gather`, waited for."""
    return start_all_gather(x, size, group_name)()


def start_reduce_scatter(x: Tensor, size: int, group_name: str) -> Callable[[], Tensor]:
    """The sum over ranks, of which each keeps its part of dim 0, once the returned function is called."""
    ops = torch.ops._c10d_functional
    pending = ops.reduce_scatter_tensor(x.contiguous(), "sum", size, group_name)
    return lambda: ops.wait_tensor(pending)


def reduce_scatter(x: Tensor, size: int, group_name: str) -> Tensor:
    """`start_reduce_scatter`, waited for."""
    return start_reduce_scatter(x, size, group_name)()


def overlap_matmuls(group_name: Any) -> None:
    """Let inductor split matmuls to overlap their collectives over a group (async tp); unrun on a GPU.

    It leaves groups alone whose ranks have not been given symmetric memory. That call is deprecated as needless in
    2.13, where the compiler's pass still asks for it.
    """
    from torch._inductor import config
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        enable_symm_mem_for_group(group_name)
    config._micro_pipeline_tp = True


def in_backward() -> bool:
    """Whether the autograd engine runs right now, as in a recomputed forward."""
    return torch._C._current_graph_task_id() != -1


#: What sees every operator under autograd; public in practice, kept in a private module.
DispatchMode: Any = _python_dispatch.TorchDispatchMode


def alias(tensor: Tensor) -> Tensor:
    """`tensor` without its graph, sharing memory and version counter, made below autograd.

    There a plain `detach` gives a counter of its own, so that a later change in place would not show.
    """
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def memory_of(tensor: Tensor) -> int:
    """Which memory a tensor lies in, fake tensors too: the same number for all its views."""
    return tensor.untyped_storage()._cdata


@functools.cache
def written(operator: Any) -> tuple[tuple[int, str], ...]:
    """Place and name of each argument that an operator changes."""
    schema = getattr(operator, "_schema", None)  # a higher-order operator has none
    arguments = enumerate(getattr(schema, "arguments", ()))
    return tuple((i, a.name) for i, a in arguments if a.alias_info and a.alias_info.is_write)


def pipeline_stage(*args: Any, **kwargs: Any) -> Any:
    """torch's PipelineStage, with two habits of torch 2.11 (not of 2.13) and one of both taken off.

    `_validate_fwd_outputs` holds the logits against the example of what goes from stage to stage, too; a
    caller of the loss need not know their shape. `_get_init_p2p_neighbors_ops` greets neighbours, of which in
    a V one is the rank itself: gloo cannot send there. `backward_weight_one_chunk` adds the gradients of
    micro-batches in the compute dtype, where FSDP2 was told to sum in another.
    """
    from torch.distributed.pipelining import PipelineStage

    class Stage(PipelineStage):
        def _validate_fwd_outputs(self, outputs: Any) -> None:
            if not self.is_last:
                super()._validate_fwd_outputs(outputs)  # type: ignore[misc]

        def _get_init_p2p_neighbors_ops(self) -> list[Any]:
            ops = super()._get_init_p2p_neighbors_ops()
            return [op for op in ops if op.group_peer != self.group_rank]

        def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
            out = super().backward_weight_one_chunk(*args, **kwargs)
            for parameter in _fsdp_parameters(self.submod):
                if parameter.unsharded_accumulated_grad is None:
                    parameter.to_accumulated_grad_if_needed()
                else:
                    parameter.accumulate_unsharded_grad_if_needed()
            return out

    return Stage(*args, **kwargs)


def _fsdp_parameters(model: Any) -> Iterator[Any]:
    """FSDP2's own objects of all parameters that have been gathered."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            for group in _groups(state):
                yield from (p for p in group.fsdp_params if hasattr(p, "_unsharded_param"))


def flash_cpu(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention (N, H, L, D) and its log-sum-exp (N, H, L) on the CPU."""
    found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return found[0], found[1]


def flash_cpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v (N, H, L, D) for any out and lse that hold these keys."""
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return backward(grad, q, k, v, out, lse, 0.0, causal)


def flash_varlen(
    q: Tensor, k: Tensor, v: Tensor, borders: Borders, causal: bool
) -> tuple[Tensor, Tensor]:
    """Attention (T, H, D) of sequences laid end to end, and its log-sum-exp (H, T): CUDA, 16 bits.

    k and v may have fewer heads. Seen in torch 2.13's own varlen_attn; not run by us.
    """
    out, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *borders, 0.0, causal, False)
    return out, lse


def flash_varlen_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    borders: Borders,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `flash_varlen` for any out and lse that hold these keys. Not run by us."""
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of a dropout that there is not
    return torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, lse, *borders, 0.0, causal, seed, q.new_empty(0)
    )


def not_compiled(function: F) -> F:
    """`torch.compiler.disable`, applied at the first call after something loaded the compiler.

    The decorator itself imports the compiler, half a second that everybody who imports us would pay for.
    """
    disabled = functools.cache(lambda: torch.compiler.disable(function))

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        return disabled()(*args) if "torch._dynamo" in sys.modules else function(*args)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]  # not traced into, 2.11 to 2.13
    return cast(F, call)


@functools.cache
def compiler(backend: str, memory_budget: float | None) -> Callable[..., Any]:
    """A backend for torch.compile with options of its own.

    They are read while a graph is cut into forward and backward, so they hold for its graphs alone. Kept,
    since torch asks for the same object before it reuses a graph.
    """
    from torch._dynamo import lookup_backend
    from torch._functorch import config

    budget: dict[str, Any] = (
        {} if memory_budget is None else {"activation_memory_budget": memory_budget}
    )

    def compile_graph(graph: Any, inputs: Any) -> Any:
        with config.patch(**budget):
            return lookup_backend(backend)(graph, inputs)

    return compile_graph


def count_compilations() -> tuple[int, int]:
    """Graphs that torch.compile made in this process, and how often it met code that it had compiled
    before."""
    if "torch._dynamo" not in sys.modules:
        return 0, 0
    from torch._dynamo.convert_frame import FRAME_COMPILE_COUNTER
    from torch._dynamo.utils import counters

    again = sum(times - 1 for times in FRAME_COMPILE_COUNTER.values())
    return counters["stats"]["unique_graphs"], again


def allow_graphs(number: int) -> None:
    """Let that many graphs of the same code live; beyond, torch runs it uncompiled (8 by default)."""
    from torch._dynamo import config

    config.recompile_limit = max(config.recompile_limit, number)
