"""Whether a job fits a number of ranks: said before any of them starts."""

from __future__ import annotations

import math

from forge_core.optim import OPTIMIZERS, find_optimizer
from forge_parallel.config import V_SCHEDULES, Layout, lies_as_said
from forge_parallel.micro_batches import MicroBatches, divide_batch
from forge_parallel.pipeline import schedule_problems
from forge_train.config.schema import DenseModelConfig, JobConfig


def layout_problems(
    config: JobConfig, world_size: int, ranks_per_node: int | None = None
) -> list[str]:
    """What of the layout, the model and the batch does not fit `world_size` ranks."""
    try:
        layout = config.parallel.axes(world_size, ranks_per_node)
    except ValueError as error:
        return [str(error)]
    return [
        *_pipeline_problems(config, layout),
        *_sequence_problems(config, layout),
        *_float8_problems(config, layout),
        *_model_problems(config, layout),
    ]


def micro_batches(config: JobConfig, layout: Layout) -> MicroBatches:
    """How the readers of a layout divide the global batch."""
    train = config.train
    return divide_batch(config.parallel, train.global_batch, layout.batch_size, train.micro_batch)


def remarks(config: JobConfig, layout: Layout) -> list[str]:
    """What the number of readers costs or changes, a line each; nothing where it does neither."""
    parts = micro_batches(config, layout)
    lines = [parts.cost] if parts.cost else []
    moe = getattr(config.model, "moe", None)
    if moe and moe.num_experts and moe.aux_scope == "global_batch" and layout.batch_size > 1:
        lines.append(
            f"model.moe.aux_scope 'global_batch' counts the k-th micro-batches of {layout.batch_size} readers "
            "together, so the balance loss depends on their number; global_batch_lagged does not"
        )
    return lines


def _pipeline_problems(config: JobConfig, layout: Layout) -> list[str]:
    if config.parallel.pp == 1:
        return []
    if config.train.objective is not None:
        return [
            f"train.objective {config.train.objective!r} calls the whole model, of which a rank of parallel.pp "
            f"{config.parallel.pp} has a part; use pp = 1, or train.loss"
        ]
    model = config.model
    if not isinstance(model, DenseModelConfig):
        return [
            f"parallel.pp {config.parallel.pp} must go with model.name 'transformer', and it is "
            f"{model.name!r}; use pp = 1, or forge_parallel.Pipeline in a loop of your own"
        ]
    count = micro_batches(config, layout).count
    problems = schedule_problems(config.parallel, count, model.num_layers)
    if model.tie_embeddings and config.parallel.pp_schedule in V_SCHEDULES:
        problems.append(
            f"model.tie_embeddings true must go with a schedule whose ends lie on two ranks, and "
            f"parallel.pp_schedule is {config.parallel.pp_schedule!r}; use 'interleaved_zero_bubble', or "
            "untie them"
        )
    if not _saves_by_name(config.optimizer.name):
        problems.append(
            f"parallel.pp {config.parallel.pp} must go with an optimizer whose state its stages share by parameter "
            f"name, and {config.optimizer.name!r} from outside is no class with named_state() and "
            "load_named_state(); give it both, or use 'adamw' or pp = 1"
        )
    return problems


def _saves_by_name(optimizer: str) -> bool:
    """Whether its state has names, as far as shows before it is built: a function's optimizer is not known."""
    if optimizer in OPTIMIZERS.built_in:
        return True
    try:
        found = find_optimizer(optimizer)
    except ValueError:  # what else is wrong with it is told by `name_problems`
        return True
    offers = ("named_state", "load_named_state")
    return isinstance(found, type) and all(callable(getattr(found, n, None)) for n in offers)


def _sequence_problems(config: JobConfig, layout: Layout) -> list[str]:
    """A sequence is cut into 2 cp chunks, and what a cp rank has of it into tp pieces."""
    pieces = 2 * layout.cp if layout.cp > 1 else 1
    if layout.tp > 1 and (config.parallel.sequence_parallel or _experts(config)):
        pieces *= layout.tp
    length = config.data.seq_len
    if length % pieces == 0:
        return []
    return [
        f"data.seq_len {length} must be divisible by {pieces} with parallel.cp {layout.cp} and "
        f"parallel.tp {layout.tp}; use {max(1, round(length / pieces)) * pieces}"
    ]


