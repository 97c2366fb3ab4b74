"""Problems of a job with its number of ranks, found before any of them starts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from forge_core.optim import OPTIMIZERS, find_optimizer
from forge_parallel import ParallelConfig
from forge_parallel.config import Layout
from forge_parallel.legal import Facts, ShardedDim, problems
from forge_parallel.micro_batches import MicroBatches, divide_batch
from forge_train._shared.problems import Problem, problems_of
from forge_train.config.experts import AMONG_TOKENS
from forge_train.config.schema import BuiltInModelConfig, JobConfig
from forge_train.config.vlm import VLMModelConfig
from forge_train.errors import refuse
from forge_train.trainer.course import Course
from forge_train.trainer.experts import EXPERT_ACTIVATIONS
from forge_vlm.fusion import PARTING, groups_of
from forge_vlm.vision.patches import num_layer_features

#: Keys of the runner by the names that they have in rules.
NAMES = {field.name: f"parallel.{field.name}" for field in fields(ParallelConfig)} | {
    "seq_len": "data.seq_len",
    "num_layers": "model.num_layers",
    "num_experts": "model.moe.num_experts",
}


def layout_problems(
    config: JobConfig, world_size: int, ranks_per_node: int | None = None
) -> list[Problem]:
    """Why layout, model and batch do not fit `world_size` ranks; empty if they do."""
    try:
        layout = config.parallel.axes(world_size, ranks_per_node)
    except ValueError as error:
        return [problem.under("parallel") for problem in problems_of(error)]
    own: list[Any] = [
        *_images(config, layout),
        *_answers(config, layout),
        *_objective(config, layout),
        *_optimizer(config),
        *_phases(config, layout),
        *_gradients(config, layout),
    ]
    return own + problems(config.parallel, layout, _facts(config, layout))


def require_layout(config: JobConfig, world_size: int, ranks_per_node: int | None = None) -> None:
    """Raise ConfigError for `layout_problems`."""
    refuse(layout_problems(config, world_size, ranks_per_node))


def micro_batches(config: JobConfig, layout: Layout) -> MicroBatches:
    """How the readers of a layout divide the global batch."""
    train = config.train
    return divide_batch(config.parallel, train.global_batch, layout.batch_size, train.micro_batch)


def remarks(config: JobConfig, layout: Layout) -> list[str]:
    """A line for each cost or change that follows from the number of readers; usually none."""
    parts = micro_batches(config, layout)
    lines = [parts.cost] if parts.cost else []
    moe = getattr(config.model, "moe", None)
    if moe and moe.num_experts and moe.aux_scope == "global_batch" and layout.batch_size > 1:
        lines.append(
            f"model.moe.aux_scope 'global_batch' counts the k-th micro-batches of {layout.batch_size} readers "
            "together, so the balance loss depends on their number; global_batch_lagged does not"
        )
    return lines


def _phases(config: JobConfig, layout: Layout) -> Iterator[Any]:
    """Problems of the rows and batches of phases."""
    course, pp = Course(config), config.parallel.pp
    if course.changes_batch and pp > 1:
        rule = f"with another seq_len or global_batch must go without parallel.pp {pp}, whose pipeline has fixed shapes"
        fix = "use pp = 1, or a run of its own for the phase, with init.from"
        yield Problem("data.phases", "pipeline", ..., rule, fix)
        return
    for segment in course.segments[1:] if course.changes_batch else ():
        here = course.config_of(segment)
        for problem in problems(config.parallel, layout, _facts(here, layout)):
            yield replace(problem, origin=f"data.phases.{segment.name}")


def _gradients(config: JobConfig, layout: Layout) -> Iterator[Problem]:
    """Layouts in which no rank has a micro-batch's gradient of a parameter."""
    every, parallel = config.metrics.gradients_every_steps, config.parallel
    wrong = {f"{axis} {n}": n > 1 for axis in ("cp", "pp", "ep") if (n := getattr(layout, axis))}
    wrong |= {"compile true": parallel.compile, f"float8 {parallel.float8!r}": parallel.float8 != "none"}  # fmt: skip
    for what in (key for key, bad in wrong.items() if every and bad):
        rule = f"measures gradients of micro-batches, which no rank has with parallel.{what}"
        fix = (
            f"set metrics.gradients_every_steps = 0, or leave parallel.{what.partition(' ')[0]} out"
        )
        yield Problem("metrics.gradients_every_steps", "layout", every, rule, fix)


