"""The layer equals a loop over tokens, slots and experts in float64: outputs and all gradients.

Inputs and router weights lie on a coarse grid, so that logits are exact in fp32 and full of exact ties: the
oracle's choice, by (score, lower id) in plain Python, must be the layer's.

Shapes: T tokens, K slots per token, E experts, D width, F width inside.
"""

import math

import pytest
import torch
import torch.nn.functional as F

from forge_moe import MoE, MoEConfig

D, HIDDEN = 16, 8
ROUTERS = {
    "mixtral": {},
    "olmoe": {"normalize": "before_top_k"},
    "deepseek_v2": {"num_groups": 4, "top_groups": 2, "group_score": "max", "route_scale": 1.5},
    "sigmoid": {"router": "sigmoid_topk"},
    "deepseek_v3": {
        "router": "sigmoid_topk",
        "expert_bias": True,
        "num_groups": 4,
        "top_groups": 2,
        "route_scale": 2.5,
    },
    "biased_softmax": {"expert_bias": True, "normalize": "before_top_k"},
    "unnormalised_sigmoid": {"router": "sigmoid_topk", "normalize": "before_top_k"},
    "uniform": {"router": "uniform"},
    "expert_choice": {"router": "expert_choice"},
    "gpt_oss": {"router_bias": True},
}


def make(num_experts: int, top_k: int, **settings) -> MoE:
    torch.manual_seed(num_experts + 7 * top_k)
    moe = MoE(MoEConfig(D, HIDDEN, num_experts, top_k=top_k, **settings))
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.normal_(std=0.5)
        moe.router.weight.copy_(torch.randint(-2, 3, moe.router.weight.shape) / 4)
        for bias in (moe.router.expert_bias, moe.router.bias):
            if bias is not None:
                bias.copy_(torch.randint(-2, 3, (num_experts,)) / 8)
    return moe


def tokens(num: int) -> torch.Tensor:
    return torch.randint(-2, 3, (num, D)) / 4.0


def best(scores: list[float], k: int) -> list[int]:
    return sorted(range(len(scores)), key=lambda e: (-scores[e], e))[:k]


