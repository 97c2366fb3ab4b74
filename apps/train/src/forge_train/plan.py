"""`forge-train plan`, and `parallel.layout = "auto"`: the planner chooses once, and a run directory keeps the choice."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from typing import Any

import tomlkit
import torch
from torch import nn

from forge_core.loss import FUSED
from forge_core.optim import HALF_STATE, hidden_matrices
from forge_moe.hooks import num_experts_by_layer
from forge_parallel import ParallelConfig, World
from forge_parallel import plan as planner
from forge_parallel.plan import Estimate, Hardware, SearchSpace
from forge_train._shared.problems import Problem, invalid, problems_of
from forge_train._shared.toml_files import read_text
from forge_train.build.build import build_trained, freeze_groups
from forge_train.build.layout import layout_problems
from forge_train.build.resolve import ResolvedJob
from forge_train.build.rules import optimizer_problems
from forge_train.build.run_directory import RunDirectory
from forge_train.config.schema import JobConfig
from forge_train.errors import ConfigError, config_errors, refuse

_BYTES = {"fp32": 4, "bf16": 2}
_SHOWN = 8
_ORIGIN = "chosen by the planner"


@dataclass(frozen=True, kw_only=True)
class PlanFlags:
    """The flags of the verb, beside the keys of the configuration."""

    gpus: int
    """GPUs of the job"""
    gpu: str = "h200"
    """their kind: h200, h100, gh200, a100, b200, gb200"""
    nodes: int | None = None
    """nodes that they are in; without it 8 GPUs each"""
    json: bool = False
    """print one JSON object"""


def show_plan(config: JobConfig, flags: PlanFlags) -> None:
    """Print memory and time of `config` on these GPUs, and alternatives. ConfigError if it cannot run there."""
    plan, space, reasons = _estimated(config, flags)
    space = replace(space, micro_batches=_sizes(config), config=plan.candidate.config)
    others = planner.search(space)[:_SHOWN]
    if flags.json:
        rows = [{"layout": planner.describe(c.candidate), "peak": c.peak, "fits": c.fits,
                 "tokens_per_second": c.time.tokens_per_second} for c in others]  # fmt: skip
        print(json.dumps({**plan.to_dict(), "reasons": reasons, "alternatives": rows}))
    else:
        print("\n".join([*reasons, planner.render(plan, others)]), end="")
    if not plan.fits:
        gpu, needs = space.hardware, f"needs {plan.peak / 1e9:.0f} GB on the fullest rank"
        rule = f"{needs} and must stay below {gpu.limit / 1e9:.0f} of an {gpu.name}"
        value, fix = planner.describe(plan.candidate), f"use {_what_fits(config, space)}"
        raise invalid("parallel", "memory", value, rule, fix, kind=ConfigError)


def price(config: JobConfig, gpu: str, gpus: int = 1, nodes: int | None = None) -> Estimate:
    """Memory and time of a step of `config` on these GPUs. ConfigError if it cannot run there."""
    return _estimated(config, PlanFlags(gpus=gpus, gpu=gpu, nodes=nodes))[0]


def with_layout(job: ResolvedJob, world: World) -> tuple[ResolvedJob, list[str]]:
    """The job with its layout chosen, and the reasons; a manual layout stays as it is.

    A resumed run keeps the layout that was chosen before for as many ranks; for another number it is chosen anew.
    """
    before = job.config.parallel
    if before.layout == "manual":
        return job, []
    per_node = before.gpus_per_node or world.local_world_size
    parallel = _earlier(job, world.world_size, per_node)
    reasons = [f"kept from {job.config.run.dir}"]
    if parallel is None:
        parallel, reasons = choose_layout(job, world.world_size, per_node)

    names = [field.name for field in fields(parallel)]
    changed = [name for name in names if getattr(parallel, name) != getattr(before, name)]
    origins = {**job.origins, **{f"parallel.{name}": _ORIGIN for name in changed}}
    return ResolvedJob(replace(job.config, parallel=parallel), origins), reasons


def choose_layout(
    job: ResolvedJob, world_size: int, gpus_per_node: int
) -> tuple[ParallelConfig, list[str]]:
    """The layout for `job` on these ranks, and why, in words.

    On a CPU FSDP over all ranks. On GPUs the fastest of those that fit, with the job's micro_batch and
    options; what is recomputed is only changed where nothing fits otherwise. The same for the same
    arguments on the same kind of GPU. ConfigError where nothing fits. Takes a second or two.
    """
    config = job.config
    if config.parallel.device == "cpu" or not torch.cuda.is_available():
        reason = f"FSDP over all {world_size} ranks: on CPUs nothing else was measured"
        return replace(config.parallel, layout="manual"), [reason]
    return _auto_layout(config, _space(config, world_size, gpus_per_node, planner.this_gpu()))


def describe_placement(config: ParallelConfig, world: World, model: nn.Module) -> list[str]:
    """A line for each axis: its ranks, and whether it leaves a node."""
    per_node = config.gpus_per_node or world.local_world_size
    layout = config.axes(world.world_size, per_node)
    return planner.Topology(layout, per_node).placement(bool(num_experts_by_layer(model)))


def _earlier(job: ResolvedJob, world_size: int, per_node: int) -> ParallelConfig | None:
    """The layout that the planner chose when this run was last started, or None if it does not fit."""
    paths = RunDirectory(job.config.run.dir)
    if paths.num_ranks() not in (None, world_size):
        return None
    try:
        table: Any = tomlkit.parse(read_text(paths.config))["parallel"]
        rows = [(key.key, item) for key, item in table.value.body if key is not None]
        chosen = {key: item.unwrap() for key, item in rows if _ORIGIN in item.trivia.comment}
        earlier = replace(job.config.parallel, **chosen)
        earlier.axes(world_size, per_node)
    except (KeyError, TypeError, ValueError):  # written by another version, or for other ranks
        return None
    return earlier if chosen else None


def _estimated(config: JobConfig, flags: PlanFlags) -> tuple[Estimate, SearchSpace, list[str]]:
    """The estimate, the space of alternatives, and why an automatic layout is what it is."""
    in_node = config.parallel.gpus_per_node
    try:
        gpu, per_node = planner.find_nodes(flags.gpu, flags.gpus, flags.nodes, in_node)
    except ValueError as error:
        raise ConfigError(replace(p, key=f"--{p.key}") for p in problems_of(error)) from error
    space = _space(config, flags.gpus, per_node, gpu)
    parallel, reasons = config.parallel, list[str]()
    if parallel.layout == "auto":
        parallel, reasons = _auto_layout(config, space)
    refuse(space.refuses(parallel))
    with config_errors():
        plan = Estimate(space.candidate(parallel, config.train.micro_batch))
        _ = plan.fits  # raises if the step cannot be traced
    return plan, space, reasons


def _auto_layout(config: JobConfig, space: SearchSpace) -> tuple[ParallelConfig, list[str]]:
    """The best layout, with what is recomputed as it is, if need be with more."""
    try:
        best, reasons = planner.auto_layout(replace(space, modes=(space.config.recompute,)))
    except ValueError:
        try:
            best, reasons = planner.auto_layout(space)
        except ValueError as error:
            found = [
                replace(p, fix=f"use {_what_fits(config, space)}") if p.code == "memory" else p
                for p in problems_of(error)
            ]
            raise ConfigError(found, "parallel.layout auto") from error
    return best.candidate.config, reasons


def _what_fits(config: JobConfig, space: SearchSpace) -> str:
    """The fastest layout and micro-batch that fit, if need be with state, then weights, too, in bf16."""
    jobs, also = {"": config}, ", optimizer.state_dtype bf16"
    if config.optimizer.name in HALF_STATE:
        jobs[also] = replace(config, optimizer=replace(config.optimizer, state_dtype="bf16"))
        weights = replace(jobs[also], parallel=replace(config.parallel, param_dtype="bf16"))
        if not any(optimizer_problems(weights)):
            jobs[f"{also}, parallel.param_dtype bf16"] = weights
    for also, job in jobs.items():
        tried = _space(job, space.world_size, space.gpus_per_node, space.hardware)
        found = planner.search(replace(tried, micro_batches=_sizes(job)))
        if found and found[0].fits:
            return planner.describe(found[0].candidate) + also
    return "more GPUs, shorter rows or a smaller model"


def _sizes(config: JobConfig) -> tuple[int | None, ...]:
    """Sizes of micro-batches to try."""
    return tuple(dict.fromkeys((config.train.micro_batch, 1, 2, 4, 8)))


def _space(config: JobConfig, world_size: int, per_node: int, gpu: Hardware) -> SearchSpace:
    """Layouts of the model as it is trained: what no stage trains has neither gradients nor moments."""
    optimizer, weight = config.optimizer, _BYTES[config.parallel.param_dtype]
    model = build_trained(config)
    freeze_groups(model, config)
    matrices = hidden_matrices(model, optimizer) if optimizer.name == "muon" else ()
    moments = dict.fromkeys(matrices, optimizer.state_bytes(weight, matrix=True))
    mtp = getattr(config.model, "mtp", None)  # an imported model has none
    ahead = 0 if mtp is None else mtp.num_modules
    storage = planner.Storage(
        weights=weight,
        gradients=weight,
        moments=optimizer.state_bytes(weight),
        frozen=_BYTES[config.lora.base_dtype] if config.lora.rank else None,
        fused_loss=config.train.loss == FUSED,
    )

    def refuses(parallel: ParallelConfig) -> list[Problem]:
        return layout_problems(replace(config, parallel=parallel), world_size, per_node)

    return SearchSpace(
        planner.Profile(model, config.data.seq_len, moments=moments, ahead=ahead),
        replace(config.parallel, layout="manual"),
        world_size,
        config.train.global_batch,
        gpu,
        per_node,
        (config.train.micro_batch,),
        storage=storage,
        refuses=refuses,
    )
