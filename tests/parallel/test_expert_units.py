"""Which FSDP2 units are gathered at a time in a model with experts over ranks, and that neighbors are gathered ahead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from forge_core import Transformer, TransformerConfig
from forge_moe import MoE, MoEConfig, expert_parallelize, recompute_contexts
from forge_parallel import ParallelConfig, make_meshes, parallelize
from forge_testing import run_on_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.lane("test")]

LAYERS = 3


def gathers(recompute: str) -> list[tuple[str, frozenset[str]]]:
    """Of a forward and backward: each unit that is gathered, with all that are gathered then; the root is left out."""
    config = TransformerConfig(vocab_size=64, dim=16, num_layers=LAYERS, num_heads=2)
    experts = MoEConfig(16, 16, 4, num_shared_experts=1, aux="attach", aux_loss_weight=0.1)
    model = Transformer(config, feed_forward=lambda _: MoE(experts))
    parallel = ParallelConfig(device="cpu", ep=2, precision="bf16", recompute=recompute)
    meshes = make_meshes(parallel)
    expert_parallelize(model, meshes.sparse["ep"])
    model = parallelize(model, parallel, meshes, recompute_contexts=recompute_contexts)

    names = {}
    for name, module in model.named_modules():
        if hasattr(module, "_get_fsdp_state") and name:
            state = module._get_fsdp_state()
            for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
                names[id(group)] = name
    alive: set[str] = set()
    found = []
    unshard, to_sharded = FSDPParamGroup.unshard, FSDPParamGroup._to_sharded

    def gather(group: Any, *args: Any, **options: Any) -> Any:
        name = names.get(id(group))
        if name is not None and name not in alive:
            alive.add(name)
            found.append((name, frozenset(alive)))
        return unshard(group, *args, **options)

    def free(group: Any) -> Any:
        alive.discard(names.get(id(group), ""))
        return to_sharded(group)

    FSDPParamGroup.unshard, FSDPParamGroup._to_sharded = gather, free
    try:
        tokens = torch.arange(32).view(2, 16) % 64
        for _ in range(2):  # FSDP2 learns its own order in the first step
            found.clear()
            model(tokens).float().square().mean().backward()
    finally:
        FSDPParamGroup.unshard, FSDPParamGroup._to_sharded = unshard, to_sharded
    assert not alive
    return found


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_three_units_are_gathered_at_most(recompute: str) -> None:
    router, experts = ("layers.{}.feed_forward." + name for name in ("router", "experts"))
    for found in run_on_ranks(2, gathers, recompute):
        assert max(len(alive) for _, alive in found) == 3
        order = [name for name, _ in found]
        forward = order[: 3 * LAYERS]
        assert forward == [
            name.format(n) for n in range(LAYERS) for name in ("layers.{}", router, experts)
        ]
        # the next block is gathered while the experts are, and not at its own turn
        for name, alive in found[: 3 * LAYERS]:
            number = int(name.split(".")[1])
            if name == f"layers.{number}" and number:
                assert experts.format(number - 1) in alive
        for number in range(LAYERS - 1):
            last = len(order) - 1 - order[::-1].index(f"layers.{number}")
            assert f"layers.{number + 1}" in found[last][1]
