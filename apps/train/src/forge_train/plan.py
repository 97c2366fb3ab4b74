"""`forge-train plan`, and the layout that `parallel.layout = "auto"` becomes."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
import tyro

from forge_core.optim import hidden_matrices
from forge_parallel import ParallelConfig
from forge_parallel.plan import (
    HARDWARE,
    Estimate,
    Hardware,
    Profile,
    SearchSpace,
    Storage,
    auto_layout,
    describe,
    estimate_layout,
    find_hardware,
    render,
    search,
)
from forge_train._shared.problems import Problem, invalid, problems_of
from forge_train.config.resolve import optimizer_problems
from forge_train.config.schema import JobConfig
from forge_train.errors import ConfigError, as_config_error, refuse
from forge_train.trainer.build import build_trained, freeze_groups
from forge_train.trainer.layout import layout_problems
from forge_train.trainer.objective import FUSED

#: Averages of gradients and squares per parameter, by optimizer; what is not here counts as AdamW.
_AVERAGES = {"adamw": 2, "lion": 1, "schedule_free_adamw": 1, "sgd": 1}
_MUON = 1  # of the matrices that are Muon's; the rest is AdamW's
#: Further tensors, with the dtype of the weights.
_POINTS = {"schedule_free_adamw": 2}
#: Optimizers that keep state in bf16, with stochastic rounding.
_HALF_STATE = ("adamw", "lion", "muon", "schedule_free_adamw")
_BYTES = {"fp32": 4.0, "bf16": 2.0}
_SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class PlanFlags:
    """The flags of the verb, beside the keys of the configuration."""

    gpus: int
    """GPUs of the job"""
    gpu: Annotated[str, tyro.conf.arg(help=f"their kind: {', '.join(HARDWARE)}")] = "h200"
    nodes: int | None = None
    """nodes that they are in (default: 8 GPUs each)"""
    json: bool = False
    """print one JSON object"""


def show_plan(config: JobConfig, flags: PlanFlags) -> None:
    """Print memory and time of `config` on these GPUs, and alternatives. ConfigError if it cannot run there."""
    plan, space, reasons = _estimated(config, flags)
    parallel, gpu, fits = plan.candidate.config, space.hardware, plan.fits
    others = search(replace(space, micro_batches=_sizes(config), config=parallel))
    if flags.json:
        rows = [{"layout": describe(c.candidate), "peak": c.peak, "fits": c.fits,
                 "tokens_per_second": c.time.tokens_per_second} for c in others[:_SHOWN]]  # fmt: skip
        print(json.dumps({**plan.to_dict(), "reasons": reasons, "alternatives": rows}))
    else:
        print("\n".join([*reasons, render(plan, others[:_SHOWN])]), end="")
    if not fits:
        needs = f"needs {plan.peak / 1e9:.0f} GB on the fullest rank and must stay below"
        rule = f"{needs} {gpu.limit / 1e9:.0f} of an {gpu.name}"
        layout = describe(plan.candidate)
        raise invalid(
            "parallel", "memory", layout, rule, f"use {_what_fits(config, space)}", kind=ConfigError
        )


def _sizes(config: JobConfig) -> tuple[int | None, ...]:
    """Sizes of micro-batches to try."""
    return tuple(dict.fromkeys((config.train.micro_batch, 1, 2, 4, 8)))


def _what_fits(config: JobConfig, space: SearchSpace) -> str:
    """The fastest layout and micro-batch that fit, if need be with state, then weights, too, in bf16."""
    state = replace(config, optimizer=replace(config.optimizer, state_dtype="bf16"))
    weights = replace(state, parallel=replace(config.parallel, param_dtype="bf16"))
    jobs, also = {"": config}, ", optimizer.state_dtype bf16"
    if config.optimizer.name in _HALF_STATE:
        jobs[also] = state
        if not any(optimizer_problems(weights)):
            jobs[f"{also}, parallel.param_dtype bf16"] = weights
    for also, job in jobs.items():
        tried = _space(job, _profile(job), space.world_size, space.gpus_per_node, space.hardware)
        found = search(replace(tried, micro_batches=_sizes(job)))
        if found and found[0].fits:
            return describe(found[0].candidate) + also
    return "more GPUs, shorter rows or a smaller model"


def price(config: JobConfig, gpu: str, gpus: int = 1, nodes: int | None = None) -> Estimate:
    """Memory and time of a step of `config` on these GPUs. ConfigError if it cannot run there."""
    return _estimated(config, PlanFlags(gpus=gpus, gpu=gpu, nodes=nodes))[0]


def _estimated(config: JobConfig, flags: PlanFlags) -> tuple[Estimate, SearchSpace, list[str]]:
    """The estimate, the space of alternatives, and why an automatic layout is what it is."""
    gpu, per_node = _machine(config, flags)
    profile = _profile(config)
    space = _space(config, profile, flags.gpus, per_node, gpu)
    parallel, reasons = config.parallel, list[str]()
    if parallel.layout == "auto":
        parallel, reasons = _auto_layout(config, space)
    refuse(layout_problems(replace(config, parallel=parallel), flags.gpus, per_node))
    try:
        plan = estimate_layout(
            profile,
            parallel,
            flags.gpus,
            global_batch=config.train.global_batch,
            micro_batch=config.train.micro_batch,
            hardware=gpu,
            gpus_per_node=per_node,
            storage=space.storage,
        )
        _ = plan.fits  # raises if the step cannot be traced
    except ValueError as error:
        raise as_config_error(error) from error
    return plan, space, reasons


def choose_layout(
    job: Any, world_size: int, gpus_per_node: int
) -> tuple[ParallelConfig, list[str]]:
    """The layout for `job` (a ResolvedJob or its JobConfig) on these ranks, and why, in words.

    On a CPU FSDP over all ranks. On GPUs the fastest of those that fit, with the job's micro_batch and
    options; what is recomputed is only changed where nothing fits otherwise. The same for the same
    arguments on the same kind of GPU. ConfigError where nothing fits. Takes a second or two.
    """
    config: JobConfig = getattr(job, "config", job)
    manual = replace(config.parallel, layout="manual")
    if config.parallel.device == "cpu" or not torch.cuda.is_available():
        return manual, [f"FSDP over all {world_size} ranks: on CPUs nothing else was measured"]
    profile = _profile(config)
    return _auto_layout(config, _space(config, profile, world_size, gpus_per_node, _this_gpu()))


def _profile(config: JobConfig) -> Profile:
    """Of the model as it is trained: what no stage trains has neither gradients nor moments."""
    model = build_trained(config)
    freeze_groups(model, config)
    hidden = hidden_matrices(model, config.optimizer) if config.optimizer.name == "muon" else ()
    moments = dict.fromkeys(hidden, _state_bytes(config, _MUON))
    mtp = getattr(config.model, "mtp", None)  # an imported model has none
    ahead = 0 if mtp is None else mtp.num_modules
    return Profile(model, config.data.seq_len, moments=moments, ahead=ahead)


def _state_bytes(config: JobConfig, averages: int) -> float:
    """Bytes per parameter of the optimizer's state, and of an average of the weights."""
    points = _POINTS.get(config.optimizer.name, 0) + (config.optimizer.ema.decay is not None)
    of_weights = _BYTES[config.parallel.param_dtype]
    return averages * _BYTES[config.optimizer.state_dtype] + points * of_weights


