"""Fully sharded data parallel: FSDP2 over one axis, HSDP over two."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from forge_parallel._shared.problems import invalid, raise_problems
from forge_parallel._shared.shards import local_tensor
from forge_parallel._torch_compat import (
    disable_compile,
    in_backward,
    reduce_unused_parameters,
    refresh_grad_dtypes,
)
from forge_parallel.axes.precision import drop_casts, own_dtype
from forge_parallel.rules import ShardedDim, offsets_are_right, uneven_vocab, width_of
from forge_parallel.structure import Structure, further_units, mark, stages_of, structure_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


HALF = (torch.bfloat16, torch.float16)
#: The attribute in which `parallelize` leaves the names of parameters that stay in 16 bits.
FROZEN_HALF = "_forge_frozen_half"
#: Elements on a tp rank from which embedding and head are units of their own: 32 MiB in bf16, where a collective
#: is bandwidth and no latency. A smaller one saves less memory than the two gathers more are worth.
OWN_UNIT = 2**24


def apply_fsdp(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    compute_dtype: torch.dtype = torch.float32,
    reduce_dtype: torch.dtype = torch.float32,
    reshard_after_forward: bool = True,
    cpu_offload: bool = False,
    sparse: DeviceMesh | None = None,
    experts: Iterable[nn.Module] = (),
    structure: Structure | None = None,
) -> nn.Module:
    """Wrap every block of `structure` (default: `structure_of(model)`) and the root with FSDP2; same object.

    A mesh with one axis shards over it; with two the first holds replicas, the second shards.
    `compute_dtype` is that of forward and backward, `reduce_dtype` that in which gradients are
    summed; parameters, gradients and optimizer state keep theirs. Nothing is divided: losses are
    sums over the step's labels, divided once by the caller.

    Modules that `model.sharding_units()` names are units too: modules outside of the blocks whose weights the root need
    not hold all the time, such as the blocks of an encoder.

    Embedding and head, as `get_input_embeddings()` and `get_output_embeddings()` return them, are units of their own from
    `OWN_UNIT` elements on a tp rank on, unless they are tied: then the root gathers the weight. An `nn.Embedding` is not
    gathered for its backward, which reads the ids only.

    A table of ids that tp shards unevenly is sharded by its width where torch would misplace shards of ids
    (`shard_of`): its all-gather and its reduce-scatter cost a copy more.

    The root, and such a head, is never resharded after its forward, as its backward follows at once. On one rank
    no module is resharded, which would free the copy in `compute_dtype` and cost a second cast; except modules
    with frozen parameters in 16 bits, and experts on one rank of `sparse` among several of `mesh`, whose copies then
    exist only while they compute. Float inputs of the model
    are cast to `compute_dtype`, those of a block are not: a block may take fp32 tables (RoPE).

    `experts` are wrapped by themselves over `sparse`. If their parameters are sharded over an axis `ep` already,
    their gradients are complete over it, and `sparse` does not contain it. A module whose own parameters have a
    mesh with an axis `ep` counts as one of them.

    A module below with a torch.dtype as attribute `compute_dtype` (a router: fp32) is wrapped by itself
    and computes in that dtype, its parameters unrounded, at one more small gather each; its attribute
    `forward_methods` names further methods that read its parameters.

    Ranks may use different parameters of a unit (a block, or the root without its blocks): gradients are
    those of one process, None if no rank used the parameter. A call of a unit is a collective, so all ranks must
    call it or none: a rank without input for a unit calls it on a dummy sequence and adds its output times zero.

    A forward without grad leaves the root gathered until the next backward (on one rank, every module):
    call `reshard(model)` before weights are changed by anything but an optimizer's step after a backward.

    Blocks that recompute inside a pipeline with split backward passes need `reshard_after_forward` False.

    Cost per step and block: one all-gather of its parameters (two with `reshard_after_forward`) in
    `compute_dtype` and one reduce-scatter of its gradients in `reduce_dtype`; HSDP adds an all-reduce
    of the shard. Once a step, one all-reduce of a byte per parameter. The next block's gather starts before
    it is needed. `cpu_offload` copies both over the bus instead of keeping them on the device.
    """
    # imported late: half a second that an fp32 run of one process does not need
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )

    mark(model, "fsdp")

    blocks = (structure_of(model) if structure is None else structure).modules(model)
    known = set(experts)
    expert_modules = [m for m in model.modules() if m in known or _is_expert(m)]
    special = [m for m in model.modules() if own_dtype(m) is not None]
    further = further_units(model)
    embedding, head = _large_ends(model)
    ends = [end for end in (embedding, head) if end is not None]
    # inner modules first, as FSDP2 gives a unit what no earlier call has wrapped
    units = dict.fromkeys([*special, *expert_modules, *blocks, *further, *ends, model], mesh)
    if sparse is not None:
        units |= dict.fromkeys(expert_modules, sparse)
    owned = _owned_parameters(units)

    offload = OffloadPolicy()
    if cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    for module, unit_mesh in units.items():
        # backward of head and root follows their forward at once
        reshards = reshard_after_forward and module not in (head, model)
        # on one rank there is nothing to free but casts of parameters that have no fp32 master
        if unit_mesh.size() == 1 and (mesh.size() == 1 or module not in expert_modules):
            reshards = reshard_after_forward and any(map(is_frozen_half, owned[module]))
        policy = MixedPrecisionPolicy(
            param_dtype=own_dtype(module) or compute_dtype,
            reduce_dtype=reduce_dtype,
            cast_forward_inputs=module is model,  # a block may take fp32 tables (RoPE)
        )

        fully_shard(
            module,
            mesh=unit_mesh,
            mp_policy=policy,
            offload_policy=offload,
            shard_placement_fn=partial(shard_of, shards=unit_mesh.size(unit_mesh.ndim - 1)),
            reshard_after_forward=reshards,
        )
        sum_gradients(module)
        for name in getattr(module, "forward_methods", ()):
            register_fsdp_forward_method(module, name)
        if module is embedding and _looks_up(module):
            module.set_unshard_in_backward(False)  # type: ignore[operator]

    reduce_unused_parameters(units)
    if (
        expert_modules
    ):  # the host waits in each layer for split sizes, so FSDP2's own prefetch comes too late
        _prefetch(blocks)
    return model


def _owned_parameters(units: Iterable[nn.Module]) -> dict[nn.Module, set[nn.Parameter]]:
    """The parameters of each unit that no earlier unit contains: FSDP2 groups them so."""
    owned: dict[nn.Module, set[nn.Parameter]] = {}
    taken: set[nn.Parameter] = set()
    for module in units:
        owned[module] = set(module.parameters()) - taken
        taken |= owned[module]
    return owned


def untied_ends(model: nn.Module) -> tuple[nn.Module | None, nn.Module | None]:
    """The embedding and the head that a model returns, as models of transformers do; None for one that is tied: another
    module reads its weight, for which the root must gather it."""
    embedding, head = (
        get() if callable(get := getattr(model, f"get_{side}_embeddings", None)) else None
        for side in ("input", "output")
    )
    names = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))

    def is_untied(end: nn.Module | None) -> bool:
        return end is not None and all(names[id(p)] == 1 for p in end.parameters())

    # a head without parameters is given those of the embedding
    tied = head is not None and not any(True for _ in head.parameters())
    return (
        embedding if is_untied(embedding) and not tied else None,
        head if is_untied(head) and not tied else None,
    )


def _large_ends(model: nn.Module) -> tuple[nn.Module | None, nn.Module | None]:
    """Those of `untied_ends` from `OWN_UNIT` elements on; None for a smaller one."""

    def large(end: nn.Module | None) -> nn.Module | None:
        size = 0 if end is None else sum(local_tensor(p).numel() for p in end.parameters())
        return end if size >= OWN_UNIT else None

    embedding, head = untied_ends(model)
    return large(embedding), large(head)


def _looks_up(module: nn.Module) -> bool:
    """Whether its forward is that of `nn.Embedding`, on a tp rank's ids or all: other code may save the weight."""
    from forge_parallel.axes.layers import VocabEmbedding

    forwards = [c for c in type(module).__mro__ if "forward" in vars(c)]
    return forwards[0] is nn.Embedding or forwards[:2] == [VocabEmbedding, nn.Embedding]


