"""Problems of a job with its number of ranks, found before any of them starts, and those of its model once it is built."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from torch import nn

from forge_core.loss import FUSED
from forge_core.optim import saves_by_name
from forge_moe.experts import sorted_experts_by_name
from forge_moe.hooks import num_experts_by_layer, whole_batch_options
from forge_parallel import ParallelConfig, check_model
from forge_parallel.compute import AFTER_EMBEDDING, MicroBatches, divide_batch
from forge_parallel.config import Layout
from forge_parallel.rules import ModelFacts, ShardedDim, problems
from forge_train._shared.problems import Problem, problems_of
from forge_train.build.build import EXPERT_ACTIVATIONS, Course
from forge_train.config.model import BuiltInModelConfig, VLMModelConfig
from forge_train.config.schema import JobConfig
from forge_train.errors import refuse
from forge_vlm.fusion import PARTING, axes_problems
from forge_vlm.vision import num_layer_features

#: Keys of the runner by the names that they have in rules; depth and experts of a built model are what was built.
_OF_BUILT = {field.name: f"parallel.{field.name}" for field in fields(ParallelConfig)}
_OF_BUILT["seq_len"] = "data.seq_len"
_NAMES = _OF_BUILT | {"num_layers": "model.num_layers", "num_experts": "model.moe.num_experts"}


def layout_problems(
    config: JobConfig, world_size: int, ranks_per_node: int | None = None
) -> list[Problem]:
    """Why layout, model and batch do not fit `world_size` ranks; empty if they do."""
    try:
        layout = config.parallel.axes(world_size, ranks_per_node)
    except ValueError as error:
        return [problem.under("parallel") for problem in problems_of(error)]
    rules = (_images, _answers, _objective, _optimizer, _phases, _gradients)
    own: list[Any] = [problem for rule in rules for problem in rule(config, layout)]
    return own + problems(config.parallel, layout, _facts(config, layout))


def require_layout(config: JobConfig, world_size: int, ranks_per_node: int | None = None) -> None:
    """Raise ConfigError for `layout_problems`."""
    refuse(layout_problems(config, world_size, ranks_per_node))


def micro_batches(config: JobConfig, layout: Layout) -> MicroBatches:
    """How the readers of a layout divide the global batch."""
    train = config.train
    return divide_batch(config.parallel, train.global_batch, layout.batch_size, train.micro_batch)


def layout_notes(config: JobConfig, layout: Layout) -> list[str]:
    """A line for each cost or change that follows from the number of data ranks; usually empty."""
    cost = micro_batches(config, layout).cost
    lines = [cost] if cost else []
    moe = getattr(config.model, "moe", None)
    if moe and moe.num_experts and moe.aux_scope == "global_batch" and layout.batch_size > 1:
        lines.append(
            f"model.moe.aux_scope 'global_batch' counts the k-th micro-batches of {layout.batch_size} readers "
            "together, so the balance loss depends on their number; global_batch_lagged does not"
        )
    return lines


def model_problems(model: nn.Module, config: JobConfig, layout: Layout) -> Iterator[Any]:
    """Problems of an unsharded model, built-in or imported, with the job: a loss inside its head, samples, pp, cp, tp.

    The model declares its stages and the width of its stream (`pipeline_parts()`), its attention (`attend`), its roles
    (`parallel_roles()`) and its MoE layers. Costs a walk over its modules.
    """
    every, new = config.metrics.gradients_every_steps, config.sample.max_new_tokens
    experts = num_experts_by_layer(model)
    if config.train.loss == FUSED and "loss" not in inspect.signature(model.forward).parameters:
        rule = f"is computed inside the head, and the forward of {config.model.name} takes no `loss` to hand there"
        fix = "use train.loss = 'cross_entropy', or compute loss(x, weight) in the head"
        yield Problem("train.loss", "unsupported", FUSED, rule, fix)
        return
    if every and layout.tp > 1 and experts:
        rule = f"measures gradients of micro-batches, of which experts see a part with parallel.tp {layout.tp}"
        fix = "use parallel.tp = 1, or metrics.gradients_every_steps = 0"
        yield Problem("metrics.gradients_every_steps", "experts", every, rule, fix)
        return

    joins_images = AFTER_EMBEDDING in getattr(model, "extra_inputs", ())
    if joins_images and layout.cp > 1 and config.train.objective:
        yield _objective_of_parts(config, layout)
        return

    # experts of modalities are a mixture for `ep` only, as no axis shards their tokens
    groups = sorted_experts_by_name(model) if layout.ep > 1 else {}
    counts = [*experts.values(), *(group.config.num_experts for group in groups.values())]

    found = check_model.model_problems(
        model,
        config.parallel,
        layout,
        seq_len=config.data.seq_len,
        num_experts=min(counts, default=0),
        whole_batch=whole_batch_options(model),
        names=_OF_BUILT,
    )
    yield from found
    if new and not found and not hasattr(model, "new_cache"):
        rule = f"needs a model that generates (new_cache), which {config.model.name} is not"
        fix = "set sample.max_new_tokens = 0"
        yield Problem("sample.max_new_tokens", "unsupported", new, rule, fix)


def _images(config: JobConfig, layout: Layout) -> Iterator[Any]:
    """Axes that a fusion cannot be computed on."""
    if isinstance(config.model, VLMModelConfig):
        axes = {"tp": layout.tp, "cp": layout.cp, "ep": layout.ep}
        for problem in axes_problems(config.model, **axes, experts=EXPERT_ACTIVATIONS):
            yield problem.under("parallel")


def _answers(config: JobConfig, layout: Layout) -> Iterator[Problem]:
    """Axes on which no rank can write answers by itself."""
    cut = [f"parallel.{axis}" for axis in _above_1(layout, "tp", "cp", "pp")]
    if cut and config.eval.exact_match.path is not None:
        rule = f"generates, and with {', '.join(cut)} no rank can run the model by itself"
        fix = "use data ranks (dp_shard, dp_replicate) or ep, or run forge-train generate on its checkpoints"
        yield Problem("eval.exact_match.path", "layout", ..., rule, fix)


def _objective(config: JobConfig, layout: Layout) -> Iterator[Problem]:
    objective, pp = config.train.objective, config.parallel.pp
    if objective is None:
        return
    if pp > 1:
        rule = f"calls the full model, of which a rank of parallel.pp {pp} has a part"
        yield Problem("train.objective", "pipeline", objective, rule, "use pp = 1, or train.loss")
        return
    model = config.model
    joins_images = isinstance(model, VLMModelConfig) and model.vision.name != "none"
    if joins_images and layout.cp > 1:
        yield _objective_of_parts(config, layout)


def _objective_of_parts(config: JobConfig, layout: Layout) -> Problem:
    """The problem of an objective of parts of sequences with a model that joins whole ones to their images."""
    rule = f"gets parts of sequences with parallel.cp {layout.cp}, and the model joins images to whole ones"
    value, fix = config.train.objective, "use cp = 1, or train.loss"
    return Problem("train.objective", "images", value, rule, fix)


def _optimizer(config: JobConfig, layout: Layout) -> Iterator[Problem]:
    name, pp = config.optimizer.name, config.parallel.pp
    if pp > 1 and not saves_by_name(name):
        rule = f"must go with a class of optimizers with named_state() and load_named_state(), and {name!r} is not one"
        fix = "give it both, or use 'adamw' or pp = 1"
        yield Problem("parallel.pp", "optimizer", pp, rule, fix)


def _phases(config: JobConfig, layout: Layout) -> Iterator[Any]:
    """Problems of the rows and batches of phases."""
    course, pp = Course(config), config.parallel.pp
    if course.changes_batch and pp > 1:
        rule = f"with another seq_len or global_batch must go without parallel.pp {pp}, whose pipeline has fixed shapes"
        fix = "use pp = 1, or a run of its own for the phase, with init.from"
        yield Problem("data.phases", "pipeline", ..., rule, fix)
        return
    for segment in course.segments[1:] if course.changes_batch else ():
        facts = _facts(course.config_of(segment), layout)
        for problem in problems(config.parallel, layout, facts):
            yield replace(problem, origin=f"data.phases.{segment.name}")


def _gradients(config: JobConfig, layout: Layout) -> Iterator[Problem]:
    """Layouts in which no rank has a micro-batch's gradient of a parameter."""
    every, parallel = config.metrics.gradients_every_steps, config.parallel
    wrong = _above_1(layout, "cp", "pp", "ep") + ["compile true"] * parallel.compile
    wrong += [f"float8 {parallel.float8!r}"] * (parallel.float8 != "none")
    for what in wrong if every else ():
        rule = f"measures gradients of micro-batches, which no rank has with parallel.{what}"
        fix = f"set metrics.gradients_every_steps = 0, or leave parallel.{what.split()[0]} out"
        yield Problem("metrics.gradients_every_steps", "layout", every, rule, fix)


