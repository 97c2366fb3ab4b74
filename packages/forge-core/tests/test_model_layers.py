"""Norms, rotation, feed-forwards against slow references in float64."""

import math
import os
import subprocess
import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from optim_nets import assert_norm
from torch import Tensor, nn

from forge_core import (
    FeedForward,
    LatentAttention,
    MLAConfig,
    RMSNorm,
    RopeScaling,
    Transformer,
    TransformerConfig,
)
from forge_core.model import Attention
from forge_core.model.rope import attention_factor, inverse_frequencies, rope_tables, rotate
from forge_testing.problems import rejects

pytestmark = pytest.mark.lane("test")


def error(got: Tensor, wanted: Tensor) -> float:
    got, wanted = got.detach(), wanted.detach()
    return float((got.double() - wanted.double()).abs().max() / wanted.double().abs().max())


def slow_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


# fp32: rounding of a few ops; bf16: the result is rounded once, 2^-8, its gradient likewise.
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 8e-3)])
def test_rms_norm_and_its_gradients(dtype: torch.dtype, bound: float) -> None:
    assert_norm(RMSNorm(24, eps=1e-3), partial(slow_rms_norm, eps=1e-3), dtype, bound)


def test_rms_norm_gradcheck_in_float64() -> None:
    norm = RMSNorm(6).double()
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(norm, (x,))


def test_rms_norm_equals_the_functional_that_accelerators_use() -> None:
    torch.manual_seed(0)
    norm, x = RMSNorm(16), torch.randn(4, 16)
    assert error(norm(x), F.rms_norm(x, (16,), norm.weight, norm.eps)) < 1e-6


def test_rms_norm_of_mixed_dtypes_keeps_the_dtype_of_x() -> None:
    x = torch.randn(2, 8, dtype=torch.bfloat16, requires_grad=True)
    norm = RMSNorm(8)
    out = norm(x)
    out.sum().backward()
    assert out.dtype == x.grad.dtype == torch.bfloat16
    assert norm.weight.grad.dtype == torch.float32


def test_rotation_is_the_complex_product() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 7, 3, 8, dtype=torch.float64, requires_grad=True)  # (B, S, H, D)
    positions = torch.stack((torch.arange(7), torch.arange(100, 107)))
    frequencies = inverse_frequencies(8, 10000.0, None)
    out = rotate(x, rope_tables(positions, frequencies))
    upstream = torch.randn_like(out)
    out.backward(upstream)
    angle = (positions[..., None] * frequencies).double()[:, :, None]  # (B, S, 1, D / 2)
    ref = x.detach().clone().requires_grad_()
    turned = torch.complex(ref[..., :4], ref[..., 4:]) * torch.polar(torch.ones_like(angle), angle)
    wanted = torch.cat((turned.real, turned.imag), -1)
    wanted.backward(upstream)
    assert error(out, wanted) < 2e-5  # tables are fp32 at position 106: 106 * 2^-24
    assert error(x.grad, ref.grad) < 2e-5


def test_rotation_is_fp32_inside_bf16() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 5, 2, 8)
    tables = rope_tables(torch.arange(1000, 1005)[None], inverse_frequencies(8, 1e4, None))
    low = x.bfloat16()
    assert torch.equal(rotate(low, tables), rotate(low.float(), tables).bfloat16())


