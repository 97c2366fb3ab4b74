"""Whether a built model fits its layout: what it says itself, asked before any process group exists."""

from __future__ import annotations

import inspect
from dataclasses import replace

from torch import nn

from forge_parallel.axes import find_roles
from forge_parallel.check_model import facts_of
from forge_parallel.config import Layout
from forge_parallel.legal import problems
from forge_parallel.pipeline import stream_dim
from forge_parallel.structure import structure_of
from forge_train.config.schema import JobConfig
from forge_train.trainer.layout import NAMES
from forge_train.trainer.mixtures import mixture_sizes, whole_batch
from forge_train.trainer.objective import FUSED

#: Keys as in `layout_problems`; depth and experts are what was built, whoever's model it is.
_NAMES = {name: key for name, key in NAMES.items() if not key.startswith("model.")}


def model_problems(model: nn.Module, config: JobConfig, layout: Layout) -> list[str]:
    """What keeps a whole model, ours or somebody's, from a loss inside its head and from the axes that cut it:
    pp, cp and tp.

    It is asked for its parts and the width of its stream (`pipeline_parts()`), its attention (`attend`), its
    roles (`parallel_roles()`) and its mixtures. Costs a walk over its modules.
    """
    if config.train.loss == FUSED and "then" not in inspect.signature(model.forward).parameters:
        return [
            f"train.loss {FUSED!r} is computed inside the head, and the forward of {config.model.name} takes no "
            "`then` to hand there; use train.loss = 'cross_entropy', or pass then(x, weight) to the head"
        ]
    if layout.pp * layout.cp * layout.tp == 1:
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
        num_experts=min(mixture_sizes(model).values(), default=0),
        whole_batch=whole_batch(model),
        names=_NAMES,
    )
    return problems(config.parallel, layout, known)
