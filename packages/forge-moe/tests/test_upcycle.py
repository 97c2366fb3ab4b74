"""Upcycling: the sparse layer begins as the dense one, in float64 to 1e-12."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_moe import MoE, MoEConfig
from forge_moe.upcycle import upcycle
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

DIM, HIDDEN = 16, 48
COPIES = MoEConfig(dim=DIM, hidden_dim=HIDDEN, num_experts=8, top_k=2)


class Dense(nn.Module):
    """SwiGLU, or GELU without a gate."""

    def __init__(self, gated: bool = True, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate_proj = nn.Linear(DIM, HIDDEN, bias=bias) if gated else None
        self.up_proj = nn.Linear(DIM, HIDDEN, bias=bias)
        self.down_proj = nn.Linear(HIDDEN, DIM, bias=bias)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        if self.gate_proj is None:
            return self.down_proj(F.gelu(self.up_proj(x)))
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


CASES: dict[str, dict[str, object]] = {
    "copies": {},
    "all experts, not renormalised": {"top_k": 8, "normalize": "before_top_k"},
    "gelu": {"activation": "gelu"},
    "sigmoid with scale": {"router": "sigmoid_topk", "route_scale": 2.5, "expert_bias": True},
    "halves": {"hidden_dim": HIDDEN // 2, "top_k": 4},
    "thirds in groups": {
        "hidden_dim": HIDDEN // 3,
        "num_experts": 12,
        "top_k": 3,
        "num_groups": 2,
        "router": "sigmoid_topk",
        "route_scale": 2.0,
    },
    "shared, rest copied": {"hidden_dim": 32, "num_shared_experts": 2, "shared_hidden_dim": 8},
    "shared with gate, rest halved": {
        "hidden_dim": 16,
        "num_shared_experts": 1,
        "shared_gate": True,
    },
}


@pytest.mark.parametrize("case", CASES)
def test_the_function_is_the_same_at_the_start(case: str) -> None:
    config = dataclasses.replace(COPIES, **CASES[case])  # type: ignore[arg-type]
    dense = Dense(gated=config.activation == "swiglu")
    torch.manual_seed(1)
    moe = MoE(config).double()
    with torch.no_grad():
        moe.router.weight.normal_()  # routes and weights far from even
    upcycle(dense, moe)
    x = torch.randn(100, DIM, dtype=torch.float64)
    wanted = dense(x)
    error = (moe(x) - wanted).abs().max() / wanted.abs().max()
    assert error < 1e-12
    chosen = moe.router(x)[1]
    assert len(set(chosen.flatten().tolist())) == config.num_experts  # every copy was asked


def test_slices_of_a_copy_are_chosen_together() -> None:
    moe = MoE(dataclasses.replace(COPIES, hidden_dim=HIDDEN // 4, top_k=4)).double()
    upcycle(Dense(), moe)
    ids = moe.router(torch.randn(50, DIM, dtype=torch.float64))[1].sort(dim=1).values
    assert torch.equal(ids % 4, torch.arange(4).expand(50, 4))


@pytest.mark.parametrize("noise", [0.01, 0.1])
def test_noise_changes_the_function_by_about_as_much(noise: float) -> None:
    dense, first, again = Dense(), MoE(COPIES).double(), MoE(COPIES).double()
    upcycle(dense, first, noise=noise, seed=3)
    upcycle(dense, again, noise=noise, seed=3)
    again.load_state_dict({**again.state_dict(), "router.weight": first.router.weight.detach()})
    x = torch.randn(200, DIM, dtype=torch.float64)
    wanted = dense(x)
    change = float(((first(x) - wanted).std() / wanted.std()).detach())
    assert 0.3 * noise < change < 3 * noise
    assert torch.equal(first(x), again(x))
    assert not torch.equal(first.experts.up_proj[0], first.experts.up_proj[1])


def test_F197_each_tensor_has_its_own_noise() -> None:
    noisy, plain = MoE(COPIES).double(), MoE(COPIES).double()
    upcycle(Dense(), noisy, noise=0.1, seed=3)
    upcycle(Dense(), plain)
    noises = [
        (getattr(noisy.experts, name) - getattr(plain.experts, name)).detach()
        for name in ("gate_proj", "up_proj", "down_proj")
    ]
    noises[2] = noises[2].mT
    for one, other in ((0, 1), (0, 2), (1, 2)):  # 6,144 numbers: a standard deviation of 0.013
        pair = torch.stack([noises[one].flatten(), noises[other].flatten()])
        assert abs(float(torch.corrcoef(pair)[0, 1])) < 0.08


def test_equal_copies_part_in_training() -> None:
    dense = Dense()
    moe = MoE(COPIES).double()
    upcycle(dense, moe)
    moe(torch.randn(64, DIM, dtype=torch.float64)).square().sum().backward()
    grad = moe.experts.up_proj.grad
    assert grad is not None
    assert not torch.equal(grad[0], grad[1])


REFUSED: dict[str, tuple[dict[str, object], str, str]] = {
    "width": ({"hidden_dim": 20}, "hidden_dim", "divides"),
    "wider than dense": ({"hidden_dim": 64}, "hidden_dim", "divides"),
    "top_k": ({"hidden_dim": 16}, "top_k", "slices"),
    "weights": ({"normalize": "before_top_k"}, "router", "sum"),
    "one expert per token": ({"normalize": "before_top_k", "top_k": 1}, "router", "sum"),
    "router": ({"router": "uniform"}, "router", "sum"),
    "sigmoids of all": (
        {"router": "sigmoid_topk", "normalize": "before_top_k", "num_experts": 2, "top_k": 2},
        "router",
        "sum",
    ),
    "activation": ({"activation": "gelu"}, "activation", "mismatch"),
    "bias": ({"bias": True}, "bias", "unsupported"),
    "dim": ({"dim": 32}, "dim", "mismatch"),
    "groups": (
        {"hidden_dim": 16, "top_k": 3, "num_experts": 12, "num_groups": 6, "top_groups": 2},
        "num_groups",
        "splits",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_changes_of_the_function_are_rejected(case: str) -> None:
    options, key, code = REFUSED[case]
    moe = MoE(dataclasses.replace(COPIES, **options))  # type: ignore[arg-type]
    before = {name: value.clone() for name, value in moe.state_dict().items()}
    with rejects(key, getattr(moe.config, key), code, where="upcycle"):
        upcycle(Dense(), moe)
    assert all(torch.equal(value, before[name]) for name, value in moe.state_dict().items())


def test_a_dense_layer_with_biases_or_other_names_is_rejected() -> None:
    with rejects("gate_proj", ..., "bias", where="upcycle"):
        upcycle(Dense(bias=True), MoE(COPIES))
    with rejects("up_proj", ..., "missing", where="upcycle"):
        upcycle(nn.Linear(2, 2), MoE(COPIES))