def test_llama3_frequencies() -> None:
    scaling = RopeScaling(8.0, 1.0, 4.0, 64)
    plain, scaled = (inverse_frequencies(32, 1e4, s) for s in (None, scaling))
    for was, now in zip(plain.tolist(), scaled.tolist()):
        wavelength = 2 * math.pi / was
        if wavelength < 64 / 4.0:
            assert now == was
        elif wavelength > 64 / 1.0:
            assert now == pytest.approx(was / 8, rel=1e-6)
        else:
            share = (64 / wavelength - 1.0) / (4.0 - 1.0)
            assert now == pytest.approx((1 - share) * was / 8 + share * was, rel=1e-6)


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_by_its_definition(truncate: bool) -> None:
    """Pair i turns L / (2 pi theta^(2 i / D)) times in L tokens; between beta_fast and beta_slow times: blended."""
    dim, theta, length = 32, 1e4, 512
    scaling = RopeScaling(
        8.0,
        name="yarn",
        original_max_position=length,
        beta_fast=16.0,
        beta_slow=2.0,
        truncate=truncate,
    )
    plain, scaled = (inverse_frequencies(dim, theta, s) for s in (None, scaling))
    low, high = (
        dim / 2 * math.log(length / (2 * math.pi * turns)) / math.log(theta)
        for turns in (16.0, 2.0)
    )
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    kinds = set()
    for pair, (was, now) in enumerate(zip(plain.tolist(), scaled.tolist())):
        share = min(max((pair - low) / (high - low), 0.0), 1.0)
        kinds.add(share if share in (0.0, 1.0) else 0.5)
        assert now == pytest.approx(share * was / 8.0 + (1 - share) * was, rel=1e-6)
    assert kinds == {0.0, 0.5, 1.0}
    assert torch.equal(inverse_frequencies(2, theta, scaling), inverse_frequencies(2, theta, None))


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({}, 0.1 * math.log(8) + 1),
        ({"attention_factor": 1.5}, 1.5),
        (
            {"mscale": 0.7, "mscale_all_dim": 0.4},
            (0.07 * math.log(8) + 1) / (0.04 * math.log(8) + 1),
        ),
        ({"attention_factor": 1.5, "mscale_all_dim": 0.4}, 1.5),
    ],
)
def test_yarn_scales_only_rotated_dims(keys: dict, wanted: float) -> None:
    """Scores are products of a query and a key, which both grow; so does the gradient."""
    scaling = RopeScaling(8.0, name="yarn", **keys)
    assert attention_factor(scaling) == pytest.approx(wanted)
    x = torch.randn(1, 5, 2, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    grads = []
    for factor in (1.0, wanted):
        some = x.clone().requires_grad_()
        tables = rope_tables(torch.arange(5)[None], inverse_frequencies(8, 1e4, scaling), factor)
        (rotate(some, tables) * x).sum().backward()
        grads.append((rotate(x, tables), some.grad))
    (plain, plain_grad), (grown, grown_grad) = grads
    assert error(grown, plain * wanted) < 1e-6
    assert error(grown_grad, plain_grad * wanted) < 1e-6


@pytest.mark.parametrize(
    ("name", "key", "value", "code"),
    [
        ("yarn", "low_freq_factor", 2.0, "foreign"),
        ("llama3", "beta_fast", 16.0, "foreign"),
        ("linear", "truncate", False, "foreign"),
        ("yarn", "beta_slow", 33.0, "range"),
        ("yarn", "truncate", 1, "type"),
        ("yarn", "mscale", 1.0, "requires"),
        ("yarn", "attention_factor", 0.0, "range"),
    ],
)
def test_keys_of_scalings(name: str, key: str, value: object, code: str) -> None:
    with rejects(key, value, code, where="rope_scaling: "):
        RopeScaling(name=name, **{key: value})
    given = {"mscale": 1.0, "mscale_all_dim": 1.0, "attention_factor": 1.0}
    with rejects("attention_factor", 1.0, "excludes"):
        RopeScaling(name="yarn", **given)


def test_a_key_that_only_latent_attention_reads() -> None:
    scaling = RopeScaling(name="yarn", mscale_all_dim=1.0)
    with rejects("rope_scaling.mscale_all_dim", 1.0, "requires"):
        TransformerConfig(8, rope_scaling=scaling)


def test_feed_forwards() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8)
    swiglu, gelu = FeedForward(8, 12, bias=True), FeedForward(8, 12, gated=False)
    gate, up = swiglu.gate_proj(x), swiglu.up_proj(x)
    assert error(swiglu(x), swiglu.down_proj(gate * torch.sigmoid(gate) * up)) < 1e-6
    up = gelu.up_proj(x)
    wanted = gelu.down_proj(up * 0.5 * (1 + torch.erf(up / math.sqrt(2))))
    assert error(gelu(x), wanted) < 1e-6
    assert gelu.up_proj.bias is None
    assert gelu.gate_proj is None


def test_a_part_of_each_head_is_rotated_and_the_rest_stays():
    x = torch.randn(2, 5, 3, 8, generator=torch.Generator().manual_seed(0))
    tables = rope_tables(torch.arange(5)[None], inverse_frequencies(4, 1e4, None))
    out = rotate(x, tables)
    assert torch.equal(out[..., :4], rotate(x[..., :4].contiguous(), tables))
    assert torch.equal(out[..., 4:], x[..., 4:])


def test_norms_over_all_heads_have_their_width_and_a_role_under_tensor_parallelism():
    config = TransformerConfig(
        8, dim=16, num_heads=4, num_kv_heads=2, qk_norm=True, qk_norm_over="all_heads"
    )
    layer = Attention(config)
    assert (layer.q_norm.weight.shape, layer.k_norm.weight.shape) == ((16,), (8,))
    roles = layer.parallel_roles()
    assert roles["q_norm.*"] == "norm_over_heads"
    assert roles["k_norm.*"] == ("norm_over_heads", 1, True), "ranks may share key heads"


