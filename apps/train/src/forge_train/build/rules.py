"""Rules that span the sections of a job, and the names of parts that it looks up, before anything starts."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from forge_core import optim
from forge_core.model import check_parts
from forge_core.registry import Registry
from forge_moe.config import AMONG_TOKENS
from forge_moe.grouped_mm import find_backend
from forge_moe.parallel import find_dispatcher
from forge_moe.router import find_rule
from forge_parallel.rules import mtp_problem
from forge_resilience.policy import RollbackConfig
from forge_train._shared.problems import Problem, problems_of
from forge_train.build.objective import find_loss, find_objective
from forge_train.config.evaluation import KINDS
from forge_train.config.model import BuiltInModelConfig, VLMModelConfig, model_builder
from forge_train.config.schema import CallbackConfig, JobConfig
from forge_train.errors import ConfigError, problems_under
from forge_train.metrics.sinks import find_sinks, sink_problems
from forge_vlm.adapters import check_adapter
from forge_vlm.vision import check_encoder

CALLBACKS = Registry("callbacks.<name>.name", "forge.callbacks", (), {})
_MOMA_ROUTER = "model.fusion.moma.router"
#: Optimizers that write weights in bf16 with stochastic rounding.
_ROUNDING = ("adamw", "lion", "muon")


def _names(config: JobConfig) -> list[Problem]:
    """A problem for each name without an object (model, its parts, router, optimizer, schedule, sinks, callbacks),
    and for each option that a part does not take or lacks.

    Imports the modules of import paths and calls nothing: a schedule is only looked up if its length depends
    on the size of an imported model.
    """
    return [
        *_model_problems(config),
        *_found_by(find_loss, config),
        *_found_by(find_objective, config.train),
        *_found_by(find_sinks, config.metrics),
        *_optimizer_problems(config),
        *_schedule_problems(config),
        *_found_by(find_callbacks, config.callbacks),
    ]


def _length_problems(config: JobConfig) -> Iterator[Problem]:
    limit, micro = getattr(config.model, "max_seq_len", None), config.train.micro_batch
    phases = config.data.phases.items()
    lengths = {f"data.phases.{name}.seq_len": phase.seq_len for name, phase in phases}
    for key, length in {"data.seq_len": config.data.seq_len, **lengths}.items():
        if limit is not None and length is not None and length > limit:
            rule = f"must be at most model.max_seq_len {limit}"
            fix = f"use {limit}, or set model.max_seq_len = {length}"
            yield Problem(key, "above_limit", length, rule, fix)
    for name, phase in phases:
        if micro and phase.global_batch is not None and phase.global_batch % micro:
            key = f"data.phases.{name}.global_batch"
            rule = f"must be divisible by train.micro_batch {micro}"
            fix = f"use {max(1, phase.global_batch // micro) * micro}"
            yield Problem(key, "divides", phase.global_batch, rule, fix)


def _loss_problems(config: JobConfig) -> Iterator[Problem]:
    mtp, objective = getattr(config.model, "mtp", None), config.train.objective
    depths = 0 if mtp is None else mtp.num_modules
    if depths and objective is not None:
        rule = f"adds to the loss of logits, and train.objective {objective!r} computes its own"
        yield Problem("model.mtp.num_modules", "excludes", depths, rule, "use one of them")
    if wrong := mtp_problem(config.parallel, depths, "model.mtp.num_modules"):
        yield wrong.under("parallel")  # type: ignore[misc]  # the same class, of another package


def optimizer_problems(config: JobConfig) -> Iterator[Problem]:
    """Of the optimizer with weights in bf16."""
    optimizer, param_dtype = config.optimizer.name, config.parallel.param_dtype
    fp32 = "parallel.param_dtype = 'fp32'"
    if param_dtype == "bf16" and optimizer not in _ROUNDING:
        rule = f"must go with an optimizer that rounds updates stochastically, and optimizer.name is {optimizer!r}"
        fix = f"use {', '.join(_ROUNDING)}, or {fp32}"
        yield Problem("parallel.param_dtype", "optimizer", param_dtype, rule, fix)
    if param_dtype == "bf16" and config.lora.rank:
        rule = f"must go without lora.rank {config.lora.rank}: frozen weights are stored in lora.base_dtype"
        yield Problem("parallel.param_dtype", "adapters", param_dtype, rule, f"use {fp32}")


def _evaluation_problems(config: JobConfig) -> Iterator[Problem]:
    """Of evaluations that no step makes, and of what cannot be evaluated."""
    asked, validation = config.eval, config.data.validation
    given = ["data.validation"] if validation is not None else []
    given += [f"eval.sets.{name}" for name in asked.sets]
    given += [f"eval.choices.{name}" for name in asked.choices]
    given += ["eval.at_start"] if asked.at_start else []

    for key in () if asked.every_steps else given:
        rule, fix = "is given but eval.every_steps is 0", "set it to 100, or leave this out"
        yield Problem(key, "never_read", ..., rule, fix)
    if config.checkpoint.best is not None and validation is None:
        rule = "needs data.validation, which is not given"
        fix = "give [data.validation] or leave checkpoint.best out"
        yield Problem("checkpoint.best", "requires", config.checkpoint.best, rule, fix)

    if asked.every_steps and _chosen_by_experts(config.model):
        rule = "chooses among later tokens, too, and cannot evaluate"
        fix = "set eval.every_steps = 0, or router = 'auxiliary_router'"
        yield Problem(_MOMA_ROUTER, "evaluation", "expert_choice", rule, fix)


def _chosen_by_experts(model: object) -> bool:
    """Whether experts choose their tokens among those of a whole row, which is for training alone."""
    fusion = model.fusion if isinstance(model, VLMModelConfig) else None
    return fusion is not None and fusion.name == "moma" and fusion.moma.router == "expert_choice"


def _exact_match_problems(config: JobConfig) -> Iterator[Problem]:
    """Problems of [eval.exact_match] with the model and the sources."""
    asked, path = config.eval.exact_match, "eval.exact_match.path"
    if asked.path is None:
        return
    remove = "or remove the table"
    if not isinstance(config.model, VLMModelConfig):
        rule = f"names questions about images, and model.name is {config.model.name!r}"
        yield Problem(path, "model", asked.path, rule, f"use 'vlm', {remove}")
    if config.eval.every_steps == 0:
        rule, fix = "is given but eval.every_steps 0 never reads it", "set eval.every_steps = 100"
        yield Problem(path, "never_read", asked.path, rule, f"{fix}, {remove}")

    known = [name for name, source in config.data.sources.items() if source.name in KINDS]
    if asked.source is not None and asked.source not in known:
        rule = f"must be a source of name 'vlm', which are {', '.join(known) or 'none'}"
        yield Problem("eval.exact_match.source", "unknown", asked.source, rule, "correct it")
    elif not known:
        rule = "needs a source of name 'vlm', whose template and resolution prompts have"
        yield Problem(path, "requires", asked.path, rule, "give one in [data.sources]")


def _fault_problems(config: JobConfig) -> Iterator[Problem]:
    resilience, digest = config.resilience, config.checkpoint.digest
    actions = (resilience.nonfinite.action, resilience.spike.action)
    if resilience.rollback != RollbackConfig() and "rollback" not in actions:
        rule = "is set, but no action is 'rollback'"
        fix = "set resilience.nonfinite.action or resilience.spike.action to 'rollback', or leave it out"
        yield Problem("resilience.rollback", "requires", ..., rule, fix)
    if digest == "blake3" and importlib.util.find_spec("blake3") is None:
        rule = "needs the package blake3, which is not installed"
        fix = "pip install 'forge-ckpt[fast]' or leave it out"
        yield Problem("checkpoint.digest", "requires", digest, rule, fix)


def _generation_problems(config: JobConfig) -> Iterator[Problem]:
    """Parts of the model that cannot write the sample at the end of the run."""
    tokens = config.sample.max_new_tokens
    if not tokens:
        return
    generates = f"cannot generate, and sample.max_new_tokens {tokens} does"
    fix = "set sample.max_new_tokens = 0"
    moe = getattr(config.model, "moe", None)
    if moe and moe.num_experts and moe.router in AMONG_TOKENS:
        rule = f"chooses among all tokens of a row and {generates}"
        yield Problem("model.moe.router", "generation", moe.router, rule, fix)
    if _chosen_by_experts(config.model):
        yield Problem(_MOMA_ROUTER, "generation", "expert_choice", generates, fix)
    spec = getattr(config.model, "attention", None)
    if spec and spec.mask != "causal":
        rule = f"is not computed with a KV cache and {generates}"
        yield Problem("model.attention.mask", "generation", spec.mask, rule, fix)


def _model_problems(config: JobConfig) -> list[Problem]:
    model = config.model
    if isinstance(model, BuiltInModelConfig):
        parts = _found_by(check_parts, model)
        if isinstance(model, VLMModelConfig):
            parts += _found_by(check_encoder, model.vision)
            parts += _found_by(check_adapter, model.adapter)
        if not model.moe.num_experts:
            return parts
        moe: dict[Callable[..., Any], str]
        moe = {find_rule: "router", find_backend: "backend", find_dispatcher: "dispatcher"}
        for find, key in moe.items():
            parts += _found_by(find, getattr(model.moe, key), table="model.moe")
        return parts
    return _found_by(model_builder, model)


def _optimizer_problems(config: JobConfig) -> list[Problem]:
    """Of the optimizer, its groups and the stages; patterns are tried on models of ours, built without values."""
    optimizer, stages = config.optimizer, config.train.stages
    found: list[Any] = optim.optimizer_problems(optimizer)
    found += optim.stage_problems(optimizer, stages, config.train.steps)
    ours = config.model.is_built_in and not _model_problems(config)
    if found or not optimizer.groups or not ours:
        return found
    # imported here: half a second, which other errors do not need
    from forge_train.build.build import build_trained

    model = build_trained(config)
    return _found_by(optim.check_something_trains, model, optimizer, stages)


def _schedule_problems(config: JobConfig) -> list[Problem]:
    # imported here: half a second, which other errors do not need
    from forge_train.build.build import build_trained, run_schedule, total_steps

    by_size = config.train.tokens_per_parameter is not None
    unknown = _found_by(optim.check_schedule, config.schedule)
    parts = by_size and bool(_model_problems(config))
    if unknown or parts or (by_size and not config.model.is_built_in):
        return unknown
    model = build_trained(config) if by_size else None
    return _found_by(run_schedule, config, total_steps(config, model), table="schedule")


def _found_by(check: Callable[..., Any], *args: Any, table: str = "") -> list[Problem]:
    """The problems with which `check(*args)` rejects its arguments, with their keys below `table`."""
    try:
        check(*args)
    except (ValueError, ImportError, ConfigError) as error:
        return problems_under(error, table) if table else list(problems_of(error))
    return []


#: What is checked, in this order.
RULES: tuple[Callable[[JobConfig], Iterable[Problem]], ...] = (
    _names,
    _length_problems,
    _loss_problems,
    lambda config: sink_problems(config.metrics),
    optimizer_problems,
    _evaluation_problems,
    _exact_match_problems,
    _fault_problems,
    _generation_problems,
)


def rule_problems(config: JobConfig) -> list[Problem]:
    """The problems of all rules."""
    return [problem for rule in RULES for problem in rule(config)]


def find_callbacks(tables: Mapping[str, CallbackConfig]) -> dict[str, Callable[[], Any]]:
    """Makers of the callback of each table, with its options bound; ValueError with all problems of names and
    options. Nothing is called."""
    return CALLBACKS.bound({name: (table.name, table.options) for name, table in tables.items()})
