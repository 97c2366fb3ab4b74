"""The private torch names in use, and why: one table, checked by tests/test_torch_names.py.

A name without a version is needed from 2.11 to 2.15, the versions that are supported. Delete what an older version
needs when its support ends.

    name                                          versions   why no public name does it
    torch._foreach_norm, _foreach_mul_, _copy_    all        one launch for many tensors; optimizers of torch use them
    distributed_c10d._set_pg_timeout              to 2.13    public as set_timeout from 2.14 on
    DTensor._op_dispatcher, _clear_DTensor_...    all        DTensor caches results by meshes of ended process groups
    FSDPModule._get_fsdp_state and its groups     all        gradients of parameters that only some ranks used
    torch.ops._c10d_functional                    all        collectives that torch.compile and fake groups trace
    config._micro_pipeline_tp, enable_symm_mem    all        async tp; never run on a GPU
    torch._C._current_graph_task_id               all        whether a forward runs inside of a backward
    _python_dispatch.TorchDispatchMode            all        documented, but in a private module
    _SetExcludeDispatchKeyGuard                   all        an alias below autograd that keeps the version counter
    PipelineStage methods                         see below  bugs of stages, fixed in 2.12 and 2.15
    _torchdynamo_disable, eval_frame              to 2.11    exempts a function without an import of the compiler
    _dynamo.lookup_backend, config, counters      all        options of one graph; counts of compilations
    cuda.memory._record_memory_history            all        documented as experimental; never run: needs a GPU
    _execution_engine.queue_callback              all        the end of a backward; FSDP2 and DDP use it
    _apply_to_tensors, _pytree.tree_leaves        all        the containers that FSDP2 casts and hooks
"""

from __future__ import annotations

import datetime
import functools
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _python_dispatch

F = TypeVar("F", bound=Callable[..., Any])


def require_attributes(owner: Any, *names: str) -> None:
    """Raise AttributeError if a class or function of torch lacks an attribute that is overridden or read here.

    Without this check a rename in torch would go unnoticed: torch would never call the override.
    """
    declared = getattr(owner, "__annotations__", {})
    for name in names:
        if not hasattr(owner, name) and name not in declared:
            raise AttributeError(
                f"{owner.__name__} of torch {torch.__version__} must have {name}, on which forge_parallel builds; "
                "use torch>=2.11,<2.16"
            )


def foreach_norm(tensors: Sequence[Tensor], norm_type: float = 2.0) -> list[Tensor]:
    """Norm of each tensor in fp32, one fused launch per device and dtype."""
    return list(torch._foreach_norm(list(tensors), norm_type, dtype=torch.float32))


