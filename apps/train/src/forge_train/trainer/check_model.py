"""Problems of a built model with its job and layout, found before any process group exists."""

from __future__ import annotations

import inspect
from dataclasses import replace

from torch import nn

from forge_moe.hooks import num_experts_by_layer, whole_batch_options
from forge_moe.sorted_experts import sorted_experts_by_name
from forge_parallel.axes import find_roles
from forge_parallel.check_model import facts_of
from forge_parallel.config import Layout
from forge_parallel.legal import problems
from forge_parallel.pipeline import stream_dim
from forge_parallel.structure import structure_of
from forge_train.config.schema import JobConfig
from forge_train.trainer.layout import NAMES
from forge_train.trainer.objective import FUSED

#: Keys as in `layout_problems`; depth and experts are what was built, whoever's model it is.
_NAMES = {name: key for name, key in NAMES.items() if not key.startswith("model.")}


def model_problems(model: nn.Module, config: JobConfig, layout: Layout) -> list[str]:
    """Why a whole model, ours or a user's, cannot run the job: a loss inside its head, samples, pp, cp, tp.

    The model itself tells: its parts and the width of its stream (`pipeline_parts()`), its attention
    (`attend`), its roles (`parallel_roles()`), its MoE layers. Costs a walk over its modules.
    """
    if config.train.loss == FUSED and "then" not in inspect.signature(model.forward).parameters:
        return [
            f"train.loss {FUSED!r} is computed inside the head, and the forward of {config.model.name} takes no "
            "`then` to hand there; use train.loss = 'cross_entropy', or pass then(x, weight) to the head"
        ]
    if config.metrics.gradients_every_steps and layout.tp > 1 and num_experts_by_layer(model):
        return [
            f"metrics.gradients_every_steps {config.metrics.gradients_every_steps} measures gradients of micro-batches, and "
            f"with parallel.tp {layout.tp} the experts of each rank see a part of their tokens; use parallel.tp = 1, or "
            "metrics.gradients_every_steps = 0"
        ]
    if problems := _layout_problems(model, config, layout):
        return problems
    if config.sample.max_new_tokens and not hasattr(model, "new_cache"):
        return [
            f"sample.max_new_tokens {config.sample.max_new_tokens} needs a model that generates "
            f"(new_cache), which {config.model.name} is not; set sample.max_new_tokens = 0"
        ]
    return []


def _layout_problems(model: nn.Module, config: JobConfig, layout: Layout) -> list[str]:
    if layout.pp * layout.cp * layout.tp * layout.ep == 1:
        return []
    try:
        structure = structure_of(model)
        matched = find_roles(model, cut=layout.tp > 1)
        facts = facts_of(model, layout, structure, matched)
        if layout.pp > 1 and not facts.obstacles["pp"]:
            stream_dim(model)
    except ValueError as error:
        return str(error).splitlines()
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
