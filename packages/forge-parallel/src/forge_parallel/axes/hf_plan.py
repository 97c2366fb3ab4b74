"""The tensor-parallel plan that a Hugging Face model carries, as a table of roles."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from forge_parallel._problems import merge_layers
from forge_parallel._shared.problems import Problem, raise_problems

#: transformers' styles that are one of the roles; others are refused by name.
STYLES = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "colwise_gather_output": "gather_output",
    "colwise_rep": "gather_output",
    "embedding_rowwise": "vocab",
    "replicated_with_grad_allreduce": "replicate_sum_grad",
}


def has_plan(model: Any) -> bool:
    """Whether a model has a tensor-parallel plan (transformers 4.51 to 5.23)."""
    return bool(
        getattr(model, "_tp_plan", None)
        or getattr(getattr(model, "config", None), "base_model_tp_plan", None)
    )


def roles_of_plan(model: nn.Module) -> dict[str, str]:
    """{name of a parameter: role} of `model`, from its config's `base_model_tp_plan` and its `_tp_plan`.

        tensor_parallel(model, mesh, roles=roles_of_plan(model))    # its default for such a model

    Embeddings without a row are sharded by ids, other modules without one are replicated. A replicated module is
    right on the whole residual stream only, so one beside colwise layers (a norm of heads) is refused, by name, as
    are unknown styles.
    """
    plan = _plan(model)
    found: dict[str, str] = {}
    beside = set()
    problems: list[Problem] = []
    for name, _ in model.named_parameters(remove_duplicate=False):
        owner = name.rpartition(".")[0]
        styles = {s for p, s in plan.items() if fnmatchcase(owner, p) or fnmatchcase(name, p)}
        unknown = styles - set(STYLES)
        if unknown or len(styles) > 1:
            listed = ", ".join(sorted(styles))
            rule = f"must be a tp style: one of {', '.join(STYLES)}"
            problems.append(Problem(owner, "style", listed, rule, "pass roles for this model"))
        elif styles:
            found[name] = STYLES[styles.pop()]
            if found[name] == "colwise":
                beside.add(owner.rpartition(".")[0])
    for name, _ in model.named_parameters(remove_duplicate=False):
        owner = name.rpartition(".")[0]
        if name in found or any(problem.key == owner for problem in problems):
            continue
        if owner.rpartition(".")[0] in beside:
            rule = "has no tp style and must have one next to colwise layers, where ranks have different heads"
            problems.append(Problem(owner, "missing", ..., rule, "pass roles for this model"))
        module = model.get_submodule(owner)
        ids = isinstance(module, nn.Embedding) and _looks_up_ids(model, module)
        found[name] = "vocab" if ids else "opaque"
    raise_problems("", merge_layers(dict.fromkeys(problems)))
    return found


def _looks_up_ids(model: Any, embedding: nn.Embedding) -> bool:
    """Whether it is the table of ids, not of positions."""
    offer = getattr(model, "get_input_embeddings", None)
    return offer is not None and offer() is embedding


def _plan(model: Any) -> dict[str, str]:
    """Rows with the names of this model: the config's are relative to its base model."""
    config_rows = getattr(model.config, "base_model_tp_plan", None) or {}
    prefix = getattr(model, "base_model_prefix", "")
    dot = f"{prefix}." if prefix and hasattr(model, prefix) else ""
    rows = {dot + pattern: style for pattern, style in config_rows.items()}
    own = getattr(model, "_tp_plan", None) or {}
    return rows | {pattern: style for pattern, style in own.items() if pattern not in rows}