def shard_of(parameter: Any, shards: int) -> Any:
    """The dim on which FSDP2 shards a parameter: dim 0 (None), or dim 1 where `shards_dim_1`.

    Raises ValueError for a dim 0 that tp shards unevenly, if torch would compute wrong offsets of its shards and dim 1
    cannot be sharded: a bias, or a width that `shards` does not divide.
    """
    from torch.distributed.tensor import Shard

    shape, rows, tp = tuple(local_tensor(parameter).shape), 1, 1
    if hasattr(parameter, "device_mesh") and parameter.placements[0] == Shard(0):
        rows, tp = parameter.size(0), parameter.device_mesh.size()
    if shards_dim_1(shape, shards, rows, tp):
        return Shard(1)
    if not offsets_are_right(rows, tp, shards):
        what = f"ids of a parameter {tuple(parameter.shape)}"
        table = ShardedDim("rows", rows, width=width_of(shape), what=what)
        wrong = uneven_vocab(table, tp, shards)
        assert wrong is not None
        raise_problems("", [wrong])
    return None


def shards_dim_1(shape: tuple[int, ...], shards: int, rows: int = 1, tp: int = 1) -> bool:
    """Whether FSDP2 shards dim 1 of a parameter with `shape` on a rank: a tp shard of `rows` on dim 0.

    True for stacks of fewer experts than `shards` (on dim 0, some ranks would hold nothing and others
    several times the mean), and if torch would compute wrong offsets for shards of dim 0, as of 50257 ids over
    tp 2 and 4 shards. Dim 1 must be divisible by `shards`.
    """
    few = len(shape) == 3 and shape[0] < shards
    return (few or not offsets_are_right(rows, tp, shards)) and width_of(shape) % shards == 0