def foreach_mul_(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply each tensor in place by a 0-dim tensor."""
    torch._foreach_mul_(list(tensors), factor)


def foreach_to(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """`tensor.to(dtype)` of each tensor in another dtype, one fused launch per device."""
    if len(tensors) == 1:
        return [tensors[0].to(dtype)]
    found = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    torch._foreach_copy_(found, list(tensors))
    return found


def set_timeout(group: Any, seconds: float) -> None:
    """Bound each later collective of a process group that torch made with its default."""
    distributed: Any = dist.distributed_c10d
    # public from torch 2.14 on, which deprecates the private name
    bound = getattr(distributed, "set_timeout", None) or distributed._set_pg_timeout
    bound(datetime.timedelta(seconds=seconds), group)


def clear_sharding_caches() -> None:
    """Clear DTensor's caches of sharding propagation, in this thread.

    Their keys are meshes that compare equal. A mesh of a later process group compares equal, too, although its
    groups have other names, and would get a cached result with the names of groups that have ended.
    """
    from torch.distributed.tensor import DTensor

    # as torch.distributed.tensor.debug does (2.11 to 2.15), which needs numpy and torch does not
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()


def reduce_unused_parameters(meshes: Mapping[Any, Any]) -> None:
    """Let all ranks reduce the same gradients of FSDP2 units, {module: mesh}, whatever parameters each rank used.

    FSDP2's reduce-scatter packs only parameters that have a gradient on this rank: ranks that used different
    parameters would add gradients of one to those of another. Here an unused parameter of a gathered unit gets
    zeros, and a parameter that no rank used since the last update has no gradient, as in one process. torch 2.13's
    `set_reduce_scatter_unused_params` only adds zeros (an optimizer would decay such parameters), and supports one
    dtype. A unit that the last micro-batch leaves out is reduced as well, and with it HSDP's sum over replicas.

    Cost: one all-reduce of a byte per parameter and axis at the end of the step's last backward; the host reads the
    result on ranks with unused parameters.
    """
    used: set[Any] = set()
    groups = {
        group: mesh
        for module, mesh in meshes.items()
        for group in _groups(module._get_fsdp_state())
        if mesh.size() > 1
    }
    for group in groups:
        group.post_backward = functools.partial(_reduce_all, group, group.post_backward, used)
    # any unit may be the root of a backward: the one whose output the loss reaches first
    for module in meshes:
        state = module._get_fsdp_state()
        # from torch 2.15 on; a pipeline calls it after the last backward, not within
        named = "wait_for_gradient_reduction"
        name = named if hasattr(state, named) else "_root_post_backward_final_callback"
        ending = functools.partial(_finish, state, getattr(state, name), groups, used)
        setattr(state, name, ending)


def refresh_grad_dtypes(module: Any) -> None:
    """Let an FSDP2 unit take the dtypes of its gradients from the parameters that are trained now.

    FSDP2 sets them once, at the first forward, from trained parameters. If all were frozen then, it would sum
    gradients in the compute dtype and leave them in it.
    """
    for group in _groups(module._get_fsdp_state()):
        require_attributes(type(group), "_init_mp_dtypes")
        group._init_mp_dtypes()
        if hasattr(group, "_init_reduce_scatter_param_order"):  # from torch 2.15 on
            group._init_reduce_scatter_param_order()


def _reduce_all(group: Any, reduce: Callable[..., None], used: set[Any], *args: Any) -> None:
    """Record the parameters that have a gradient, give the others zeros, then call FSDP2's `reduce`."""
    gathered = [p for p in _trained(group) if _gathered(p) is not None]
    for parameter in gathered:
        if parameter.sharded_param.grad is None and group._partial_reduce_output is None:
            # the optimizer has cleared gradients since the last backward: start a new record
            used.discard(parameter)
        if _has_gradient(parameter):
            used.add(parameter)
    if group.reduce_grads and gathered:
        fill = _fill_apart if _sums_apart(gathered[0]) else _fill
        fill(gathered)
    reduce(*args)


def _fill(parameters: list[Any]) -> None:
    """Give zeros to parameters without a gradient."""
    for parameter in parameters:
        if not _has_gradient(parameter):
            full = parameter._unsharded_param
            full.grad = torch.zeros_like(full, dtype=full.grad_dtype)


def _fill_apart(parameters: list[Any]) -> None:
    """`_fill` before torch 2.15, where FSDP2 sums in `unsharded_accumulated_grad` and packs one dtype."""
    waiting = [p.unsharded_accumulated_grad for p in parameters]
    dtype = next((gradient.dtype for gradient in waiting if gradient is not None), None)
    for parameter in parameters:
        if not _has_gradient(parameter):
            zeros = torch.zeros_like(parameter._unsharded_param, dtype=dtype)
            parameter.unsharded_accumulated_grad = zeros
        # The order matters: without the sum first, the cast would overwrite the accumulated gradient.
        elif dtype is not None:
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()


def _sums_apart(parameter: Any) -> bool:
    """Whether FSDP2 sums gradients of micro-batches in `unsharded_accumulated_grad`, as before torch 2.15.

    From 2.15 on they are summed in `.grad`, whose `grad_dtype` is that of sums.
    """
    if hasattr(parameter, "to_accumulated_grad_if_needed"):
        return True
    require_attributes(type(parameter), "unsharded_grad_dtype")
    return False


def _finish(
    state: Any,
    finish: Callable[..., None],
    groups: Mapping[Any, Any],
    used: set[Any],
    *args: Any,
) -> None:
    """After the step's last backward, remove the zero gradients of parameters that no rank used."""
    finish(*args)
    if state._state_ctx.is_last_backward:
        for mesh in dict.fromkeys(groups.values()):
            _drop_unused([g for g in groups if groups[g] == mesh], mesh, used)


def _drop_unused(groups: list[Any], mesh: Any, used: set[Any]) -> None:
    """Remove the zero gradients of parameters that no rank of `mesh` used: one all-reduce of flags."""
    parameters = [parameter for group in groups for parameter in _trained(group)]
    if not parameters:
        return
    used_here = [parameter in used for parameter in parameters]
    # made on the device in the common case: a copy from pageable host memory would wait for the device
    flags = torch.ones(len(used_here), dtype=torch.uint8, device=mesh.device_type)
    if not all(used_here):
        flags.copy_(torch.tensor(used_here, dtype=torch.uint8))
    for axis in range(mesh.ndim):
        dist.all_reduce(flags, dist.ReduceOp.MAX, mesh.get_group(axis))
    if not all(used_here):
        for parameter, is_used in zip(parameters, flags.tolist(), strict=True):
            if not is_used:
                parameter.sharded_param.grad = None


def _trained(group: Any) -> list[Any]:
    """FSDP2's objects of the trained parameters of a group."""
    return [p for p in group.fsdp_params if p.sharded_param.requires_grad]


def _has_gradient(parameter: Any) -> bool:
    """Whether FSDP2 has a gradient of it to reduce in this backward."""
    waiting = parameter.unsharded_accumulated_grad
    return waiting is not None or parameter._unsharded_param.grad is not None


def _groups(state: Any) -> list[Any]:
    """The parameter groups that an FSDP2 module gathers together: one in torch 2.11, several possible in 2.13."""
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def all_reduce(x: Tensor, group_name: str) -> Tensor:
    """A new tensor with the sum over ranks, by the functional ops that torch.compile and fake groups support."""
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(x.contiguous(), "sum", group_name))