def _images(config: JobConfig, layout: Layout) -> Iterator[Problem]:
    """Axes that a fusion cannot be computed on."""
    if not isinstance(config.model, VLMModelConfig):
        return
    fusion, key = config.model.fusion, "parallel.cp"
    if config.model.bidirectional != "none" and layout.cp > 1:
        rule = f"splits sequences whose tokens attend both ways by model.bidirectional {config.model.bidirectional!r}"
        yield Problem(key, "bidirectional", layout.cp, rule, "use cp = 1, or 'none'")
    if layout.ep > 1 and fusion.name in PARTING:
        yield from _experts_of_groups(config.model, layout)
    if fusion.name == "moma" and fusion.moma.router != "token_choice" and layout.cp > 1:
        router = f"model.fusion.moma.router {fusion.moma.router!r}"
        rule = f"splits the sequences among whose tokens the experts of {router} choose"
        yield Problem(key, "router", layout.cp, rule, "use cp = 1, or token_choice")


def _answers(config: JobConfig, layout: Layout) -> Iterator[Problem]:
    """Axes on which no rank can write answers by itself."""
    cut = [f"{axis} {n}" for axis in ("tp", "cp", "pp") if (n := getattr(layout, axis)) > 1]
    if cut and config.eval.exact_match.path is not None:
        rule = f"generates, and with parallel.{', parallel.'.join(cut)} no rank can run the model by itself"
        fix = "use data ranks (dp_shard, dp_replicate) or ep, or run forge-train generate on its checkpoints"
        yield Problem("eval.exact_match.path", "layout", ..., rule, fix)


def _experts_of_groups(model: VLMModelConfig, layout: Layout) -> Iterator[Problem]:
    """Why ranks cannot share the experts of modalities."""
    fusion, key, ep = model.fusion, "parallel.ep", layout.ep
    if fusion.name != "moma":
        rule = f"must be 1 with model.fusion.name {fusion.name!r}, whose weights of a modality are not experts"
        fix = "use data ranks (dp_shard, dp_replicate), or the fusion moma"
        yield Problem(key, "fusion", ep, rule, fix)
        return
    if layout.tp > 1:
        rule = (
            f"with model.fusion.name 'moma' must go without parallel.tp {layout.tp}, whose ranks would send the experts "
            "of a modality the same tokens"
        )
        yield Problem(key, "tp", ep, rule, "use tp = 1, or ep = 1")
    if model.feed_forward not in EXPERT_ACTIVATIONS:
        rule = f"must go with model.feed_forward {' or '.join(EXPERT_ACTIVATIONS)}, and it is {model.feed_forward!r}"
        yield Problem(key, "feed_forward", ep, rule, "use ep = 1")
    for group in groups_of(list(model.modalities), fusion.moma.share)[0]:
        num = fusion.moma.experts.get(group, fusion.moma.num_experts)
        if num % layout.ep:
            rule = f"must divide the {num} experts of modality {group!r} of model.fusion.moma"
            yield Problem(key, "divides", ep, rule, f"use ep = 1, or {-(-num // ep) * ep} experts")


def _objective(config: JobConfig, layout: Layout) -> list[Problem]:
    if config.train.objective is None:
        return []
    if config.parallel.pp == 1:
        model = config.model
        joins = isinstance(model, VLMModelConfig) and model.vision.name != "none"
        return [objective_of_parts(config, layout)] if joins and layout.cp > 1 else []
    rule = f"calls the full model, of which a rank of parallel.pp {config.parallel.pp} has a part"
    fix = "use pp = 1, or train.loss"
    return [Problem("train.objective", "pipeline", config.train.objective, rule, fix)]