def _float8_problems(config: JobConfig, layout: Layout) -> list[str]:
    """Float8 kernels sum gradients of weights over the tokens of a rank in pieces of 16; emulation does not."""
    if config.parallel.float8 == "none" or config.parallel.device == "cpu":
        return []
    micro = micro_batches(config, layout).size
    # shared experts see a tp rank's part
    ranks = layout.cp * (layout.tp if _experts(config) else 1)
    tokens = micro * config.data.seq_len // ranks
    if tokens % 16 == 0:
        return []
    return [
        f"parallel.float8 {config.parallel.float8!r} must have a multiple of 16 tokens of a micro-batch on each "
        f"rank, and they are {tokens} ({micro} x {config.data.seq_len} over {ranks}); use a data.seq_len "
        f"divisible by {16 * ranks}, or float8 = 'none'"
    ]


def _model_problems(config: JobConfig, layout: Layout) -> list[str]:
    problems = []
    ep, experts = layout.ep, _experts(config)
    if ep > 1 and (not experts or experts % ep):
        problems.append(
            f"parallel.ep {ep} must divide model.moe.num_experts {experts} of a mixture; use ep = 1, or "
            f"{max(ep, experts // ep * ep)} experts"
        )
    model = config.model
    if layout.cp > 1 and not isinstance(model, DenseModelConfig):
        problems.append(
            f"parallel.cp {layout.cp} must go with model.name 'transformer', and it is {model.name!r}; use "
            "cp = 1"
        )
    if not isinstance(model, DenseModelConfig):
        return problems
    if model.moe.num_experts and layout.cp * layout.tp > 1:
        problems += _experts_see_some_tokens(model)
    if layout.tp == 1:
        return problems
    if model.attention.sinks:
        problems.append(
            f"parallel.tp {layout.tp} cannot cut model.attention.sinks, a logit per head; use tp = 1, or "
            "sinks = false"
        )
    widths = {
        "num_heads": model.num_heads,
        "num_kv_heads": model.resolved_num_kv_heads,
    }
    if len(model.moe_layers) < model.num_layers:  # experts are not cut
        widths["hidden_dim"] = model.resolved_hidden_dim
    if model.moe_layers and model.moe.num_shared_experts:
        layer = model.moe.layer_config(model.dim, model.resolved_hidden_dim)
        widths["moe.shared_hidden_dim"] = layer.resolved_shared_hidden_dim
    if not lies_as_said(model.vocab_size, layout.tp, layout.dp_shard * layout.cp):
        whole = layout.tp * layout.dp_shard * layout.cp
        problems.append(
            f"model.vocab_size {model.vocab_size} over parallel.tp {layout.tp} and {whole // layout.tp} shards "
            f"must be even, as torch misplaces such shards; use {-(-model.vocab_size // whole) * whole}"
        )
    for name, value in widths.items():
        if value % layout.tp:
            problems.append(
                f"parallel.tp {layout.tp} must divide model.{name} {value}; use tp = "
                f"{math.gcd(value, layout.tp)}, or another {name}"
            )
    return problems


def _experts_see_some_tokens(model: DenseModelConfig) -> list[str]:
    """What decides over all tokens of a micro-batch, of which a cp or tp rank has a part."""
    fix = "with parallel.cp and parallel.tp above 1, which cut its tokens; use data, expert or pipeline ranks"
    problems = []
    if model.moe.capacity_factor is not None:
        problems.append(
            f"model.moe.capacity_factor {model.moe.capacity_factor} counts a whole micro-batch and cannot go "
            f"{fix}, or no capacity"
        )
    if model.moe.router == "expert_choice":
        problems.append(
            f"model.moe.router 'expert_choice' ranks the tokens of a whole micro-batch and cannot go {fix}, "
            "or another router"
        )
    return problems


def _experts(config: JobConfig) -> int:
    return int(getattr(getattr(config.model, "moe", None), "num_experts", 0))