def start_all_gather(x: Tensor, size: int, group_name: str) -> Callable[[], Tensor]:
    """Start an all-gather; the returned function waits and gives the shards of all ranks, concatenated on dim 0."""
    ops = torch.ops._c10d_functional
    pending = ops.all_gather_into_tensor(x.contiguous(), size, group_name)
    return lambda: ops.wait_tensor(pending)


def all_gather(x: Tensor, size: int, group_name: str) -> Tensor:
    """The shards of all ranks, concatenated on dim 0."""
    return start_all_gather(x, size, group_name)()


def start_reduce_scatter(x: Tensor, size: int, group_name: str) -> Callable[[], Tensor]:
    """Start a reduce-scatter; the returned function waits and gives this rank's shard, on dim 0, of the sum over ranks."""
    ops = torch.ops._c10d_functional
    pending = ops.reduce_scatter_tensor(x.contiguous(), "sum", size, group_name)
    return lambda: ops.wait_tensor(pending)


def reduce_scatter(x: Tensor, size: int, group_name: str) -> Tensor:
    """This rank's shard, on dim 0, of the sum over ranks."""
    return start_reduce_scatter(x, size, group_name)()


def function_output(x: Tensor) -> Tensor:
    """`x`, to be returned by the forward of a custom autograd function whose last operator may return its input.

    `to` the same dtype, `contiguous` and `wait_tensor` may do so. Dynamo of torch 2.11 then lists the tensor as an
    output twice and loses the gradient of the first: it is silently zero. So there a compiled forward clones.
    """
    return x.clone() if _LOSES_GRADIENTS and torch.compiler.is_compiling() else x