def _prefetch(blocks: list[nn.Module]) -> None:
    """Set what each unit of the blocks gathers ahead: one block at most, and one unit inside of a block.

    FSDP2's implicit prefetch works only while the host runs ahead of the device. With experts the host waits in
    every layer for the split sizes of their exchange. A block gathers the units inside of it (router, experts) under its
    attention; the last of these gathers the next block under its own matmuls. The backward goes the other way, unit by
    unit.
    """
    from torch.distributed.fsdp import FSDPModule

    units: list[list[Any]] = [[m for m in b.modules() if isinstance(m, FSDPModule)] for b in blocks]
    for block, *inner in units:
        block.set_modules_to_forward_prefetch(inner)
    for before, after in pairwise(units):
        # not FSDP2's list: a unit inside of a block runs again where the block recomputes, with no next block
        before[-1].register_forward_pre_hook(partial(_gather_in_forward, after[0]))

    order = [unit for block, *inner in reversed(units) for unit in (block, *reversed(inner))]
    for unit, following in pairwise(order):
        unit.set_modules_to_backward_prefetch([following])


@disable_compile
def _gather_in_forward(unit: Any, *hooked: Any) -> None:
    """Start to gather a unit; its own forward waits for it."""
    if not in_backward():
        unit.unshard(async_op=True)


def is_frozen_half(parameter: nn.Parameter) -> bool:
    """Whether a parameter needs no fp32 master: it is in 16 bits, and no step changes it."""
    return parameter.dtype in HALF and not parameter.requires_grad


def _is_expert(module: nn.Module) -> bool:
    """Whether its own parameters are sharded over `ep` already."""
    return any(is_sharded_over("ep", p) for p in module.parameters(recurse=False))


