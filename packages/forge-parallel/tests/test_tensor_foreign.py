"""Weights that tp cuts belong to their module's forward: other code that uses them is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tensor_models import VOCAB, Attention, Block, FeedForward, mesh_of, seeded
from torch import Tensor, nn

from forge_parallel import ParallelConfig, make_meshes, parallelize
from forge_parallel.axes.tensor import tensor_parallel
from forge_testing import device, run_on_ranks
from forge_testing.problems import assert_problem

pytestmark = [pytest.mark.distributed, pytest.mark.lane("test")]


class Fused(Attention):
    """One product for queries, keys and values."""

    def forward(self, x: Tensor) -> Tensor:
        projections = (self.q_proj, self.k_proj, self.v_proj)
        weight = torch.cat([p.weight for p in projections])
        sizes = [p.weight.size(0) for p in projections]
        q, k, v = F.linear(x, weight).split(sizes, -1)
        heads = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (q, k, v))
        out = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(-2))


class FunctionalHead(nn.Module):
    """A head that is a function of the embedding's weight, called by nobody."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, model.head = model, nn.Identity()

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.model(tokens), self.model.embedding.weight)

    def parallel_roles(self) -> dict[str, Any]:
        roles = self.model.parallel_roles()
        del roles["head.*"]
        return {f"model.{row}": role for row, role in roles.items()}


def fused() -> nn.Module:
    model: Any = seeded(kinds="a")
    model.layers[0] = Block(FeedForward(), Fused())
    return model


def functional_head() -> nn.Module:
    return FunctionalHead(seeded(kinds="a"))


def used_from_outside(build: Callable[[], nn.Module], sequence_parallel: bool) -> ValueError | None:
    config = ParallelConfig(
        device=device().type, precision="fp32", tp=2, sequence_parallel=sequence_parallel
    )
    model = parallelize(build(), config, make_meshes(config))
    try:
        model(torch.arange(8, device=device())[None] % VOCAB).square().sum().backward()
    except ValueError as error:
        return error
    return None


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("build", [fused, functional_head])
def test_F87_use_of_a_sharded_weight_in_other_code_raises(
    build: Callable[[], nn.Module], sequence_parallel: bool
) -> None:
    for error in run_on_ranks(2, used_from_outside, build, sequence_parallel):
        assert_problem(error, "weight", ..., "foreign")


def looked_at() -> list[Any]:
    tokens = torch.arange(8, device=device())[None] % VOCAB
    model: Any = tensor_parallel(seeded(kinds="ao"), mesh_of(1, 2)["tp"], sequence_parallel=False)
    model(tokens).sum().backward()
    attention = model.layers[0].mixer
    found = [attention.q_proj.weight.dtype, tuple(attention.q_proj.weight.shape)]
    nn.init.ones_(attention.q_proj.weight)
    found += [float(attention.q_proj.weight.detach().full_tensor().mean())]
    found += ["layers.0.mixer.q_proj.weight" in model.state_dict()]
    found += [torch.equal(copy.deepcopy(model)(tokens), model(tokens))]
    # by name, and a copy that every rank has whole is anybody's
    x = torch.ones(1, 8, 16, device=device())
    opaque = model.layers[1].mixer
    found += [torch.equal(F.linear(x, opaque.inner["a"].weight), x @ opaque.inner["a"].weight.T)]
    return found


def test_F87_inspecting_a_sharded_weight_is_allowed() -> None:
    for found in run_on_ranks(2, looked_at):
        assert found == [torch.float32, (16, 16), 1.0, True, True, True]


def by_keyword() -> float:
    class Keywords(FeedForward):
        def forward(self, x: Tensor, ctx: Any = None) -> Tensor:
            hidden = F.silu(self.gate_proj(input=x)) * self.up_proj(input=x)
            return self.down_proj(input=hidden)

    models: list[Any] = [seeded(kinds="a"), seeded(kinds="a")]
    models[1].layers[0].feed_forward.__class__ = Keywords
    config = ParallelConfig(device=device().type, precision="fp32", tp=2)
    meshes = make_meshes(config)
    tokens = torch.arange(8, device=device())[None] % VOCAB
    outs = [parallelize(model, config, meshes)(tokens) for model in models]
    return float((outs[0] - outs[1]).nan_to_num(0.0).abs().max())


def test_F113_layers_take_their_input_by_keyword() -> None:
    assert run_on_ranks(2, by_keyword) == [0.0, 0.0]
