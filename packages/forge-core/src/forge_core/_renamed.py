"""Modules and names of 0.1, found until 0.3.0 with a DeprecationWarning."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from forge_core._shared.problems import invalid
from forge_core._shared.renamed import OldModules, read_renamed

_Init = TypeVar("_Init", bound=Callable[..., None])

#: Module of 0.1 -> module of today, below the package and in full.
_MODULES = {
    "loss.fused": "loss.token",
    "model.documents": "model.attention_ops",
    "model.head": "model.transformer",
    "model.layer_types": "model.config",
    "model.mla_config": "model.mla",
    "model.mrope": "model.rope",
    "model.mtp_config": "model.mtp",
    "model.parts": "model.block",
    "model.rows": "model.attention_ops",
    "model.spec": "model.attention_ops",
    "model.yarn": "model.rope",
}
MODULES = {f"forge_core.{old}": f"forge_core.{new}" for old, new in _MODULES.items()}
#: Module -> {name of 0.1: name of today, there or in another module}.
NAMES = {
    "forge_core": {"initialise": "initialize"},  # language: old name
    "forge_core.model": {"initialise": "initialize"},  # language: old name
    "forge_core.model.attention_ops": {
        "attend_rows": "attend_sequences",
        "attend_scores": "reference_attention",
        "cut": "document_lengths",
        "scaled_products": "attention_scores",
        "softmax_scores": "attention_weights",
        "within_segments": "attend_documents",
    },
    "forge_core.model.config": {
        "BLOCK_NAMES": "forge_core.model:BLOCK_NAMES",
        "GATED": "forge_core.model.feed_forward:GATED",
        "ROPE_NAMES": "forge_core.model.rope:ROPE_NAMES",
    },
    "forge_core.model.feed_forward": {"KINDS": "SPECS", "Kind": "FeedForwardSpec"},
    "forge_core.model.init": {"initialise": "initialize"},  # language: old name
    "forge_core.model.mtp": {"NextTokenModule": "MTPModule"},
    "forge_core.model.transformer": {"Finish": "LogitsTransform", "Then": "HeadLoss"},
    "forge_core.protocols": {
        "CountsFlops": "ModuleCost",
        "DeclaresInit": "ModuleInit",
        "DeclaresKinds": "ModuleInit",
        "DeclaresRoles": "ModuleSharding",
        "PreparesContext": "ModuleForward",
        "ScalesRates": "ModuleInit",
        "ShowsAttention": "ModuleForward",
    },
}
OLD_MODULES = OldModules(MODULES)


def renamed(owner: str, level: int = 2) -> Callable[[str], Any]:
    """Return a module's `__getattr__` that reads its old names, with a DeprecationWarning."""
    return read_renamed(NAMES, owner, level)


def renamed_argument(given: dict[str, Any], old: str, new: str) -> Any:
    """Take the value of an old keyword out of `given`, with a DeprecationWarning."""
    warnings.warn(f"{old}=: use {new}=", DeprecationWarning, stacklevel=3)
    return given.pop(old)


def reject_old_head(kind: type) -> None:
    """ValueError for a subclass of Transformer with a `head` of its own, which forward called in 0.1."""
    if "head" in vars(kind):
        rule = "is not called by forward since 0.2"
        fix = "define project(hidden, loss=None), whose hidden states are normed already"
        raise invalid(f"{kind.__name__}.head", "renamed", ..., rule, fix)


def config_form(init: _Init) -> _Init:
    """Let `__init__` of an optimizer also take (model, config[, groups]), its arguments in 0.1, with a DeprecationWarning."""

    @wraps(init)
    def either(self: Any, *args: Any, **kwargs: Any) -> None:
        given = {**dict(zip(("model", "config", "groups"), args)), **kwargs}
        # by name: the module of the class imports this one
        if all(kind.__name__ != "OptimizerConfig" for kind in type(given.get("config")).__mro__):
            return init(self, *args, **kwargs)

        model, config, groups = given.pop("model"), given.pop("config"), given.pop("groups", None)
        name = type(self).__name__
        text = f"{name}(model, config): use {name}(param_groups(model, config), lr=...), or build_optimizer(model, config)"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        arguments = self.config_arguments(init, model, config)
        init(self, **{**arguments, **given, **({} if groups is None else {"params": groups})})
        self.follow_model(model)

    return either  # type: ignore[return-value]
