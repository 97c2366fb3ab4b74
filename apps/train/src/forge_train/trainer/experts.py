"""[model.moe] in the runner: which feed-forwards are mixtures, and their ranks."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch import nn

from forge_core.model import build_feed_forward
from forge_moe import MoE, MoEConfig, SortedExperts, expert_parallelize
from forge_parallel import Meshes, find_world
from forge_train.config.experts import MoESection
from forge_train.config.schema import BuiltInModelConfig, JobConfig
from forge_train.config.vlm import VLMModelConfig

#: Feed-forwards whose experts are stacks, which `parallel.ep` shards.
EXPERT_ACTIVATIONS = ("swiglu", "gelu")


def feed_forward_factory(config: BuiltInModelConfig) -> Callable[[int], nn.Module] | None:
    """Makes the feed-forward of each layer, a mixture where [model.moe] asks for one; None for a dense model."""
    if not config.moe.num_experts:
        return None

    def make(layer: int) -> nn.Module:
        if config.moe.is_mixture(layer):
            return MoE(config.moe.layer_config(config.dim, config.resolved_hidden_dim))
        return build_feed_forward(config, layer)

    return make


def group_expert_factory(config: VLMModelConfig) -> Callable[[str, int], nn.Module] | None:
    """Makes the experts of MoMa's groups; None for other fusions, and for activations that forge_moe does not have."""
    if config.fusion.name != "moma" or config.feed_forward not in EXPERT_ACTIVATIONS:
        return None
    hidden = config.fusion.moma.hidden_dim or config.resolved_hidden_dim

    def make(group: str, num: int) -> nn.Module:
        return SortedExperts(
            MoEConfig(
                dim=config.dim,
                hidden_dim=hidden,
                num_experts=num,
                top_k=1,  # the router is not its own
                normalize="before_top_k",
                activation=config.feed_forward,  # type: ignore[arg-type]
                bias=config.feed_forward_bias,
            )
        )

    return make


def shard_experts(model: nn.Module, job: JobConfig, meshes: Meshes) -> None:
    """Shard the experts of every MoE layer and of every group of MoMa over the ranks of `parallel.ep`; nothing without it. Collective."""
    if job.parallel.ep == 1:
        return
    # an imported model may have MoE layers too; it has no [model.moe], so the defaults hold
    moe: Any = getattr(job.model, "moe", None) or MoESection()
    ranks = meshes.sparse["ep"]
    per_node = job.parallel.gpus_per_node or find_world().local_world_size
    expert_parallelize(
        model,
        ranks,
        dispatcher=moe.dispatcher,
        chunks=moe.dispatch_chunks,
        ranks_per_node=min(per_node, ranks.size()),
        timeout=timedelta(seconds=job.parallel.timeout_seconds),
    )
