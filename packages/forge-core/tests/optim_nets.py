"""A model with each kind of parameter that the optimizers of matrices and vectors tell apart, and steps of it."""

import copy

import torch
from torch import nn

DECAYED = {"table", "experts"}


class Small(nn.Module):
    """A matrix longer than a chunk of the update, a stack, a norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(300, 240))
        self.experts = nn.Parameter(torch.randn(2, 3, 4))
        self.experts_bias = nn.Parameter(torch.randn(2, 4))  # F146: a vector for each expert
        self.norm = nn.LayerNorm(4)


def recorded(model, steps, seed=1):
    """Gradients of some steps, by name."""
    generator = torch.Generator().manual_seed(seed)
    return [
        {n: torch.randn(p.shape, generator=generator) for n, p in model.named_parameters()}
        for _ in range(steps)
    ]


def run(model, optimizer, gradients, **arguments):
    for step in gradients:
        for name, parameter in model.named_parameters():
            parameter.grad = step[name].clone()
        optimizer.step(**arguments)


def error(got, wanted):
    return float((got.double() - wanted.double()).abs().max() / wanted.double().abs().max())


def assert_same_weights(model, other):
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def assert_resumes(model, optimizer, other, second, gradients):
    """`other` and `second` go on from the state of the first two with the same bits."""
    other.load_state_dict(model.state_dict())
    second.load_named_state(copy.deepcopy(optimizer.named_state()))
    run(model, optimizer, gradients)
    run(other, second, gradients)
    assert_same_weights(model, other)


def load_evaluated(model, optimizer, values, state):
    """Load the weights to evaluate and the state of an optimizer that trains at others."""
    optimizer.eval()
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), values):
            parameter.copy_(value)
    optimizer.load_named_state(state)
    optimizer.train()


def assert_norm(norm, slow, dtype, bound):
    """Output and gradients of a norm of 24 are those of `slow(x, weight)` in float64."""
    torch.manual_seed(0)
    norm = norm.to(dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(24))
    x = (torch.randn(3, 5, 24) * 3).to(dtype).requires_grad_()
    upstream = torch.randn(3, 5, 24).to(dtype)
    out = norm(x)
    out.backward(upstream)
    wide, weight = (t.detach().double().requires_grad_() for t in (x, norm.weight))
    wanted = slow(wide, weight)
    wanted.backward(upstream.double())
    assert out.dtype == x.grad.dtype == norm.weight.grad.dtype == dtype
    for got, true in ((out, wanted), (x.grad, wide.grad), (norm.weight.grad, weight.grad)):
        assert error(got.detach(), true.detach()) < bound