_LOSES_GRADIENTS = torch.__version__ < "2.12"

#: Whether torch can split the backward of any graph into gradients of inputs and of weights. Before 2.13 it raises
#: at some custom functions, and adds the gradient of a weight twice that is below two points where it splits the graph.
SPLITS_ANY_BACKWARD = torch.__version__ >= "2.13"


def overlap_matmuls(group_name: Any) -> None:
    """Let inductor split matmuls to overlap them with collectives of a group (async tp). Never run on a GPU.

    Inductor's pass skips groups without symmetric memory. torch 2.13 deprecates the call that enables it as
    unnecessary, but its pass still checks for it.
    """
    from torch._inductor import config
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        enable_symm_mem_for_group(group_name)
    config._micro_pipeline_tp = True


def in_backward() -> bool:
    """Whether the autograd engine runs right now, as in a recomputed forward."""
    return torch._C._current_graph_task_id() != -1


#: Base class of modes that see every operator below autograd; documented by torch, but in a private module.
DispatchMode: Any = _python_dispatch.TorchDispatchMode


def alias(tensor: Tensor) -> Tensor:
    """`tensor` without its graph, sharing memory and version counter; for use below autograd.

    There a plain `detach` has a version counter of its own and would hide later in-place changes.
    """
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def storage_id(tensor: Tensor) -> int:
    """A number of the tensor's storage, equal for all its views; for fake tensors, too."""
    return tensor.untyped_storage()._cdata


@functools.cache
def mutated_arguments(operator: Any) -> tuple[tuple[int, str], ...]:
    """(position, name) of each argument that an operator changes in place."""
    schema = getattr(operator, "_schema", None)  # a higher-order operator has none
    arguments = enumerate(getattr(schema, "arguments", ()))
    return tuple((i, a.name) for i, a in arguments if a.alias_info and a.alias_info.is_write)


def pipeline_stage(*args: Any, **kwargs: Any) -> Any:
    """torch's PipelineStage with three methods overridden.

    `_validate_fwd_outputs` (torch 2.11): compares also the last stage's logits with the example of the stream
    between stages; they have another shape. `_get_init_p2p_neighbors_ops` (2.11; gone in 2.15): sends to neighbors,
    one of which is the rank itself in a V-schedule; gloo cannot send to itself. `backward_weight_one_chunk`
    (before 2.15): adds gradients of micro-batches in the compute dtype; FSDP2's dtype for sums is restored after each.
    """
    from torch.distributed.pipelining import PipelineStage

    return stage_of(PipelineStage)(*args, **kwargs)


@functools.cache
def stage_of(base: Any) -> Any:
    """The class of `pipeline_stage`."""
    require_attributes(base, "backward_weight_one_chunk")
    if torch.__version__ < "2.15":
        require_attributes(base, "_get_init_p2p_neighbors_ops")
    if torch.__version__ < "2.12":
        require_attributes(base, "_validate_fwd_outputs")

    class Stage(base):
        def _validate_fwd_outputs(self, outputs: Any) -> None:
            if not self.is_last:
                super()._validate_fwd_outputs(outputs)

        def _get_init_p2p_neighbors_ops(self) -> list[Any]:
            ops = super()._get_init_p2p_neighbors_ops()
            return [op for op in ops if op.group_peer != self.group_rank]

        def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
            out = super().backward_weight_one_chunk(*args, **kwargs)
            for parameter in filter(_sums_apart, _fsdp_parameters(self.submod)):
                if parameter.unsharded_accumulated_grad is None:
                    parameter.to_accumulated_grad_if_needed()
                else:
                    parameter.accumulate_unsharded_grad_if_needed()
            return out

    return Stage


