"""Prepare a model for the ranks that train it, in steps whose order is the order of the code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from forge_parallel._shared.module_protocols import check_names
from forge_parallel._shared.problems import invalid
from forge_parallel.axes.fsdp import FROZEN_HALF, HALF, apply_fsdp, is_frozen_half, keep_on_host
from forge_parallel.axes.precision import casts_suffice, compute_in, own_dtype
from forge_parallel.axes.roles import Matched, find_roles, roles_of_plan
from forge_parallel.check_model import check_model, report_blocks
from forge_parallel.config import ParallelConfig, keeps_gathered
from forge_parallel.meshes import Meshes, config_of_mesh, make_meshes, with_one_rank
from forge_parallel.structure import Blocks, Structure, structure_of

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def parallelize(
    model: nn.Module,
    config: ParallelConfig | None = None,
    meshes: Meshes | None = None,
    *,
    mesh: Any = None,
    plan: Mapping[str, Any] | None = None,
    blocks: Blocks | None = None,
    roles: Mapping[str, Any] | None = None,
    seq_len: int = 2048,
    recompute_contexts: Callable[[], tuple[Any, Any]] | None = None,
    compile_backend: str = "inductor",
    report: Callable[[str], None] | None = None,
) -> nn.Module:
    """Shard, wrap and compile `model` (plain, or on the meta device) in place, and move it to its device.

        with launch(config) as meshes:
            model = parallelize(model_on_meta, config, meshes)
            initialize(model, seed=0)             # storage of a meta model has arbitrary content

        mesh = init_device_mesh("cuda", (4, 2), mesh_dim_names=("dp_shard", "tp"))
        parallelize(model, mesh=mesh, plan={"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()})

    One process in fp32 is not wrapped, and in bf16 as a rule its parameters are cast for each forward (`compute_in`);
    any other layout or precision uses FSDP2, and its mixed precision in bf16, which gives the same numbers.
    A model with values must have the same values on all ranks: each rank keeps its shard, nothing is sent. Trained
    parameters in 16 bits become fp32 masters; with `param_dtype` bf16 all parameters are stored in it, but those of
    modules with a `compute_dtype` of their own. Frozen ones keep their dtype in fp32: FSDP2, here also in one process in fp32,
    casts them to the dtype of the forward, module by module. Shard experts first (`forge_moe.expert_parallelize`).

    meshes              default: those of the running process group, or of one process
    mesh                a DeviceMesh with named dims, in place of `meshes` and of the axes of `config`: `config_of_mesh`.
                        `make_meshes(config, mesh=mesh)` gives what `global_count` takes
    plan                in place of `roles`, for tp: {pattern of module names: style}, as torch's `parallelize_module` and
                        transformers have it. A style is ColwiseParallel(), RowwiseParallel() or SequenceParallel()
                        without layouts, which follow from the config, or a name of `axes.roles.STYLES`
    blocks              wrapped, recomputed and compiled one by one: a pattern of names ("encoder.layer.*"), or a list
                        of names, patterns and modules. Default: `model.blocks()`, else the longest list of like
                        modules, which is reported (see `structure_of`)
    roles               the table that tp needs. Default: `model.parallel_roles()`, or a Hugging Face model's own plan
    seq_len             tokens of a sequence, for the cost of attention when pp splits the depth. pp needs
                        `model.pipeline_parts()`: a pipeline rank keeps its stages, and `Pipeline` runs them
    recompute_contexts  makes the contexts that record decisions of a forward and replay them in its recomputation
                        (forge_moe has one for routes)
    compile_backend     of torch.compile
    report              is called with a sentence on blocks that were chosen by default (without `report` a warning
                        on rank 0), and with a table of the linear layers in float8 and the reasons for the others

    Raises ValueError, before any change, for a model that the layout would compute wrongly: experts that are not
    sharded over ep, a parameter in several blocks, recomputation without blocks, ambiguous blocks. And for a misspelled
    method or attribute of a class (see `forge_parallel.protocols`), which would be ignored otherwise.

    Cost: memory as `materialize`; one collective to make the mesh if `meshes` is not given.
    """
    check_names(model)
    if mesh is not None:
        if meshes is not None:
            raise invalid("mesh", "excludes", ..., "replaces meshes", "give one of them")
        config = config_of_mesh(mesh, config)
    config = ParallelConfig() if config is None else config
    meshes = make_meshes(config, mesh=mesh) if meshes is None else meshes
    if plan is not None:
        if roles is not None:
            raise invalid("plan", "excludes", ..., "replaces roles", "give one of them")
        roles = roles_of_plan(model, plan)
    # FSDP2 casts frozen parameters in 16 bits to the dtype of the forward, on one rank in fp32, too
    if meshes.dense is None and (
        any(is_frozen_half(p) for p in model.parameters())
        or (config.precision == "bf16" and not casts_suffice(model))
    ):
        meshes = with_one_rank(config, meshes)

    # blocks are searched only for a step that needs them: the search raises ValueError for ambiguous ones
    by_block = meshes.dense is not None or config.recompute != "none" or config.compile
    structure = structure_of(model, blocks) if by_block or blocks is not None else Structure()
    matched = find_roles(model, roles, sharded=meshes.tp.size > 1)
    check_model(model, config, meshes, structure, matched)
    report_blocks(model, config, meshes, structure, report)

    store_parameters(model, config.param_dtype)
    if config.param_dtype == "fp32":  # else updates are made for 16 bits
        model.__dict__[FROZEN_HALF] = [n for n, p in model.named_parameters() if is_frozen_half(p)]

    if config.float8 != "none":  # replaces modules, so before stages share them and classes change
        from forge_parallel.float8 import convert_float8, float8_table

        linears = convert_float8(
            model,
            config.float8,
            all_gather=config.float8_all_gather,
            device=meshes.device,
            tp=meshes.tp.size,
            matched=matched,
        )
        if report is not None:
            report(float8_table(linears))

    stages = [model]  # the modules that become FSDP roots
    if meshes.pp.size > 1:
        from forge_parallel.pipeline import split

        stages = split(model, config, meshes, seq_len=seq_len, structure=structure)
    for stage in stages:
        roles_here = matched.within(stage)
        _adapt(stage, config, meshes, structure, roles_here, recompute_contexts, compile_backend)
    parameter_device = torch.device("cpu") if config.cpu_offload else meshes.device
    return materialize(model, meshes.device, parameter_device)


def store_parameters(model: nn.Module, param_dtype: str) -> None:
    """Give parameters in fp32 and 16 bits the dtype in which `parallelize` stores them, in place.

        store_parameters(model, "bf16"); load(model); store_parameters(model, "fp32")

    "fp32": trained ones get fp32 values, as updates need them. "bf16": all are bf16, but those of a module that
    computes in a dtype of its own (`compute_dtype`) have that.
    """
    dtype = _DTYPES[param_dtype]
    half = dtype in HALF
    own = {p: d for m in model.modules() if (d := own_dtype(m)) for p in m.parameters()}
    for parameter in model.parameters():
        wanted = own.get(parameter, dtype) if half else dtype
        known = parameter.dtype in (torch.float32, *HALF)
        if parameter.dtype == wanted or not known or not (half or parameter.requires_grad):
            continue
        if not hasattr(parameter, "device_mesh"):
            parameter.data = parameter.data.to(wanted)
            continue
        # an expert, sharded before: setting `.data` of a DTensor does not replace its local tensor
        cast = nn.Parameter(parameter.detach().to(wanted), requires_grad=parameter.requires_grad)
        cast.__dict__.update(parameter.__dict__)
        torch.utils.swap_tensors(parameter, cast)


def _adapt(
    model: nn.Module,
    config: ParallelConfig,
    meshes: Meshes,
    structure: Structure,
    matched: Matched,
    contexts: Callable[[], tuple[Any, Any]] | None,
    compile_backend: str,
) -> None:
    """Do the steps of `parallelize` on a model or stage in their order, each with its reason; all keep parameter names."""
    if meshes.tp.size > 1:  # before FSDP2, which shards the local shards again
        from forge_parallel.axes.tensor import tensor_parallel

        tensor_parallel(
            model,
            meshes.dense["tp"],
            sequence_parallel=None if config.sequence_parallel else False,
            matched=matched,
            async_tp=config.async_tp,
        )

    if meshes.cp.size > 1:  # before compile, which would trace the replaced attention
        from forge_parallel.axes.context import context_parallel

        context_parallel(model, meshes.cp, exchange=config.cp_exchange)

    if config.recompute != "none":  # before compile, which then runs inside of it
        from forge_parallel.recompute import recompute

        blocks = structure.modules(model)
        recompute(blocks, config.recompute, every=config.recompute_every, contexts=contexts)

    if config.compile:  # before FSDP: its hooks stay outside of the compiled code
        from forge_parallel.compile import compile_blocks

        compile_blocks(
            model, compile_backend, memory_budget=config.memory_budget, structure=structure
        )

    if meshes.dense is not None:  # before allocation: each rank allocates only its shard
        experts: list[nn.Module] = []
        if meshes.sparse is not None:  # else experts are sharded like dense parameters
            owners = dict.fromkeys(n.rpartition(".")[0] for n in matched.expert_parameters)
            experts = [model.get_submodule(owner) for owner in owners]

        apply_fsdp(
            model,
            meshes.fsdp(meshes.dense),
            compute_dtype=_DTYPES[config.precision],
            reduce_dtype=_DTYPES[config.reduce_dtype],
            reshard_after_forward=config.reshard_after_forward and not keeps_gathered(config),
            cpu_offload=config.cpu_offload,
            sparse=None if meshes.sparse is None else meshes.fsdp(meshes.sparse),
            experts=experts,
            structure=structure,
        )
        keep_on_host(model)
    elif config.precision == "bf16":
        compute_in(model, torch.bfloat16)


def materialize(
    model: nn.Module, device: torch.device, parameter_device: torch.device | None = None
) -> nn.Module:
    """Move to `device`; tensors on the meta device get storage there, with arbitrary content.

    `parameter_device` is another device for the parameters (the host, with CPU offload). Existing values do not
    change, and a parameter under several names stays one parameter.
    """
    parameter_device = device if parameter_device is None else parameter_device
    parameters = {id(p) for p in model.parameters()}

    def move(tensor: torch.Tensor) -> torch.Tensor:
        to = parameter_device if id(tensor) in parameters else device
        return torch.empty_like(tensor, device=to) if tensor.is_meta else tensor.to(to)

    # Leaving the meta device makes a new Parameter for each name, which would untie shared ones.
    meta = any(t.is_meta for t in [*model.parameters(), *model.buffers()])
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False) if meta else ():
        names.setdefault(parameter, []).append(name)

    model._apply(move)
    for first, *others in names.values():
        for name in others:
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, model.get_parameter(first))
    return model
