"""Problems of a job with its number of ranks, found before any of them starts."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from forge_core.optim import OPTIMIZERS, find_optimizer
from forge_parallel import ParallelConfig
from forge_parallel.config import Layout
from forge_parallel.legal import Facts, ShardedDim, problems
from forge_parallel.micro_batches import MicroBatches, divide_batch
from forge_train.config.schema import BuiltInModelConfig, JobConfig

#: Keys of the runner by the names that they have in rules.
NAMES = {field.name: f"parallel.{field.name}" for field in fields(ParallelConfig)} | {
    "seq_len": "data.seq_len",
    "num_layers": "model.num_layers",
    "num_experts": "model.moe.num_experts",
}


def layout_problems(
    config: JobConfig, world_size: int, ranks_per_node: int | None = None
) -> list[str]:
    """Why layout, model and batch do not fit `world_size` ranks; empty if they do."""
    try:
        layout = config.parallel.axes(world_size, ranks_per_node)
    except ValueError as error:
        return [str(error)]
    own = [*_objective(config), *_optimizer(config)]
    return own + problems(config.parallel, layout, _facts(config, layout))


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


def _objective(config: JobConfig) -> list[str]:
    if config.parallel.pp == 1 or config.train.objective is None:
        return []
    return [
        f"train.objective {config.train.objective!r} calls the whole model, of which a rank of parallel.pp "
        f"{config.parallel.pp} has a part; use pp = 1, or train.loss"
    ]


def _optimizer(config: JobConfig) -> list[str]:
    if config.parallel.pp == 1 or _saves_by_name(config.optimizer.name):
        return []
    return [
        f"parallel.pp {config.parallel.pp} must go with an optimizer whose state its stages share by parameter "
        f"name, and {config.optimizer.name!r} from outside is no class with named_state() and "
        "load_named_state(); give it both, or use 'adamw' or pp = 1"
    ]


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
        num_experts=None if moe is None else moe.num_experts,
        names=NAMES,
    )
    return (
        replace(known, **_of_model(config.model))
        if isinstance(config.model, BuiltInModelConfig)
        else known
    )


def _of_model(model: BuiltInModelConfig) -> dict[str, Any]:
    """Facts about the built-in model, before it is built."""
    return {
        "num_layers": model.num_layers,
        "tied": ("the embedding (model.tie_embeddings)",) if model.tie_embeddings else (),
        "widths": [
            ShardedDim(f"model.{name} {size}", size, shared=name == "num_kv_heads")
            for name, size in _widths(model).items()
        ],
        "vocab": [
            ShardedDim(f"model.vocab_size {model.vocab_size}", model.vocab_size, width=model.dim)
        ],
        "whole_batch": _whole_batch(model),
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


def _whole_batch(model: BuiltInModelConfig) -> dict[str, str]:
    """Options that need all tokens of a micro-batch on one rank, with the alternative to each."""
    moe, found = model.moe, dict[str, str]()
    if moe.num_experts and moe.capacity_factor is not None:
        found[f"model.moe.capacity_factor {moe.capacity_factor}"] = "no capacity"
    if moe.num_experts and moe.router == "expert_choice":
        found["model.moe.router 'expert_choice'"] = "another router"
    return found