def objective_of_parts(config: JobConfig, layout: Layout) -> Problem:
    """The problem of an objective of parts of sequences with a model that joins whole ones to their images."""
    rule = f"gets parts of sequences with parallel.cp {layout.cp}, and the model joins images to whole ones"
    value, fix = config.train.objective, "use cp = 1, or train.loss"
    return Problem("train.objective", "images", value, rule, fix)


def _optimizer(config: JobConfig) -> list[Problem]:
    if config.parallel.pp == 1 or _saves_by_name(config.optimizer.name):
        return []
    rule = (
        f"must go with an optimizer whose state its stages share by parameter name, and {config.optimizer.name!r} from "
        "outside is not a class with named_state() and load_named_state()"
    )
    fix = "give it both, or use 'adamw' or pp = 1"
    return [Problem("parallel.pp", "optimizer", config.parallel.pp, rule, fix)]


def _saves_by_name(optimizer: str) -> bool:
    """Whether its state has names, as far as its class tells; of a function nothing is known before the call."""
    if optimizer in OPTIMIZERS.built_in:
        return True
    try:
        found = find_optimizer(optimizer)
    except ValueError:  # `name_problems` reports it
        return True
    offers = ("named_state", "load_named_state")
    return isinstance(found, type) and all(callable(getattr(found, n, None)) for n in offers)


def _facts(config: JobConfig, layout: Layout) -> Facts:
    """Facts about model and batch from the configuration; an imported model has its own once it is built."""
    parts, moe = micro_batches(config, layout), getattr(config.model, "moe", None)
    known = Facts(
        seq_len=config.data.seq_len,
        micro_batch=parts.size,
        num_micro_batches=parts.count,
        # an imported model tells once it is built
        num_experts=None if moe is None or _by_modality(config) else moe.num_experts,
        names=NAMES,
    )
    return (
        replace(known, **_of_model(config.model))
        if isinstance(config.model, BuiltInModelConfig)
        else known
    )


def _by_modality(config: JobConfig) -> bool:
    """Whether the experts are those of modalities, which have rules of their own."""
    return isinstance(config.model, VLMModelConfig) and config.model.fusion.name in PARTING


def _of_model(model: BuiltInModelConfig) -> dict[str, Any]:
    """Facts about the built-in model, before it is built."""
    return {
        "num_layers": model.num_layers,
        "tied": ("the embedding (model.tie_embeddings)",) if model.tie_embeddings else (),
        "widths": [
            ShardedDim(f"model.{name}", size, shared=name == "num_kv_heads")
            for name, size in _widths(model).items()
        ],
        "vocab": [ShardedDim("model.vocab_size", model.vocab_size, width=model.dim)],
        "whole_batch": _whole_batch(model),
        "first_blocks": _first_blocks(model),
    }


def _widths(model: BuiltInModelConfig) -> dict[str, int]:
    """Widths that tp must divide; routed experts are not sharded by it."""
    widths = {"num_heads": model.num_heads, "num_kv_heads": model.resolved_num_kv_heads}
    if len(model.moe_layers) < model.num_layers:
        widths["hidden_dim"] = model.resolved_hidden_dim
    if model.moe_layers and model.moe.num_shared_experts:
        layer = model.moe.layer_config(model.dim, model.resolved_hidden_dim)
        widths["moe.shared_hidden_dim"] = layer.resolved_shared_hidden_dim
    return widths


def _first_blocks(model: BuiltInModelConfig) -> int:
    """Blocks that take features of an encoder, which only the first stage of a pipeline has."""
    return max(1, num_layer_features(model.vision)) if isinstance(model, VLMModelConfig) else 1


def _whole_batch(model: BuiltInModelConfig) -> dict[str, str]:
    """Options that need all tokens of a micro-batch on one rank, with the alternative to each."""
    moe, found = model.moe, dict[str, str]()
    if moe.num_experts and moe.capacity_factor is not None:
        found[f"model.moe.capacity_factor {moe.capacity_factor}"] = "no capacity"
    if moe.num_experts and moe.router in AMONG_TOKENS:
        found[f"model.moe.router {moe.router!r}"] = "another router"
    return found