def test_modules_of_keywords_are_those_of_a_config() -> None:
    config = TransformerConfig(vocab_size=32, dim=16, num_layers=1, num_heads=4, num_kv_heads=2)
    built = []
    for build in (
        lambda: Attention(config),
        lambda: Attention.from_config(config),
        lambda: Attention(dim=16, num_heads=4, num_kv_heads=2),
    ):
        torch.manual_seed(0)
        built.append(build().state_dict())
    for state in built[1:]:
        assert all(torch.equal(built[0][name], state[name]) for name in built[0])
    one, two = Transformer(config), Transformer.from_config(config)
    three = Transformer(vocab_size=32, dim=16, num_layers=1, num_heads=4, num_kv_heads=2)
    for other in (two, three):
        assert other.config == one.config
        assert all(map(torch.equal, one.parameters(), other.parameters()))
    assert isinstance(
        Transformer(vocab_size=8, dim=8, feed_forward="gelu").layers["0"].feed_forward, FeedForward
    )
    own = Transformer(vocab_size=8, dim=8, feed_forward=lambda layer: nn.Identity())
    assert isinstance(own.layers["0"].feed_forward, nn.Identity)


LATENT = MLAConfig(kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8)
BUILDERS = {
    "attention": lambda **own: Attention(dim=16, num_heads=4, num_kv_heads=2, **own),
    "latent": lambda **own: LatentAttention(dim=16, num_heads=2, mla=LATENT, **own),
    "feed_forward": lambda **own: FeedForward(16, 32, **own),
    "norm": lambda **own: RMSNorm(16, **own),
    "transformer": lambda **own: Transformer(
        vocab_size=8, dim=16, num_heads=2, num_layers=2, **own
    ),
}


@pytest.mark.parametrize("name", BUILDERS)
def test_device_dtype_reset_parameters_and_repr(name: str) -> None:
    build = BUILDERS[name]
    module = build(device="meta", dtype=torch.bfloat16)
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in module.parameters())
    module = build(device="meta").to_empty(device="cpu")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(float("nan"))
    torch.manual_seed(0)
    module.reset_parameters()
    torch.manual_seed(0)
    wanted = build()
    assert all(map(torch.equal, module.parameters(), wanted.parameters()))
    assert module.extra_repr() in repr(module)
    assert module.extra_repr()


_INTERPRETED = """
import torch
from forge_core.model import norm_kernel
from forge_core.model.norm import PlusOneRMSNorm
from forge_core.model.norm_kernel import RMSNormByKernel

norm_kernel._PROGRAMS = 8  # an interpreted row takes milliseconds
torch.manual_seed(0)
for shape, dtype, stored in (
    ((3, 5, 48), torch.bfloat16, torch.float32),
    ((21, 20), torch.float16, torch.bfloat16),
    ((7, 64), torch.float32, torch.float32),
):
    norm = PlusOneRMSNorm(shape[-1], 1e-6)
    torch.nn.init.normal_(norm.weight, std=0.1)
    norm.to(stored)
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    upstream = torch.randn(shape, dtype=dtype)
    found = []
    for call in (norm, lambda x, norm=norm: RMSNormByKernel.apply(x, norm.weight, norm.eps, 1.0)):
        x.grad = norm.weight.grad = None
        out = call(x)
        out.backward(upstream)
        found.append((out, x.grad, norm.weight.grad))
    # in 16 bits two roundings of nearly one number differ by a unit of the last digit
    for right, kernel in zip(*found):
        bound = {torch.bfloat16: 2**-7, torch.float16: 2**-10}.get(kernel.dtype, 1e-5)
        wide, exact = kernel.detach().double(), right.detach().double()
        error = float((wide - exact).abs().max() / exact.abs().max())
        assert right.dtype == kernel.dtype
        assert error <= bound, (shape, error)
"""


def test_the_kernel_of_rms_norm_equals_torchs_operators() -> None:
    """Forward and backward; Triton's interpreter runs it on a CPU."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", _INTERPRETED], env=environment, check=True)


_ROTATED = """
import torch
from forge_core.model import rope, rope_kernel

torch.manual_seed(0)
for batch, tables in ((2, 1), (3, 3)):
    x = torch.randn(batch, 7, 3, 10, dtype=torch.bfloat16)
    cos, sin = (torch.randn(tables, 7, 1, 5) for _ in range(2))
    for direction in (1.0, -1.0):
        right = rope._rotate(x, cos, sin, direction).double()
        error = (rope_kernel.rotate(x, cos, sin, direction).double() - right).abs().max()
        assert error <= right.abs().max() * 2**-7
        assert right.count_nonzero()
"""


def test_the_kernel_of_the_rotation_equals_torchs_operators() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", _ROTATED], env=environment, check=True)
