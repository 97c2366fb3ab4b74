"""Selective recomputation keeps products of matrices: nothing may write into them."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from forge_moe import MoE, MoEConfig

pytestmark = pytest.mark.lane("test")

KEPT = [getattr(torch.ops.aten, n).default for n in ("_grouped_mm", "mm", "bmm", "addmm")]
# What leaves rows without an expert, or adds to a product.
CASES = {
    "pads": ({}, True),
    "capacity": ({"capacity_factor": 0.5}, False),
    "likelier tokens": ({"capacity_factor": 0.5, "drop_policy": "probability"}, True),
    "expert choice": ({"router": "expert_choice"}, True),
    "biases": ({"bias": True, "num_shared_experts": 1}, False),
    "gelu": ({"bias": True, "activation": "gelu"}, True),
    "clamped": ({"bias": True, "activation": "clamped_swiglu"}, True),
}


def gradients(moe: MoE, x: torch.Tensor, ctx: SimpleNamespace | None, kept: bool):
    x = x.clone().requires_grad_()
    contexts = partial(create_selective_checkpoint_contexts, KEPT)
    run = partial(checkpoint, moe, use_reentrant=False, context_fn=contexts) if kept else moe
    moe.zero_grad()
    run(x, ctx).square().sum().backward()
    return {"x": x.grad} | {name: p.grad for name, p in moe.named_parameters()}


@pytest.mark.parametrize("backend", ["grouped_mm", "batched"])
@pytest.mark.parametrize("case", CASES)
def test_F90_matmul_results_that_are_kept_are_not_written_into(case: str, backend: str) -> None:
    """torch's own policy refuses a tensor that changed after it was kept; widths of 16 bytes."""
    options, pads = CASES[case]
    torch.manual_seed(0)
    moe = MoE(MoEConfig(dim=8, hidden_dim=16, num_experts=4, backend=backend, **options))
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    valid = torch.arange(12).view(2, 6) != 11
    ctx = SimpleNamespace(valid=valid) if pads else None
    x = torch.randn(2, 6, 8)
    wanted, found = (gradients(moe, x, ctx, kept) for kept in (False, True))
    for name, gradient in wanted.items():
        assert torch.equal(found[name], gradient), name
