"""Compiled is eager: values and gradients of every function of our own, and of the layer in one graph."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from forge_moe import Experts, LocalDispatch, MoE, MoEConfig
from forge_moe.dispatch.local import Permutation
from forge_moe.load_balancing import AttachLoss

IDS = torch.tensor([[2, 0], [4, 4], [0, 4], [2, 3], [1, 2]])  # 4 is dropped
TOKENS_WITH_SLOT = [4, 3]


def there_and_back(x: Tensor, weights: Tensor) -> Tensor:
    local = LocalDispatch(4)
    sent = local.dispatch(x, weights, IDS)
    return local.combine(sent.rows * 2, sent.meta)


def fewer_rows(x: Tensor, weights: Tensor) -> Tensor:
    local = LocalDispatch(4)
    sent = local.dispatch(x.bfloat16(), weights, IDS, num_rows=8)
    return local.combine(sent.rows * 2, sent.meta)


def received_rows(x: Tensor, weights: Tensor) -> Tensor:
    received = Permutation.received(IDS, 4, TOKENS_WITH_SLOT)
    return received.unpermute(received.permute(x) * 2, weights)


def attached(x: Tensor, weights: Tensor) -> Tensor:
    return AttachLoss.apply(x * 2, weights.square().mean(), torch.tensor(0.5))


def experts(**options) -> Callable[[Tensor, Tensor], Tensor]:
    torch.manual_seed(0)
    stack = Experts(MoEConfig(dim=8, hidden_dim=16, num_experts=4, **options))
    for parameter in stack.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    counts = torch.tensor([2, 0, 1, 1])  # and a tail of one row

    def run(x: Tensor, weights: Tensor) -> Tensor:
        return stack(x * weights[:, :1], counts)

    return run


def in_bf16(run: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    def wrapped(x: Tensor, weights: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return run(x, weights)

    return wrapped


FUNCTIONS = {
    "local dispatch": there_and_back,
    "local dispatch of fewer rows": fewer_rows,
    "received rows": received_rows,
    "attached loss": attached,
    "experts": experts(),
    "experts with biases": experts(bias=True),
    "clamped experts": experts(bias=True, activation="clamped_swiglu"),
    "experts in one kernel": in_bf16(experts(bias=True, activation="gelu")),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_F123_compiled_gradients_equal_eager_gradients(name: str) -> None:
    """One graph each: nothing may be left to eager, where it could not be wrong."""
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(5, size, generator=generator) for size in (8, 2)]
    upstream = torch.randn(5, 8, generator=generator)
    found = []
    for run in (FUNCTIONS[name], torch.compile(FUNCTIONS[name], backend="eager", fullgraph=True)):
        x, weights = (value.clone().requires_grad_() for value in inputs)
        y = run(x, weights)
        (y.float() * upstream).sum().backward()
        found.append({"y": y.detach(), "x": x.grad, "weights": weights.grad})
    for key, value in found[0].items():
        assert value.abs().max() > 1e-3, key
        torch.testing.assert_close(found[1][key], value, rtol=1e-6, atol=1e-6)


def layer(**options) -> MoE:
    torch.manual_seed(0)
    moe = MoE(MoEConfig(dim=8, hidden_dim=16, num_experts=4, **options))
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return moe


@pytest.mark.slow
def test_F123_a_compiled_layer_trains_as_an_eager_one() -> None:
    torch._dynamo.reset()
    moe, x = layer(aux="attach", aux_loss_weight=0.1, num_shared_experts=1), torch.randn(2, 6, 8)
    ctx = SimpleNamespace(valid=torch.arange(12).view(2, 6) != 11)
    gradients = []
    for run in (moe, torch.compile(moe, backend="eager")):
        moe.zero_grad()
        run(x, ctx).square().sum().backward()
        gradients.append([p.grad.clone() for p in moe.parameters()])
    for eager, compiled in zip(*gradients):
        assert eager.abs().max() > 1e-4
        torch.testing.assert_close(compiled, eager, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_F109_without_gradients_a_layer_is_one_graph_also_in_fp32() -> None:
    torch._dynamo.reset()
    moe, x = layer(), torch.randn(2, 6, 8)
    compiled = torch.compile(moe, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(x), moe(x))
        exported = torch.export.export(moe, (x,)).module()
        other = torch.randn(2, 6, 8)  # other routes
        # the layer may batch these experts, whose products differ by rounding
        torch.testing.assert_close(exported(other), moe(other), rtol=1e-6, atol=1e-6)
    with pytest.raises(Exception, match=r"fullgraph = True.*torch\.no_grad"):
        compiled(x)
