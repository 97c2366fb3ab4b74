"""Parts that a configuration names: every verb that reads one looks them up before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from forge_core.model import check_parts
from forge_core.optim import (
    check_optimizer,
    check_schedule,
    check_something_trains,
    stage_problems,
)
from forge_core.registry import Registry
from forge_moe.routers import find_rule
from forge_train._shared.problems import Problem, problems_of
from forge_train.config.model_builder import model_builder
from forge_train.config.schema import BuiltInModelConfig, CallbackConfig, JobConfig
from forge_train.config.vlm import VLMModelConfig
from forge_train.errors import ConfigError, problems_under
from forge_train.metrics.sinks import find_sinks
from forge_train.trainer.objective import find_loss, find_objective
from forge_vlm.adapters import check_adapter
from forge_vlm.vision import check_encoder


def name_problems(config: JobConfig) -> list[Problem]:
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


def _model_problems(config: JobConfig) -> list[Problem]:
    model = config.model
    if isinstance(model, BuiltInModelConfig):
        parts = _found_by(check_parts, model)
        if isinstance(model, VLMModelConfig):
            parts += _found_by(check_encoder, model.vision)
            parts += _found_by(check_adapter, model.adapter)
        if not model.moe.num_experts:
            return parts
        return [*parts, *_found_by(find_rule, model.moe.router, table="model.moe")]
    return _found_by(model_builder, model)


def _optimizer_problems(config: JobConfig) -> list[Problem]:
    """Of the optimizer, its groups and the stages; patterns are tried on models of ours, built without values."""
    optimizer, stages = config.optimizer, config.train.stages
    # a block with a matrix without values: an optimizer checks some options only with parameters
    stand_in = nn.Sequential(nn.Linear(1, 1, device="meta"))
    alone = [{name: replace(own, patterns=("*",))} for name, own in optimizer.groups.items()]
    found: list[Any] = [
        problem
        for groups in alone or [{}]
        for problem in _found_by(check_optimizer, stand_in, replace(optimizer, groups=groups))
    ]
    found += stage_problems(optimizer, stages, config.train.steps)
    ours = config.model.is_built_in and not _model_problems(config)
    if found or not optimizer.groups or not ours:
        return list({str(problem): problem for problem in found}.values())
    # imported here: half a second, which other errors do not need
    from forge_train.trainer.build import build_trained

    model = build_trained(config)
    return _found_by(check_something_trains, model, optimizer, stages)


def _schedule_problems(config: JobConfig) -> list[Problem]:
    # imported here: half a second, which other errors do not need
    from forge_train.trainer.build import build_trained, run_schedule, total_steps

    by_size = config.train.tokens_per_parameter is not None
    unknown = _found_by(check_schedule, config.schedule)
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


CALLBACKS = Registry("callbacks.<name>.name", "forge.callbacks", (), {})


def find_callbacks(tables: Mapping[str, CallbackConfig]) -> dict[str, Callable[[], Any]]:
    """Makers of the callback of each table, with its options bound; ValueError with all problems of names and
    options. Nothing is called."""
    return CALLBACKS.bound({name: (table.name, table.options) for name, table in tables.items()})
