"""Kind of each parameter of a model: a matrix, a vector, the weight of a norm, a bias, an embedding, or a stack of them.

Weight decay, Muon, learning rates of a parametrization, initial values and FLOPs of frozen parameters depend on it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from torch import Tensor, nn

from forge_core._shared.parameter_kinds import ParameterKind
from forge_core._shared.problems import Problem, raise_problems

__all__ = [
    "ParameterKind",
    "declares_kinds",
    "is_matrix",
    "own_kinds",
    "parameter_kinds",
    "stacked_vectors",
]

_DIMS = {"matrix": 2, "stacked_matrix": 3}
_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._NormBase)


def parameter_kinds(model: nn.Module) -> dict[str, ParameterKind]:
    """Return {parameter name: kind} of all parameters; a tied one counts once, under its first name.

    A module may declare the kinds of the parameters that it holds itself, by `parameter_kinds() -> {name: kind}`. Without
    that the module decides (embedding, norm, convolution), or the name (`bias` at its end) and the number of dims. Raises
    ValueError for each declared name that does not exist, unknown kind, and kind that does not fit the dims.
    """
    problems: list[Problem] = []
    found: dict[nn.Parameter, tuple[str, ParameterKind]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        own = dict(module.named_parameters(recurse=False))
        for name, declared in _declared(module).items():
            problems += _kind_problems(dot + name, declared, own.get(name))
        for name, kind in own_kinds(module).items():
            first, before = found.get(own[name], (dot + name, kind))
            # a head that is tied to an embedding is one, whichever is named first
            found[own[name]] = (first, kind if kind == "embedding" else before)
    raise_problems("", problems)
    return dict(found.values())


def own_kinds(module: nn.Module) -> dict[str, ParameterKind]:
    """Return {name: kind} of the parameters that a module holds itself."""
    declared = _declared(module)
    own = module.named_parameters(recurse=False)
    return {n: declared[n] if n in declared else _default(module, n, p) for n, p in own}


def is_matrix(kind: ParameterKind) -> bool:
    """Whether it is a weight of a matmul or a lookup, which decays; vectors, norms, biases and stacks of them do not."""
    return kind.removeprefix("stacked_") in ("matrix", "embedding", "tensor")


def stacked_vectors(model: nn.Module) -> frozenset[str]:
    """Names of the trainable vectors, norms and biases of two dims or more, which decayed in older versions (F146)."""
    kinds = parameter_kinds(model)
    stacked = [n for n, p in model.named_parameters() if p.requires_grad and p.ndim > 1]
    return frozenset(name for name in stacked if not is_matrix(kinds[name]))


def declares_kinds(module: nn.Module) -> bool:
    """Whether a module itself defines `parameter_kinds`; one that forwards attributes (of torch.compile) does not."""
    return inspect.getattr_static(module, "parameter_kinds", None) is not None


def _declared(module: Any) -> Mapping[str, ParameterKind]:
    return module.parameter_kinds() if declares_kinds(module) else {}


def _kind_problems(name: str, kind: Any, parameter: Tensor | None) -> Iterator[Problem]:
    if kind not in get_args(ParameterKind):
        rule = "is declared by parameter_kinds and is no kind of parameter"
        yield Problem(name, "unknown", kind, rule, f"use {', '.join(get_args(ParameterKind))}")
    elif parameter is None:
        rule = "is declared by parameter_kinds, and does not exist"
        yield Problem(name, "not_found", ..., rule, "declare parameters that the module has")
    elif parameter.ndim != _DIMS.get(kind, parameter.ndim) or (
        kind.startswith("stacked_") and parameter.ndim < 2
    ):
        rule = f"does not fit its {parameter.ndim} dims: parameter_kinds must declare what it is"
        fix = "a matrix has 2, a stack one more than what is in it"
        yield Problem(name, "dims", kind, rule, fix)


def _default(module: nn.Module, name: str, parameter: Tensor) -> ParameterKind:
    """The kind of a parameter that no module declares."""
    stacked = parameter.ndim > 1
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return "embedding"
    if name.endswith("bias"):
        return "stacked_bias" if stacked else "bias"
    # norms of other libraries have weights of a head, too
    if isinstance(module, _NORMS) or type(module).__name__.endswith("Norm"):
        return "stacked_norm" if stacked else "norm"
    if not stacked:
        return "vector"
    if isinstance(module, nn.modules.conv._ConvNd) or parameter.ndim > 3:
        return "tensor"
    return "matrix" if parameter.ndim == 2 else "stacked_matrix"
