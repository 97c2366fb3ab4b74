"""Feed-forwards, norms and blocks by name, and factors of the stream, against their definitions in float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from optim_nets import assert_norm
from torch import Tensor

from forge_core import FeedForward, Transformer, TransformerConfig, fused_cross_entropy
from forge_core.model import PlusOneRMSNorm, initialize
from forge_core.model.block import build_block
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")

SHAPE = {"vocab_size": 29, "dim": 12, "num_layers": 2, "num_heads": 3, "head_dim": 6}


def error(got: Tensor, wanted: Tensor) -> float:
    got, wanted = got.detach(), wanted.detach()
    return float((got.double() - wanted.double()).abs().max() / wanted.double().abs().max())


def randomise(module: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.5)


def _gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def _tanh_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


ACTIVATIONS = {
    "swiglu": (_silu, True),
    "geglu": (_gelu, True),
    "geglu_tanh": (_tanh_gelu, True),
    "gelu": (_gelu, False),
    "gelu_tanh": (_tanh_gelu, False),
    "relu": (lambda x: x.clamp(min=0), False),
    "relu2": (lambda x: x.clamp(min=0) ** 2, False),
    "silu": (_silu, False),
}


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_a_feed_forward_is_its_definition(kind: str) -> None:
    config = TransformerConfig(**SHAPE, feed_forward=kind, feed_forward_bias=True)
    layer = Transformer(config).blocks()[0].feed_forward.double()
    randomise(layer)
    f, gated = ACTIVATIONS[kind]
    assert layer.up_proj.out_features == (64 if gated else 48)
    x = torch.randn(2, 5, 12, dtype=torch.float64, requires_grad=True)
    up = x @ layer.up_proj.weight.T + layer.up_proj.bias
    hidden = f(x @ layer.gate_proj.weight.T + layer.gate_proj.bias) * up if gated else f(up)
    wanted = hidden @ layer.down_proj.weight.T + layer.down_proj.bias
    out = layer(x)
    assert error(out, wanted) < 1e-12
    (got,), (gradient,) = (torch.autograd.grad(some.square().sum(), x) for some in (out, wanted))
    assert error(got, gradient) < 1e-12
    assert (layer.gate_proj is not None) == gated == ("gate_proj.*" in layer.parallel_roles())
    assert layer.flops_per_token(8) == 2.0 * layer.up_proj.weight.numel() * (3 if gated else 2)


def test_the_two_gelus_differ() -> None:
    exact, approximate = (
        FeedForward(12, 20, kind=kind).double() for kind in ("geglu", "geglu_tanh")
    )
    approximate.load_state_dict(exact.state_dict())
    x = torch.randn(3, 12, dtype=torch.float64)
    assert 1e-6 < error(approximate(x), exact(x)) < 1e-2


# fp32: rounding of a few ops; bf16: the result is rounded once, 2^-8, its gradient likewise.
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 8e-3)])
def test_a_norm_with_weights_around_0(dtype: torch.dtype, bound: float) -> None:
    def slow(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * (1 + weight)

    norm = PlusOneRMSNorm(24, eps=1e-3)
    assert not norm.weight.any()
    assert_norm(norm, slow, dtype, bound)


def test_it_begins_at_0_in_every_place() -> None:
    config = TransformerConfig(**SHAPE, norm="rms_norm_plus_one", block="sandwich", qk_norm=True)
    with torch.device("meta"):
        model = Transformer(config)
    initialize(model.to_empty(device="cpu"), 0)
    norms = {name: p for name, p in model.named_parameters() if "norm" in name}
    assert len(norms) == 2 * (4 + 2) + 1
    assert not any(p.any() for p in norms.values())
    plain = Transformer(TransformerConfig(**SHAPE, qk_norm=True))
    assert {float(p.detach().min()) for n, p in plain.named_parameters() if "norm" in n} == {1.0}


class Double(torch.nn.Linear):
    """A sublayer that is a matrix."""

    def forward(self, x: Tensor, *_: object) -> Tensor:
        return super().forward(x)


@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("name", ["pre_norm", "post_norm", "sandwich"])
def test_a_block_is_its_definition(name: str, scale: float) -> None:
    config = TransformerConfig(**SHAPE, block=name, residual_scale=scale)
    block = build_block(config, Double(12, 12), Double(12, 12)).double()
    randomise(block)
    weights = dict(block.named_parameters())

    def norm(x: Tensor, which: str) -> Tensor:
        if f"{which}.weight" not in weights:
            return x
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weights[f"{which}.weight"]

    x = torch.randn(2, 5, 12, dtype=torch.float64)
    wanted = x
    for part in ("mixer", "feed_forward"):
        inside = (
            norm(wanted, f"{part}_norm") @ weights[f"{part}.weight"].T + weights[f"{part}.bias"]
        )
        wanted = wanted + scale * norm(inside, f"{part}_post_norm")
    assert error(block(x, None), wanted) < 1e-12
    norms = {n.removesuffix(".weight") for n in weights if "norm" in n}
    assert {f"{n}.*" for n in norms} == {
        k for k, v in block.parallel_roles().items() if v == "sequence"
    }
    assert len(norms) == (4 if name == "sandwich" else 2)


FACTORS = {"embedding_scale": 3.3, "logits_scale": 0.125, "logits_softcap": 0.7}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("key", FACTORS)
def test_factors_of_stream_and_logits(key: str, tied: bool) -> None:
    config = TransformerConfig(**SHAPE, tie_embeddings=tied, **{key: FACTORS[key]})
    model = Transformer(config)
    randomise(model)
    plain = Transformer(TransformerConfig(**SHAPE, tie_embeddings=tied))
    plain.load_state_dict(model.state_dict())
    tokens = torch.randint(0, 29, (2, 7))
    if key == "embedding_scale":
        wanted = plain(plain.embedding(tokens) * 3.3, positions=torch.arange(7)[None])
    elif key == "logits_scale":
        wanted = plain(tokens) / 8
    else:
        wanted = 0.7 * torch.tanh(plain(tokens) / 0.7)
    assert error(model(tokens), wanted) < 1e-6
    assert error(model(tokens), plain(tokens)) > 1e-2


def test_the_embeddings_factor_is_rounded_as_they_are() -> None:
    model = Transformer(TransformerConfig(**SHAPE, embedding_scale=12**0.5)).bfloat16()
    tokens = torch.randint(0, 29, (2, 7))
    wanted = model.embedding(tokens) * torch.tensor(12**0.5).bfloat16()
    assert torch.equal(model.embed(tokens), wanted)
    assert wanted.dtype == torch.bfloat16


@pytest.mark.parametrize("softcap", [None, 0.7])
def test_a_loss_inside_the_head_sees_the_scale_and_the_cap(softcap: float | None) -> None:
    model = Transformer(TransformerConfig(**SHAPE, logits_scale=0.3, logits_softcap=softcap))
    randomise(model)
    tokens, labels = torch.randint(0, 29, (2, 7)), torch.randint(0, 29, (2, 7))

    def loss(x: Tensor, weight: Tensor, **head: float) -> Tensor:
        assert head == ({} if softcap is None else {"softcap": softcap})
        return fused_cross_entropy(x, weight, labels, **head).sum

    within = model(tokens, loss=loss)
    logits = model(tokens)
    wanted = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    assert error(within, wanted) < 1e-6
    gradients = [torch.autograd.grad(each, list(model.parameters())) for each in (within, wanted)]
    assert all(error(a, b) < 1e-5 for a, b in zip(*gradients))


@pytest.mark.parametrize("key", [*FACTORS, "residual_scale"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, "1"])
def test_a_factor_is_a_number_above_0(key: str, value: object) -> None:
    with rejects(key, value, "range"):
        TransformerConfig(8, **{key: value})
