# Copied from scripts/shared/module_arguments.py; edit that file, then run scripts/copy_shared.py.
"""Arguments of modules as in torch: the fields of a config as keywords, `device` and `dtype`."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields
from functools import wraps
from typing import Any, Self

import torch

Init = Callable[..., None]
Device = torch.device | str | int | None


@contextlib.contextmanager
def factory(device: Device = None, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Create parameters and buffers on `device` and, where the module sets no dtype itself, in `dtype`.

    torch's default dtype is changed meanwhile, for all threads of the process.
    """
    before = torch.get_default_dtype()
    try:
        if dtype is not None:
            torch.set_default_dtype(dtype)
        with contextlib.nullcontext() if device is None else torch.device(device):
            yield
    finally:
        if dtype is not None:
            torch.set_default_dtype(before)


class FromConfig:
    """Base of modules whose first argument is a config."""

    @classmethod
    def from_config(cls, config: Any, *args: Any, **kwargs: Any) -> Self:
        """Return the module of a config, with initial values; arguments are those of the constructor."""
        return cls(config, *args, **kwargs)  # type: ignore[call-arg]


def factory_arguments(init: Init) -> Init:
    """Let `__init__` of a module take `device` and `dtype`: those of its parameters, as in torch."""

    @wraps(init)
    def build(
        self: Any,
        *args: Any,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        with factory(device, dtype):
            init(self, *args, **kwargs)

    signature = inspect.signature(init)
    build.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*signature.parameters.values(), *_keywords({"device": None, "dtype": None})]
    )
    return build


def config_arguments(kind: type | str, **fixed: Any) -> Callable[[Init], Init]:
    """Let `__init__(self, config, ...)` of a module also take the fields of its config, `device` and `dtype`.

        class MoE(nn.Module):
            @config_arguments(MoEConfig)
            def __init__(self, config: MoEConfig) -> None: ...

        MoE(MoEConfig(dim=64, hidden_dim=128, num_experts=8)); MoE(dim=64, hidden_dim=128, num_experts=8)

    kind: the class of the config, or "module:name" where that module imports this one. fixed: fields that the module does not read.
    A keyword that is a field and an argument of `__init__` too is an argument if it is callable or None, else a field.
    """

    def decorate(init: Init) -> Init:
        _, config, *others = inspect.signature(init).parameters.values()
        own = {p.name for p in others}

        def with_fields(self: Any, config: Any = None, *args: Any, **kwargs: Any) -> None:
            # positional fields are numbers, as in nn.Linear(64, 128)
            if config is None or isinstance(config, int):
                build: Any = _imported(kind) if isinstance(kind, str) else kind
                names = {f.name for f in fields(build)}
                rest = {k: v for k, v in kwargs.items() if k in own and _is_argument(k, v, names)}
                given = {k: v for k, v in kwargs.items() if k not in rest}
                first = () if config is None else (config, *args)
                config = build(*first, **fixed, **given)
                args, kwargs = (), rest
            init(self, config, *args, **kwargs)

        decorated = factory_arguments(wraps(init)(with_fields))
        optional = config.replace(default=None)
        keywords = {"device": None, "dtype": None}
        if not isinstance(kind, str):
            named = {f.name: _default(f) for f in fields(kind) if f.name not in {*own, *fixed}}
            parameters = _keywords({**named, **keywords})
        else:
            parameters = [
                *_keywords(keywords),
                inspect.Parameter("fields", inspect.Parameter.VAR_KEYWORD),
            ]
        this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        decorated.__signature__ = inspect.Signature([this, optional, *others, *parameters])  # type: ignore[attr-defined]
        return decorated

    return decorate


def _imported(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def _is_argument(name: str, value: Any, names: set[str]) -> bool:
    """Whether a keyword that may be a field is an argument of the constructor."""
    return value is None or callable(value) or name not in names


def _default(field: Any) -> Any:
    """The default of a field, for a signature."""
    if field.default is not MISSING:
        return field.default
    return inspect.Parameter.empty if field.default_factory is MISSING else field.default_factory()


def _keywords(defaults: dict[str, Any]) -> list[inspect.Parameter]:
    """Keyword-only parameters, those without a default first."""
    kind, empty = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.empty
    found = [inspect.Parameter(name, kind, default=value) for name, value in defaults.items()]
    return sorted(found, key=lambda parameter: parameter.default is not empty)
