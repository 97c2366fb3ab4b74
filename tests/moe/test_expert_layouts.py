"""Experts of Forge compute the same in the layouts of transformers and torchtitan."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from forge_moe import MoE, experts_from, experts_to
from forge_testing.problems import assert_problem, rejects

pytestmark = pytest.mark.lane("test")


def titan(state: dict[str, Tensor], x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """torchtitan's loop over experts: (silu(x w1^T) * x w3^T) w2^T."""
    out = torch.zeros_like(x)
    for token, slot in ((t, k) for t in range(len(x)) for k in range(ids.size(1))):
        w1, w2, w3 = (state[name][ids[token, slot]] for name in ("w1", "w2", "w3"))
        hidden = F.silu(x[token] @ w1.T) * (x[token] @ w3.T)
        out[token] += weights[token, slot] * (hidden @ w2.T)
    return out


@torch.no_grad()
def test_the_layouts_compute_the_same_and_go_back() -> None:
    torch.manual_seed(0)
    moe = MoE(dim=8, hidden_dim=12, num_experts=4, top_k=2)
    for parameter in moe.experts.parameters():
        parameter.mul_(20)  # outputs of the size of x
    x = torch.randn(10, 8)
    wanted, (weights, ids) = moe(x), moe.router(x)

    config = MixtralConfig(hidden_size=8, intermediate_size=12, num_local_experts=4)
    theirs = MixtralExperts(config)
    theirs.load_state_dict(experts_to("transformers", moe.experts.state_dict()))
    torch.testing.assert_close(theirs(x, ids, weights), wanted)
    found = experts_to("torchtitan", moe.experts.state_dict())
    assert found["w1"].shape == (4, 12, 8)
    torch.testing.assert_close(titan(found, x, weights, ids), wanted)

    own = moe.experts.state_dict()
    for layout, state in (("transformers", theirs.state_dict()), ("torchtitan", found)):
        back = experts_from(layout, state)
        assert back.keys() == own.keys()
        assert all(torch.equal(back[name], own[name]) for name in own)
        moe.experts.load_state_dict(back)


def test_options_that_a_layout_does_not_have_are_rejected() -> None:
    state = MoE(dim=8, hidden_dim=12, num_experts=4, bias=True).experts.state_dict()
    del state["gate_proj"]
    with rejects("gate_proj", ..., "missing", where="experts: ") as error:
        experts_to("transformers", state)
    assert_problem(error.value, "up_proj_bias", ..., "extra")
    with rejects("layout", "megatron", "unknown"):
        experts_from("megatron", state)