def _auto_layout(config: JobConfig, space: SearchSpace) -> tuple[ParallelConfig, list[str]]:
    try:
        best, reasons = auto_layout(replace(space, modes=(space.config.recompute,)))
    except ValueError:
        try:
            best, reasons = auto_layout(space)
        except ValueError as error:
            found = [
                replace(p, fix=f"use {_what_fits(config, space)}") if p.code == "memory" else p
                for p in problems_of(error)
            ]
            raise ConfigError(found, "parallel.layout auto") from error
    return best.candidate.config, reasons


def _space(
    config: JobConfig, profile: Profile, gpus: int, per_node: int, gpu: Hardware
) -> SearchSpace:
    averages = _AVERAGES.get(config.optimizer.name, 2)
    weight = int(_BYTES[config.parallel.param_dtype])
    frozen = {"bf16": 2, "fp32": 4}[config.lora.base_dtype] if config.lora.rank else None
    moments = _state_bytes(config, averages)
    fused = config.train.loss == FUSED
    storage = Storage(
        weights=weight, gradients=weight, moments=moments, frozen=frozen, fused_loss=fused
    )

    def refuses(parallel: ParallelConfig) -> list[Problem]:
        return layout_problems(replace(config, parallel=parallel), gpus, per_node)

    return SearchSpace(profile, replace(config.parallel, layout="manual"), gpus, config.train.global_batch, gpu,
                per_node, (config.train.micro_batch,), storage=storage, refuses=refuses)  # fmt: skip


def _machine(config: JobConfig, flags: PlanFlags) -> tuple[Hardware, int]:
    """The GPU and how many of them share a node."""
    if flags.gpus < 1:
        rule, fix = "must be at least 1", "use --gpus 8"
        raise invalid("--gpus", "range", flags.gpus, rule, fix, kind=ConfigError)
    if flags.nodes is not None and (flags.nodes < 1 or flags.gpus % flags.nodes):
        rule, fix = f"must divide --gpus {flags.gpus}", "leave it out for nodes of 8"
        raise invalid("--nodes", "divides", flags.nodes, rule, fix, kind=ConfigError)
    per_node = config.parallel.gpus_per_node or 8
    if flags.nodes is not None:
        per_node = flags.gpus // flags.nodes
    try:
        return find_hardware(flags.gpu), min(per_node, flags.gpus)
    except ValueError as error:
        found = [replace(p, key=f"--{p.key}") for p in problems_of(error)]
        raise ConfigError(found) from error


def _this_gpu() -> Hardware:
    """The row of this machine's GPU with its own memory; for an unknown kind that of the h100."""
    name = torch.cuda.get_device_name().lower()
    known = [h for h in sorted(HARDWARE, key=len, reverse=True) if h in name]
    memory = float(torch.cuda.get_device_properties(0).total_memory)
    return replace(HARDWARE[known[0] if known else "h100"], memory=memory)