def _above_1(layout: Layout, *axes: str) -> list[str]:
    """These axes with more than one rank, and their sizes."""
    return [f"{axis} {n}" for axis in axes if (n := getattr(layout, axis)) > 1]


def _facts(config: JobConfig, layout: Layout) -> ModelFacts:
    """Facts about model and batch from the configuration; an imported model has its own once it is built."""
    parts, model = micro_batches(config, layout), config.model
    known = ModelFacts(
        seq_len=config.data.seq_len,
        micro_batch=parts.size,
        num_micro_batches=parts.count,
        names=_NAMES,
    )
    if not isinstance(model, BuiltInModelConfig):
        return known

    # widths that tp must divide; routed experts are not sharded by it
    widths = {"num_heads": model.num_heads, "num_kv_heads": model.resolved_num_kv_heads}
    if len(model.moe_layers) < model.num_layers:
        widths["hidden_dim"] = model.resolved_hidden_dim
    if model.moe_layers and model.moe.num_shared_experts:
        layer = model.moe.layer_config(model.dim, model.resolved_hidden_dim)
        widths["moe.shared_hidden_dim"] = layer.resolved_shared_hidden_dim

    # only the first stage of a pipeline has features of an encoder; experts of modalities have rules of their own
    vlm = model if isinstance(model, VLMModelConfig) else None
    by_modality = vlm is not None and vlm.fusion.name in PARTING
    return replace(
        known,
        num_experts=None if by_modality else model.moe.num_experts,
        num_layers=model.num_layers,
        tied=("the embedding (model.tie_embeddings)",) if model.tie_embeddings else (),
        widths=[
            ShardedDim(f"model.{name}", size, shared=name == "num_kv_heads")
            for name, size in widths.items()
        ],
        vocab=[ShardedDim("model.vocab_size", model.vocab_size, width=model.dim)],
        whole_batch=model.moe.whole_batch("model.moe") if model.moe.num_experts else {},
        first_blocks=1 if vlm is None else max(1, num_layer_features(vlm.vision)),
    )
