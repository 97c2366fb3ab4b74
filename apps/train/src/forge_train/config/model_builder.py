"""The builder of an imported model: `model.name` as an import path or an entry point."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from forge_core.registry import Registry
from forge_train._shared.problems import invalid
from forge_train.config.schema import MODELS_GROUP, ImportedModelConfig
from forge_train.errors import ConfigError, config_errors

MODELS = Registry("model.name", MODELS_GROUP, (), {})


def model_builder(section: ImportedModelConfig) -> Callable[[], Any]:
    """The builder that `model.name` names, with its arguments; ConfigError where it does not take them."""
    with config_errors():
        build = MODELS.find(section.name)

    def call(function: Callable[..., Any]) -> Any:
        try:
            return function(vocab_size=section.vocab_size, **section.args)
        except (TypeError, ValueError) as error:
            rule = f"does not fit {section.name}(vocab_size=..., **args): {error}"
            fix = "give the arguments that this builder takes"
            raise invalid(
                "model.args", "call", section.args, rule, fix, kind=ConfigError
            ) from error

    call(inspect.signature(build).bind)
    return lambda: call(build)