def is_sharded_over(axis: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter is a DTensor of a mesh with this axis."""
    mesh = getattr(parameter, "device_mesh", None)
    return mesh is not None and axis in (mesh.mesh_dim_names or ())


def sum_gradients(module: Any) -> None:
    """Let a wrapped module sum its gradients over ranks and divide by nothing.

    Losses are divided once by the labels of the global batch, so FSDP2's mean over ranks would be wrong. Both
    calls are needed: only a divide factor selects PREMUL_SUM, which gloo does not support.
    """
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)


def reshard(model: nn.Module) -> None:
    """Let the next forward gather its weights anew; a plain model is not changed.

        with torch.no_grad():
            swap_in(ema)                # through model.parameters()
            loss = model(tokens)
            reshard(model)              # or the next forward computes with the weights of this one
            swap_out(ema)

    A forward without grad leaves weights gathered: those of the root, and on one rank or without
    `reshard_after_forward` those of all units. These gathered weights do not follow changes of the parameters.
    Cost: none now; the next forward gathers (on one rank: casts) them once more.
    """
    drop_casts(model)
    for module in _units(model):
        module.reshard()  # type: ignore[operator]


def follow_requires_grad(model: nn.Module) -> None:
    """Apply changes of `requires_grad` made after `parallelize` to FSDP2's units.

        model.vision.requires_grad_(False)      # or forge_core.optim.set_multipliers
        follow_requires_grad(model)             # between steps, on all ranks

    Without this call a gathered unit keeps the flags with which it was gathered, and a unit whose parameters were
    all frozen at its first forward sums gradients in the compute dtype. A unit without a trained parameter
    reduces nothing.

    Raises ValueError, naming it, for a parameter that was frozen and in 16 bits at `parallelize`: it has no fp32
    master, so updates would be rounded away.

    Cost: that of `reshard`; compiled blocks are compiled once more.
    """
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name in model.__dict__.get(FROZEN_HALF, ()):
        if name in trained:
            rule = "was frozen and in 16 bits at parallelize, and must stay frozen: updates would be rounded away"
            fix = "to train it later give it in fp32, or freeze it after parallelize"
            raise invalid(name, "frozen", ..., rule, fix)
    reshard(model)
    for module in _units(model):
        refresh_grad_dtypes(module)


def _units(model: nn.Module) -> list[nn.Module]:
    """The FSDP2 modules of the model, or of this rank's stages of it."""
    modules = dict.fromkeys(m for stage in stages_of(model) for m in stage.modules())
    return [module for module in modules if hasattr(module, "set_requires_gradient_sync")]


def accumulate(model: Any, last: bool) -> None:
    """Declare before a micro-batch's forward whether it is the last of the step; no effect on a plain model.

    Gradients are reduce-scattered after every micro-batch, so that no rank holds more than its shard of them;
    only HSDP's all-reduce over replicas waits for the last one.
    """
    if hasattr(model, "set_is_last_backward"):
        model.set_is_last_backward(last)
        model.set_requires_all_reduce(last)


class _HostTensor:
    """Hides a tensor from FSDP2's root, which moves the tensors in tuples, lists and dicts to the device."""

    def __init__(self, value: Any) -> None:
        self.value = value


def keep_on_host(model: nn.Module) -> None:
    """Let keywords named in `model.host_inputs` reach its forward on the device they are given on.

    FSDP2 would otherwise move a tensor that the model reads on the host (document ids) to the accelerator; reading
    it back waits for all work queued there. Call it after `apply_fsdp`: one hook runs before FSDP2's own
    pre-forward hook and one after it.
    """
    names = frozenset(getattr(model, "host_inputs", ()))
    if not names:
        return

    def hide(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {k: _HostTensor(v) if k in names else v for k, v in kwargs.items()}

    def show(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {k: v.value if isinstance(v, _HostTensor) else v for k, v in kwargs.items()}

    model.register_forward_pre_hook(hide, prepend=True, with_kwargs=True)
    model.register_forward_pre_hook(show, with_kwargs=True)