def chosen(moe: MoE, logits: torch.Tensor, place: int) -> list[int]:
    """Experts of one token, from its exact logits (E,) in fp32."""
    c = moe.router.config
    if c.name == "uniform":
        return [(place * c.top_k + k) % c.num_experts for k in range(c.top_k)]
    score = torch.sigmoid(logits) if c.name == "sigmoid_topk" else logits.softmax(0)
    if moe.router.expert_bias is not None:
        score = score + moe.router.expert_bias
    size = c.num_experts // c.num_groups
    groups = score.view(c.num_groups, size)
    strength = [
        max(g.tolist()) if c.group_score == "max" else g.sort(descending=True).values[:2].sum()
        for g in groups
    ]
    allowed = best(strength, c.top_groups)
    listed = [s if e // size in allowed else -math.inf for e, s in enumerate(score.tolist())]
    return best(listed, c.top_k)


def choices(moe: MoE, x: torch.Tensor) -> list[list[int]]:
    bias = moe.router.bias
    logits = F.linear(x, moe.router.weight.detach(), None if bias is None else bias.detach())
    if moe.config.router != "expert_choice":
        return [chosen(moe, row, t) for t, row in enumerate(logits)]
    scores, share = logits.softmax(1), math.ceil(len(x) * moe.config.top_k / moe.config.num_experts)
    takes = [best(scores[:, e].tolist(), min(share, len(x))) for e in range(scores.size(1))]
    return [[e for e, taken in enumerate(takes) if t in taken] for t in range(len(x))]


def feed_forward(x, p, e, c):
    def affine(x, name):
        out = x @ p[f"experts.{name}"][e]
        bias = p.get(f"experts.{name}_bias")
        return out if bias is None else out + bias[e]

    if c.activation == "clamped_swiglu":
        both = affine(x, "gate_up_proj")
        gate = torch.stack([min(v, v * 0 + c.swiglu_limit) for v in both[0::2]])
        up = torch.stack(
            [v if abs(v) < c.swiglu_limit else v.sign() * c.swiglu_limit for v in both[1::2]]
        )
        return affine((up + 1) * gate / (1 + torch.exp(-c.swiglu_alpha * gate)), "down_proj")
    if c.activation == "gelu":
        return affine(F.gelu(affine(x, "up_proj")), "down_proj")
    return affine(F.silu(affine(x, "gate_proj")) * affine(x, "up_proj"), "down_proj")


def oracle(moe: MoE, x: torch.Tensor, ids: list[list[int]]):
    """y (T, D) in float64, and the float64 copies of x and parameters that it depends on."""
    c = moe.config
    p = {n: v.detach().double().requires_grad_() for n, v in moe.named_parameters()}
    x = x.double().requires_grad_()
    out = []
    for token, mine in zip(x, ids):
        logits = p["router.weight"] @ token + p.get("router.bias", 0.0)
        scores = torch.sigmoid(logits) if c.router == "sigmoid_topk" else logits.softmax(0)
        weights = [scores[e] for e in mine]
        if c.normalize == "after_top_k" and c.router != "expert_choice":
            weights = [w / sum(weights) for w in weights]
        y = torch.zeros(D, dtype=torch.float64) + 0.0 * token
        for weight, e in zip(weights, mine):
            y = y + c.route_scale * weight * feed_forward(token, p, e, c)
        if moe.shared is not None:
            y = y + shared_experts(token, p, c)
        out.append(y)
    return (torch.stack(out) if out else x * 1.0), {"x": x, **p}


def shared_experts(x, p, c):
    """The shared experts one by one: each has its own columns of the stacked matrices."""
    width = c.shared_hidden_dim or c.hidden_dim
    total = 0.0
    for s in range(c.num_shared_experts):
        part = slice(s * width, (s + 1) * width)
        up, down = p["shared.up_proj.weight"][part], p["shared.down_proj.weight"][:, part]
        gate = p["shared.gate_proj.weight"][part]
        total = total + down @ (F.silu(gate @ x) * (up @ x))
    return total * torch.sigmoid(p["shared.gate.weight"] @ x) if c.shared_gate else total


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    """max|a - b| / max|b|. Gradients that cancel (a router's with one slot) are 0 but for rounding: the
    denominator is then 0.01, where other gradients are about 1."""
    if b.numel() == 0:
        return 0.0
    return ((a.double() - b).abs().max() / b.abs().max().clamp_min(0.01)).item()


def compare(moe: MoE, x: torch.Tensor, bound: float) -> None:
    ids = choices(moe, x)
    wanted, sources = oracle(moe, x, ids)
    upstream = torch.randn(wanted.shape, dtype=torch.float64)
    gradients = torch.autograd.grad(
        (wanted * upstream).sum(), list(sources.values()), allow_unused=True
    )
    x = x.to(moe.router.weight.dtype).requires_grad_()
    routed = moe.router.route(x)
    found = [sorted(e for e in row if e < moe.config.num_experts) for row in routed.ids.tolist()]
    assert found == [sorted(row) for row in ids]
    y = moe(x)
    assert error(y, wanted) <= bound
    (y.double() * upstream).sum().backward()
    named = {"x": x, **dict(moe.named_parameters())}
    for name, gradient in zip(sources, gradients):
        assert named[name].grad is not None, name
        want = torch.zeros_like(sources[name]) if gradient is None else gradient
        assert error(named[name].grad, want) <= bound, name


@pytest.mark.parametrize("backend", ["loop", "grouped_mm", "batched"])
@pytest.mark.parametrize("router", ROUTERS)
def test_every_router_on_every_backend(router: str, backend: str) -> None:
    moe = make(8, 2, backend=backend, **ROUTERS[router])
    compare(moe, tokens(24), 1e-5)


@pytest.mark.parametrize("router", ["mixtral", "sigmoid"])
@pytest.mark.parametrize(
    ("num_experts", "top_k", "num"),
    [(1, 1, 5), (4, 1, 9), (2, 2, 1), (8, 2, 0), (16, 8, 20), (256, 8, 60), (3, 2, 500)],
)
def test_shapes_ties_and_idle_experts(num_experts: int, top_k: int, num: int, router: str) -> None:
    alone = {"normalize": "before_top_k"} if top_k == 1 else {}
    compare(make(num_experts, top_k, **ROUTERS[router], **alone), tokens(num), 1e-5)


@pytest.mark.parametrize("backend", ["loop", "grouped_mm", "batched"])
@pytest.mark.parametrize(
    "settings",
    [
        {"bias": True},
        {"activation": "gelu", "bias": True},
        {"activation": "clamped_swiglu", "bias": True, "router_bias": True},
        {"activation": "clamped_swiglu", "swiglu_limit": 0.5, "swiglu_alpha": 3.0},
        {"num_shared_experts": 3},
        {"num_shared_experts": 2, "shared_hidden_dim": 4, "shared_gate": True},
    ],
)
def test_kinds_of_experts(settings: dict, backend: str) -> None:
    compare(make(4, 2, backend=backend, **settings), tokens(12), 1e-5)


@pytest.mark.lane("test")
def test_in_float64_to_the_last_digits() -> None:
    compare(make(8, 2, bias=True).double(), tokens(24).double(), 1e-13)


@pytest.mark.lane("test")
@pytest.mark.parametrize("backend", ["loop", "grouped_mm", "batched"])
def test_in_bf16_within_its_rounding(backend: str) -> None:
    """2^-8 per rounding; a token passes four products, and its gradient eight."""
    moe = make(8, 2, backend=backend)
    moe.experts.bfloat16()
    for parameter in moe.experts.parameters():  # the oracle starts from the rounded weights
        parameter.data = parameter.data.bfloat16()
    x = tokens(24)
    ids = choices(moe, x)
    wanted, sources = oracle(moe, x, ids)
    wanted.sum().backward()
    moe.router.weight.data = moe.router.weight.data.bfloat16()  # exact: it lies on the grid
    rows = x.bfloat16().requires_grad_()
    y = moe(rows)
    y.sum().backward()  # an expanded gradient
    assert y.dtype == torch.bfloat16
    assert error(y, wanted.detach()) < 0.02
    for name, parameter in {"x": rows, **dict(moe.named_parameters())}.items():
        want = sources[name].grad
        want = torch.zeros_like(sources[name]) if want is None else want
        assert error(parameter.grad, want) < 0.04, name