def _fsdp_parameters(model: Any) -> Iterator[Any]:
    """FSDP2's own objects of all parameters that it has gathered."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            for group in _groups(state):
                yield from (p for p in group.fsdp_params if _gathered(p) is not None)


def _gathered(parameter: Any) -> Any:
    """The unsharded parameter, if FSDP2 has gathered it before, else None."""
    require_attributes(type(parameter), "_unsharded_param")
    return getattr(parameter, "_unsharded_param", None)


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Call `call` once when the backward that is running has ended."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(call)


def map_tensors(function: Callable[[Tensor], Tensor], values: Any) -> Any:
    """`values` with every tensor in its lists, tuples, dicts and dataclasses replaced by `function` of it."""
    from torch.distributed.utils import _apply_to_tensors

    return _apply_to_tensors(function, values)


def tensors_of(values: Any) -> list[Tensor]:
    """The tensors in lists, tuples, dicts and registered classes."""
    from torch.utils._pytree import tree_leaves

    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def disable_compile(function: F) -> F:
    """`torch.compiler.disable`, applied at the first call after the compiler was imported.

    The decorator itself imports the compiler, which would cost every import of this package half a second.
    """

    @functools.cache
    def disabled() -> Any:
        made = torch.compiler.disable(function)
        require_attributes(made, "_torchdynamo_disable")
        return made

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        return disabled()(*args) if "torch._dynamo" in sys.modules else function(*args)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]  # not traced into, 2.11 to 2.15
    # 2.11 honours the mark in functions that a compiled frame calls, but not in a frame that it starts with
    if torch.__version__ < "2.12":
        frames: Any = torch._C._dynamo.eval_frame
        actions = frames._FrameAction
        never = frames._FrameExecStrategy(actions.SKIP, actions.DEFAULT)
        frames.set_code_exec_strategy(cast(Any, call).__code__, never)
    return cast(F, call)


@functools.cache
def compiler(backend: str, memory_budget: float | None) -> Callable[..., Any]:
    """A backend for torch.compile with options of its own.

    torch reads them while it partitions a graph into forward and backward, so they apply only to its graphs.
    Cached, as torch reuses a graph only for the same backend object.
    """
    from torch._dynamo import lookup_backend
    from torch._functorch import config

    budget: dict[str, Any] = {}
    if memory_budget is not None:
        budget["activation_memory_budget"] = memory_budget
        # the mesh of a DTensor is such an object in a graph, and holds no tensors
        name = "unsafe_treat_script_objects_as_zero_size"
        if hasattr(config, name):
            budget[name] = True

    def compile_graph(graph: Any, inputs: Any) -> Any:
        with config.patch(**budget):
            return lookup_backend(backend)(graph, inputs)

    return compile_graph


def count_compilations() -> tuple[int, int]:
    """Graphs that torch.compile made in this process, and how often it compiled the same code again."""
    if "torch._dynamo" not in sys.modules:
        return 0, 0
    from torch._dynamo.convert_frame import FRAME_COMPILE_COUNTER
    from torch._dynamo.utils import counters

    again = sum(times - 1 for times in FRAME_COMPILE_COUNTER.values())
    return counters["stats"]["unique_graphs"], again


def raise_recompile_limit(number: int) -> None:
    """Allow that many graphs of the same code; beyond the limit (8 by default) torch runs it uncompiled."""
    from torch._dynamo import config

    config.recompile_limit = max(config.recompile_limit, number)


def start_memory_history() -> None:
    """Record allocations of the CUDA allocator with their stacks, from now on. Never run: it needs a GPU."""
    require_attributes(torch.cuda.memory, "_record_memory_history", "_dump_snapshot")
    torch.cuda.memory._record_memory_history(max_entries=200_000)


def stop_memory_history(path: str | None) -> None:
    """Write the allocations since `start_memory_history` to `path`, if one is given, and record no more."""
    if path is not None:
        torch.cuda.memory._dump_snapshot(path)
    torch.cuda.memory._record_memory_history(enabled=None)
