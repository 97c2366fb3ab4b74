"""Problems of a built model with its job and layout, found before any process group exists."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from forge_moe.hooks import num_experts_by_layer, whole_batch_options
from forge_moe.sorted_experts import sorted_experts_by_name
from forge_parallel.axes import find_roles
from forge_parallel.check_model import facts_of
from forge_parallel.compute import AFTER_EMBEDDING
from forge_parallel.config import Layout
from forge_parallel.legal import problems
from forge_parallel.pipeline import stream_dim
from forge_parallel.structure import structure_of
from forge_train._shared.problems import Problem, problems_of
from forge_train.config.schema import JobConfig
from forge_train.trainer.layout import NAMES, objective_of_parts
from forge_train.trainer.objective import FUSED

#: Keys as in `layout_problems`; depth and experts are what was built, whoever's model it is.
_NAMES = {name: key for name, key in NAMES.items() if not key.startswith("model.")}


def model_problems(model: nn.Module, config: JobConfig, layout: Layout) -> Iterator[Problem]:
    """Why a whole model, ours or a user's, cannot run the job: a loss inside its head, samples, pp, cp, tp.

    The model itself tells: its parts and the width of its stream (`pipeline_parts()`), its attention
    (`attend`), its roles (`parallel_roles()`), its MoE layers. Costs a walk over its modules.
    """
    every, new = config.metrics.gradients_every_steps, config.sample.max_new_tokens
    if config.train.loss == FUSED and "then" not in inspect.signature(model.forward).parameters:
        rule = f"is computed inside the head, and the forward of {config.model.name} takes no `then` to hand there"
        fix = "use train.loss = 'cross_entropy', or pass then(x, weight) to the head"
        yield Problem("train.loss", "unsupported", FUSED, rule, fix)
    elif every and layout.tp > 1 and num_experts_by_layer(model):
        rule = (
            f"measures gradients of micro-batches, and with parallel.tp {layout.tp} the experts of each rank see a part "
            "of their tokens"
        )
        fix = "use parallel.tp = 1, or metrics.gradients_every_steps = 0"
        yield Problem("metrics.gradients_every_steps", "experts", every, rule, fix)
    elif layout.cp > 1 and config.train.objective and _joins_after_embedding(model):
        yield objective_of_parts(config, layout)
    elif problems := _layout_problems(model, config, layout):
        yield from problems
    elif new and not hasattr(model, "new_cache"):
        rule = f"needs a model that generates (new_cache), which {config.model.name} is not"
        fix = "set sample.max_new_tokens = 0"
        yield Problem("sample.max_new_tokens", "unsupported", new, rule, fix)


def _joins_after_embedding(model: nn.Module) -> bool:
    return AFTER_EMBEDDING in getattr(model, "extra_inputs", ())


def _layout_problems(model: nn.Module, config: JobConfig, layout: Layout) -> Sequence[Any]:
    if layout.pp * layout.cp * layout.tp * layout.ep == 1:
        return []
    try:
        structure = structure_of(model)
        matched = find_roles(model, cut=layout.tp > 1)
        facts = facts_of(model, layout, structure, matched)
        if layout.pp > 1 and not facts.obstacles["pp"]:
            stream_dim(model)
    except ValueError as error:
        return problems_of(error)
    known = replace(
        facts,
        seq_len=config.data.seq_len,
        num_experts=_num_experts(model, layout),
        whole_batch=whole_batch_options(model),
        names=_NAMES,
    )
    return problems(config.parallel, layout, known)


def _num_experts(model: nn.Module, layout: Layout) -> int:
    """Experts of the mixture that has fewest; those of modalities are a mixture for `ep` alone, as no axis cuts their tokens."""
    found = [*num_experts_by_layer(model).values()]
    if layout.ep > 1:
        found += [m.config.num_experts for m in sorted_experts_by_name(model).values()]
    return min(found, default=0)
